/* What nodes fetch before an attempt begins: token files by URL, and a checkpoint to start from. */
#include "tests/unit/daemon/core_world.h"

static Boost__JobSpec *fetching_spec(struct arena *mem, const char *train, const char *init)
{
    Boost__JobSpec *s = spec_new(mem);
    s->data->cache_dir = arena_strdup(mem, "/cache");
    if (train)
        s->data->train[0]->path = arena_strdup(mem, train);
    if (init) {
        Boost__InitFrom *from = arena_alloc(mem, sizeof *from);
        boost__init_from__init(from);
        from->path = arena_strdup(mem, init);
        from->has_weights_only = from->weights_only = true;
        s->checkpoint->init_from = from;
    }
    return s;
}

static void a_checkpoint_by_url_is_fetched_and_not_verified(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    struct arena mem;
    join_world(w, a);
    arena_init(&mem, 1 << 20);
    int64_t id = submit_spec(w, fetching_spec(&mem, NULL, "s3://b/p/0badcafe-9/step-40.a2/"), false);
    pump(w);
    assert_int_equal(a->fetches, 1);
    assert_true(a->fetched_init);
    assert_int_equal(a->verifies, 0);
    struct fake_attempt *x = newest(w, a, id);
    assert_string_equal(x->resume, "s3://b/p/0badcafe-9/step-40.a2"); /* the agent knows where that lies */
    assert_says(event_of(w, id, "started")->text, "from the weights of s3://b/p/0badcafe-9/step-40.a2");
    /* From a checkpoint of its own on it is not needed. */
    say_step(w, a, x, 10);
    say_checkpoint(w, a, x, 10);
    say_end_of(w, a, x, 0, (struct end){.signal = 9});
    x = (pump(w), recovered(w, a, id));
    assert_int_equal(x->from_step, 10);
    assert_int_equal(a->fetches, 1);
    arena_free(&mem);
    world_free(w);
}

static void what_cannot_be_had_holds_the_job(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    struct arena mem;
    join_world(w, a);
    arena_init(&mem, 1 << 20);
    a->fetch_code = ERR_CORRUPT;
    int64_t id = submit_spec(w, fetching_spec(&mem, "http://h/a.txt", NULL), false);
    pump(w);
    assert_state(w, id, HELD);
    assert_says(job_of(w, id)->reason_text, "cannot fetch its files");
    a->fetch_code = ERR_UNREACHABLE; /* says nothing about them */
    control(w, BOOST__CONTROL_REQUEST__VERB__RELEASE, id, false);
    pump(w);
    assert_state(w, id, QUEUED);
    int before = a->fetches;
    advance(w, 30000);
    assert_in_range(a->fetches, before + 3, before + 8);
    a->fetch_code = ERR_OK;
    advance(w, 10000);
    assert_int_equal(newest(w, a, id)->attempt, 1);
    arena_free(&mem);
    world_free(w);
}

/* What `status` says of the job. */
static void assert_shown(struct world *w, int64_t id, const char *part)
{
    struct arena mem;
    arena_init(&mem, 1 << 20);
    Boost__JobSummary *s = core_summary(w->core, job_of(w, id), &mem);
    assert_non_null(s);
    assert_says(s->info, part);
    arena_free(&mem);
}

static void a_server_that_fails_is_tried_so_often_and_then_the_job_held(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    struct arena mem;
    join_world(w, a);
    arena_init(&mem, 1 << 20);
    a->fetch_code = ERR_UNREACHABLE;
    a->failure_text = "http://h/a.txt: status 500";
    int64_t id = submit_spec(w, fetching_spec(&mem, "http://h/a.txt", NULL), false);
    pump(w);
    assert_int_equal(a->fetches, 1);
    assert_int_equal(a->fetch_tries, 3);
    assert_says(event_of(w, id, "fetch-failed")->text, "(try 1): http://h/a.txt: status 500 (check the path)");
    assert_shown(w, id, "fetches its files in 1s, try 2 of 10; last: http://h/a.txt: status 500");
    a->silent_fetch = true;
    advance(w, 1500);
    assert_shown(w, id, "fetches its files on n1, try 2 of 10; last: http://h/a.txt: status 500");
    assert_int_equal(a->fetch_tries, 1); /* its devices are not held for long */
    a->silent_fetch = false;
    int64_t begun = w->now;
    control(w, HOLD, id, false); /* a release begins anew, and at once */
    control(w, RELEASE, id, false);
    pump(w);
    assert_int_equal(a->fetches, 3);
    assert_int_equal(job_of(w, id)->fetch_tries, 1);
    assert_int_equal(count_events(w, id, "fetch-failed"), 2);
    while (job_of(w, id)->state == STATE(QUEUED) && w->now - begun < 3600 * NS_PER_S)
        advance(w, 1000);
    assert_state(w, id, HELD);
    assert_int_equal(a->fetches, 12);
    assert_in_range((w->now - begun) / NS_PER_S, 511 * 3 / 4, 511 * 5 / 4 + 10);
    assert_int_equal(count_events(w, id, "fetch-failed"), 2);
    assert_int_equal(job_of(w, id)->reason, REASON(DataError));
    assert_says(job_of(w, id)->reason_text, "n1 cannot fetch its files in 10 tries, for ");
    assert_says(job_of(w, id)->reason_text, "http://h/a.txt: status 500");
    assert_says(job_of(w, id)->reason_text, "release with: boostctl release 1");
    advance(w, 3600000);
    assert_int_equal(a->fetches, 12);
    a->fetch_code = ERR_OK;
    control(w, RELEASE, id, false);
    pump(w);
    assert_int_equal(newest(w, a, id)->attempt, 1);
    arena_free(&mem);
    world_free(w);
}

static void each_failure_is_an_event_and_each_try_is_not(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int events;
    } tries[] = {
        {"status 500", 1},
        {"status 500", 1},
        {"status 503", 2},
        {"no answer after 12 ms", 3},
        {"no answer after 135 ms", 3},
        {"no answer", 4},
        {"status 503", 5},
    };
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    struct arena mem;
    join_world(w, a);
    arena_init(&mem, 1 << 20);
    a->fetch_code = ERR_TIMEOUT;
    a->failure_text = tries[0].text;
    int64_t id = submit_spec(w, fetching_spec(&mem, "http://h/a.txt", NULL), false);
    pump(w);
    for (int i = 0; i < (int)(sizeof tries / sizeof *tries); i++) {
        a->failure_text = tries[i].text;
        while (a->fetches <= i)
            advance(w, 100);
        assert_int_equal(count_events(w, id, "fetch-failed"), tries[i].events);
    }
    arena_free(&mem);
    world_free(w);
}

static void others_run_while_it_waits_to_try_again(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    struct arena mem;
    join_world(w, a);
    arena_init(&mem, 1 << 20);
    a->silent_fetch = true;
    a->fetch_code = ERR_TIMEOUT;
    int64_t id = submit_spec(w, fetching_spec(&mem, "http://h/a.txt", NULL), false);
    pump(w);
    uint64_t task = a->last_task;
    int64_t behind = submit(w), last = submit(w);
    pump(w);
    assert_state(w, behind, QUEUED);
    Boost__Failure why = BOOST__FAILURE__INIT;
    why.has_code = true;
    why.code = ERR_TIMEOUT;
    why.message = (char *)(uintptr_t) "no byte moved";
    say_task(w, "n1", task, &why);
    pump(w);
    assert_state(w, behind, STARTING);
    struct fake_attempt *x = newest(w, a, behind);
    advance(w, 5000);
    assert_int_equal(a->fetches, 1); /* they have its devices; the next that come free are its own */
    assert_shown(w, id, "then fetches its files, try 2 of 10; last: no byte moved");
    a->silent_fetch = false;
    a->fetch_code = ERR_OK;
    control(w, CANCEL, behind, true);
    pump(w);
    say_end_of(w, a, x, 0, (struct end){.signal = 9});
    say_end_of(w, a, x, 1, (struct end){.signal = 9});
    pump(w);
    assert_int_equal(newest(w, a, id)->attempt, 1);
    assert_state(w, last, QUEUED);
    arena_free(&mem);
    world_free(w);
}

static void a_full_node_is_waited_for(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    struct arena mem;
    join_world(w, a);
    arena_init(&mem, 1 << 20);
    a->fetch_code = ERR_NOSPACE;
    a->failure_text = "no room";
    int64_t id = submit_spec(w, fetching_spec(&mem, "http://h/a.txt", NULL), false);
    advance(w, 7200000);
    assert_state(w, id, QUEUED);
    assert_int_equal(count_events(w, id, "fetch-failed"), 1);
    assert_shown(w, id, "; last: no room");
    arena_free(&mem);
    world_free(w);
}

static void an_attempt_to_come_is_held_likewise(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    struct arena mem;
    join_world(w, a);
    arena_init(&mem, 1 << 20);
    int64_t id = submit_spec(w, fetching_spec(&mem, "http://h/a.txt", NULL), false);
    pump(w);
    struct fake_attempt *x = newest(w, a, id);
    say_step(w, a, x, 10);
    say_checkpoint(w, a, x, 10);
    a->fetch_code = ERR_UNREACHABLE;
    a->failure_text = "http://h/a.txt: status 500";
    say_end_of(w, a, x, 0, (struct end){.signal = 9});
    pump(w);
    while (job_of(w, id)->fetch_tries < 2)
        advance(w, 250);
    assert_shown(w, id, "attempt 2 fetches its files in ");
    assert_shown(w, id, "try 3 of 10; last: http://h/a.txt: status 500");
    for (int i = 0; i < 1000 && job_of(w, id)->state == STATE(RECOVERING); i++)
        advance(w, 1000);
    assert_state(w, id, HELD);
    assert_says(job_of(w, id)->reason_text, "in 10 tries");
    a->fetch_code = ERR_OK;
    control(w, RELEASE, id, false);
    pump(w);
    assert_int_equal(newest(w, a, id)->attempt, 2);
    assert_int_equal(newest(w, a, id)->from_step, 10);
    arena_free(&mem);
    world_free(w);
}

/* What the first node has fetched may be thrown out while the second still fetches. */
static void what_lies_there_for_long_is_asked_for_again(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 1), *b = agent_add(w, "n2", 1);
    struct arena mem;
    join_world(w, a);
    join_world(w, b);
    arena_init(&mem, 1 << 20);
    Boost__JobSpec *s = fetching_spec(&mem, "http://h/a.txt", NULL);
    Boost__Resources *r = arena_alloc(&mem, sizeof *r);
    boost__resources__init(r);
    r->has_nodes = true;
    r->nodes = 2;
    s->resources = r;
    b->silent_fetch = true;
    int64_t id = submit_spec(w, s, false);
    pump(w);
    assert_int_equal(a->fetches, 1);
    uint64_t task = b->last_task;
    for (int i = 0; i < 30; i++) { /* an hour and a half */
        Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
        Boost__TaskProgress p = BOOST__TASK_PROGRESS__INIT;
        m.body_case = BOOST__AGENT_MESSAGE__BODY_TASK_PROGRESS;
        m.task_progress = &p;
        p.has_id = p.has_done = p.has_total = true;
        p.id = task;
        p.done = i * 1000 + 1;
        p.total = 40000;
        say(w, "n2", &m);
        advance(w, 180000);
    }
    assert_int_equal(a->fetches, 1);
    b->silent_fetch = false;
    say_task(w, "n2", task, NULL);
    pump(w);
    assert_int_equal(a->fetches, 2);
    assert_int_equal(b->fetches, 2);
    assert_int_equal(newest(w, a, id)->attempt, 1);
    arena_free(&mem);
    world_free(w);
}

static void a_cancelled_job_leaves_off(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    struct arena mem;
    join_world(w, a);
    arena_init(&mem, 1 << 20);
    a->silent_fetch = true;
    int64_t id = submit_spec(w, fetching_spec(&mem, "http://h/a.txt", NULL), false);
    pump(w);
    assert_int_equal(a->fetches, 1);
    assert_int_equal(a->cancelled, 0);
    uint64_t task = a->last_task;
    control(w, BOOST__CONTROL_REQUEST__VERB__CANCEL, id, true);
    assert_state(w, id, CANCELLED);
    assert_int_equal(a->cancelled, task);
    arena_free(&mem);
    world_free(w);
}

static void a_copy_that_a_job_begins_from_stays(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    struct arena mem;
    join_world(w, a);
    arena_init(&mem, 1 << 20);
    Boost__JobSpec *first = spec_new(&mem);
    first->checkpoint->mirror = arena_strdup(&mem, "s3://b/p/");
    first->checkpoint->has_keep = true;
    first->checkpoint->keep = 1;
    int64_t id = submit_spec(w, first, false);
    struct fake_attempt *x = newest(w, a, id);
    checkpoint_at(w, a, x, 10);
    int64_t second = submit_spec(w, fetching_spec(&mem, NULL, "s3://b/p/0badcafe-1/step-10.a1"), true);
    pump(w);
    checkpoint_at(w, a, x, 20);
    assert_int_equal(a->deletes, 0); /* the second job, held, is yet to begin from it */
    control(w, BOOST__CONTROL_REQUEST__VERB__CANCEL, second, true);
    checkpoint_at(w, a, x, 30);
    assert_int_equal(a->deletes, 2);
    arena_free(&mem);
    world_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_checkpoint_by_url_is_fetched_and_not_verified),
        cmocka_unit_test(what_cannot_be_had_holds_the_job),
        cmocka_unit_test(a_server_that_fails_is_tried_so_often_and_then_the_job_held),
        cmocka_unit_test(each_failure_is_an_event_and_each_try_is_not),
        cmocka_unit_test(others_run_while_it_waits_to_try_again),
        cmocka_unit_test(a_full_node_is_waited_for),
        cmocka_unit_test(an_attempt_to_come_is_held_likewise),
        cmocka_unit_test(what_lies_there_for_long_is_asked_for_again),
        cmocka_unit_test(a_cancelled_job_leaves_off),
        cmocka_unit_test(a_copy_that_a_job_begins_from_stays),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
