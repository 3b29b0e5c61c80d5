/* What users look at: jobs by name, logs, goodput; and the rendezvous. */
#include "tests/unit/daemon/core_world.h"

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
        cmocka_unit_test(jobs_are_found_by_what_users_type),
        cmocka_unit_test(logs_come_from_the_agent_or_from_memory),
        cmocka_unit_test(rendezvous_goes_through),
        cmocka_unit_test(goodput_adds_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
