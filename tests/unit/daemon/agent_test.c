/* The agent from an order to the end of its attempt, over deaths of agent, keeper and ranks. */
#include "tests/unit/daemon/agent_world.h"

static void test_from_start_to_forget(void **state)
{
    struct fixture *f = *state;
    char path[PATH_MAX];
    start_agent(f);
    accept_agent(f, NULL);
    assert_string_equal(f->registered->node, "n1");
    assert_int_equal(f->registered->cpu_slots, 2);
    assert_int_equal(f->registered->n_attempts, 0);
    assert_true(f->registered->cores >= 1 && f->registered->memory_mib > 0);
    order_start(f, "exit7", 1, 1);
    expect_end(f, 1, 7);
    read_log(f, 1, 0, 0);
    expect_log(f, "rank 0 is up\n", true);
    run_path(f, 1, "", path);
    assert_true(fs_exists(path));
    order_forget(f, 1);
    await_path(path, false);
    read_log(f, 1, 5, 0); /* from the log that was kept */
    expect_log(f, "0 is up\n", true);
    read_log(f, 9, 0, 0);
    Boost__AgentMessage *m = expect(f, BOOST__AGENT_MESSAGE__BODY_TASK);
    assert_int_equal(m->task->failure->code, ERR_NOT_FOUND);
    boost__agent_message__free_unpacked(m, NULL);
    read_log(f, 2, 0, WAIT_MS); /* of an attempt that is about to start */
    order_start(f, "exit7", 2, 1);
    m = expect(f, BOOST__AGENT_MESSAGE__BODY_TASK);
    assert_null(m->task->failure);
    assert_int_equal(m->task->data.len, strlen("rank 0 is up\n"));
    boost__agent_message__free_unpacked(m, NULL);
    kill_agent(f, SIGTERM);
    path_in(f, "agent.log", path);
    struct buffer log;
    buffer_init(&log, 1 << 20);
    assert_int_equal(fs_read_file(path, &log, NULL), 0);
    assert_non_null(strstr((char *)log.data, "boost-agent ready node=n1\n"));
    buffer_free(&log);
}

static void test_updates_and_repeated_start(void **state)
{
    struct fixture *f = *state;
    struct procid keeper, again;
    start_agent(f);
    accept_agent(f, NULL);
    order_start(f, "steps", 1, 1);
    order_start(f, "steps", 1, 1);
    Boost__AgentMessage *m;
    for (;;) {
        m = expect(f, BOOST__AGENT_MESSAGE__BODY_RANK_UPDATE);
        bool training = m->rank_update->phase == BOOST__RANK_UPDATE__PHASE__TRAINING && m->rank_update->step == 1;
        boost__agent_message__free_unpacked(m, NULL);
        if (training)
            break;
    }
    load_id(f, 1, "keeper.id", &keeper);
    order_start(f, "steps", 1, 1);
    read_log(f, 1, 0, WAIT_MS);
    expect_log(f, "rank 0 is up\n", false); /* once */
    load_id(f, 1, "keeper.id", &again);
    assert_int_equal(again.pid, keeper.pid);
    assert_true(procid_alive(&keeper));
    /* A follower is answered when the end comes, not at its deadline. */
    int64_t begin = clock_mono_ns();
    read_log(f, 1, 13, 60000);
    touch(f, 1, "go");
    expect_log(f, "", true);
    assert_true(clock_mono_ns() - begin < 10 * NS_PER_S);
}

/* D7: attempt 2 is refused until the end of attempt 1 is certain. */
static void test_next_attempt_waits_for_the_kill(void **state)
{
    struct fixture *f = *state;
    struct procid rank;
    start_agent(f);
    accept_agent(f, NULL);
    order_start(f, "wait", 1, 1);
    load_id(f, 1, "rank-0.pid", &rank);
    order_start(f, "exit7", 2, 1);
    Boost__AgentMessage *m = expect(f, BOOST__AGENT_MESSAGE__BODY_ATTEMPT_REFUSED);
    assert_int_equal(m->attempt_refused->attempt, 2);
    assert_int_equal(m->attempt_refused->class_, BOOST__EXIT_CLASS__VALUE__INFRA);
    assert_non_null(strstr(m->attempt_refused->text, "attempt 1"));
    boost__agent_message__free_unpacked(m, NULL);
    order_stop(f, 1, BOOST__STOP_ATTEMPT__HOW__KILL, 0);
    m = expect(f, BOOST__AGENT_MESSAGE__BODY_RANK_END);
    assert_int_equal(m->rank_end->record->signal, SIGKILL);
    assert_true(m->rank_end->record->killed_by_us);
    boost__agent_message__free_unpacked(m, NULL);
    pass(f, BOOST__AGENT_MESSAGE__BODY_NODE_END);
    assert_false(procid_alive(&rank));
    order_start(f, "exit7", 2, 1);
    expect_end(f, 2, 7);
    order_start(f, "exit7", 3, 1);
    expect_end(f, 3, 7);
    char path[PATH_MAX];
    order_forget(f, 1);
    run_path(f, 1, "", path);
    await_path(path, false);
    order_start(f, "exit7", 1, 1); /* an order that comes late */
    expect_refused(f, BOOST__EXIT_CLASS__VALUE__INFRA, BOOST__REASON__VALUE__NONE, "older than attempt");
}

static void test_refusals(void **state)
{
    struct fixture *f = *state;
    char good[PATH_MAX], path[PATH_MAX];
    start_agent(f);
    accept_agent(f, NULL);
    memcpy(good, f->data, sizeof good);
    path_in(f, "missing.txt", f->data);
    order_start(f, "exit7", 1, 1);
    expect_refused(f, BOOST__EXIT_CLASS__VALUE__SPEC, BOOST__REASON__VALUE__DataError, "missing.txt");
    assert_int_equal(fs_write_atomic(f->data, "short", 5, 0644, NULL), 0);
    order_start(f, "exit7", 1, 1);
    expect_refused(f, BOOST__EXIT_CLASS__VALUE__SPEC, BOOST__REASON__VALUE__DataError, "5 tokens");
    memcpy(f->data, good, sizeof good);
    snprintf(f->ckpt, sizeof f->ckpt, "%s/below", good);
    order_start(f, "exit7", 1, 1);
    expect_refused(f, BOOST__EXIT_CLASS__VALUE__SPEC, BOOST__REASON__VALUE__SpecError, "not a directory");
    run_path(f, 1, "", path);
    assert_false(fs_exists(path));
    path_in(f, "ckpt", f->ckpt);
    order_start(f, "exit7", 1, 1); /* mended: it runs */
    expect_end(f, 1, 7);
}

/* D2: ranks run on, the next agent takes them up and hears of their end. */
static void test_agent_killed_while_ranks_run(void **state)
{
    struct fixture *f = *state;
    struct procid rank;
    Boost__Verdict keep;
    verdict_of(&keep, 1, BOOST__VERDICT__WHAT__KEEP);
    start_agent(f);
    accept_agent(f, NULL);
    order_start(f, "steps", 1, 1);
    load_id(f, 1, "rank-0.pid", &rank);
    kill_agent(f, SIGKILL);
    assert_true(procid_alive(&rank));
    int64_t begin = clock_mono_ns();
    start_agent(f);
    accept_agent(f, &keep);
    assert_true(clock_mono_ns() - begin < NS_PER_S);
    assert_int_equal(f->registered->n_attempts, 1);
    assert_int_equal(f->registered->attempts[0]->job, 17);
    assert_int_equal(f->registered->attempts[0]->attempt, 1);
    assert_string_equal(f->registered->attempts[0]->store_id, store);
    assert_true(f->registered->attempts[0]->alive);
    assert_int_equal(f->registered->attempts[0]->n_ranks, 1);
    assert_true(procid_alive(&rank));
    touch(f, 1, "go");
    expect_end(f, 1, 5);
}

/* D5, D30: the end came while no agent was there; it is reported, and again until acknowledged, never re-run. */
static void test_agent_away_when_ranks_end(void **state)
{
    struct fixture *f = *state;
    char path[PATH_MAX];
    Boost__Verdict keep;
    verdict_of(&keep, 1, BOOST__VERDICT__WHAT__KEEP);
    start_agent(f);
    accept_agent(f, NULL);
    order_start(f, "steps", 1, 1);
    run_path(f, 1, "rank-0.pid", path);
    await_path(path, true);
    kill_agent(f, SIGKILL);
    touch(f, 1, "go");
    run_path(f, 1, "keeper.end", path);
    await_path(path, true);
    f->mute = true;
    for (int i = 0; i < 2; i++) {
        start_agent(f);
        accept_agent(f, &keep);
        assert_int_equal(f->registered->n_attempts, 1);
        assert_false(f->registered->attempts[0]->alive);
        expect_end(f, 1, 5);
        kill_agent(f, i ? SIGTERM : SIGKILL);
    }
    f->mute = false;
    start_agent(f);
    accept_agent(f, &keep);
    order_start(f, "steps", 1, 1); /* told again: it has ended, that is all */
    expect_end(f, 1, 5);
    read_log(f, 1, 0, 0);
    expect_log(f, "rank 0 is up\n", true);
}

/* D3, D44: the keeper is killed: what it had started dies too, even what left the rank's session. */
static void test_keeper_killed(void **state)
{
    struct fixture *f = *state;
    struct procid keeper, rank, escaped;
    start_agent(f);
    accept_agent(f, NULL);
    order_start(f, "escape", 1, 2);
    load_id(f, 1, "keeper.id", &keeper);
    load_id(f, 1, "rank-1.pid", &rank);
    load_id(f, 1, "escaped.id", &escaped);
    await_log(f, 1, 0);
    await_log(f, 1, 1);
    assert_int_equal(procid_signal(&keeper, SIGKILL, NULL), 0);
    for (int i = 0; i < 2; i++) {
        Boost__AgentMessage *m = expect(f, BOOST__AGENT_MESSAGE__BODY_RANK_END);
        assert_true(m->rank_end->record->lost && !m->rank_end->record->has_exit_code &&
                    !m->rank_end->record->killed_by_us);
        assert_non_null(strstr((char *)m->rank_end->record->log_tail.data, "is up"));
        boost__agent_message__free_unpacked(m, NULL);
    }
    Boost__AgentMessage *m = expect(f, BOOST__AGENT_MESSAGE__BODY_NODE_END);
    assert_non_null(strstr(m->node_end->note, "keeper"));
    boost__agent_message__free_unpacked(m, NULL);
    assert_false(procid_alive(&rank));
    assert_false(procid_alive(&escaped));
    char path[PATH_MAX];
    struct buffer group;
    buffer_init(&group, PATH_MAX);
    run_path(f, 1, "keeper.cgroup", path);
    if (!fs_read_file(path, &group, NULL)) /* where there is one, it is gone */
        assert_false(fs_exists((char *)group.data));
    buffer_free(&group);
}

/* D1: after a crash of both, the rank's pid belongs to somebody else: it is left alone. */
static void test_reused_pid_is_left_alone(void **state)
{
    struct fixture *f = *state;
    struct procid keeper, rank;
    char path[PATH_MAX];
    Boost__Verdict fence;
    verdict_of(&fence, 1, BOOST__VERDICT__WHAT__FENCE);
    start_agent(f);
    accept_agent(f, NULL);
    order_start(f, "wait", 1, 1);
    load_id(f, 1, "keeper.id", &keeper);
    load_id(f, 1, "rank-0.pid", &rank);
    kill_agent(f, SIGKILL);
    assert_int_equal(procid_signal(&keeper, SIGKILL, NULL), 0);
    await_gone(&keeper);
    int rc = procid_signal(&rank, SIGKILL, NULL); /* or it has met its broken pipe */
    assert_true(!rc || rc == ERR_NOT_FOUND);
    await_gone(&rank);
    pid_t stranger = fork();
    if (stranger == 0)
        for (;;)
            pause();
    rank.pid = stranger; /* the old start time */
    run_path(f, 1, "rank-0.pid", path);
    assert_int_equal(procid_save(path, &rank, NULL), 0);
    start_agent(f);
    accept_agent(f, &fence);
    Boost__AgentMessage *m = expect(f, BOOST__AGENT_MESSAGE__BODY_RANK_END);
    assert_true(m->rank_end->record->lost);
    boost__agent_message__free_unpacked(m, NULL);
    pass(f, BOOST__AGENT_MESSAGE__BODY_NODE_END);
    assert_int_equal(waitpid(stranger, NULL, WNOHANG), 0);
    kill(stranger, SIGKILL);
    waitpid(stranger, NULL, 0);
}

static void test_fence_kills(void **state)
{
    struct fixture *f = *state;
    struct procid rank;
    Boost__Verdict fence;
    verdict_of(&fence, 1, BOOST__VERDICT__WHAT__FENCE);
    start_agent(f);
    accept_agent(f, NULL);
    order_start(f, "wait", 1, 1);
    load_id(f, 1, "rank-0.pid", &rank);
    close(f->conn); /* the controller restarts */
    f->conn = -1;
    accept_agent(f, &fence);
    Boost__AgentMessage *m = expect(f, BOOST__AGENT_MESSAGE__BODY_RANK_END);
    assert_true(m->rank_end->record->killed_by_us);
    boost__agent_message__free_unpacked(m, NULL);
    pass(f, BOOST__AGENT_MESSAGE__BODY_NODE_END);
    assert_false(procid_alive(&rank));
}

/* D11: a file of no bytes after a power cut: set aside, and the agent starts. */
static void test_quarantine(void **state)
{
    struct fixture *f = *state;
    char path[PATH_MAX];
    run_path(f, 3, "", path);
    assert_int_equal(fs_make_dirs(path, 0755, NULL), 0);
    touch(f, 3, "start.pb");
    run_path(f, 4, "", path); /* died before start.pb: nothing to keep */
    assert_int_equal(fs_make_dirs(path, 0755, NULL), 0);
    start_agent(f);
    accept_agent(f, NULL);
    assert_int_equal(f->registered->n_attempts, 0);
    run_path(f, 3, "", path);
    assert_false(fs_exists(path));
    run_path(f, 4, "", path);
    assert_false(fs_exists(path));
    snprintf(path, sizeof path, "%s/lost+found", f->state);
    DIR *dir = opendir(path);
    assert_non_null(dir);
    int found = 0;
    struct dirent *e;
    while ((e = readdir(dir)))
        found += !strncmp(e->d_name, "0badcafe-17.3.", 14);
    closedir(dir);
    assert_int_equal(found, 1);
    order_start(f, "exit7", 3, 1);
    expect_end(f, 3, 7);
}

/* A state directory too deep for a socket's address: ranks are told of a short one. */
static void test_long_state_directory(void **state)
{
    struct fixture *f = *state;
    char path[PATH_MAX];
    struct buffer packed;
    memset(f->state + strlen(f->state), 'x', 120);
    start_agent(f);
    accept_agent(f, NULL);
    order_start(f, "kv", 1, 1);
    pass(f, BOOST__AGENT_MESSAGE__BODY_KV); /* the rank has got through */
    run_path(f, 1, "start.pb", path);
    buffer_init(&packed, LIMIT_FRAME);
    assert_int_equal(fs_read_file(path, &packed, NULL), 0);
    Boost__AttemptStart *s = boost__attempt_start__unpack(NULL, packed.len, packed.data);
    assert_true(fs_exists(s->rendezvous_socket));
    order_stop(f, 1, BOOST__STOP_ATTEMPT__HOW__KILL, 0);
    pass(f, BOOST__AGENT_MESSAGE__BODY_NODE_END);
    kill_agent(f, SIGTERM);
    *strrchr(s->rendezvous_socket, '/') = '\0';
    assert_false(fs_exists(s->rendezvous_socket));
    boost__attempt_start__free_unpacked(s, NULL);
    buffer_free(&packed);
}

static void test_other_store_is_left_alone(void **state)
{
    struct fixture *f = *state;
    struct procid rank;
    start_agent(f);
    accept_agent(f, NULL);
    order_start(f, "steps", 1, 1);
    load_id(f, 1, "rank-0.pid", &rank);
    kill_agent(f, SIGTERM);
    f->store_id = "12345678"; /* a fresh boostd, which starts again at job 1 */
    start_agent(f);
    accept_agent(f, NULL);
    assert_string_equal(f->registered->attempts[0]->store_id, store);
    order_start(f, "exit7", 1, 1); /* same numbers, another job */
    expect_end(f, 1, 7);
    assert_true(procid_alive(&rank));
    /* When it ends its devices are free, which only another Register can say. */
    assert_int_equal(procid_signal(&rank, SIGKILL, NULL), 0);
    accept_agent(f, NULL);
    bool seen = false;
    for (size_t i = 0; i < f->registered->n_attempts; i++) {
        const Boost__LiveAttempt *x = f->registered->attempts[i];
        if (strcmp(x->store_id, store) == 0) {
            seen = true;
            assert_false(x->alive);
        }
    }
    assert_true(seen); /* its own controller may come back for it */
    f->store_id = store;
}

/* Whenever the agent dies between an order and a running rank, the rank runs once, and its code arrives. */
static void test_agent_killed_at_any_moment(void **state)
{
    struct fixture *f = *state;
    for (int i = 1; i <= 24; i++) {
        Boost__Verdict keep;
        char path[PATH_MAX];
        struct stat st;
        verdict_of(&keep, i, BOOST__VERDICT__WHAT__KEEP);
        start_agent(f);
        accept_agent(f, NULL);
        order_start(f, "count", i, 1);
        struct timespec moment = {.tv_nsec = (long)(i - 1) * 700000};
        nanosleep(&moment, NULL);
        kill_agent(f, SIGKILL);
        start_agent(f);
        accept_agent(f, &keep);
        order_start(f, "count", i, 1);
        expect_end(f, i, 9);
        run_path(f, i, "count", path);
        assert_int_equal(stat(path, &st), 0);
        assert_int_equal(st.st_size, 1);
        order_forget(f, i);
        run_path(f, i, "", path);
        await_path(path, false);
        kill_agent(f, SIGKILL);
    }
}

static void test_one_agent_a_state_directory(void **state)
{
    struct fixture *f = *state;
    start_agent(f);
    accept_agent(f, NULL);
    pid_t first = f->agent;
    start_agent(f);
    int status;
    assert_int_equal(waitpid(f->agent, &status, 0), f->agent);
    f->agent = first;
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 5);
    char path[PATH_MAX], expected[PATH_MAX + 100];
    struct buffer log;
    path_in(f, "agent.log", path);
    buffer_init(&log, 1 << 20);
    assert_int_equal(fs_read_file(path, &log, NULL), 0);
    snprintf(expected, sizeof expected, "another boost-agent (pid %d) runs with the state directory %s", (int)first,
             f->state);
    assert_non_null(strstr((char *)log.data, expected));
    buffer_free(&log);
}

int main(int argc, char **argv)
{
    int status = agent_world(argc, argv);
    if (status >= 0)
        return status;
    const struct CMUnitTest tests[] = {
        AGENT_TEST(test_from_start_to_forget),
        AGENT_TEST(test_updates_and_repeated_start),
        AGENT_TEST(test_next_attempt_waits_for_the_kill),
        AGENT_TEST(test_refusals),
        AGENT_TEST(test_agent_killed_while_ranks_run),
        AGENT_TEST(test_agent_away_when_ranks_end),
        AGENT_TEST(test_keeper_killed),
        AGENT_TEST(test_reused_pid_is_left_alone),
        AGENT_TEST(test_fence_kills),
        AGENT_TEST(test_quarantine),
        AGENT_TEST(test_long_state_directory),
        AGENT_TEST(test_other_store_is_left_alone),
        AGENT_TEST(test_agent_killed_at_any_moment),
        AGENT_TEST(test_one_agent_a_state_directory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
