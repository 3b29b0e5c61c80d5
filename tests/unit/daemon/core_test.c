/* The controller core in a world driven by hand: submit, placement, checkpoints,
 * failures, stops. What happens to nodes and over restarts is in core_nodes_test.c. */
#include "tests/unit/daemon/core_world.h"

/* ---- submit and the happy path ---------------------------------------------------------- */

static void a_job_runs_to_its_end(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    assert_int_equal(a->preflights, 1);
    assert_int_equal(x->n_ranks, 2);
    assert_string_equal(x->ckpt_dir, "/ckpt/0badcafe-1");
    assert_int_equal(x->resume[0], 0);
    say_metrics(w, a, x, 0, 1, 5.5);
    say_step(w, a, x, 20);
    say_checkpoint(w, a, x, 20);
    pump(w);
    assert_int_equal(job_of(w, id)->checkpoint_step, 20);
    assert_true(job_of(w, id)->loss == 5.5);
    assert_says(event_of(w, id, "checkpoint")->text, "step 20 committed: 2 shards");
    say_finished(w, a, x);
    pump(w);
    assert_state(w, id, COMPLETED);
    assert_int_equal(job_of(w, id)->checkpoint_step, 100);
    assert_true(x->forgotten);
    assert_int_equal(job_of(w, id)->reason, REASON(NONE));
    assert_non_null(event_of(w, id, "submitted"));
    assert_string_equal(event_of(w, id, "submitted")->actor, "uid 1000 (ann)");
    assert_says(event_of(w, id, "completed")->text, "all 100 steps done");
    assert_int_equal(core_stats(w->core)->illegal_transitions, 0);
    assert_int_equal(core_stats(w->core)->protocol_errors, 0);
    world_free(w);
}

/* The node with most cores is the bound, whoever else is there; while none has told its cores there is none. */
static void threads_beyond_every_nodes_cores_are_refused(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *small = agent_add(w, "n1", 2), *large = agent_add(w, "n2", 2);
    struct arena mem;
    struct error err;
    Boost__Resources resources = BOOST__RESOURCES__INIT;
    Boost__JobSpec *resolved = NULL;
    bool would_wait;
    const char *reason;
    arena_init(&mem, 1 << 20);
    Boost__JobSpec *spec = spec_new(&mem);
    spec->resources = &resources;
    resources.has_threads_per_rank = true;
    resources.threads_per_rank = 9;
    small->cores = 4;
    large->cores = 8;
    assert_true(submit_spec(w, spec, true) > 0);
    join_world(w, large);
    join_world(w, small);
    assert_int_equal(submit_spec(w, spec, true), 0);
    assert_int_equal(w->reply_rc, ERR_INVALID);
    assert_says(w->reply_text, "resources.threads_per_rank = 9: no node has so many cores, n2 has most, 8");
    assert_int_equal(core_dry_run(w->core, spec, &user_ann, &mem, &resolved, &would_wait, &reason, &err), ERR_INVALID);
    assert_null(resolved);
    assert_says(err.hint, "1 to 8");
    resources.threads_per_rank = 8;
    assert_true(submit_spec(w, spec, true) > 0);
    arena_free(&mem);
    world_free(w);
}

static void the_submit_is_answered_after_the_commit(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct arena mem;
    arena_init(&mem, 1 << 20);
    core_submit(w->core, spec_new(&mem), &user_ann, false, on_submit, w);
    core_run(w->core);
    assert_int_equal(w->replies, 0);
    mem_settle(w->store);
    assert_int_equal(w->replies, 1);
    assert_int_equal(w->reply_rc, ERR_OK);
    /* An unacknowledged one may be lost, an acknowledged one is not. */
    core_submit(w->core, spec_new(&mem), &user_ann, false, on_submit, w);
    core_run(w->core);
    controller_restart(w);
    assert_non_null(core_job(w->core, 1));
    assert_null(core_job(w->core, 2));
    arena_free(&mem);
    world_free(w);
}

static void bad_specs_and_a_sick_store_are_refused(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct arena mem;
    arena_init(&mem, 1 << 20);
    Boost__JobSpec *s = spec_new(&mem);
    s->model->rank = -4;
    assert_int_equal(submit_spec(w, s, false), 0);
    assert_int_equal(w->reply_rc, ERR_INVALID);
    assert_says(w->reply_text, "rank");
    s->model->rank = 16;
    w->store->sick = ERR_NOSPACE;
    assert_int_equal(submit_spec(w, s, false), 0);
    assert_int_equal(w->reply_rc, ERR_NOSPACE);
    assert_says(w->reply_text, "no space left on device");
    w->store->sick = 0;
    assert_int_equal(submit_spec(w, s, false), 1);
    arena_free(&mem);
    world_free(w);
}

/* The disk is found full by the submit itself: its user is told in time, and what was refused never runs. */
static void a_store_that_falls_sick_under_a_user_is_told(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    struct arena mem;
    int64_t id;
    arena_init(&mem, 1 << 20);
    join_world(w, a);
    (void)run_job(w, a, &id);
    w->store->stuck = true; /* not known yet */
    submit_spec(w, spec_new(&mem), false);
    assert_int_equal(w->reply_rc, -1);
    w->store->sick = ERR_NOSPACE;
    advance(w, 6000);
    assert_int_equal(w->reply_rc, ERR_NOSPACE);
    assert_says(w->reply_text, "the job is not taken");
    assert_says(w->reply_hint, "submit again");
    int replies = w->replies;
    assert_int_equal(control(w, HOLD, id, false), -1);
    advance(w, 6000);
    assert_int_equal(w->replies, replies + 1);
    assert_int_equal(w->reply_rc, ERR_NOSPACE);
    w->store->stuck = false;
    w->store->sick = 0;
    advance(w, 1000);
    assert_int_equal(w->replies, replies + 1);
    assert_state(w, id, HELD);
    assert_state(w, id + 1, CANCELLED);
    assert_int_equal(job_of(w, id + 1)->n_attempts, 0);
    arena_free(&mem);
    world_free(w);
}

static void preflight_refuses_and_its_silence_does_not(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    join_world(w, a);
    a->preflight_code = ERR_NOT_FOUND;
    assert_int_equal(submit_spec(w, spec_new(&mem), false), 0);
    assert_int_equal(w->reply_rc, ERR_INVALID);
    assert_says(w->reply_text, "data.bin is not there");
    assert_says(w->reply_hint, "check the path");
    assert_null(core_next_job(w->core, 0));
    /* Held: not asked. */
    int64_t id = submit_spec(w, spec_new(&mem), true);
    assert_state(w, id, HELD);
    assert_int_equal(a->preflights, 1);
    a->answers = false;
    assert_int_equal(submit_spec(w, spec_new(&mem), false), 0);
    assert_int_equal(w->reply_rc, -1);
    advance(w, 2100);
    assert_int_equal(w->reply_rc, ERR_OK);
    assert_int_equal(w->reply_job, 2);
    arena_free(&mem);
    world_free(w);
}

static const char *info(struct world *w, int64_t id, struct arena *mem)
{
    Boost__JobSummary *s = core_summary(w->core, job_of(w, id), mem);
    assert_non_null(s);
    return s->info;
}

static void pending_jobs_say_why(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct arena mem;
    arena_init(&mem, 1 << 22);
    int64_t first = submit(w);
    assert_string_equal(info(w, first, &mem), "no node is up");
    struct fake_agent *a = agent_add(w, "n1", 1);
    join_world(w, a);
    pump(w);
    assert_string_equal(info(w, first, &mem), "needs 2 devices on a node; the largest has 1");
    disconnect(w, a);
    a->slots = 3;
    join_world(w, a);
    pump(w);
    assert_state(w, first, STARTING);
    int64_t second = submit(w), third = submit(w);
    assert_string_equal(info(w, second, &mem), "needs 2 devices, 1 of 3 free");
    assert_string_equal(info(w, third, &mem), "needs 2 devices, 1 of 3 free");
    assert_string_equal(info(w, first, &mem), "n1");
    arena_free(&mem);
    world_free(w);
}

static void agents_of_users_take_only_their_jobs(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct arena mem;
    arena_init(&mem, 1 << 22);
    struct fake_agent *a = agent_add(w, "n1", 2);
    a->uid = 1001;
    join_world(w, a);
    int64_t id = submit(w);
    assert_string_equal(info(w, id, &mem), "node n1 takes only jobs of uid 1001 (its agent does not run as root)");
    struct fake_agent *b = agent_add(w, "n2", 2);
    b->uid = 1000;
    join_world(w, b);
    pump(w);
    assert_state(w, id, STARTING);
    assert_non_null(fake_find(b, id, 1));
    arena_free(&mem);
    world_free(w);
}

static void higher_priority_goes_first(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct arena mem;
    arena_init(&mem, 1 << 20);
    Boost__JobSpec *s = spec_new(&mem);
    int64_t low = submit_spec(w, s, false);
    s->has_priority = 1;
    s->priority = 80;
    int64_t high = submit_spec(w, s, false);
    struct fake_agent *a = agent_add(w, "n1", 2);
    join_world(w, a);
    pump(w);
    assert_state(w, high, STARTING);
    assert_state(w, low, QUEUED);
    arena_free(&mem);
    world_free(w);
}

/* ---- failures ------------------------------------------------------------------------------ */

static void a_killed_rank_costs_no_budget_and_the_job_resumes(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    say_step(w, a, x, 40);
    say_checkpoint(w, a, x, 20);
    say_checkpoint(w, a, x, 40);
    say_step(w, a, x, 47);
    pump(w);
    /* Rank 1 first by the keeper's order, though the peer's end arrives before it. */
    x->seq = 2;
    say_end_of(w, a, x, 0, (struct end){.exit_code = 65, .seq = 2});
    say_end_of(w, a, x, 1, (struct end){.signal = 9, .seq = 1, .log = "one\ntwo\nthree\nfour\n"});
    pump(w);
    assert_state(w, id, RECOVERING);
    assert_true(x->kills > 0);
    const struct store_event *e = event_of(w, id, "rank-exit");
    assert_says(e->text, "rank 1 on n1: signal 9 (SIGKILL); infrastructure, no restart used; attempt 1 at step 47");
    assert_says(e->text, "  two\n  three\n  four");
    assert_string_equal(e->node, "n1");
    assert_int_equal(job_of(w, id)->reason, REASON(RankSignal));
    assert_int_equal(job_of(w, id)->restarts_used, 0);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    if (!x->forgotten)
        assert_says(info(w, id, &mem), "ending attempt 1");
    say_node_end(w, a, x);
    pump(w);
    assert_says(info(w, id, &mem), "attempt 2 in 1s: rank 1 on n1: signal 9 (SIGKILL); from step 40");
    assert_true(x->forgotten);
    assert_false(core_summary(w->core, job_of(w, id), &mem)->has_attempt_step);
    int64_t before = w->now;
    struct fake_attempt *y = recovered(w, a, id);
    assert_true(w->now - before < 2 * NS_PER_S);
    assert_int_equal(y->from_step, 40);
    assert_string_equal(y->resume, "/ckpt/0badcafe-1/step-40.a1");
    /* The job has seen step 47; its newest attempt is at 41. */
    const Boost__JobSummary *now = core_summary(w->core, job_of(w, id), &mem);
    assert_int_equal(now->step, 47);
    assert_true(now->has_attempt_step);
    assert_int_equal(now->attempt_step, 41);
    assert_int_equal(a->verifies, 1);
    say_finished(w, a, y);
    pump(w);
    assert_state(w, id, COMPLETED);
    arena_free(&mem);
    world_free(w);
}

static void the_budget_is_counted_and_named(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    join_world(w, a);
    Boost__JobSpec *s = spec_new(&mem);
    s->restart->has_max_restarts = s->restart->has_no_progress_limit = 1;
    s->restart->max_restarts = 2;
    s->restart->no_progress_limit = 10;
    int64_t id = submit_spec(w, s, false);
    for (int k = 1; k <= 3; k++) {
        struct fake_attempt *x = newest(w, a, id);
        say_step(w, a, x, 1);
        pump(w);
        say_end_of(w, a, x, 0, (struct end){.exit_code = 7});
        pump(w);
        const char *text = event_of(w, id, "rank-exit")->text;
        assert_says(text, "rank 0 on n1: exit code 7");
        if (k <= 2) {
            char budget[64];
            snprintf(budget, sizeof budget, "restart %d of 2", k);
            assert_says(text, budget);
            for (int i = 0; i < 100 && job_of(w, id)->state == STATE(RECOVERING); i++)
                advance(w, 250);
        } else {
            assert_says(text, "all 2 restarts used");
        }
    }
    assert_state(w, id, FAILED);
    assert_int_equal(job_of(w, id)->reason, REASON(RankExit));
    arena_free(&mem);
    world_free(w);
}

static void a_later_checkpoint_resets_the_budget(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    for (int k = 0; k < 3; k++) {
        say_end_of(w, a, x, 0, (struct end){.exit_code = 7});
        pump(w);
        assert_int_equal(job_of(w, id)->restarts_used, 1);
        assert_int_equal(job_of(w, id)->stuck_attempts, k ? 0 : 1);
        x = recovered(w, a, id);
        say_checkpoint(w, a, x, 20 * (k + 1));
        say_step(w, a, x, 20 * (k + 1));
        pump(w);
        assert_int_equal(job_of(w, id)->restarts_used, 0);
        assert_int_equal(job_of(w, id)->stuck_attempts, 0);
        assert_int_equal(job_of(w, id)->backoff_count, 0);
    }
    world_free(w);
}

static void spec_and_data_errors_fail_at_once(void **state)
{
    (void)state;
    static const struct {
        const char *error;
        int reason;
    } cases[] = {{"/data/train.txt: token 300 at offset 17, vocab 256", REASON(DataError)},
                 {"the plan does not fit the arena", REASON(SpecError)}};
    for (int i = 0; i < 2; i++) {
        struct world *w = world_new();
        struct fake_agent *a = agent_add(w, "n1", 2);
        int64_t id;
        join_world(w, a);
        struct fake_attempt *x = run_job(w, a, &id);
        say_end_of(w, a, x, 1, (struct end){.exit_code = 64, .error = cases[i].error});
        pump(w);
        assert_state(w, id, FAILED);
        assert_int_equal(job_of(w, id)->n_attempts, 1);
        assert_int_equal(job_of(w, id)->reason, cases[i].reason);
        assert_says(job_of(w, id)->reason_text, cases[i].error);
        assert_true(x->forgotten);
        assert_says(event_of(w, id, "rank-exit")->text, "no restart can help");
        world_free(w);
    }
}

static void lost_peers_are_never_the_cause(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    a->obeys_kill = false;
    say_end_of(w, a, x, 0, (struct end){.exit_code = 65});
    pump(w);
    /* Killed at once, decided only with the other end. */
    assert_int_equal(x->kills, 1);
    advance(w, 3000);
    assert_state(w, id, RUNNING);
    say_end_of(w, a, x, 1, (struct end){.exit_code = 7, .error = "index out of range"});
    pump(w);
    assert_state(w, id, RECOVERING);
    assert_says(event_of(w, id, "rank-exit")->text, "rank 1 on n1: exit code 7: index out of range");
    say_node_end(w, a, x);
    a->obeys_kill = true;
    x = recovered(w, a, id);
    /* Only 65s: the first of them, and it is nobody's fault. */
    say_end_of(w, a, x, 1, (struct end){.exit_code = 65});
    say_end_of(w, a, x, 0, (struct end){.exit_code = 65});
    pump(w);
    assert_says(event_of(w, id, "rank-exit")->text, "rank 1 on n1: exit code 65 (lost a peer); infrastructure");
    world_free(w);
}

static void an_oom_kill_is_the_applications(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    say_end_of(w, a, x, 1, (struct end){.signal = 9, .oom = true});
    pump(w);
    assert_says(event_of(w, id, "rank-exit")->text, "out of memory; application failure, restart 1 of 3");
    x = recovered(w, a, id);
    say_end_of(w, a, x, 1, (struct end){.exit_code = 0}); /* without DONE */
    pump(w);
    assert_says(event_of(w, id, "rank-exit")->text, "exit code 0 without its DONE record; application failure");
    x = recovered(w, a, id);
    say_end_of(w, a, x, 1, (struct end){.lost = true});
    pump(w);
    assert_says(event_of(w, id, "rank-exit")->text, "its end was not seen");
    assert_says(event_of(w, id, "rank-exit")->text, "infrastructure");
    world_free(w);
}

static void no_progress_holds_with_the_mend(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    for (int k = 1; k <= 3; k++) {
        say_end_of(w, a, x, 0, (struct end){.signal = 9});
        pump(w);
        if (k < 3)
            x = recovered(w, a, id);
    }
    assert_state(w, id, HELD);
    assert_int_equal(job_of(w, id)->reason, REASON(NoProgress));
    struct arena mem;
    arena_init(&mem, 1 << 20);
    assert_string_equal(info(w, id, &mem), "no progress in 3 attempts; release with: boostctl release 1");
    arena_free(&mem);
    advance(w, 600000);
    assert_state(w, id, HELD);
    assert_int_equal(control(w, RELEASE, id, false), ERR_OK);
    pump(w);
    assert_state(w, id, STARTING);
    assert_int_equal(job_of(w, id)->stuck_attempts, 0);
    world_free(w);
}

static void backoff_doubles_to_its_ceiling(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    join_world(w, a);
    Boost__JobSpec *s = spec_new(&mem);
    s->restart->has_no_progress_limit = 1;
    s->restart->no_progress_limit = 100;
    int64_t id = submit_spec(w, s, false);
    double expected = 1;
    for (int k = 0; k < 12; k++) {
        struct fake_attempt *x = newest(w, a, id);
        say_end_of(w, a, x, 0, (struct end){.signal = 9});
        pump(w);
        double delay = (double)(job_of(w, id)->backoff_due - job_of(w, id)->backoff_from) / 1e9;
        assert_true(delay >= 0.75 * expected - 1e-6 && delay <= 1.25 * expected + 1e-6 && delay <= 300);
        expected = expected * 2 < 300 ? expected * 2 : 300;
        while (job_of(w, id)->state == STATE(RECOVERING))
            advance(w, 1000);
    }
    arena_free(&mem);
    world_free(w);
}

static void the_rendezvous_names_who_is_missing(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    join_world(w, a);
    int64_t id = submit(w);
    struct fake_attempt *x = newest(w, a, id);
    say_update(w, a, x, 0, BOOST__RANK_UPDATE__PHASE__LOADING, 0);
    say_update(w, a, x, 1, BOOST__RANK_UPDATE__PHASE__RENDEZVOUS, 0);
    advance(w, 119000);
    assert_state(w, id, STARTING);
    advance(w, 1500);
    assert_true(job_of(w, id)->state == STATE(RECOVERING));
    assert_int_equal(job_of(w, id)->reason, REASON(RendezvousTimeout));
    assert_says(event_of(w, id, "rendezvous-timeout")->text, "no rendezvous in 120 s: rank 1 missing");
    world_free(w);
}

static void hangs_and_refusals(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    Boost__HangReport h = BOOST__HANG_REPORT__INIT;
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    h.has_job = h.has_attempt = h.has_rank = 1;
    h.job = id;
    h.attempt = 1;
    h.rank = 1;
    h.text = (char *)(uintptr_t) "no micro-batch for 30 s, in all_reduce tp0";
    m.body_case = BOOST__AGENT_MESSAGE__BODY_HANG;
    m.hang = &h;
    advance(w, 30000);
    say(w, "n1", &m);
    pump(w);
    assert_int_equal(job_of(w, id)->reason, REASON(Hang));
    assert_says(event_of(w, id, "hang")->text, "rank 1 on n1 hangs: no micro-batch for 30 s, in all_reduce tp0; "
                                               "application failure, restart 1 of 3");
    assert_true(job_of(w, id)->detection_s > 29 && job_of(w, id)->detection_s < 31);
    (void)x;
    /* A node that will not have it: SPEC ends the job, with the hint. */
    while (job_of(w, id)->state == STATE(RECOVERING))
        advance(w, 250);
    x = newest(w, a, id);
    x->alive = false;
    x->forgotten = true;
    Boost__AttemptRefused r = BOOST__ATTEMPT_REFUSED__INIT;
    boost__agent_message__init(&m);
    r.has_job = r.has_attempt = r.has_class_ = r.has_reason = 1;
    r.job = id;
    r.attempt = 2;
    r.class_ = BOOST__EXIT_CLASS__VALUE__SPEC;
    r.reason = REASON(DataError);
    r.text = (char *)(uintptr_t) "/data/train.txt is shorter than one window";
    r.hint = (char *)(uintptr_t) "33 tokens are needed";
    m.body_case = BOOST__AGENT_MESSAGE__BODY_ATTEMPT_REFUSED;
    m.attempt_refused = &r;
    say(w, "n1", &m);
    pump(w);
    assert_state(w, id, FAILED);
    assert_int_equal(job_of(w, id)->reason, REASON(DataError));
    assert_says(job_of(w, id)->reason_text, "33 tokens are needed");
    world_free(w);
}

/* A disk that is full or away at a restart: tried again, then held, never the end of a job that has run for weeks. */
static void a_disk_in_trouble_at_a_restart_ends_no_job(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    say_step(w, a, x, 20);
    say_checkpoint(w, a, x, 20);
    say_end_of(w, a, x, 0, (struct end){.signal = 9});
    pump(w);
    for (int attempt = 2; attempt <= 4; attempt++) {
        for (int i = 0; i < 400 && job_of(w, id)->state == STATE(RECOVERING); i++)
            advance(w, 250);
        assert_state(w, id, STARTING);
        x = newest(w, a, id);
        x->alive = false;
        x->forgotten = true;
        Boost__AttemptRefused r = BOOST__ATTEMPT_REFUSED__INIT;
        Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
        r.has_job = r.has_attempt = r.has_class_ = r.has_reason = 1;
        r.job = id;
        r.attempt = attempt;
        r.class_ = BOOST__EXIT_CLASS__VALUE__SPEC;
        r.reason = attempt == 2 ? REASON(DataError) : REASON(DiskFull);
        r.text = (char *)(uintptr_t) "checkpoint directory /ckpt cannot be written: write: No space left on device";
        r.hint = (char *)(uintptr_t) "make room on that file system";
        m.body_case = BOOST__AGENT_MESSAGE__BODY_ATTEMPT_REFUSED;
        m.attempt_refused = &r;
        say(w, "n1", &m);
        pump(w);
    }
    assert_state(w, id, HELD);
    assert_int_equal(job_of(w, id)->restarts_used, 0);
    assert_says(job_of(w, id)->reason_text, "release with: boostctl release");
    assert_says(job_of(w, id)->reason_text, "make room on that file system");
    assert_int_equal(control(w, RELEASE, id, false), ERR_OK);
    advance(w, 1000);
    assert_int_equal(newest(w, a, id)->from_step, 20);
    world_free(w);
}

/* One failing job never disturbs another. */
static void jobs_do_not_touch_each_other(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 4);
    int64_t one, two;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &one);
    struct fake_attempt *y = run_job(w, a, &two);
    x = newest(w, a, one);
    say_end_of(w, a, x, 0, (struct end){.exit_code = 64, .error = "bad"});
    pump(w);
    assert_state(w, one, FAILED);
    assert_state(w, two, RUNNING);
    assert_int_equal(y->kills + y->terms, 0);
    world_free(w);
}

/* ---- checkpoints ---------------------------------------------------------------------------- */

static struct checkpoint *ckpt(struct world *w, int64_t id, int64_t step, int attempt)
{
    struct checkpoint *k = job_checkpoint(job_of(w, id), step, attempt);
    assert_non_null(k);
    return k;
}

static void damaged_ones_are_skipped_and_said(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    say_checkpoint(w, a, x, 20);
    say_checkpoint(w, a, x, 40);
    say_step(w, a, x, 50);
    pump(w);
    snprintf(a->verify_bad, sizeof a->verify_bad, "step-40.a1");
    a->verify_code = ERR_CORRUPT;
    say_end_of(w, a, x, 0, (struct end){.signal = 9});
    x = (pump(w), recovered(w, a, id));
    assert_int_equal(x->from_step, 20);
    assert_says(event_of(w, id, "checkpoint-damaged")->text, "checkpoint of step 40 does not verify");
    assert_says(event_of(w, id, "checkpoint-damaged")->text, "the one of step 20 is tried");
    assert_says(ckpt(w, id, 40, 1)->note, "damaged: ");
    /* The next one knows, over a restart too. */
    controller_restart(w);
    join_world(w, a);
    pump(w);
    assert_true(ckpt(w, id, 40, 1)->damaged);
    snprintf(a->verify_bad, sizeof a->verify_bad, "step-");
    int verifies = a->verifies;
    say_end_of(w, a, x, 0, (struct end){.signal = 9});
    x = (pump(w), recovered(w, a, id));
    assert_int_equal(a->verifies, verifies + 1); /* only that of step 20 */
    assert_int_equal(x->from_step, 0);
    assert_says(event_of(w, id, "started")->text, "from the initial weights: no committed checkpoint of it verifies");
    world_free(w);
}

static void not_reaching_is_not_damage(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    say_checkpoint(w, a, x, 20);
    pump(w);
    snprintf(a->verify_bad, sizeof a->verify_bad, "step-");
    a->verify_code = ERR_IO;
    say_end_of(w, a, x, 0, (struct end){.signal = 9});
    advance(w, 3000);
    assert_state(w, id, RECOVERING);
    assert_false(ckpt(w, id, 20, 1)->damaged);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    assert_says(info(w, id, &mem), "cannot be verified yet");
    arena_free(&mem);
    a->verify_bad[0] = 0;
    x = recovered(w, a, id);
    assert_int_equal(x->from_step, 20);
    world_free(w);
}

static void retention_keeps_what_it_should(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    join_world(w, a);
    Boost__JobSpec *s = spec_new(&mem);
    s->checkpoint->has_keep = s->checkpoint->has_keep_every = 1;
    s->checkpoint->keep = 2;
    s->checkpoint->keep_every = 30;
    int64_t id = submit_spec(w, s, false);
    struct fake_attempt *x = newest(w, a, id);
    for (int64_t step = 10; step <= 60; step += 10) {
        say_step(w, a, x, step);
        say_checkpoint(w, a, x, step);
        pump(w);
    }
    static const int states[] = {CKPT(DELETED), CKPT(DELETED),   CKPT(COMMITTED),
                                 CKPT(DELETED), CKPT(COMMITTED), CKPT(COMMITTED)};
    for (int i = 0; i < 6; i++)
        assert_int_equal(ckpt(w, id, 10 * (i + 1), 1)->state, states[i]);
    assert_string_equal(a->deleted, "/ckpt/0badcafe-1/step-40.a1");
    arena_free(&mem);
    world_free(w);
}

static void the_one_resumed_from_stays_until_the_next_commit(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    join_world(w, a);
    Boost__JobSpec *s = spec_new(&mem);
    s->checkpoint->has_keep = 1;
    s->checkpoint->keep = 1;
    int64_t id = submit_spec(w, s, false);
    struct fake_attempt *x = newest(w, a, id);
    say_step(w, a, x, 20);
    say_checkpoint(w, a, x, 20);
    pump(w);
    /* The manifest of 40 is written after the attempt that wrote it died, before 20 was read. */
    say_end_of(w, a, x, 0, (struct end){.signal = 9});
    pump(w);
    x = recovered(w, a, id);
    assert_int_equal(x->from_step, 20);
    assert_int_equal(ckpt(w, id, 20, 1)->state, CKPT(COMMITTED));
    say_checkpoint(w, a, x, 40);
    pump(w);
    assert_int_equal(ckpt(w, id, 20, 1)->state, CKPT(DELETED));
    assert_int_equal(ckpt(w, id, 40, 2)->state, CKPT(COMMITTED));
    arena_free(&mem);
    world_free(w);
}

static void incomplete_and_failed_ones_are_abandoned(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    say_step(w, a, x, 20);
    say_shard(w, a, x, 0, 20, NULL);
    say_shard(w, a, x, 1, 20, "write: No space left on device");
    pump(w);
    assert_int_equal(ckpt(w, id, 20, 1)->state, CKPT(ABANDONED));
    assert_says(ckpt(w, id, 20, 1)->note, "No space left on device");
    assert_int_equal(job_of(w, id)->reason, REASON(DiskFull));
    assert_int_equal(a->deletes, 1); /* both ranks have spoken: the space is given back */
    assert_state(w, id, RUNNING);
    say_shard(w, a, x, 0, 40, NULL);
    pump(w);
    assert_int_equal(ckpt(w, id, 40, 1)->state, CKPT(WRITING));
    say_end_of(w, a, x, 1, (struct end){.signal = 11});
    pump(w);
    assert_int_equal(ckpt(w, id, 40, 1)->state, CKPT(ABANDONED));
    assert_says(ckpt(w, id, 40, 1)->note, "1 of 2 shards");
    assert_int_equal(a->deletes, 2);
    x = recovered(w, a, id);
    assert_int_equal(x->from_step, 0);
    world_free(w);
}

static void a_manifest_under_way_is_waited_for(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    a->answers = false; /* the manifest takes its time */
    say_step(w, a, x, 100);
    say_checkpoint(w, a, x, 100);
    say_end_of(w, a, x, 0, (struct end){.done = true});
    say_end_of(w, a, x, 1, (struct end){.done = true});
    say_node_end(w, a, x);
    pump(w);
    assert_state(w, id, RUNNING);
    assert_false(x->forgotten);
    /* The task's reply, late. */
    Boost__TaskReply r = BOOST__TASK_REPLY__INIT;
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    r.has_id = 1;
    r.id = ckpt(w, id, 100, 1)->task;
    assert_true(r.id != 0);
    m.body_case = BOOST__AGENT_MESSAGE__BODY_TASK;
    m.task = &r;
    advance(w, 4000);
    say(w, "n1", &m);
    pump(w);
    assert_state(w, id, COMPLETED);
    assert_int_equal(job_of(w, id)->checkpoint_step, 100);
    world_free(w);
}

/* The store cannot write for longer than a manifest is waited for: the last checkpoint is committed all the same. */
static void a_full_disk_of_the_store_costs_no_checkpoint(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    w->store->sick = ERR_NOSPACE;
    say_step(w, a, x, 100);
    say_checkpoint(w, a, x, 100);
    say_end_of(w, a, x, 0, (struct end){.done = true});
    say_end_of(w, a, x, 1, (struct end){.done = true});
    say_node_end(w, a, x);
    advance(w, 45500);
    assert_state(w, id, RUNNING);
    w->store->sick = 0;
    advance(w, 1000);
    assert_state(w, id, COMPLETED);
    assert_int_equal(ckpt(w, id, 100, 1)->state, CKPT(COMMITTED));
    world_free(w);
}

/* ---- stops ------------------------------------------------------------------------------------ */

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

/* ---- the rest ------------------------------------------------------------------------------------ */

static void jobs_are_found_by_what_users_type(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct arena mem;
    struct error err;
    struct job *job;
    arena_init(&mem, 1 << 20);
    Boost__JobSpec *s = spec_new(&mem);
    static const char *const names[] = {"cola-60m", "cola-130m", "cola-60m-b", "lax", "7"};
    for (int i = 0; i < 5; i++) {
        s->name = arena_strdup(&mem, names[i]);
        assert_int_equal(submit_spec(w, s, true), i + 1);
    }
    static const struct {
        const char *ref;
        int rc;
        int64_t id;
    } cases[] = {{"1", 0, 1},
                 {"2.3", ERR_NOT_FOUND, 0}, /* no attempt yet */
                 {"2.3/1", ERR_NOT_FOUND, 0},
                 {"cola-60m", 0, 1},
                 {"cola-1", 0, 2},
                 {"la", 0, 4},
                 {"7", 0, 5},
                 {"cola", ERR_AMBIGUOUS, 0},
                 {"x", ERR_NOT_FOUND, 0},
                 {"", ERR_NOT_FOUND, 0},
                 {"99", ERR_NOT_FOUND, 0},
                 {"2.x", ERR_NOT_FOUND, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        assert_int_equal(core_find_job(w->core, cases[i].ref, &job, &err), cases[i].rc);
        if (!cases[i].rc)
            assert_int_equal(job->id, cases[i].id);
    }
    assert_int_equal(core_find_job(w->core, "cola", &job, &err), ERR_AMBIGUOUS);
    assert_says(err.message, "1 (cola-60m), 2 (cola-130m), 3 (cola-60m-b)");
    s->name = arena_strdup(&mem, "lax");
    submit_spec(w, s, true);
    assert_int_equal(core_find_job(w->core, "lax", &job, &err), ERR_AMBIGUOUS);
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    assert_int_equal(id, 7);
    assert_int_equal(core_find_job(w->core, "7.1", &job, &err), ERR_OK);
    assert_int_equal(core_find_job(w->core, "7.1/9", &job, &err), ERR_OK);
    assert_int_equal(job->id, 7);
    assert_int_equal(core_find_job(w->core, "7.0", &job, &err), ERR_NOT_FOUND);
    assert_int_equal(core_find_job(w->core, "7.2/0", &job, &err), ERR_NOT_FOUND);
    assert_string_equal(err.message, "job 7 has no attempt 2");
    assert_string_equal(err.hint, "its only attempt is 1");
    say_end_of(w, a, x, 0, (struct end){.signal = 9});
    pump(w);
    recovered(w, a, id);
    assert_int_equal(core_find_job(w->core, "7.2", &job, &err), ERR_OK);
    assert_int_equal(core_find_job(w->core, "7.99999999999999999999", &job, &err), ERR_NOT_FOUND);
    assert_string_equal(err.hint, "its attempts are 1 to 2");
    arena_free(&mem);
    world_free(w);
}

static struct {
    int calls, rc, attempt;
    char text[256], note[256];
    bool finished;
} log_seen;

static void on_log(void *arg, int rc, const struct error *err, const struct core_log *log)
{
    (void)arg;
    (void)err;
    log_seen.calls++;
    log_seen.rc = rc;
    if (rc)
        return;
    log_seen.attempt = log->attempt;
    log_seen.finished = log->finished;
    snprintf(log_seen.text, sizeof log_seen.text, "%.*s", (int)log->len, log->data ? (const char *)log->data : "");
    snprintf(log_seen.note, sizeof log_seen.note, "%s", log->note ? log->note : "");
}

static void logs_come_from_the_agent_or_from_memory(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    Boost__LogsRequest r = BOOST__LOGS_REQUEST__INIT;
    memset(&log_seen, 0, sizeof log_seen);
    int64_t id = submit(w);
    core_read_log(w->core, job_of(w, id), &r, on_log, w);
    assert_int_equal(log_seen.calls, 1);
    assert_says(log_seen.note, "has not started");
    r.wait_ms = 20000;
    core_read_log(w->core, job_of(w, id), &r, on_log, w);
    advance(w, 5000);
    assert_int_equal(log_seen.calls, 1);
    join_world(w, a);
    pump(w);
    assert_int_equal(log_seen.calls, 2); /* as soon as there is an attempt */
    assert_string_equal(log_seen.text, "hello\n");
    assert_int_equal(log_seen.attempt, 1);
    r.has_rank = 1;
    r.rank = 7;
    core_read_log(w->core, job_of(w, id), &r, on_log, w);
    assert_int_equal(log_seen.rc, ERR_NOT_FOUND);
    r.rank = 0;
    struct fake_attempt *x = newest(w, a, id);
    say_end_of(w, a, x, 0, (struct end){.signal = 11, .log = "its last words\n"});
    pump(w);
    disconnect(w, a);
    core_read_log(w->core, job_of(w, id), &r, on_log, w);
    assert_string_equal(log_seen.text, "its last words\n");
    assert_says(log_seen.note, "n1 cannot be reached: the last 15 bytes that the controller kept");
    world_free(w);
}

static void rendezvous_goes_through(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    join_world(w, a);
    int64_t id = submit(w);
    Boost__KvOp op = BOOST__KV_OP__INIT;
    Boost__KvForward f = BOOST__KV_FORWARD__INIT;
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    m.body_case = BOOST__AGENT_MESSAGE__BODY_KV;
    m.kv = &f;
    f.has_id = f.has_job = f.has_attempt = f.has_rank = 1;
    f.id = 1;
    f.job = id;
    f.attempt = 1;
    f.rank = 1;
    f.op = &op;
    op.has_kind = op.has_timeout_ms = 1;
    op.kind = BOOST__KV_OP__KIND__GET;
    op.group = (char *)(uintptr_t) "world";
    op.key = (char *)(uintptr_t) "addr0";
    op.timeout_ms = 5000;
    say(w, "n1", &m);
    pump(w);
    assert_int_equal(w->kv_answers, 0);
    f.rank = 0;
    op.kind = BOOST__KV_OP__KIND__SET;
    op.has_value = 1;
    op.value.data = (uint8_t *)(uintptr_t) "1.2.3.4";
    op.value.len = 7;
    say(w, "n1", &m);
    pump(w);
    assert_int_equal(w->kv_answers, 2);
    op.kind = BOOST__KV_OP__KIND__GET;
    op.has_value = 0;
    op.key = (char *)(uintptr_t) "never";
    say(w, "n1", &m);
    advance(w, 4900);
    assert_int_equal(w->kv_answers, 2);
    advance(w, 200);
    assert_int_equal(w->kv_answers, 3);
    assert_false(w->kv_ok);
    assert_string_equal(w->kv_text, "nobody set world/never in time");
    world_free(w);
}

static void goodput_adds_up(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id = submit(w);
    advance(w, 7000); /* queue 7 */
    join_world(w, a);
    pump(w);
    struct fake_attempt *x = newest(w, a, id);
    advance(w, 3000); /* restart (start) 3 */
    say_step(w, a, x, 1);
    advance(w, 20000); /* productive 20 */
    say_checkpoint(w, a, x, 20);
    say_step(w, a, x, 30);
    pump(w);
    say_end_of(w, a, x, 0, (struct end){.signal = 9});
    pump(w);
    int64_t down = w->now;
    x = recovered(w, a, id);
    double restart = (double)(w->now - down) / 1e9;
    controller_restart(w); /* the new one knows how far the job had been */
    join_world(w, a);
    pump(w);
    advance(w, 5000); /* replay 5: steps 21 to 30 again */
    say_step(w, a, x, 31);
    advance(w, 10000); /* productive 10 */
    struct arena mem;
    arena_init(&mem, 1 << 20);
    Boost__ShowReply *show = core_show(w->core, job_of(w, id), &mem);
    assert_true(show->goodput->queue_s > 6.9 && show->goodput->queue_s < 7.1);
    assert_true(show->goodput->restart_s > 2.9 + restart && show->goodput->restart_s < 3.1 + restart);
    assert_true(show->goodput->replay_s > 4.9 && show->goodput->replay_s < 5.1);
    assert_true(show->goodput->productive_s > 29.9 && show->goodput->productive_s < 30.1);
    assert_int_equal(show->n_attempts, 2);
    assert_says(show->attempts[0]->text, "rank 0 on n1: signal 9 (SIGKILL)");
    assert_int_equal(show->attempts[1]->from_step, 20);
    arena_free(&mem);
    world_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_job_runs_to_its_end),
        cmocka_unit_test(threads_beyond_every_nodes_cores_are_refused),
        cmocka_unit_test(the_submit_is_answered_after_the_commit),
        cmocka_unit_test(bad_specs_and_a_sick_store_are_refused),
        cmocka_unit_test(a_store_that_falls_sick_under_a_user_is_told),
        cmocka_unit_test(preflight_refuses_and_its_silence_does_not),
        cmocka_unit_test(pending_jobs_say_why),
        cmocka_unit_test(agents_of_users_take_only_their_jobs),
        cmocka_unit_test(higher_priority_goes_first),
        cmocka_unit_test(a_killed_rank_costs_no_budget_and_the_job_resumes),
        cmocka_unit_test(the_budget_is_counted_and_named),
        cmocka_unit_test(a_later_checkpoint_resets_the_budget),
        cmocka_unit_test(spec_and_data_errors_fail_at_once),
        cmocka_unit_test(lost_peers_are_never_the_cause),
        cmocka_unit_test(an_oom_kill_is_the_applications),
        cmocka_unit_test(no_progress_holds_with_the_mend),
        cmocka_unit_test(backoff_doubles_to_its_ceiling),
        cmocka_unit_test(the_rendezvous_names_who_is_missing),
        cmocka_unit_test(hangs_and_refusals),
        cmocka_unit_test(a_disk_in_trouble_at_a_restart_ends_no_job),
        cmocka_unit_test(jobs_do_not_touch_each_other),
        cmocka_unit_test(damaged_ones_are_skipped_and_said),
        cmocka_unit_test(not_reaching_is_not_damage),
        cmocka_unit_test(retention_keeps_what_it_should),
        cmocka_unit_test(the_one_resumed_from_stays_until_the_next_commit),
        cmocka_unit_test(incomplete_and_failed_ones_are_abandoned),
        cmocka_unit_test(a_manifest_under_way_is_waited_for),
        cmocka_unit_test(a_full_disk_of_the_store_costs_no_checkpoint),
        cmocka_unit_test(cancel_in_every_state),
        cmocka_unit_test(what_has_ended_says_how_and_where),
        cmocka_unit_test(hold_and_release),
        cmocka_unit_test(a_job_that_finishes_while_stopping_has_finished),
        cmocka_unit_test(only_the_owner_and_root_may),
        cmocka_unit_test(asked_checkpoints_reach_the_agent),
        cmocka_unit_test(the_time_limit_counts_all_attempts),
        cmocka_unit_test(stops_have_deadlines),
        cmocka_unit_test(jobs_are_found_by_what_users_type),
        cmocka_unit_test(logs_come_from_the_agent_or_from_memory),
        cmocka_unit_test(rendezvous_goes_through),
        cmocka_unit_test(goodput_adds_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
