/* The core when what it stands on gives way: a store that refuses for good, memory that
 * runs out, a disk that damages what was committed, texts that do not fit. */
#include <stddef.h>
#include <stdlib.h>

/* The core's own calloc can be made to fail; the world's never does. A sanitizer has its own. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define CALLOC_FAILS 0
#else
#define CALLOC_FAILS 1
#define calloc       __libc_calloc
#endif
void *__libc_calloc(size_t n, size_t size);
#include "core_world.h"
#undef calloc
#include "proto/base/utf8.h"

static volatile int calloc_fails_at; /* the so many-th call from now; 0 = none */

#if CALLOC_FAILS
void *calloc(size_t n, size_t size);
void *calloc(size_t n, size_t size)
{
    if (calloc_fails_at && --calloc_fails_at == 0)
        return NULL;
    return __libc_calloc(n, size);
}
#endif

static int attempt_rows(struct world *w, int64_t id)
{
    int n = 0;
    for (int i = 0; i < w->store->n_attempts; i++)
        n += w->store->attempts[i].job == id;
    return n;
}

/* ---- the store ------------------------------------------------------------------------- */

static void no_order_goes_out_for_a_row_that_was_refused(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id = submit(w);
    w->store->refuses = ERR_CORRUPT;
    join_world(w, a); /* the job is placed */
    advance(w, 10500);
    assert_state(w, id, STARTING);
    assert_int_equal(a->n_attempts, 0);
    assert_int_equal(attempt_rows(w, id), 0);
    assert_true(job_of(w, id)->unsettled > 0);
    /* Tried again each second, and not more often. */
    assert_true(w->store->refused >= 9 && w->store->refused <= 14);
    assert_int_equal(core_stats(w->core)->store_failures, w->store->refused);
    w->store->refuses = 0;
    advance(w, 1500);
    assert_int_equal(attempt_rows(w, id), 1);
    assert_int_equal(job_of(w, id)->unsettled, 0);
    struct fake_attempt *x = newest(w, a, id);
    assert_int_equal(x->starts, 1);
    assert_int_equal(w->store->n_nodes, 1);
    say_step(w, a, x, 1);
    pump(w);
    assert_state(w, id, RUNNING);
    controller_restart(w);
    join_world(w, a);
    pump(w);
    assert_state(w, id, RUNNING);
    world_free(w);
}

/* Shards come once: their rows are written again with the rest. */
static void a_refused_checkpoint_is_whole_on_disk_later(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    w->store->refuses = ERR_NOMEM;
    say_step(w, a, x, 20);
    say_checkpoint(w, a, x, 20);
    advance(w, 3000);
    assert_int_equal(a->manifests, 0);
    assert_int_equal(w->store->n_shards, 0);
    w->store->refuses = 0;
    advance(w, 2000);
    assert_int_equal(w->store->n_shards, 2);
    assert_int_equal(a->manifests, 1);
    assert_int_equal(job_of(w, id)->checkpoint_step, 20);
    controller_restart(w);
    join_world(w, a);
    pump(w);
    say_end_of(w, a, x, 0, (struct end){.signal = 9});
    pump(w);
    x = recovered(w, a, id);
    assert_int_equal(x->from_step, 20);
    world_free(w);
}

/* The agent keeps an attempt until the store has how it ended, and no longer. */
static void ends_are_acknowledged_when_the_row_is_written_after_all(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    w->store->refuses = ERR_NOMEM;
    assert_int_equal(control(w, CANCEL, id, true), ERR_NOMEM);
    advance(w, 3000);
    w->store->refuses = 0;
    advance(w, 1500); /* the kill is ordered, and confirmed */
    assert_state(w, id, CANCELLED);
    assert_true(x->forgotten);
    x = run_job(w, a, &id);
    say_end_of(w, a, x, 0, (struct end){.signal = 9});
    w->store->refuses = ERR_NOMEM;
    advance(w, 3000);
    assert_state(w, id, RECOVERING);
    assert_false(x->forgotten);
    assert_int_equal(w->store->attempts[1].end_ns, 0);
    w->store->refuses = 0;
    advance(w, 1500);
    assert_true(w->store->attempts[1].end_ns > 0);
    assert_true(x->forgotten);
    recovered(w, a, id);
    world_free(w);
}

static void a_refused_submit_leaves_nothing(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct arena mem;
    arena_init(&mem, 1 << 20);
    w->store->refuses = ERR_CORRUPT;
    assert_int_equal(submit_spec(w, spec_new(&mem), false), 0);
    assert_int_equal(w->reply_rc, ERR_CORRUPT);
    advance(w, 3000);
    w->store->refuses = 0;
    advance(w, 3000);
    assert_null(core_next_job(w->core, 0));
    assert_int_equal(w->store->n_jobs, 0);
    arena_free(&mem);
    world_free(w);
}

/* ---- memory ---------------------------------------------------------------------------- */

/* Whichever allocation of a start fails: nothing leaks that another job needs, and rows have no gap. */
static void a_start_without_memory_is_tried_again(void **state)
{
    (void)state;
    int starts_put_off = 0;
    if (!CALLOC_FAILS)
        skip();
    for (int at = 1; at <= 12; at++) {
        struct world *w = world_new();
        struct fake_agent *a = agent_add(w, "n1", 2);
        join_world(w, a);
        struct arena mem;
        arena_init(&mem, 1 << 20);
        int64_t id = submit_spec(w, spec_new(&mem), true);
        arena_free(&mem);
        assert_int_equal(control(w, RELEASE, id, false), ERR_OK);
        if (job_of(w, id)->state == STATE(STARTING)) { /* ended, so that the next pass starts it anew */
            assert_int_equal(control(w, HOLD, id, false), ERR_OK);
            advance(w, 1000);
        }
        assert_state(w, id, HELD);
        int before = job_of(w, id)->n_attempts;
        core_control(w->core, RELEASE, id, false, &user_ann, on_control, w);
        while (mem_settle(w->store))
            ;
        calloc_fails_at = at;
        core_run(w->core);
        bool failed = calloc_fails_at == 0;
        calloc_fails_at = 0;
        starts_put_off += failed && job_of(w, id)->n_attempts == before;
        advance(w, 12000);
        assert_state(w, id, STARTING);
        assert_int_equal(job_of(w, id)->n_attempts, before + 1);
        assert_int_equal(attempt_rows(w, id), before + 1);
        assert_int_equal(control(w, CANCEL, id, true), ERR_OK);
        advance(w, 1000);
        assert_state(w, id, CANCELLED);
        run_job(w, a, &id); /* needs all devices of the node */
        world_free(w);
    }
    assert_true(starts_put_off >= 4); /* the picture, core_start, parts and ranks at least */
}

/* ---- checkpoints ----------------------------------------------------------------------- */

/* Each attempt commits the same step, and the disk damages it each time: no progress, so no loop for ever. */
static void a_disk_that_damages_every_newest_checkpoint_is_no_progress(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    say_checkpoint(w, a, x, 20);
    say_checkpoint(w, a, x, 40);
    say_step(w, a, x, 45);
    pump(w);
    snprintf(a->verify_bad, sizeof a->verify_bad, "step-40");
    a->verify_code = ERR_CORRUPT;
    say_end_of(w, a, x, 0, (struct end){.signal = 9});
    pump(w);
    for (int k = 1; k <= 3; k++) {
        x = recovered(w, a, id);
        assert_int_equal(x->from_step, 20);
        assert_int_equal(job_of(w, id)->stuck_attempts, k - 1);
        say_checkpoint(w, a, x, 40);
        say_step(w, a, x, 45);
        pump(w);
        assert_int_equal(job_of(w, id)->checkpoint_step, 40);
        assert_int_equal(job_of(w, id)->stuck_attempts, k - 1);
        if (k == 2) { /* remembered */
            controller_restart(w);
            join_world(w, a);
            pump(w);
        }
        say_end_of(w, a, x, 0, (struct end){.signal = 9});
        pump(w);
    }
    assert_state(w, id, HELD);
    assert_int_equal(job_of(w, id)->reason, REASON(NoProgress));
    /* A later one is progress again. */
    assert_int_equal(control(w, RELEASE, id, false), ERR_OK);
    advance(w, 1000);
    x = newest(w, a, id);
    say_checkpoint(w, a, x, 60);
    say_step(w, a, x, 65);
    say_end_of(w, a, x, 0, (struct end){.signal = 9});
    pump(w);
    assert_int_equal(job_of(w, id)->stuck_attempts, 0);
    world_free(w);
}

/* ---- texts ----------------------------------------------------------------------------- */

static bool all_utf8(const char *s)
{
    for (size_t len = strlen(s), n; len; s += n, len -= n)
        if (!(n = utf8_length(s, len)))
            return false;
    return true;
}

static void long_texts_are_cut_between_characters(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    static char log[6001];
    for (int shift = 0; shift < 3; shift++) { /* three bytes a character: one of these cuts fits */
        struct fake_attempt *x = run_job(w, a, &id);
        memset(log, 'x', (size_t)shift);
        for (size_t i = (size_t)shift; i + 3 < sizeof log; i += 3)
            memcpy(log + i, "\xE2\x82\xAC", 3);
        say_end_of(w, a, x, 0, (struct end){.exit_code = 7, .error = log, .log = log});
        pump(w);
        assert_in_range(strlen(job_of(w, id)->reason_text), 1000, 4095);
        assert_true(all_utf8(job_of(w, id)->reason_text));
        for (int i = 0; i < w->store->n_events; i++)
            assert_true(all_utf8(w->store->events[i].text));
        control(w, CANCEL, id, true);
        advance(w, 2000);
    }
    world_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_order_goes_out_for_a_row_that_was_refused),
        cmocka_unit_test(a_refused_checkpoint_is_whole_on_disk_later),
        cmocka_unit_test(ends_are_acknowledged_when_the_row_is_written_after_all),
        cmocka_unit_test(a_refused_submit_leaves_nothing),
        cmocka_unit_test(a_start_without_memory_is_tried_again),
        cmocka_unit_test(a_disk_that_damages_every_newest_checkpoint_is_no_progress),
        cmocka_unit_test(long_texts_are_cut_between_characters),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
