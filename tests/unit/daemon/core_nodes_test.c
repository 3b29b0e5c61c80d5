/* The controller core over lost nodes, returning agents and its own restarts. */
#include "tests/unit/daemon/core_world.h"

static Boost__NodeInfo *node_info(struct world *w, const char *name, struct arena *mem)
{
    Boost__NodesReply *r = core_nodes(w->core, mem);
    assert_non_null(r);
    for (size_t i = 0; i < r->n_nodes; i++)
        if (strcmp(r->nodes[i]->name, name) == 0)
            return r->nodes[i];
    return NULL;
}

static int liveness(struct world *w, const char *name)
{
    struct arena mem;
    arena_init(&mem, 1 << 20);
    Boost__NodeInfo *n = node_info(w, name, &mem);
    int l = n ? (int)n->liveness : -1;
    arena_free(&mem);
    return l;
}
#define assert_liveness(w, name, l) assert_int_equal(liveness(w, name), BOOST__NODE_LIVENESS__VALUE__##l)

static void silence_makes_suspect_then_down(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    assert_liveness(w, "n1", UP);
    advance(w, 60000); /* past the restart grace */
    struct fake_attempt *x = run_job(w, a, &id);
    a->beating = false;
    advance(w, 2500);
    assert_liveness(w, "n1", UP);
    advance(w, 1500);
    assert_liveness(w, "n1", SUSPECT);
    assert_state(w, id, RUNNING);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    assert_says(core_summary(w->core, job_of(w, id), &mem)->info, "still believed running");
    arena_free(&mem);
    a->beating = true;
    advance(w, 1000);
    assert_liveness(w, "n1", UP);
    assert_int_equal(x->kills + x->terms, 0);
    a->beating = false;
    advance(w, 8900);
    assert_state(w, id, RUNNING);
    advance(w, 2000);
    assert_liveness(w, "n1", DOWN);
    assert_state(w, id, RECOVERING);
    assert_int_equal(job_of(w, id)->reason, REASON(NodeLost));
    assert_says(event_of(w, id, "node-lost")->text, "n1 lost (no heartbeat for 10 s); infrastructure, no restart used");
    assert_true(job_of(w, id)->detection_s > 9.5);
    world_free(w);
}

/* D7: the node comes back with the old attempt alive; it gets no new one before it confirmed the kill. */
static void a_returning_node_is_fenced_first(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 4);
    int64_t id;
    join_world(w, a);
    advance(w, 40000);
    struct fake_attempt *x = run_job(w, a, &id);
    checkpoint_at(w, a, x, 20);
    disconnect(w, a);
    advance(w, 8000);
    assert_state(w, id, RUNNING);
    advance(w, 5000);
    assert_state(w, id, RECOVERING);
    a->obeys_kill = false;
    join_world(w, a);
    pump(w);
    assert_int_equal(x->kills, 1);
    /* Stale reports of the fenced attempt count for nothing. */
    uint64_t stale = core_stats(w->core)->stale_reports;
    say_step(w, a, x, 90);
    say_checkpoint(w, a, x, 90);
    say_metrics(w, a, x, 0, 90, 1.0);
    pump(w);
    assert_true(core_stats(w->core)->stale_reports >= stale + 5);
    assert_int_equal(job_of(w, id)->checkpoint_step, 20);
    assert_null(job_checkpoint(job_of(w, id), 90, 1));
    assert_true(job_of(w, id)->step == 20);
    advance(w, 20000);
    assert_state(w, id, RECOVERING); /* four devices, two free, and still not there */
    kill_all(w, a, x);
    pump(w);
    assert_state(w, id, STARTING);
    assert_true(x->forgotten);
    assert_int_equal(newest(w, a, id)->from_step, 20);
    world_free(w);
}

static void it_recovers_elsewhere_meanwhile(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    struct fake_agent *b = agent_add(w, "n2", 2);
    int64_t id;
    join_world(w, a);
    join_world(w, b);
    advance(w, 40000);
    struct fake_attempt *x = run_job(w, a, &id);
    disconnect(w, a);
    advance(w, 13000);
    assert_state(w, id, STARTING);
    struct fake_attempt *y = newest(w, b, id);
    say_step(w, b, y, 1);
    pump(w);
    assert_state(w, id, RUNNING);
    /* The old node is back: fenced, and the new attempt hears nothing of it. */
    join_world(w, a);
    pump(w);
    assert_true(x->kills == 1 && !x->alive && x->forgotten);
    assert_int_equal(y->kills + y->terms, 0);
    assert_state(w, id, RUNNING);
    int64_t next = submit(w);
    assert_non_null(newest(w, a, next));
    world_free(w);
}

static void an_agent_restart_restarts_no_rank(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    disconnect(w, a);
    advance(w, 1500);
    snprintf(a->instance, sizeof a->instance, "instance-n1-2");
    join_world(w, a);
    pump(w);
    assert_state(w, id, RUNNING);
    assert_int_equal(x->starts, 1);
    assert_int_equal(x->kills + x->terms, 0);
    /* What ended meanwhile is told from its record. */
    disconnect(w, a);
    for (int i = 0; i < 2; i++) {
        x->ended[i] = true;
        x->ends[i] = (struct end){.exit_code = i ? 65 : 7, .seq = i + 1};
    }
    x->alive = false;
    advance(w, 1000);
    join_world(w, a);
    pump(w);
    assert_state(w, id, RECOVERING);
    assert_says(event_of(w, id, "rank-exit")->text, "rank 0 on n1: exit code 7");
    world_free(w);
}

/* An agent under another name brings what runs: it is nobody's there, and is not killed while it may be what n1 has. */
static void an_agent_under_another_name_kills_nothing(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    struct fake_agent *b = agent_add(w, "n9", 2);
    struct error err;
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    b->attempts[0] = *x;
    b->n_attempts = 1;
    struct fake_attempt *y = &b->attempts[0];
    disconnect(w, a);
    assert_int_equal(try_register(w, b, &err), ERR_REFUSED);
    assert_says(err.message, "which was placed on node n1");
    assert_says(err.hint, "--node n1");
    b->connected = false;
    y->alive = false; /* nor is its end forgotten */
    assert_int_equal(try_register(w, b, &err), ERR_REFUSED);
    b->connected = false;
    y->alive = true;
    advance(w, 1000);
    assert_int_equal(y->kills + y->terms, 0);
    assert_int_equal(liveness(w, "n9"), -1); /* not known as a node */
    snprintf(a->instance, sizeof a->instance, "instance-n1-2");
    join_world(w, a);
    pump(w);
    assert_state(w, id, RUNNING);
    assert_int_equal(x->kills + x->terms, 0);
    /* While n1 has it, the other is a stranger; as it is once n1 is given up. */
    join_world(w, b);
    pump(w);
    assert_int_equal(y->kills, 1);
    assert_state(w, id, RUNNING);
    world_free(w);
}

static void another_name_is_taken_when_the_first_is_down(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    struct fake_agent *b = agent_add(w, "n9", 2);
    struct error err;
    int64_t id;
    join_world(w, a);
    advance(w, 40000);
    b->attempts[0] = *run_job(w, a, &id);
    b->n_attempts = 1;
    disconnect(w, a);
    assert_int_equal(try_register(w, b, &err), ERR_REFUSED);
    b->connected = false;
    advance(w, 13000);
    assert_state(w, id, RECOVERING);
    join_world(w, b);
    pump(w);
    assert_int_equal(b->attempts[0].kills, 1);
    advance(w, 5000);
    assert_state(w, id, STARTING);
    assert_non_null(newest(w, b, id));
    world_free(w);
}

static void an_agent_without_the_attempt_has_lost_it(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    disconnect(w, a);
    x->alive = false;
    x->forgotten = true; /* rebooted */
    snprintf(a->boot, sizeof a->boot, "boot-n1-2");
    snprintf(a->instance, sizeof a->instance, "instance-n1-2");
    advance(w, 2000);
    join_world(w, a);
    pump(w);
    assert_state(w, id, RECOVERING);
    assert_says(event_of(w, id, "node-lost")->text, "its agent came back without the attempt");
    assert_int_equal(job_of(w, id)->restarts_used, 0);
    recovered(w, a, id);
    world_free(w);
}

/* A hang was reported, and the ranks came to their end before the kill reached them. */
static void a_job_given_up_may_still_have_finished(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    a->obeys_kill = false;
    Boost__HangReport h = BOOST__HANG_REPORT__INIT;
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    h.has_job = h.has_attempt = h.has_rank = 1;
    h.job = id;
    h.attempt = 1;
    m.body_case = BOOST__AGENT_MESSAGE__BODY_HANG;
    m.hang = &h;
    say(w, "n1", &m);
    pump(w);
    assert_state(w, id, RECOVERING);
    say_finished(w, a, x);
    pump(w);
    assert_state(w, id, COMPLETED);
    assert_int_equal(job_of(w, id)->checkpoint_step, 100);
    world_free(w);
}

static void a_lost_start_is_sent_again(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    join_world(w, a);
    int64_t id = submit(w);
    struct fake_attempt *x = newest(w, a, id);
    x->alive = false;
    x->forgotten = true; /* as if it had never come */
    disconnect(w, a);
    advance(w, 1000);
    join_world(w, a);
    pump(w);
    assert_state(w, id, STARTING);
    assert_int_equal(job_of(w, id)->n_attempts, 1);
    assert_int_equal(newest(w, a, id)->starts, 1);
    world_free(w);
}

static void a_second_agent_of_the_name_is_refused(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    struct error err;
    join_world(w, a);
    snprintf(a->instance, sizeof a->instance, "instance-n1-2");
    assert_int_equal(try_register(w, a, &err), ERR_REFUSED);
    assert_says(err.message, "another agent of node n1");
    /* Its connection is dead, though that was not seen yet: then it may. */
    a->beating = false;
    advance(w, 4000);
    assert_int_equal(try_register(w, a, &err), ERR_OK);
    snprintf(a->name, sizeof a->name, "bad name");
    assert_int_equal(try_register(w, a, &err), ERR_PROTOCOL);
    world_free(w);
}

/* ---- restarts of the controller -------------------------------------------------------------- */

static void restarted(struct world *w, struct fake_agent *a)
{
    controller_restart(w);
    advance(w, 500);
    join_world(w, a);
    pump(w);
}

static void it_comes_back_in_every_state(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct arena mem;
    arena_init(&mem, 1 << 20);
    struct fake_agent *a = agent_add(w, "n1", 2);
    join_world(w, a);
    /* HELD and QUEUED */
    int64_t held = submit_spec(w, spec_new(&mem), true);
    int64_t id = submit(w); /* STARTING */
    int64_t queued = submit(w);
    struct fake_attempt *x = newest(w, a, id);
    restarted(w, a);
    assert_state(w, held, HELD);
    assert_state(w, queued, QUEUED);
    assert_state(w, id, STARTING);
    assert_int_equal(x->starts, 1);
    say_step(w, a, x, 1);
    pump(w);
    /* RUNNING, with metrics and a checkpoint half reported */
    say_metrics(w, a, x, 0, 1, 5.0);
    say_shard(w, a, x, 0, 20, NULL);
    say_step(w, a, x, 20);
    pump(w);
    restarted(w, a);
    assert_state(w, id, RUNNING);
    assert_int_equal(x->kills + x->terms, 0);
    assert_int_equal(x->starts, 1);
    say_shard(w, a, x, 0, 20, NULL); /* a repeat is fine */
    say_shard(w, a, x, 1, 20, NULL);
    pump(w);
    assert_int_equal(job_of(w, id)->checkpoint_step, 20);
    assert_int_equal(job_attempt(job_of(w, id), 1)->ranks[0].metrics_seq, 1);
    /* RECOVERING, the kill not confirmed */
    a->obeys_kill = false;
    say_end_of(w, a, x, 0, (struct end){.exit_code = 7});
    pump(w);
    assert_state(w, id, RECOVERING);
    int kills = x->kills;
    restarted(w, a);
    assert_state(w, id, RECOVERING);
    assert_true(x->kills > kills); /* derived from state again */
    a->obeys_kill = true;
    kill_all(w, a, x);
    pump(w);
    assert_int_equal(job_of(w, id)->restarts_used, 1);
    assert_int_equal(count_events(w, id, "rank-exit"), 1);
    assert_true(x->forgotten);
    /* RECOVERING, in back-off */
    assert_true(job_of(w, id)->backoff_due > 0);
    restarted(w, a);
    x = recovered(w, a, id);
    assert_int_equal(x->attempt, 2);
    assert_int_equal(x->from_step, 20);
    /* STOPPING, asked */
    a->obeys_term = false;
    assert_int_equal(control(w, CANCEL, id, false), ERR_OK);
    assert_int_equal(x->terms, 1);
    restarted(w, a);
    assert_state(w, id, STOPPING);
    assert_int_equal(x->terms, 2);
    assert_int_equal(x->kills, 0);
    /* STOPPING, to be killed */
    a->obeys_kill = false;
    assert_int_equal(control(w, CANCEL, id, true), ERR_OK);
    kills = x->kills;
    restarted(w, a);
    assert_int_equal(x->kills, kills + 1);
    a->obeys_kill = true;
    kill_all(w, a, x);
    pump(w);
    assert_state(w, id, CANCELLED);
    assert_state(w, queued, STARTING);
    restarted(w, a);
    assert_state(w, id, CANCELLED);
    assert_int_equal(core_stats(w->core)->illegal_transitions, 0);
    arena_free(&mem);
    world_free(w);
}

/* An end that was told but whose effect was not durable is told again and counts once. */
static void an_end_is_acknowledged_with_its_effect(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    checkpoint_at(w, a, x, 100);
    say_end_of(w, a, x, 1, (struct end){.done = true});
    pump(w);
    assert_false(x->end_acked[1]);
    restarted(w, a); /* rank 1's clean end was in memory only */
    say_end_of(w, a, x, 0, (struct end){.done = true});
    say_node_end(w, a, x);
    pump(w);
    assert_state(w, id, COMPLETED);
    assert_true(x->forgotten);
    /* And a failure, lost between memory and disk. */
    x = run_job(w, a, &id);
    say_end_of(w, a, x, 0, (struct end){.exit_code = 7});
    core_run(w->core);
    deliver_one(w);
    core_run(w->core);
    controller_restart(w);
    assert_state(w, id, RUNNING);
    join_world(w, a);
    pump(w);
    assert_state(w, id, RECOVERING);
    assert_int_equal(job_of(w, id)->restarts_used, 1);
    world_free(w);
}

/* D9: a restart declares nothing down before its grace, and the live attempt is not restarted. */
static void the_grace_after_a_restart(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    controller_restart(w);
    advance(w, 29000);
    assert_state(w, id, RUNNING);
    assert_liveness(w, "n1", JOINING);
    join_world(w, a);
    advance(w, 5000);
    assert_state(w, id, RUNNING);
    assert_int_equal(x->kills + x->terms, 0);
    assert_int_equal(x->starts, 1);
    /* Nobody comes: lost after the grace. */
    controller_restart(w);
    advance(w, 31000);
    assert_liveness(w, "n1", DOWN);
    assert_state(w, id, RECOVERING);
    assert_says(event_of(w, id, "node-lost")->text, "did not come back in 30 s after the controller's start");
    world_free(w);
}

/* A row that cannot be read costs its attempt, not the job: and least of all is the job COMPLETED by it. */
static void a_damaged_placement_fails_the_attempt(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    w->store->attempts[w->store->n_attempts - 1].placement = "n1";
    controller_restart(w);
    pump(w);
    assert_state(w, id, RECOVERING);
    assert_says(event_of(w, id, "node-lost")->text, "placement in state.db cannot be read");
    assert_int_equal(x->kills, 0);
    join_world(w, a);
    assert_int_equal(x->kills, 1); /* fenced */
    advance(w, 5000);
    assert_int_equal(job_of(w, id)->n_attempts, 2);
    world_free(w);
}

static void work_on_files_is_derived_again(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    a->answers = false;
    checkpoint_at(w, a, x, 20);
    assert_int_equal(a->manifests, 1);
    assert_int_equal(job_of(w, id)->checkpoint_step, -1);
    a->answers = true;
    restarted(w, a);
    assert_int_equal(a->manifests, 2);
    assert_int_equal(job_of(w, id)->checkpoint_step, 20);
    /* An agent that comes back without having answered. */
    a->answers = false;
    say_checkpoint(w, a, x, 40);
    pump(w);
    disconnect(w, a);
    a->answers = true;
    advance(w, 1000);
    join_world(w, a);
    advance(w, 6000);
    assert_int_equal(job_of(w, id)->checkpoint_step, 40);
    world_free(w);
}

static void a_full_disk_stops_submits_and_nothing_else(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct arena mem;
    arena_init(&mem, 1 << 20);
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    w->store->sick = ERR_NOSPACE;
    assert_int_equal(submit_spec(w, spec_new(&mem), false), 0);
    assert_int_equal(w->reply_rc, ERR_NOSPACE);
    say_step(w, a, x, 30);
    advance(w, 5000);
    assert_state(w, id, RUNNING);
    assert_int_equal(x->kills + x->terms, 0);
    /* The kill of the rest does not wait for the disk; the next attempt does. */
    say_end_of(w, a, x, 0, (struct end){.signal = 9});
    advance(w, 10000);
    assert_int_equal(x->kills, 1);
    assert_state(w, id, RECOVERING);
    assert_false(x->end_acked[0]);
    w->store->sick = 0;
    pump(w);
    advance(w, 100);
    assert_state(w, id, STARTING);
    assert_true(x->forgotten);
    arena_free(&mem);
    world_free(w);
}

/* An agent that lists one job's attempts by the hundred: none of them is where the next one may go, and that is all. */
static void attempts_beyond_reason_are_fenced(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id = submit(w);
    for (int i = 0; i < 200; i++)
        a->attempts[a->n_attempts++] =
            (struct fake_attempt){.job = id, .attempt = 1000 + i, .world = 2, .ranks = {0, 1}, .n_ranks = 2, .alive = true};
    a->obeys_kill = false;
    join_world(w, a);
    pump(w);
    assert_state(w, id, QUEUED);
    for (int i = 0; i < a->n_attempts; i++) {
        assert_int_equal(a->attempts[i].kills, 1);
        a->attempts[i].alive = false; /* that is not told yet */
    }
    struct fake_agent *b = agent_add(w, "n2", 2);
    join_world(w, b);
    pump(w);
    assert_state(w, id, STARTING);
    assert_int_equal(job_of(w, id)->n_attempts, 1); /* their numbers count for nothing: no copy was adopted */
    world_free(w);
}

static void a_register_beyond_reason_is_refused(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", INT32_MAX);
    struct error err;
    assert_int_equal(try_register(w, a, &err), ERR_PROTOCOL);
    world_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(silence_makes_suspect_then_down),
        cmocka_unit_test(a_returning_node_is_fenced_first),
        cmocka_unit_test(it_recovers_elsewhere_meanwhile),
        cmocka_unit_test(an_agent_restart_restarts_no_rank),
        cmocka_unit_test(an_agent_under_another_name_kills_nothing),
        cmocka_unit_test(another_name_is_taken_when_the_first_is_down),
        cmocka_unit_test(an_agent_without_the_attempt_has_lost_it),
        cmocka_unit_test(a_job_given_up_may_still_have_finished),
        cmocka_unit_test(a_lost_start_is_sent_again),
        cmocka_unit_test(a_second_agent_of_the_name_is_refused),
        cmocka_unit_test(it_comes_back_in_every_state),
        cmocka_unit_test(an_end_is_acknowledged_with_its_effect),
        cmocka_unit_test(the_grace_after_a_restart),
        cmocka_unit_test(a_damaged_placement_fails_the_attempt),
        cmocka_unit_test(work_on_files_is_derived_again),
        cmocka_unit_test(a_full_disk_stops_submits_and_nothing_else),
        cmocka_unit_test(attempts_beyond_reason_are_fenced),
        cmocka_unit_test(a_register_beyond_reason_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
