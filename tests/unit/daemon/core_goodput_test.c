/* Where a job's time goes, in full: over restarts of the controller, with checkpoint stalls, in device-seconds. */
#include <math.h>

#include "tests/unit/daemon/core_world.h"

static Boost__Goodput goodput(struct world *w, int64_t id)
{
    struct arena mem;
    arena_init(&mem, 1 << 20);
    const Boost__ShowReply *show = core_show(w->core, job_of(w, id), &mem);
    assert_non_null(show);
    Boost__Goodput g = *show->goodput;
    arena_free(&mem);
    return g;
}

#define assert_near(value, want)                                                                    \
    do {                                                                                            \
        double v = (value);                                                                         \
        if (fabs(v - (want)) > 0.11)                                                                \
            fail_msg("%s:%d: " #value " is %.3f, not %.3f", __FILE__, __LINE__, v, (double)(want)); \
    } while (0)

static void away(struct world *w, struct fake_agent *a, int64_t ms)
{
    mem_crash(w->store);
    core_destroy(w->core);
    w->core = NULL;
    queue_drop(w);
    w->now += ms * NS_PER_MS;
    a->connected = false;
    boot(w);
    join_world(w, a);
    pump(w);
}

/* Ranks train on while the controller is away: its time is theirs. */
static void time_without_a_controller_counts(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    join_world(w, a);
    int64_t id, second;
    struct fake_attempt *x = run_job(w, a, &id);
    second = submit(w);
    advance(w, 10000);
    say_checkpoint(w, a, x, 20); /* writes the row */
    pump(w);
    away(w, a, 500000);
    advance(w, 5000);
    assert_state(w, id, RUNNING);
    assert_near(goodput(w, id).productive_s, 515);
    assert_near(goodput(w, id).device_s, 2 * 515);
    assert_near(goodput(w, second).queue_s, 515);
    assert_near(goodput(w, second).device_s, 0);
    /* A wall clock that was set back adds nothing. */
    say_checkpoint(w, a, x, 40);
    pump(w);
    w->wall_offset -= 3600 * NS_PER_S;
    away(w, a, 1000);
    assert_near(goodput(w, id).productive_s, 515);
    world_free(w);
}

static double elapsed(struct world *w, int64_t id)
{
    struct arena mem;
    arena_init(&mem, 1 << 20);
    double s = core_summary(w->core, job_of(w, id), &mem)->elapsed_s;
    arena_free(&mem);
    return s;
}

/* What usage says of the only user: all, and of late. */
static double used(struct world *w, double *recent)
{
    struct arena mem;
    arena_init(&mem, 1 << 20);
    const Boost__UsageReply *r = core_usage(w->core, NULL, 0, &mem);
    assert_non_null(r);
    assert_int_equal(r->n_rows, 1);
    double all = r->rows[0]->device_seconds;
    *recent = r->rows[0]->recent;
    arena_free(&mem);
    return all;
}

/* A controller that knows which boot it runs in. */
static struct world *world_of_boot(const char *id)
{
    struct world *w = world_new();
    w->ops.boot_id = id;
    controller_restart(w);
    return w;
}

#define DAY (86400 * NS_PER_S)

/* The wall clock is set while an attempt runs, and put right while the next one does. */
static void who_sets_the_clock_is_charged_no_more(void **state)
{
    (void)state;
    for (int sign = -1; sign <= 1; sign += 2) {
        struct world *w = world_of_boot("b1");
        struct fake_agent *a = agent_add(w, "n1", 2);
        join_world(w, a);
        int64_t id;
        double recent;
        struct fake_attempt *x = run_job(w, a, &id);
        advance(w, 10000);
        w->wall_offset += sign * 10 * DAY;
        say_end_of(w, a, x, 0, (struct end){.signal = 9});
        pump(w);
        x = recovered(w, a, id);
        advance(w, 9000);
        w->wall_offset -= sign * 10 * DAY;
        advance(w, 1000);
        double want = elapsed(w, id); /* from the first start to now, less what nothing held: the back-off of 1 s */
        assert_true(want > 20 && want < 25);
        double charged = goodput(w, id).device_s;
        assert_true(charged > 2 * 19.9 && charged <= 2 * want);
        assert_near(used(w, &recent), charged);
        assert_true(fabs(recent - charged) < 0.5);
        say_checkpoint(w, a, x, 20);
        pump(w);
        away(w, a, 5000);
        assert_near(goodput(w, id).device_s, charged + 10);
        assert_near(used(w, &recent), charged + 10);
        assert_true(recent < charged + 10.5);
        assert_near(elapsed(w, id), want + 5);
        world_free(w);
    }
}

/* It is set while there is no controller: within a boot that is told from the time that passed, of another boot the
 * wall clock is all that there is. */
static void the_clock_is_set_while_there_is_no_controller(void **state)
{
    (void)state;
    static const struct {
        const char *boot;
        int64_t set;
        double passed;
    } cases[] = {{"b1", DAY, 5}, {"b1", -DAY, 5}, {"b2", 0, 5}, {"b2", 3600 * NS_PER_S, 3605}, {"b2", -DAY, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct world *w = world_of_boot("b1");
        struct fake_agent *a = agent_add(w, "n1", 2);
        struct arena mem;
        double recent;
        arena_init(&mem, 1 << 20);
        join_world(w, a);
        Boost__JobSpec *s = spec_new(&mem);
        s->has_time_limit_s = 1;
        s->time_limit_s = 7200;
        int64_t id = submit_spec(w, s, false);
        struct fake_attempt *x = newest(w, a, id);
        say_step(w, a, x, 1);
        advance(w, 10000);
        say_checkpoint(w, a, x, 20);
        pump(w);
        w->wall_offset += cases[i].set;
        w->ops.boot_id = cases[i].boot;
        away(w, a, 5000);
        advance(w, 2000);
        assert_state(w, id, RUNNING);
        assert_near(elapsed(w, id), 12 + cases[i].passed);
        assert_near(goodput(w, id).productive_s, 12 + cases[i].passed);
        assert_near(goodput(w, id).device_s, 2 * (12 + cases[i].passed));
        assert_near(used(w, &recent), 2 * (12 + cases[i].passed));
        assert_true(recent < 2 * (12.5 + cases[i].passed));
        arena_free(&mem);
        world_free(w);
    }
}

static void say_stall(struct world *w, struct fake_agent *a, struct fake_attempt *x, double ms)
{
    const struct named_value stall = {"ckpt_ms", ms};
    say_values(w, a, x, 0, 20, &stall, 1);
    x->metrics_seq[0]--; /* its answer was lost: it comes again, and counts once */
    say_values(w, a, x, 0, 20, &stall, 1);
}

static void stalls_are_not_productive(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    join_world(w, a);
    int64_t id;
    struct fake_attempt *x = run_job(w, a, &id);
    advance(w, 20000);
    say_stall(w, a, x, 4000);
    pump(w);
    assert_near(goodput(w, id).stall_s, 4);
    assert_near(goodput(w, id).productive_s, 16);
    advance(w, 1000);
    say_checkpoint(w, a, x, 20);
    pump(w);
    away(w, a, 10000);
    assert_near(goodput(w, id).stall_s, 4);
    assert_near(goodput(w, id).productive_s, 27);
    world_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(time_without_a_controller_counts),
        cmocka_unit_test(who_sets_the_clock_is_charged_no_more),
        cmocka_unit_test(the_clock_is_set_while_there_is_no_controller),
        cmocka_unit_test(stalls_are_not_productive),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
