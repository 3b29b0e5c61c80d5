/* The agent and its node: health checks that the controller hears of, prolog and epilog, the node's environment. */
#include "tests/unit/daemon/agent_world.h"

static const char *text_of(char text[PATH_MAX + 64], const char *field, const char *value)
{
    snprintf(text, PATH_MAX + 64, "%s=%s", field, value);
    return text;
}

/* An executable file of the fixture's directory. */
static void script(struct fixture *f, const char *name, const char *body, char path[PATH_MAX])
{
    char text[2048];
    path_in(f, name, path);
    int len = snprintf(text, sizeof text, "#!/bin/sh\ncd %s || exit 99\n%s\n", f->dir, body);
    assert_int_equal(fs_write_atomic(path, text, (size_t)len, 0755, NULL), 0);
}

/* The next report of the node's health. */
static Boost__AgentMessage *expect_health(struct fixture *f)
{
    return expect(f, BOOST__AGENT_MESSAGE__BODY_HEALTH);
}

static void expect_failed(struct fixture *f, const char *check, const char *text)
{
    Boost__AgentMessage *m = expect_health(f);
    assert_int_equal(m->health->n_failed, 1);
    assert_string_equal(m->health->failed[0]->check, check);
    if (!strstr(m->health->failed[0]->text, text))
        fail_msg("'%s' is not in '%s'", text, m->health->failed[0]->text);
    assert_false(m->health->pending);
    boost__agent_message__free_unpacked(m, NULL);
}

static void expect_passed(struct fixture *f)
{
    Boost__AgentMessage *m = expect_health(f);
    assert_int_equal(m->health->n_failed, 0);
    assert_false(m->health->pending);
    boost__agent_message__free_unpacked(m, NULL);
}

static void ask(struct fixture *f, bool mended)
{
    Boost__CheckHealth order = BOOST__CHECK_HEALTH__INIT;
    order.has_mended = true;
    order.mended = mended;
    tell(f, BOOST__CONTROLLER_MESSAGE__BODY_CHECK_HEALTH, &order);
}

/* What takes no time is in the Register already. */
static void test_found_before_the_first_word(void **state)
{
    struct fixture *f = *state;
    f->sets[0] = "memory_floor_mib=1000000000";
    f->sets[1] = "data_address=203.0.113.7"; /* documentation's: of no machine */
    start_agent(f);
    accept_agent(f, NULL);
    const Boost__HealthReport *r = f->registered->health;
    assert_non_null(r);
    assert_false(r->pending);
    assert_int_equal(r->n_failed, 2);
    assert_string_equal(r->failed[0]->check, "memory");
    assert_non_null(strstr(r->failed[0]->text, "less than memory_floor_mib (1000000000)"));
    assert_string_equal(r->failed[1]->check, "port");
    assert_non_null(strstr(r->failed[1]->text, "203.0.113.7 can be bound: Cannot assign requested address"));
    kill_agent(f, SIGTERM);
}

static void test_a_script_fails_and_passes_again(void **state)
{
    struct fixture *f = *state;
    char path[PATH_MAX], set[PATH_MAX + 64], flag[PATH_MAX];
    path_in(f, "broken", flag);
    assert_int_equal(fs_write_atomic(flag, "", 0, 0644, NULL), 0);
    script(f, "health.sh", "echo checking; [ ! -e broken ] || { echo \"$BOOST_SCRIPT $BOOST_NODE: broken\"; exit 3; }",
           path);
    f->sets[0] = text_of(set, "health_script", path);
    f->sets[1] = "health_interval_ms=100";
    start_agent(f);
    accept_agent(f, NULL);
    expect_failed(f, "script", "health.sh: status 3 after ");
    expect_failed(f, "script", "s: health n1: broken"); /* each time: a cordon may have been lifted by hand */
    unlink(flag);
    expect_passed(f);
    assert_null(await(f, BOOST__AGENT_MESSAGE__BODY_HEALTH, 500)); /* nothing new */
    ask(f, false);
    expect_passed(f);
    kill_agent(f, SIGTERM);
}

static void test_a_script_that_takes_its_time_is_waited_for(void **state)
{
    struct fixture *f = *state;
    char path[PATH_MAX], set[PATH_MAX + 64], flag[PATH_MAX];
    path_in(f, "go", flag);
    script(f, "health.sh", "while [ ! -e go ]; do sleep 0.01; done", path);
    f->sets[0] = text_of(set, "health_script", path);
    start_agent(f);
    accept_agent(f, NULL);
    assert_true(f->registered->health->pending && !f->registered->health->n_failed);
    assert_int_equal(fs_write_atomic(flag, "", 0, 0644, NULL), 0);
    expect_passed(f);
    kill_agent(f, SIGTERM);
    unlink(flag);
    f->sets[1] = "health_timeout_ms=300";
    start_agent(f);
    accept_agent(f, NULL);
    expect_failed(f, "script", "health.sh: not over after 0.3 s, killed: it printed nothing");
    kill_agent(f, SIGTERM);
}

/* The check before an attempt: refused as the node's fault, and told before the refusal. */
static void test_an_attempt_finds_the_node_unfit(void **state)
{
    struct fixture *f = *state;
    char path[PATH_MAX], set[PATH_MAX + 64];
    script(f, "health.sh", "[ -z \"$BOOST_JOB\" ] || { echo \"not for job $BOOST_JOB, ranks $BOOST_RANKS\"; exit 1; }",
           path);
    f->sets[0] = text_of(set, "health_script", path);
    start_agent(f);
    accept_agent(f, NULL);
    order_start(f, "exit7", 1, 2);
    Boost__AgentMessage *m;
    for (bool failed = false; !failed; boost__agent_message__free_unpacked(m, NULL)) {
        m = expect_health(f); /* of the start it may be one that passed */
        failed = m->health->n_failed > 0;
    }
    expect_refused(f, BOOST__EXIT_CLASS__VALUE__INFRA, BOOST__REASON__VALUE__NONE, "health check: script: ");
    kill_agent(f, SIGTERM);
}

/* What a job asks for and does not find is no fault of the node. */
static void test_less_memory_than_the_ranks_ask_for(void **state)
{
    struct fixture *f = *state;
    start_agent(f);
    accept_agent(f, NULL);
    f->memory_mib = INT64_C(1) << 40;
    order_start(f, "exit7", 1, 2);
    Boost__AgentMessage *m = expect(f, BOOST__AGENT_MESSAGE__BODY_ATTEMPT_REFUSED);
    assert_int_equal(m->attempt_refused->class_, BOOST__EXIT_CLASS__VALUE__INFRA);
    assert_non_null(strstr(m->attempt_refused->text, "and 2199023255552 MiB are asked for (2 x 1099511627776)"));
    boost__agent_message__free_unpacked(m, NULL);
    f->memory_mib = 1;
    order_start(f, "exit7", 2, 1);
    expect_end(f, 2, 7);
    assert_null(await(f, BOOST__AGENT_MESSAGE__BODY_HEALTH, 100));
    kill_agent(f, SIGTERM);
}

/* Until the attempt's last word: it may have been told while the epilog ran. */
static void expect_over(struct fixture *f)
{
    for (bool over = false; !over;) {
        Boost__AgentMessage *m = expect(f, BOOST__AGENT_MESSAGE__BODY_NODE_END);
        over = !m->node_end->epilog;
        boost__agent_message__free_unpacked(m, NULL);
    }
}

static void test_prolog_and_epilog_frame_an_attempt(void **state)
{
    struct fixture *f = *state;
    char prolog[PATH_MAX], epilog[PATH_MAX], sets[2][PATH_MAX + 64], path[PATH_MAX];
    script(f, "prolog.sh", "echo prolog $BOOST_JOB $BOOST_ATTEMPT $BOOST_RANKS $BOOST_UID >>order", prolog);
    script(f, "epilog.sh", "[ -d ckpt ] && echo epilog $BOOST_JOB >>order; while [ ! -e go ]; do sleep 0.01; done",
           epilog);
    f->sets[0] = text_of(sets[0], "prolog", prolog);
    f->sets[1] = text_of(sets[1], "epilog", epilog);
    start_agent(f);
    accept_agent(f, NULL);
    order_start(f, "exit7", 1, 2);
    pass(f, BOOST__AGENT_MESSAGE__BODY_RANK_END); /* at once, whatever the epilog does */
    pass(f, BOOST__AGENT_MESSAGE__BODY_RANK_END);
    Boost__AgentMessage *m = expect(f, BOOST__AGENT_MESSAGE__BODY_NODE_END);
    assert_true(m->node_end->epilog);
    boost__agent_message__free_unpacked(m, NULL);
    /* Meanwhile the attempt counts as there, for whoever asks and over a new connection. */
    close(f->conn);
    f->conn = -1;
    Boost__Verdict fence;
    verdict_of(&fence, 1, BOOST__VERDICT__WHAT__FENCE);
    accept_agent(f, &fence);
    assert_true(f->registered->n_attempts == 1 && f->registered->attempts[0]->alive);
    assert_true(f->registered->attempts[0]->epilog);
    m = expect(f, BOOST__AGENT_MESSAGE__BODY_NODE_END);
    assert_true(m->node_end->epilog);
    boost__agent_message__free_unpacked(m, NULL);
    order_forget(f, 1); /* waits for the script */
    path_in(f, "go", path);
    assert_int_equal(fs_write_atomic(path, "", 0, 0644, NULL), 0);
    expect_over(f);
    run_path(f, 1, "", path);
    await_path(path, false);
    struct buffer order;
    buffer_init(&order, 4096);
    path_in(f, "order", path);
    assert_int_equal(fs_read_file(path, &order, NULL), 0);
    char expected[256];
    snprintf(expected, sizeof expected, "prolog 17 0badcafe-17.1 0,1 %u\nepilog 17\n", (unsigned)geteuid());
    assert_string_equal((char *)order.data, expected);
    buffer_free(&order);
    kill_agent(f, SIGTERM);
}

static void test_a_prolog_fails(void **state)
{
    struct fixture *f = *state;
    char prolog[PATH_MAX], epilog[PATH_MAX], sets[2][PATH_MAX + 64], path[PATH_MAX];
    script(f, "prolog.sh", "echo 'scratch cannot be mounted'; exit 32", prolog);
    script(f, "epilog.sh", "echo >>epilog", epilog);
    f->sets[0] = text_of(sets[0], "prolog", prolog);
    f->sets[1] = text_of(sets[1], "epilog", epilog);
    f->sets[2] = "health_interval_ms=100";
    start_agent(f);
    accept_agent(f, NULL);
    order_start(f, "exit7", 1, 1);
    expect_failed(f, "prolog", "s: scratch cannot be mounted");
    expect_refused(f, BOOST__EXIT_CLASS__VALUE__INFRA, BOOST__REASON__VALUE__NONE, "prolog: ");
    /* No check mends it, whoever asks for one; an operator says that it is. */
    assert_null(await(f, BOOST__AGENT_MESSAGE__BODY_HEALTH, 400));
    kill_agent(f, SIGKILL);
    start_agent(f);
    accept_agent(f, NULL);
    assert_int_equal(f->registered->health->n_failed, 1);
    assert_string_equal(f->registered->health->failed[0]->check, "prolog");
    ask(f, false);
    expect_failed(f, "prolog", "s: scratch cannot be mounted");
    ask(f, true);
    expect_passed(f);
    kill_agent(f, SIGKILL);
    start_agent(f);
    accept_agent(f, NULL);
    assert_int_equal(f->registered->health->n_failed, 0);
    path_in(f, "epilog", path);
    assert_false(fs_exists(path));
    kill_agent(f, SIGTERM);
}

/* What a prolog has set up is taken down though the attempt never was, and then nothing of it is left. */
static void test_an_epilog_follows_a_prolog_whatever_comes_between(void **state)
{
    struct fixture *f = *state;
    char prolog[PATH_MAX], epilog[PATH_MAX], sets[2][PATH_MAX + 64], path[PATH_MAX];
    script(f, "prolog.sh", "[ -e down ] || { rmdir state/attempts && echo >state/attempts; }", prolog);
    script(f, "epilog.sh", "[ -e down ] || { rm state/attempts && mkdir state/attempts; }; echo >>down", epilog);
    f->sets[0] = text_of(sets[0], "prolog", prolog);
    f->sets[1] = text_of(sets[1], "epilog", epilog);
    start_agent(f);
    accept_agent(f, NULL);
    order_start(f, "exit7", 1, 1);
    Boost__AgentMessage *m = expect(f, BOOST__AGENT_MESSAGE__BODY_ATTEMPT_REFUSED);
    assert_int_equal(m->attempt_refused->class_, BOOST__EXIT_CLASS__VALUE__INFRA);
    assert_non_null(strstr(m->attempt_refused->text, "attempts"));
    assert_true(m->attempt_refused->epilog); /* the devices stay taken */
    boost__agent_message__free_unpacked(m, NULL);
    path_in(f, "down", path);
    await_path(path, true);
    expect_over(f);
    order_start(f, "exit7", 2, 1);
    pass(f, BOOST__AGENT_MESSAGE__BODY_RANK_END);
    close(f->conn);
    f->conn = -1;
    accept_agent(f, NULL);
    assert_int_equal(f->registered->n_attempts, 1);
    assert_int_equal(f->registered->attempts[0]->attempt, 2);
    kill_agent(f, SIGTERM);
}

/* D24, D31: it never ends; its attempt is told to, and does. */
static void test_a_stop_ends_a_prolog(void **state)
{
    struct fixture *f = *state;
    char prolog[PATH_MAX], sets[PATH_MAX + 64], path[PATH_MAX];
    script(f, "prolog.sh", "trap '' TERM; echo >begun; sleep 60 & wait", prolog);
    f->sets[0] = text_of(sets, "prolog", prolog);
    start_agent(f);
    accept_agent(f, NULL);
    order_start(f, "exit7", 1, 1);
    path_in(f, "begun", path);
    await_path(path, true);
    int64_t from = clock_mono_ns();
    order_stop(f, 1, BOOST__STOP_ATTEMPT__HOW__KILL, 0);
    pass(f, BOOST__AGENT_MESSAGE__BODY_NODE_END);
    assert_true(clock_mono_ns() - from < 10 * NS_PER_S);
    kill_agent(f, SIGTERM);
}

static void test_an_epilog_hangs(void **state)
{
    struct fixture *f = *state;
    char epilog[PATH_MAX], sets[PATH_MAX + 64];
    script(f, "epilog.sh", "echo still busy; sleep 60", epilog);
    f->sets[0] = text_of(sets, "epilog", epilog);
    f->sets[1] = "epilog_timeout_ms=2000";
    start_agent(f);
    accept_agent(f, NULL);
    order_start(f, "exit7", 1, 1);
    pass(f, BOOST__AGENT_MESSAGE__BODY_NODE_END);
    expect_failed(f, "epilog", "epilog.sh: not over after 2.0 s, killed: still busy");
    expect_over(f);
    kill_agent(f, SIGTERM);
}

/* An agent dies with the epilog on its way: the next one runs it, and once it has run nobody runs it again. */
static void test_an_epilog_outlives_the_agent(void **state)
{
    struct fixture *f = *state;
    char epilog[PATH_MAX], sets[PATH_MAX + 64], path[PATH_MAX];
    script(f, "epilog.sh", "echo >>runs; while [ ! -e go ]; do sleep 0.01; done", epilog);
    f->sets[0] = text_of(sets, "epilog", epilog);
    start_agent(f);
    accept_agent(f, NULL);
    order_start(f, "exit7", 1, 1);
    pass(f, BOOST__AGENT_MESSAGE__BODY_NODE_END);
    path_in(f, "runs", path);
    await_path(path, true); /* the script is, too */
    kill_agent(f, SIGKILL);
    path_in(f, "go", path);
    assert_int_equal(fs_write_atomic(path, "", 0, 0644, NULL), 0);
    for (int i = 0; i < 2; i++) {
        start_agent(f);
        accept_agent(f, NULL);
        expect_over(f);
        kill_agent(f, SIGTERM);
    }
    struct buffer runs;
    buffer_init(&runs, 4096);
    path_in(f, "runs", path);
    assert_int_equal(fs_read_file(path, &runs, NULL), 0);
    assert_int_equal(runs.len, 2);
    buffer_free(&runs);
}

/* D3, D44: what an attempt that is over has left is found by its environment, and killed. */
static void test_what_an_attempt_left_is_killed(void **state)
{
    struct fixture *f = *state;
    char run[PATH_MAX + 128];
    f->sets[0] = "health_interval_ms=100";
    start_agent(f);
    accept_agent(f, NULL);
    snprintf(run, sizeof run, "BOOST_RUN_DIR=%s/attempts/0badcafe-17.1", f->state);
    char *env[] = {run, NULL};
    char *argv[] = {"sleep", "60", NULL};
    for (int i = 0; i < 5; i++) { /* a new one after each kill, for longer than one may take to die */
        pid_t pid = fork();
        if (pid == 0) {
            execve("/bin/sleep", argv, env);
            _exit(127);
        }
        int status;
        pid_t gone;
        while ((gone = waitpid(pid, &status, WNOHANG)) == 0)
            assert_null(await(f, BOOST__AGENT_MESSAGE__BODY_HEALTH, 20)); /* the node is none the worse */
        assert_int_equal(gone, pid);
        assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    }
    assert_null(await(f, BOOST__AGENT_MESSAGE__BODY_HEALTH, 100));
    kill_agent(f, SIGTERM);
}

/* The node's environment under the job's own, and neither over what the agent sets. */
static void test_the_nodes_environment(void **state)
{
    struct fixture *f = *state;
    f->sets[0] = "env={key: \"NCCL_SOCKET_IFNAME\" value: \"eth7\"}";
    f->sets[1] = "env={key: \"AGENT_TEST\" value: \"exit7\"}";
    f->sets[2] = "label={key: \"rack\" value: \"r1\"}";
    f->sets[3] = "switch=leaf1";
    start_agent(f);
    accept_agent(f, NULL);
    assert_int_equal(f->registered->n_env, 2);
    assert_string_equal(f->registered->label[0]->value, "r1");
    assert_string_equal(f->registered->switch_, "leaf1");
    order_start(f, "environment", 1, 1);
    expect_end(f, 1, 0);
    read_log(f, 1, 0, 0);
    expect_log(f, "rank 0 is up\nNCCL_SOCKET_IFNAME=eth7 AGENT_TEST=environment\n", true);
    kill_agent(f, SIGTERM);
}

int main(int argc, char **argv)
{
    int status = agent_world(argc, argv);
    if (status >= 0)
        return status;
    const struct CMUnitTest tests[] = {
        AGENT_TEST(test_found_before_the_first_word),
        AGENT_TEST(test_a_script_fails_and_passes_again),
        AGENT_TEST(test_a_script_that_takes_its_time_is_waited_for),
        AGENT_TEST(test_an_attempt_finds_the_node_unfit),
        AGENT_TEST(test_less_memory_than_the_ranks_ask_for),
        AGENT_TEST(test_prolog_and_epilog_frame_an_attempt),
        AGENT_TEST(test_a_prolog_fails),
        AGENT_TEST(test_an_epilog_follows_a_prolog_whatever_comes_between),
        AGENT_TEST(test_a_stop_ends_a_prolog),
        AGENT_TEST(test_an_epilog_hangs),
        AGENT_TEST(test_an_epilog_outlives_the_agent),
        AGENT_TEST(test_what_an_attempt_left_is_killed),
        AGENT_TEST(test_the_nodes_environment),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
