/* Cancel, hold, release, time limits, and stops that do not stop. */
#include "tests/unit/daemon/core_world.h"

static const char *info(struct world *w, int64_t id, struct arena *mem)
{
    Boost__JobSummary *s = core_summary(w->core, job_of(w, id), mem);
    assert_non_null(s);
    return s->info;
}

static void cancel_in_every_state(void **state)
{
    (void)state;
    for (int now = 0; now < 2; now++) {
        struct world *w = world_new();
        struct arena mem;
        arena_init(&mem, 1 << 20);
        int64_t id = submit(w); /* QUEUED */
        assert_int_equal(control(w, CANCEL, id, now), ERR_OK);
        assert_state(w, id, CANCELLED);
        assert_int_equal(control(w, CANCEL, id, now), ERR_REFUSED);
        id = submit_spec(w, spec_new(&mem), true); /* HELD */
        assert_int_equal(control(w, CANCEL, id, now), ERR_OK);
        assert_state(w, id, CANCELLED);
        struct fake_agent *a = agent_add(w, "n1", 2);
        join_world(w, a);
        id = submit(w); /* STARTING */
        struct fake_attempt *x = newest(w, a, id);
        assert_state(w, id, STARTING);
        assert_int_equal(control(w, CANCEL, id, now), ERR_OK);
        assert_state(w, id, CANCELLED);
        assert_true(x->kills == 1 && x->terms == 0 && x->forgotten);
        x = run_job(w, a, &id); /* RUNNING */
        assert_int_equal(control(w, CANCEL, id, now), ERR_OK);
        assert_state(w, id, CANCELLED);
        assert_int_equal(x->terms, now ? 0 : 1);
        assert_int_equal(x->kills, now ? 1 : 0);
        assert_int_equal(job_of(w, id)->checkpoint_step, now ? -1 : 2);
        assert_says(job_of(w, id)->reason_text, "cancelled by uid 1000 (ann)");
        x = run_job(w, a, &id); /* RECOVERING, the kill not confirmed */
        a->obeys_kill = false;
        say_end_of(w, a, x, 0, (struct end){.signal = 9});
        pump(w);
        assert_state(w, id, RECOVERING);
        assert_int_equal(control(w, CANCEL, id, now), ERR_OK);
        assert_state(w, id, STOPPING);
        a->obeys_kill = true;
        kill_all(w, a, x);
        pump(w);
        assert_state(w, id, CANCELLED);
        x = run_job(w, a, &id); /* RECOVERING, in back-off */
        say_end_of(w, a, x, 0, (struct end){.signal = 9});
        pump(w);
        assert_int_equal(control(w, CANCEL, id, now), ERR_OK);
        assert_state(w, id, CANCELLED);
        advance(w, 10000);
        assert_state(w, id, CANCELLED);
        x = run_job(w, a, &id); /* STOPPING */
        a->obeys_term = false;
        assert_int_equal(control(w, CANCEL, id, false), ERR_OK);
        assert_state(w, id, STOPPING);
        assert_int_equal(control(w, CANCEL, id, false), ERR_REFUSED);
        assert_int_equal(control(w, CANCEL, id, true), ERR_OK);
        assert_state(w, id, CANCELLED);
        assert_int_equal(core_stats(w->core)->illegal_transitions, 0);
        arena_free(&mem);
        world_free(w);
    }
}

static void what_has_ended_says_how_and_where(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    struct arena mem;
    int64_t id;
    arena_init(&mem, 1 << 20);
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    assert_int_equal(control(w, HOLD, id, false), ERR_OK);
    assert_state(w, id, HELD);
    assert_int_equal(control(w, RELEASE, id, false), ERR_OK);
    pump(w);
    x = newest(w, a, id);
    say_step(w, a, x, 100);
    say_metrics(w, a, x, 0, 100, 1.5);
    say_checkpoint(w, a, x, 100);
    for (int r = 0; r < 2; r++)
        say_end_of(w, a, x, r, (struct end){.done = true});
    say_node_end(w, a, x);
    advance(w, 1000);
    assert_state(w, id, COMPLETED);
    for (int restarted = 0; restarted < 2; restarted++) {
        Boost__ShowReply *show = core_show(w->core, job_of(w, id), &mem);
        assert_int_equal(show->n_attempts, 2);
        assert_int_equal(show->attempts[0]->reason, REASON(Held));
        assert_says(show->attempts[0]->text, "held by uid 1000 (ann)");
        assert_int_equal(show->attempts[1]->reason, REASON(NONE));
        assert_string_equal(show->attempts[1]->text, "all steps done");
        assert_int_equal(show->summary->n_nodes, 1);
        assert_string_equal(show->summary->nodes[0], "n1");
        assert_says(show->summary->info, "2 attempts");
        controller_restart(w);
        pump(w);
    }
    arena_free(&mem);
    world_free(w);
}

static void hold_and_release(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    assert_int_equal(control(w, HOLD, id, false), ERR_OK);
    assert_says(w->reply_text, "HELD");
    assert_state(w, id, HELD);
    assert_int_equal(job_of(w, id)->checkpoint_step, 2);
    assert_int_equal(control(w, HOLD, id, false), ERR_REFUSED);
    advance(w, 60000);
    assert_state(w, id, HELD);
    assert_int_equal(control(w, RELEASE, id, false), ERR_OK);
    pump(w);
    x = newest(w, a, id);
    assert_int_equal(x->from_step, 2);
    assert_int_equal(job_of(w, id)->stuck_attempts, 0);
    say_step(w, a, x, 3);
    pump(w);
    /* Released while it still stops: queued again at once. */
    a->obeys_term = false;
    assert_int_equal(control(w, HOLD, id, false), ERR_OK);
    assert_state(w, id, STOPPING);
    assert_int_equal(control(w, RELEASE, id, false), ERR_OK);
    assert_state(w, id, STOPPING);
    kill_all(w, a, x);
    pump(w);
    assert_state(w, id, STARTING);
    assert_int_equal(newest(w, a, id)->attempt, 3);
    world_free(w);
}

static void a_job_that_finishes_while_stopping_has_finished(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    a->obeys_term = false;
    assert_int_equal(control(w, CANCEL, id, false), ERR_OK);
    say_finished(w, a, x);
    pump(w);
    assert_state(w, id, COMPLETED);
    assert_int_equal(job_of(w, id)->reason, REASON(NONE));
    world_free(w);
}

static void only_the_owner_and_root_may(void **state)
{
    (void)state;
    struct world *w = world_new();
    int64_t id = submit(w);
    core_control(w->core, CANCEL, id, false, &user_bob, on_control, w);
    pump(w);
    assert_int_equal(w->reply_rc, ERR_REFUSED);
    assert_says(w->reply_text, "belongs to ann (uid 1000)");
    assert_state(w, id, QUEUED);
    struct core_user own = {.uid = 500, .name = "boost"}, root = {.uid = 0, .name = "root"};
    core_control(w->core, HOLD, id, false, &own, on_control, w);
    pump(w);
    assert_int_equal(w->reply_rc, ERR_OK);
    core_control(w->core, CANCEL, id, false, &root, on_control, w);
    pump(w);
    assert_int_equal(w->reply_rc, ERR_OK);
    assert_int_equal(control(w, CANCEL, 99, false), ERR_NOT_FOUND);
    world_free(w);
}

static void asked_checkpoints_reach_the_agent(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    id = submit(w);
    assert_int_equal(control(w, CHECKPOINT, id, false), ERR_REFUSED);
    struct fake_attempt *x = newest(w, a, id);
    say_step(w, a, x, 1);
    pump(w);
    assert_int_equal(control(w, CHECKPOINT, id, false), ERR_OK);
    assert_int_equal(x->checkpoints_asked, 1);
    disconnect(w, a);
    assert_int_equal(control(w, CHECKPOINT, id, false), ERR_UNREACHABLE);
    world_free(w);
}

static void the_time_limit_counts_all_attempts(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    Boost__JobSpec *s = spec_new(&mem);
    s->has_time_limit_s = 1;
    s->time_limit_s = 100;
    int64_t id = submit_spec(w, s, false);
    advance(w, 500000); /* queue time does not count */
    join_world(w, a);
    pump(w);
    struct fake_attempt *x = newest(w, a, id);
    say_step(w, a, x, 1);
    advance(w, 50000);
    say_end_of(w, a, x, 0, (struct end){.signal = 9});
    pump(w);
    x = recovered(w, a, id);
    advance(w, 40000);
    assert_state(w, id, RUNNING);
    advance(w, 10500);
    assert_state(w, id, TIMEOUT);
    assert_int_equal(x->terms, 1); /* with a checkpoint */
    assert_int_equal(job_of(w, id)->checkpoint_step, 2);
    assert_int_equal(job_of(w, id)->reason, REASON(TimeLimit));
    assert_says(event_of(w, id, "timeout")->text, "time limit of 100 s reached");
    Boost__JobSummary *sum = core_summary(w->core, job_of(w, id), &mem);
    assert_true(sum->elapsed_s >= 99.9 && sum->elapsed_s < 103);
    arena_free(&mem);
    world_free(w);
}

/* A controller that comes back late knows an old step only. */
static void a_time_limit_says_the_step_that_is_known(void **state)
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
    say_step(w, a, newest(w, a, id), 1);
    pump(w);
    advance(w, 90000);
    controller_restart(w);
    advance(w, 11000);
    assert_says(job_of(w, id)->reason_text, "time limit of 100 s reached at step 1 or later");
    arena_free(&mem);
    world_free(w);

    w = world_new();
    a = agent_add(w, "n1", 2);
    arena_init(&mem, 1 << 20);
    s = spec_new(&mem);
    s->has_time_limit_s = 1;
    s->time_limit_s = 100;
    join_world(w, a);
    id = submit_spec(w, s, false);
    assert_state(w, id, STARTING);
    advance(w, 101000);
    assert_says(job_of(w, id)->reason_text, "time limit of 100 s reached before its first step");
    arena_free(&mem);
    world_free(w);
}

/* D19, D26: what does not stop is killed; what does not die drains its node with a full reason. */
static void stops_have_deadlines(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    a->obeys_term = a->obeys_kill = false;
    assert_int_equal(control(w, CANCEL, id, false), ERR_OK);
    assert_says(w->reply_text, "at most 30 s");
    advance(w, 29000);
    assert_int_equal(x->kills, 0);
    advance(w, 2000);
    assert_int_equal(x->kills, 1);
    assert_non_null(event_of(w, id, "stop-overdue"));
    struct arena mem;
    arena_init(&mem, 1 << 20);
    Boost__ShowReply *show = core_show(w->core, job_of(w, id), &mem);
    assert_non_null(show);
    assert_int_equal(show->n_waits, 1);
    assert_string_equal(show->waits[0]->name, "kill confirmed by n1");
    assert_true(show->waits[0]->limit_s == 30);
    advance(w, 28000);
    assert_state(w, id, STOPPING);
    advance(w, 2000);
    assert_state(w, id, CANCELLED);
    assert_says(event_of(w, 0, "node-drained")->text,
                "job 1 attempt 1: 2 ranks not confirmed dead 30.0 s after SIGKILL");
    /* Its devices are not given to anybody. */
    int64_t next = submit(w);
    assert_state(w, next, QUEUED);
    assert_says(info(w, next, &mem), "no node takes new work");
    /* Confirmed after all, to another run of the controller: the node is taken back. */
    controller_restart(w);
    join_world(w, a);
    pump(w);
    assert_null(event_of(w, 0, "node-resumed"));
    assert_state(w, next, QUEUED);
    kill_all(w, a, x);
    pump(w);
    assert_non_null(event_of(w, 0, "node-resumed"));
    assert_state(w, next, STARTING);
    arena_free(&mem);
    world_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cancel_in_every_state),
        cmocka_unit_test(what_has_ended_says_how_and_where),
        cmocka_unit_test(hold_and_release),
        cmocka_unit_test(a_job_that_finishes_while_stopping_has_finished),
        cmocka_unit_test(only_the_owner_and_root_may),
        cmocka_unit_test(asked_checkpoints_reach_the_agent),
        cmocka_unit_test(the_time_limit_counts_all_attempts),
        cmocka_unit_test(a_time_limit_says_the_step_that_is_known),
        cmocka_unit_test(stops_have_deadlines),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
