/* A controller on an adopted copy of the store: the world has gone on since the copy was made. */
#include "tests/unit/daemon/core_world.h"

static void adopted(struct world *w)
{
    controller_restart(w);
    core_adopted(w->core);
}

/* What the copy knows is as it was: nothing is touched. */
static void nothing_has_changed(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    join_world(w, a);
    int64_t id;
    struct fake_attempt *x = run_job(w, a, &id);
    adopted(w);
    join_world(w, a);
    assert_int_equal(job_of(w, id)->n_attempts, 1);
    assert_true(x->alive && x->kills == 0);
    say_step(w, a, x, 9);
    pump(w);
    assert_int_equal(job_of(w, id)->step, 9);
    world_free(w);
}

/* Meanwhile attempt 4 began, of a job of which the copy knows attempt 1. It is fenced, and its number not used again. */
static void numbers_go_on(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    join_world(w, a);
    int64_t id;
    struct fake_attempt *x = run_job(w, a, &id);
    x->attempt = 4;
    struct fake_attempt other = *x; /* and a job that the copy does not know */
    other.job = 7;
    other.attempt = 1;
    struct fake_attempt *y = &a->attempts[a->n_attempts++];
    *y = other;
    a->slots = 4;
    adopted(w);
    join_world(w, a);
    advance(w, 5000);
    assert_false(x->alive || y->alive);
    struct job *job = job_of(w, id);
    assert_int_equal(job->n_attempts, 5);
    assert_non_null(strstr(job_attempt(job, 3)->text, "after the copy"));
    assert_true(job_attempt(job, 4)->fenced && job_attempt(job, 4)->end_ns);
    assert_int_equal(newest(w, a, id)->attempt, 5);
    assert_true(submit(w) > 7);
    /* It can be read again. */
    controller_restart(w);
    assert_int_equal(job_of(w, id)->n_attempts, 5);
    join_world(w, a);
    assert_int_equal(job_of(w, id)->n_attempts, 5);
    world_free(w);
}

/* A node that is not back yet may have what nobody knows of: nothing starts before, nor for ever. */
static void waits_for_every_node(void **state)
{
    (void)state;
    for (int comes = 0; comes < 2; comes++) {
        struct world *w = world_new();
        struct fake_agent *a = agent_add(w, "n1", 2), *b = agent_add(w, "n2", 2);
        join_world(w, a);
        join_world(w, b);
        advance(w, 1000);
        adopted(w);
        join_world(w, a);
        int64_t id = submit(w);
        advance(w, 5000);
        assert_int_equal(job_of(w, id)->state, BOOST__JOB_STATE__VALUE__QUEUED);
        struct arena mem;
        arena_init(&mem, 1 << 20);
        Boost__JobSummary *s = core_summary(w->core, job_of(w, id), &mem);
        assert_non_null(strstr(s->info, "until every node has registered"));
        arena_free(&mem);
        if (comes)
            join_world(w, b);
        else
            advance(w, 30000); /* restart_grace_ms */
        advance(w, 100);
        assert_int_equal(job_of(w, id)->state, BOOST__JOB_STATE__VALUE__STARTING);
        world_free(w);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(nothing_has_changed), cmocka_unit_test(numbers_go_on),
                                       cmocka_unit_test(waits_for_every_node)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
