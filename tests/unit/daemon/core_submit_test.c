/* Submitting, validation, who goes first, and a job that runs to its end. */
#include "tests/unit/daemon/core_world.h"

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
    checkpoint_at(w, a, x, 20);
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
    assert_int_equal(core_dry_run(w->core, spec, 1, &user_ann, &mem, &resolved, &would_wait, &reason, &err),
                     ERR_INVALID);
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
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
