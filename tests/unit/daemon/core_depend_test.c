/* Other jobs and limits that a job waits for, changes of a job that waits, and who has used how much. */
#include "tests/unit/daemon/core_wants.h"

static void fails_for_good(struct world *w, int64_t id)
{
    struct attempt *a = job_live_attempt(job_of(w, id));
    struct fake_agent *agent = agent_of(w, a->parts[0].node);
    struct fake_attempt *x = newest(w, agent, id);
    say_end_of(w, agent, x, 0, (struct end){.exit_code = 64, .error = "no such file"});
    say_node_end(w, agent, x);
    advance(w, 2000);
    assert_state(w, id, FAILED);
}

static void each_kind(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "gpu01", 8);
    int64_t good = submit_want(w, (struct want){0}), bad = submit_want(w, (struct want){0});
    int64_t ok = submit_want(w, (struct want){.after = "afterok:1"});
    int64_t any = submit_want(w, (struct want){.after = "afterany:2"});
    int64_t not_ok = submit_want(w, (struct want){.after = "afternotok:2"});
    int64_t begun = submit_want(w, (struct want){.after = "after:1"});
    int64_t vain = submit_want(w, (struct want){.after = "afterok:2"});
    int64_t vain_too = submit_want(w, (struct want){.after = "afternotok:1"});
    assert_string_equal(info(w, ok), "afterok:1: job 1 (tiny) is QUEUED");
    join_world(w, a);
    advance(w, 100);
    assert_state(w, good, STARTING);
    assert_state(w, begun, STARTING);
    assert_state(w, ok, QUEUED);
    runs(w, good);
    runs(w, bad);
    assert_string_equal(info(w, any), "afterany:2: job 2 (tiny) is RUNNING");
    struct arena mem;
    arena_init(&mem, 1 << 20);
    assert_int_equal(core_summary(w->core, job_of(w, any), &mem)->reason, REASON(Dependency));
    arena_free(&mem);
    ends(w, good);
    assert_state(w, ok, STARTING);
    assert_state(w, any, QUEUED);
    assert_state(w, vain_too, HELD);
    assert_string_equal(job_of(w, vain_too)->reason_text,
                        "afternotok:1 can never be met: job 1 (tiny) is COMPLETED; boostctl release 8 runs it without, "
                        "cancel drops it");
    fails_for_good(w, bad);
    assert_state(w, any, STARTING);
    assert_state(w, not_ok, STARTING);
    assert_state(w, vain, HELD);
    assert_int_equal(job_of(w, vain)->reason, REASON(Dependency));
    /* Released, it runs without; and that stays so. */
    assert_int_equal(control(w, RELEASE, vain, false), ERR_OK);
    advance(w, 100);
    assert_state(w, vain, STARTING);
    assert_int_equal(job_of(w, vain)->resolved->n_after, 0);
    assert_int_equal(job_of(w, vain)->spec->n_after, 0); /* what restart --set begins with */
    /* One that comes too late for it is held at once. */
    int64_t late = submit_want(w, (struct want){.after = "afterok:2"});
    assert_state(w, late, HELD);
    assert_int_equal(try_want(w, (struct want){.after = "afterok:99"}), 0);
    assert_string_equal(w->reply_text, "after[0] = 'afterok:99': there is no such job");
    assert_int_equal(core_stats(w->core)->illegal_transitions, 0);
    world_free(w);
}

/* Over a restart of the controller, and with no node there. */
static void dependencies_last(void **state)
{
    (void)state;
    struct world *w = world_new();
    int64_t first = submit_want(w, (struct want){0}), second = submit_want(w, (struct want){.after = "afterok:1"});
    int64_t third = submit_want(w, (struct want){.after = "afterok:2"});
    controller_restart(w);
    pump(w);
    assert_state(w, second, QUEUED);
    assert_int_equal(control(w, CANCEL, first, true), ERR_OK);
    assert_state(w, second, HELD);
    assert_state(w, third, QUEUED);
    assert_int_equal(control(w, CANCEL, second, true), ERR_OK);
    assert_state(w, third, HELD);
    assert_int_equal(job_of(w, third)->spec->n_after, 1);
    assert_int_equal(control(w, RELEASE, third, true), ERR_OK);
    controller_restart(w);
    pump(w);
    assert_state(w, third, QUEUED);
    assert_int_equal(job_of(w, third)->spec->n_after, 0);
    world_free(w);
}

static void limits(void **state)
{
    (void)state;
    struct world *w = world_new();
    Boost__UserLimit bob = BOOST__USER_LIMIT__INIT, *list[] = {&bob};
    bob.user = "bob";
    bob.has_running_jobs = bob.has_devices = bob.has_queued_jobs = 1;
    bob.running_jobs = 1;
    w->config.user_devices = 3;
    w->config.user_queued_jobs = 2;
    w->config.user_limit = list;
    w->config.n_user_limit = 1;
    reconfigured(w);
    struct fake_agent *a = agent_add(w, "gpu01", 8);
    join_world(w, a);
    struct arena mem;
    Boost__JobSpec *resolved;
    struct error err;
    const char *reason;
    bool waits;
    arena_init(&mem, 1 << 20);
    for (int jobs = 2; jobs <= 3; jobs++) { /* of an array, dry: as many as there may be, and one more */
        int rc = core_dry_run(w->core, spec_new(&mem), jobs, &user_ann, &mem, &resolved, &waits, &reason, &err);
        assert_int_equal(rc, jobs == 2 ? ERR_OK : ERR_REFUSED);
        if (!rc)
            boost__job_spec__free_unpacked(resolved, NULL);
    }
    arena_free(&mem);
    int64_t two = submit_want(w, (struct want){.tp = 2}), more = submit_want(w, (struct want){.tp = 2});
    int64_t one = submit_want(w, (struct want){0}), next = submit_want(w, (struct want){0});
    assert_state(w, two, STARTING);
    assert_string_equal(info(w, more), "user limit: 3 of 3 devices");
    assert_state(w, one, STARTING); /* it keeps nobody waiting, not even of the same user */
    assert_int_equal(try_want(w, (struct want){0}), 0);
    assert_string_equal(w->reply_text, "ann has 2 jobs queued or held, and may have 2");
    assert_int_equal(try_want(w, (struct want){.tp = 4}), 0);
    assert_string_equal(w->reply_text, "the job needs 4 devices, and ann may have 3 at once");
    runs(w, one);
    ends(w, one);
    assert_string_equal(info(w, more), "user limit: 3 of 3 devices"); /* for `next` took the third */
    assert_state(w, next, STARTING);
    int64_t bobs = submit_want(w, (struct want){.user = &user_bob, .tp = 4});
    int64_t bobs_next = submit_want(w, (struct want){.user = &user_bob});
    assert_state(w, bobs, STARTING);
    assert_string_equal(info(w, bobs_next), "user limit: 1 of 1 running jobs");
    /* Counted anew by the next controller. */
    controller_restart(w);
    join_world(w, a);
    advance(w, 100);
    assert_string_equal(info(w, bobs_next), "user limit: 1 of 1 running jobs");
    assert_int_equal(control(w, CANCEL, more, true), ERR_OK);
    assert_true(submit_want(w, (struct want){.tp = 2, .held = true}) > 0);
    ends(w, two);
    world_free(w);
}

/* All or none; so many at once; known by the first one's number. */
static void arrays(void **state)
{
    (void)state;
    enum { TASKS = 5 };
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "gpu01", 8);
    struct arena mem;
    Boost__JobSpec *specs[TASKS];
    static const int32_t index[TASKS] = {0, 2, 4, 6, 8};
    join_world(w, a);
    submit_want(w, (struct want){.tp = 2, .held = true});
    arena_init(&mem, 1 << 20);
    for (int i = 0; i < TASKS; i++) {
        specs[i] = spec_new(&mem);
        specs[i]->name = arena_printf(&mem, "sweep-%d", index[i]);
    }
    specs[3]->parallel->tp = 3; /* does not divide */
    core_submit_array(w->core, specs, TASKS, index, 2, &user_ann, false, on_submit, w);
    pump(w);
    assert_int_not_equal(w->reply_rc, ERR_OK);
    assert_says(w->reply_text, "task 6: ");
    assert_null(core_job(w->core, 2));
    specs[3]->parallel->tp = 2;
    a->preflight_code = ERR_NOT_FOUND;
    core_submit_array(w->core, specs, TASKS, index, 2, &user_ann, false, on_submit, w);
    pump(w);
    assert_says(w->reply_text, "task 0: ");
    assert_null(core_job(w->core, 2));
    a->preflight_code = 0;
    a->preflights = 0;
    core_submit_array(w->core, specs, TASKS, index, 2, &user_ann, false, on_submit, w);
    pump(w);
    assert_int_equal(w->reply_rc, ERR_OK);
    assert_int_equal(w->reply_job, 2);
    assert_int_equal(a->preflights, TASKS);
    for (int i = 0; i < TASKS; i++) {
        assert_int_equal(job_of(w, 2 + i)->array_job, 2);
        assert_int_equal(job_of(w, 2 + i)->array_index, index[i]);
    }
    assert_state(w, 2, STARTING);
    assert_state(w, 3, STARTING);
    assert_string_equal(info(w, 4), "array limit: 2 of 2 tasks of array 2 run");
    controller_restart(w);
    join_world(w, a);
    advance(w, 100);
    assert_string_equal(info(w, 4), "array limit: 2 of 2 tasks of array 2 run");
    runs(w, 2);
    ends(w, 2);
    assert_state(w, 4, STARTING);
    assert_state(w, 5, QUEUED);
    struct job *found;
    struct error err;
    assert_int_equal(core_find_job(w->core, "2_8", &found, &err), ERR_OK);
    assert_int_equal(found->id, 6);
    assert_int_equal(core_find_job(w->core, "2_3", &found, &err), ERR_NOT_FOUND);
    assert_int_equal(core_find_job(w->core, "1_0", &found, &err), ERR_NOT_FOUND);
    assert_int_equal(core_task(w->core, 2, -1, NULL)->id, 2);
    assert_int_equal(core_task(w->core, 2, -1, job_of(w, 5))->id, 6);
    assert_null(core_task(w->core, 2, -1, job_of(w, 6)));
    arena_free(&mem);
    world_free(w);
}

static int update(struct world *w, int64_t id, int priority, int64_t limit_s)
{
    Boost__UpdateRequest u = BOOST__UPDATE_REQUEST__INIT;
    u.has_priority = priority >= 0;
    u.priority = priority;
    u.has_time_limit_s = limit_s >= 0;
    u.time_limit_s = limit_s;
    w->reply_rc = -1;
    core_update(w->core, &u, id, &user_ann, on_control, w);
    pump(w);
    return w->reply_rc;
}

static void updates(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "gpu01", 1);
    join_world(w, a);
    int64_t runner = submit_want(w, (struct want){0}), first = submit_want(w, (struct want){0});
    int64_t second = submit_want(w, (struct want){0}), bobs = submit_want(w, (struct want){.user = &user_bob});
    assert_int_equal(update(w, second, 70, 600), ERR_OK);
    assert_string_equal(w->reply_text, "priority 70, time limit 600 s");
    assert_int_equal(update(w, bobs, 99, -1), ERR_REFUSED);
    assert_int_equal(update(w, second, 101, -1), ERR_INVALID);
    assert_int_equal(update(w, second, -1, -1), ERR_INVALID);
    controller_restart(w);
    join_world(w, a);
    advance(w, 100);
    assert_int_equal(job_of(w, second)->priority, 70);
    assert_int_equal(job_of(w, second)->resolved->time_limit_s, 600);
    runs(w, runner);
    advance(w, 3000);
    assert_int_equal(update(w, runner, -1, 2), ERR_OK); /* it has run longer already */
    advance(w, 2000);
    assert_state(w, runner, TIMEOUT);
    assert_int_equal(update(w, runner, 1, -1), ERR_REFUSED);
    assert_state(w, second, STARTING);
    assert_state(w, first, QUEUED);
    world_free(w);
}

static const Boost__UsageRow *usage_of(struct world *w, const char *user, int64_t since, struct arena *mem)
{
    arena_init(mem, 1 << 20);
    Boost__UsageReply *r = core_usage(w->core, user, since, mem);
    assert_non_null(r);
    return r->n_rows == 1 ? r->rows[0] : NULL;
}

static void usage(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "gpu01", 8);
    struct arena mem;
    join_world(w, a);
    int64_t two = submit_want(w, (struct want){.tp = 2});
    submit_want(w, (struct want){.user = &user_bob, .held = true});
    runs(w, two);
    advance(w, 100000);
    int64_t middle = world_wall(w);
    advance(w, 10000);
    ends(w, two);
    advance(w, 50000);
    const Boost__UsageRow *r = usage_of(w, "ann", 0, &mem);
    assert_non_null(r);
    assert_string_equal(r->user, "ann");
    assert_int_equal(r->jobs, 1);
    assert_int_equal(r->running, 0);
    assert_in_range(r->device_seconds, 220, 224);
    assert_in_range(r->recent, 200, 224);
    assert_true(r->gpu_seconds < 1);
    arena_free(&mem);
    r = usage_of(w, "1000", middle, &mem);
    assert_in_range(r->device_seconds, 20, 24);
    arena_free(&mem);
    r = usage_of(w, "bob", 0, &mem);
    assert_int_equal(r->queued, 1);
    assert_int_equal(r->jobs, 0);
    arena_free(&mem);
    assert_null(usage_of(w, "carol", 0, &mem));
    arena_free(&mem);
    world_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_kind), cmocka_unit_test(dependencies_last), cmocka_unit_test(limits),
        cmocka_unit_test(arrays),    cmocka_unit_test(updates),           cmocka_unit_test(usage),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
