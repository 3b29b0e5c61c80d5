/* Whom a failure is laid at, and when a job with a time limit begins to end. */
#include "tests/unit/daemon/core_world.h"

static void say_hang(struct world *w, struct fake_agent *a, struct fake_attempt *x, int rank, const char *text)
{
    Boost__HangReport h = BOOST__HANG_REPORT__INIT;
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    h.has_job = h.has_attempt = h.has_rank = 1;
    h.job = x->job;
    h.attempt = x->attempt;
    h.rank = rank;
    h.text = (char *)(uintptr_t)text;
    m.body_case = BOOST__AGENT_MESSAGE__BODY_HANG;
    m.hang = &h;
    say(w, a->name, &m);
    pump(w);
}

static const char inside[] = "rank 0 made no progress for 30.0 s (limit 30.0 s) while training, 7 steps done; last "
                             "collective: all_reduce \"latent qkv\" in group tp (call 1234, 512 KiB); doing: training";
static const char outside[] =
    "rank 1 made no progress for 30.1 s (limit 30.0 s) while training, 7 steps done; last "
    "collective: all_reduce \"latent o\" in group tp (call 1233, 512 KiB), done; doing: training";

/* All hang when one does: the one that the others wait for is named, whoever's report came first. */
static void the_hang_of_the_one_that_holds_up_the_rest(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    join_world(w, a);
    int64_t id;
    struct fake_attempt *x = run_job(w, a, &id);
    advance(w, 30000);
    say_hang(w, a, x, 0, inside);
    assert_state(w, id, RUNNING);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    const Boost__ShowReply *show = core_show(w->core, job_of(w, id), &mem);
    assert_int_equal(show->n_waits, 1);
    assert_says(show->waits[0]->name, "to tell which one holds them up");
    arena_free(&mem);
    advance(w, 300);
    say_hang(w, a, x, 1, outside);
    assert_state(w, id, RECOVERING);
    assert_says(event_of(w, id, "hang")->text, "rank 1 on n1 hangs: rank 1 made no progress");
    assert_says(job_of(w, id)->attempts[0]->text, "\"latent o\" in group tp (call 1233, 512 KiB), done");
    assert_true(job_of(w, id)->detection_s > 29 && job_of(w, id)->detection_s < 31);
    world_free(w);

    /* Nobody else says so: the first that did is all that is known. */
    w = world_new();
    a = agent_add(w, "n1", 2);
    join_world(w, a);
    x = run_job(w, a, &id);
    say_hang(w, a, x, 0, inside);
    advance(w, 900);
    assert_state(w, id, RUNNING);
    advance(w, 200);
    assert_state(w, id, RECOVERING);
    assert_says(event_of(w, id, "hang")->text, "rank 0 on n1 hangs");
    world_free(w);

    /* A rank that ends meanwhile says more than one that hangs. */
    w = world_new();
    a = agent_add(w, "n1", 2);
    join_world(w, a);
    x = run_job(w, a, &id);
    say_hang(w, a, x, 0, inside);
    say_end_of(w, a, x, 1, (struct end){.exit_code = 7});
    advance(w, 2000);
    assert_null(event_of(w, id, "hang"));
    assert_says(job_of(w, id)->attempts[0]->text, "rank 1 on n1: exit code 7");
    world_free(w);
}

static void say_step_ms(struct world *w, struct fake_agent *a, struct fake_attempt *x, double ms)
{
    say_values(w, a, x, 0, 1, &(struct named_value){"step_ms", ms}, 1);
    pump(w);
}

/* Two steps of 5 s have to fit in before the limit, and the checkpoint. */
static void a_time_limit_leaves_time_for_a_checkpoint(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    Boost__JobSpec *s = spec_new(&mem);
    s->has_time_limit_s = 1;
    s->time_limit_s = 100;
    join_world(w, a);
    int64_t id = submit_spec(w, s, false);
    struct fake_attempt *x = newest(w, a, id);
    say_step(w, a, x, 1);
    say_step_ms(w, a, x, 5000);
    a->obeys_term = false;
    advance(w, 89000);
    assert_state(w, id, RUNNING);
    advance(w, 2000);
    assert_state(w, id, STOPPING);
    assert_int_equal(x->terms, 1);
    assert_int_equal(x->kills, 0);
    assert_says(job_of(w, id)->reason_text, "time limit of 100 s reached at step 1, but for 10.0 s for a checkpoint");
    advance(w, 40000); /* the grace */
    assert_state(w, id, TIMEOUT);
    /* Steps as long as the limit itself: it runs for half of it at least. */
    s->time_limit_s = 10;
    id = submit_spec(w, s, false);
    x = newest(w, a, id);
    say_step(w, a, x, 1);
    say_step_ms(w, a, x, 60000);
    advance(w, 4500);
    assert_state(w, id, RUNNING);
    advance(w, 1000);
    assert_state(w, id, STOPPING);
    arena_free(&mem);
    world_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_hang_of_the_one_that_holds_up_the_rest),
        cmocka_unit_test(a_time_limit_leaves_time_for_a_checkpoint),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
