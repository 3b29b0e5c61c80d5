/* Devices taken from a running job: it checkpoints, waits its turn again, and goes on from there. */
#include "tests/unit/daemon/core_world.h"

static void preempted_goes_on_later(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "gpu01", 2);
    join_world(w, a);
    int64_t id, other;
    struct fake_attempt *x = run_job(w, a, &id);
    say_step(w, a, x, 7);
    pump(w);
    control(w, HOLD, other = submit(w), false);
    assert_true(core_preempt(w->core, job_of(w, id), job_of(w, other)));
    assert_state(w, id, STOPPING);
    /* Asked twice it is on its way already. */
    assert_true(core_preempt(w->core, job_of(w, id), job_of(w, other)));
    control(w, RELEASE, other, false);
    advance(w, 1000);
    assert_int_equal(x->terms, 1);
    assert_int_equal(x->kills, 0);
    const struct store_event *e = event_of(w, id, "preempted");
    assert_non_null(e);
    assert_says(e->text, "job 2 (tiny, priority 50) needs its devices");
    assert_int_equal(count_events(w, id, "preempted"), 1);
    assert_non_null(event_of(w, id, "queued"));
    assert_says(event_of(w, id, "queued")->text, "preempted at step 7 by job 2");
    assert_says(event_of(w, id, "queued")->text, "last checkpoint at step 8");
    assert_int_equal(job_of(w, id)->attempts[0]->reason, REASON(Preempted));
    assert_int_equal(job_of(w, id)->restarts_used, 0);
    assert_int_equal(job_of(w, id)->stuck_attempts, 0);
    assert_state(w, id, QUEUED);
    assert_state(w, other, STARTING);
    say_finished(w, a, newest(w, a, other));
    advance(w, 1000);
    assert_state(w, other, COMPLETED);
    assert_state(w, id, STARTING); /* where it was */
    assert_int_equal(newest(w, a, id)->from_step, 8);
    world_free(w);
}

static void preempted_while_starting_is_killed(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "gpu01", 2);
    join_world(w, a);
    int64_t id = submit(w), other;
    assert_state(w, id, STARTING);
    struct fake_attempt *x = newest(w, a, id);
    control(w, HOLD, other = submit(w), false);
    a->obeys_kill = false;
    assert_true(core_preempt(w->core, job_of(w, id), job_of(w, other)));
    pump(w);
    assert_int_equal(x->terms, 0);
    assert_true(x->kills > 0);
    assert_state(w, id, STOPPING);
    kill_all(w, a, x);
    pump(w);
    assert_int_equal(job_of(w, id)->n_attempts, 2);
    world_free(w);
}

static void cancel_while_preempted(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "gpu01", 2);
    join_world(w, a);
    int64_t id, other;
    struct fake_attempt *x = run_job(w, a, &id);
    control(w, HOLD, other = submit(w), false);
    a->obeys_term = false;
    assert_true(core_preempt(w->core, job_of(w, id), job_of(w, other)));
    pump(w);
    assert_int_equal(x->terms, 1);
    assert_int_equal(control(w, CANCEL, id, false), ERR_OK);
    assert_state(w, id, STOPPING);
    advance(w, 40000); /* the grace */
    assert_state(w, id, CANCELLED);
    assert_false(core_preempt(w->core, job_of(w, id), job_of(w, other)));
    assert_false(core_preempt(w->core, job_of(w, other), job_of(w, id)));
    world_free(w);
}

/* A job that the victim's end finds finished has finished. */
static void preempted_at_its_last_step(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "gpu01", 2);
    join_world(w, a);
    int64_t id, other;
    struct fake_attempt *x = run_job(w, a, &id);
    control(w, HOLD, other = submit(w), false);
    a->obeys_term = false;
    assert_true(core_preempt(w->core, job_of(w, id), job_of(w, other)));
    say_finished(w, a, x);
    pump(w);
    assert_state(w, id, COMPLETED);
    assert_int_equal(core_stats(w->core)->illegal_transitions, 0);
    world_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(preempted_goes_on_later),
        cmocka_unit_test(preempted_while_starting_is_killed),
        cmocka_unit_test(cancel_while_preempted),
        cmocka_unit_test(preempted_at_its_last_step),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
