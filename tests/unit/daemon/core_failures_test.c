/* How attempts fail: classes, budgets, causes, back-off, rendezvous, hangs, refusals. */
#include "tests/unit/daemon/core_world.h"

static const char *info(struct world *w, int64_t id, struct arena *mem)
{
    Boost__JobSummary *s = core_summary(w->core, job_of(w, id), mem);
    assert_non_null(s);
    return s->info;
}

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

static void hangs(void **state)
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
    world_free(w);
}

static void refuse(struct world *w, int64_t id, int attempt, Boost__Reason__Value reason, const char *text,
                   const char *hint)
{
    Boost__AttemptRefused r = BOOST__ATTEMPT_REFUSED__INIT;
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    r.has_job = r.has_attempt = r.has_class_ = r.has_reason = 1;
    r.job = id;
    r.attempt = attempt;
    r.class_ = BOOST__EXIT_CLASS__VALUE__SPEC;
    r.reason = reason;
    r.text = (char *)(uintptr_t)text;
    r.hint = (char *)(uintptr_t)hint;
    m.body_case = BOOST__AGENT_MESSAGE__BODY_ATTEMPT_REFUSED;
    m.attempt_refused = &r;
    say(w, "n1", &m);
    pump(w);
}

/* A node that will not have a job which nobody has seen train: SPEC ends it, with the hint. */
static void what_never_ran_is_refused_for_good(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    join_world(w, a);
    int64_t id = submit(w);
    assert_state(w, id, STARTING);
    struct fake_attempt *x = newest(w, a, id);
    x->alive = false;
    x->forgotten = true;
    refuse(w, id, 1, REASON(DataError), "/data/train.txt is shorter than one window", "33 tokens are needed");
    assert_state(w, id, FAILED);
    assert_int_equal(job_of(w, id)->reason, REASON(DataError));
    assert_says(job_of(w, id)->reason_text, "33 tokens are needed");
    world_free(w);
}

/* A disk that is full or away at a restart: tried again, then held, never the end of a job that has run for weeks, or
 * for some steps. */
static void a_disk_in_trouble_at_a_restart_ends_no_job(void **state)
{
    (void)state;
    for (int checkpoint = 0; checkpoint < 2; checkpoint++) {
        struct world *w = world_new();
        struct fake_agent *a = agent_add(w, "n1", 2);
        int64_t id;
        join_world(w, a);
        struct fake_attempt *x = run_job(w, a, &id);
        say_step(w, a, x, 20);
        if (checkpoint)
            say_checkpoint(w, a, x, 20);
        say_end_of(w, a, x, 0, (struct end){.signal = 9});
        pump(w);
        for (int attempt = 2; job_of(w, id)->state != STATE(HELD) && attempt <= 4; attempt++) {
            for (int i = 0; i < 400 && job_of(w, id)->state == STATE(RECOVERING); i++)
                advance(w, 250);
            assert_state(w, id, STARTING);
            x = newest(w, a, id);
            x->alive = false;
            x->forgotten = true;
            refuse(w, id, attempt, attempt == 2 ? REASON(DataError) : REASON(DiskFull),
                   "checkpoint directory /ckpt cannot be written: write: No space left on device",
                   "make room on that file system");
        }
        assert_state(w, id, HELD);
        assert_int_equal(job_of(w, id)->restarts_used, 0);
        assert_int_equal(job_of(w, id)->reason, REASON(DiskFull));
        assert_says(job_of(w, id)->reason_text, "no progress in 3 attempts, the checkpoints' disk is full; "
                                                "release with: boostctl release");
        assert_says(job_of(w, id)->reason_text, "make room on that file system");
        assert_int_equal(control(w, RELEASE, id, false), ERR_OK);
        advance(w, 1000);
        assert_int_equal(newest(w, a, id)->from_step, checkpoint ? 20 : 0);
        world_free(w);
    }
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_killed_rank_costs_no_budget_and_the_job_resumes),
        cmocka_unit_test(the_budget_is_counted_and_named),
        cmocka_unit_test(a_later_checkpoint_resets_the_budget),
        cmocka_unit_test(spec_and_data_errors_fail_at_once),
        cmocka_unit_test(lost_peers_are_never_the_cause),
        cmocka_unit_test(an_oom_kill_is_the_applications),
        cmocka_unit_test(no_progress_holds_with_the_mend),
        cmocka_unit_test(backoff_doubles_to_its_ceiling),
        cmocka_unit_test(the_rendezvous_names_who_is_missing),
        cmocka_unit_test(hangs),
        cmocka_unit_test(what_never_ran_is_refused_for_good),
        cmocka_unit_test(a_disk_in_trouble_at_a_restart_ends_no_job),
        cmocka_unit_test(jobs_do_not_touch_each_other),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
