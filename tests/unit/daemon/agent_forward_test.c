/* What an agent passes between ranks and controller: metrics, shards, stops, hangs, the rendezvous. */
#include "tests/unit/daemon/agent_world.h"

static void test_metrics_and_shards_survive(void **state)
{
    struct fixture *f = *state;
    char path[PATH_MAX];
    start_agent(f);
    accept_agent(f, NULL);
    f->mute = true; /* the window fills: 8 batches of 256 would be all of them */
    order_start(f, "records", 1, 1);
    run_path(f, 1, "written", path);
    await_path(path, true);
    pass(f, BOOST__AGENT_MESSAGE__BODY_METRICS);
    close(f->conn); /* nothing was acknowledged */
    f->conn = -1;
    f->mute = false;
    accept_agent(f, NULL);
    while (f->metrics < 1000 || f->shards < 2)
        boost__agent_message__free_unpacked(
            expect(f, f->metrics < 1000 ? BOOST__AGENT_MESSAGE__BODY_METRICS : BOOST__AGENT_MESSAGE__BODY_SHARDS),
            NULL);
    kill_agent(f, SIGKILL);
    touch(f, 1, "go");
    run_path(f, 1, "keeper.end", path);
    await_path(path, true);
    start_agent(f);
    accept_agent(f, NULL);
    expect_end(f, 1, 0);
    assert_int_equal(f->metrics, 1001); /* before the node's end */
    for (int i = 1; i <= 1001; i++)
        assert_true(f->metric_count[i] >= 1);
}

static void test_acknowledged_is_not_sent_again(void **state)
{
    struct fixture *f = *state;
    char path[PATH_MAX];
    start_agent(f);
    accept_agent(f, NULL);
    order_start(f, "records", 1, 1);
    while (f->metrics < 1000)
        pass(f, BOOST__AGENT_MESSAGE__BODY_METRICS);
    pass(f, BOOST__AGENT_MESSAGE__BODY_HEARTBEAT); /* the acknowledgements have been read */
    pass(f, BOOST__AGENT_MESSAGE__BODY_HEARTBEAT);
    kill_agent(f, SIGTERM); /* saves how far it was */
    start_agent(f);
    accept_agent(f, NULL);
    touch(f, 1, "go");
    expect_end(f, 1, 0);
    assert_int_equal(f->metrics, 1001);
    for (int i = 1; i <= 1001; i++)
        assert_int_equal(f->metric_count[i], 1);
    run_path(f, 1, "agent.acks", path);
    assert_true(fs_exists(path));
}

static void test_stop_gently(void **state)
{
    struct fixture *f = *state;
    Boost__RequestCheckpoint checkpoint = BOOST__REQUEST_CHECKPOINT__INIT;
    start_agent(f);
    accept_agent(f, NULL);
    order_start(f, "term", 1, 1);
    Boost__AgentMessage *m;
    bool training = false;
    while (!training) {
        m = expect(f, BOOST__AGENT_MESSAGE__BODY_RANK_UPDATE);
        training = m->rank_update->phase == BOOST__RANK_UPDATE__PHASE__TRAINING;
        boost__agent_message__free_unpacked(m, NULL);
    }
    checkpoint.has_job = checkpoint.has_attempt = true;
    checkpoint.job = 17;
    checkpoint.attempt = 1;
    tell(f, BOOST__CONTROLLER_MESSAGE__BODY_CHECKPOINT, &checkpoint);
    order_stop(f, 1, BOOST__STOP_ATTEMPT__HOW__TERM, 60000);
    expect_end(f, 1, 0);
    read_log(f, 1, 0, 0);
    expect_log(f, "rank 0 is up\nstop 1 checkpoint 1\n", true);
}

static void test_grace_runs_out(void **state)
{
    struct fixture *f = *state;
    start_agent(f);
    accept_agent(f, NULL);
    order_start(f, "stubborn", 1, 1);
    Boost__AgentMessage *m;
    bool training = false;
    while (!training) {
        m = expect(f, BOOST__AGENT_MESSAGE__BODY_RANK_UPDATE);
        training = m->rank_update->phase == BOOST__RANK_UPDATE__PHASE__TRAINING;
        boost__agent_message__free_unpacked(m, NULL);
    }
    int64_t begin = clock_mono_ns();
    order_stop(f, 1, BOOST__STOP_ATTEMPT__HOW__TERM, 300);
    m = expect(f, BOOST__AGENT_MESSAGE__BODY_RANK_END);
    assert_true(m->rank_end->record->killed_by_us);
    assert_int_equal(m->rank_end->record->signal, SIGKILL);
    boost__agent_message__free_unpacked(m, NULL);
    assert_true(clock_mono_ns() - begin >= 300 * NS_PER_MS);
    pass(f, BOOST__AGENT_MESSAGE__BODY_NODE_END);
    order_stop(f, 1, BOOST__STOP_ATTEMPT__HOW__KILL, 0); /* again, and of one that never was */
    pass(f, BOOST__AGENT_MESSAGE__BODY_NODE_END);
    order_stop(f, 44, BOOST__STOP_ATTEMPT__HOW__KILL, 0);
    m = expect(f, BOOST__AGENT_MESSAGE__BODY_NODE_END);
    assert_int_equal(m->node_end->attempt, 44);
    boost__agent_message__free_unpacked(m, NULL);
}

static void answer_kv(struct fixture *f, uint64_t id, const char *value)
{
    Boost__KvAnswer answer = BOOST__KV_ANSWER__INIT;
    Boost__KvResult result = BOOST__KV_RESULT__INIT;
    answer.has_id = answer.has_job = answer.has_attempt = answer.has_rank = true;
    answer.id = id;
    answer.job = 17;
    answer.attempt = 1;
    answer.result = &result;
    result.has_ok = result.ok = result.has_value = true;
    result.value = (ProtobufCBinaryData){strlen(value), (uint8_t *)(uintptr_t)value};
    tell(f, BOOST__CONTROLLER_MESSAGE__BODY_KV, &answer);
}

/* The next forwarded request: its id, after checking its kind. */
static uint64_t expect_kv(struct fixture *f, Boost__KvOp__Kind kind)
{
    Boost__AgentMessage *m = expect(f, BOOST__AGENT_MESSAGE__BODY_KV);
    assert_int_equal(m->kv->job, 17);
    assert_int_equal(m->kv->rank, 0);
    assert_string_equal(m->kv->op->key, "address of 1");
    assert_int_equal(m->kv->op->kind, kind);
    if (kind == BOOST__KV_OP__KIND__SET)
        assert_memory_equal(m->kv->op->value.data, "mine", 4);
    uint64_t id = m->kv->id;
    boost__agent_message__free_unpacked(m, NULL);
    return id;
}

/* A controller that restarts has forgotten what was set: it is told again. */
static void test_sets_are_repeated_to_a_new_controller(void **state)
{
    struct fixture *f = *state;
    start_agent(f);
    accept_agent(f, NULL);
    order_start(f, "kv set", 1, 1);
    answer_kv(f, expect_kv(f, BOOST__KV_OP__KIND__SET), "");
    expect_kv(f, BOOST__KV_OP__KIND__GET);
    close(f->conn);
    f->conn = -1;
    accept_agent(f, NULL);
    expect_kv(f, BOOST__KV_OP__KIND__SET);
    answer_kv(f, expect_kv(f, BOOST__KV_OP__KIND__GET), "yours");
    expect_end(f, 1, 0);
    read_log(f, 1, 0, 0);
    expect_log(f, "rank 0 is up\n76 1 \n77 1 yours\n", true);
}

static void test_rendezvous_outlives_the_link(void **state)
{
    struct fixture *f = *state;
    start_agent(f);
    accept_agent(f, NULL);
    order_start(f, "kv", 1, 1);
    pass(f, BOOST__AGENT_MESSAGE__BODY_KV);
    close(f->conn); /* lost before the answer */
    f->conn = -1;
    accept_agent(f, NULL);
    answer_kv(f, expect_kv(f, BOOST__KV_OP__KIND__GET), "1.2.3.4:5");
    expect_end(f, 1, 0);
    read_log(f, 1, 0, 0);
    expect_log(f, "rank 0 is up\n77 1 1.2.3.4:5\n", true);
}

static void test_hang_is_reported(void **state)
{
    struct fixture *f = *state;
    f->hang_ms = 500;
    start_agent(f);
    accept_agent(f, NULL);
    order_start(f, "hang", 1, 1);
    Boost__AgentMessage *m = expect(f, BOOST__AGENT_MESSAGE__BODY_HANG);
    assert_non_null(strstr(m->hang->text, "rank 0 made no progress"));
    assert_non_null(strstr(m->hang->text, "training"));
    boost__agent_message__free_unpacked(m, NULL);
    /* It may have been lost with its connection, and the rank will not move again. */
    close(f->conn);
    f->conn = -1;
    accept_agent(f, NULL);
    pass(f, BOOST__AGENT_MESSAGE__BODY_HANG);
}

int main(int argc, char **argv)
{
    int status = agent_world(argc, argv);
    if (status >= 0)
        return status;
    const struct CMUnitTest tests[] = {
        AGENT_TEST(test_metrics_and_shards_survive),
        AGENT_TEST(test_acknowledged_is_not_sent_again),
        AGENT_TEST(test_stop_gently),
        AGENT_TEST(test_grace_runs_out),
        AGENT_TEST(test_sets_are_repeated_to_a_new_controller),
        AGENT_TEST(test_rendezvous_outlives_the_link),
        AGENT_TEST(test_hang_is_reported),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
