/* The agent as a process, with a controller made of a socket and the test, and with the test program again as keeper
 * and as worker (what to do is in AGENT_TEST). For agent_*_test.c; a program's main begins with agent_world(). */
#ifndef BOOST_TESTS_AGENT_WORLD_H
#define BOOST_TESTS_AGENT_WORLD_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "daemon/agent_main.h"
#include "daemon/cgroup.h"
#include "daemon/keeper_main.h"
#include "daemon/procid.h"
#include "proto/agent.pb-c.h"
#include "proto/base/clock.h"
#include "proto/base/fs.h"
#include "proto/frame.h"
#include "proto/rankfiles.h"
#include "proto/reclog.h"

#define HELPER static __attribute__((unused))

enum { WAIT_MS = 15000, MAX_RANKS = 4, MAX_SEQ = 4096 };
static const char store[] = "0badcafe";
static char self_path[PATH_MAX];

/* ---- the rank's side ---- */

HELPER void worker_append(const char *run_dir, int rank, const char *suffix, const ProtobufCMessage *m, bool durable)
{
    char path[PATH_MAX];
    uint8_t packed[512];
    struct reclog_writer w;
    if (rank_file_path(path, sizeof path, run_dir, rank, suffix, NULL) || reclog_open(&w, path, NULL) ||
        reclog_append(&w, packed, protobuf_c_message_pack(m, packed), durable, NULL))
        _exit(98);
    reclog_close(&w);
}

HELPER void worker_metric(const char *run_dir, int rank, int64_t seq)
{
    Boost__MetricRecord m = BOOST__METRIC_RECORD__INIT;
    m.has_seq = m.has_step = true;
    m.seq = m.step = seq;
    worker_append(run_dir, rank, "metrics", &m.base, false);
}

HELPER void worker_shard(const char *run_dir, int rank, int64_t seq)
{
    Boost__ShardRecord m = BOOST__SHARD_RECORD__INIT;
    m.has_seq = m.has_step = m.has_rank = true;
    m.seq = seq;
    m.step = seq * 10;
    m.rank = rank;
    worker_append(run_dir, rank, "shards", &m.base, true);
}

HELPER void worker_wait(const char *run_dir, const char *name)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", run_dir, name);
    while (!fs_exists(path))
        poll(NULL, 0, 2);
}

HELPER void worker_touch(const char *run_dir, const char *name)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", run_dir, name);
    if (fs_write_atomic(path, "", 0, 0644, NULL))
        _exit(97);
}

/* One request over the rendezvous socket, with `set` a SET before it; prints what it got. */
HELPER int worker_rendezvous(const char *run_dir, int rank, bool set)
{
    char path[PATH_MAX];
    struct buffer packed, out, in;
    buffer_init(&packed, LIMIT_FRAME);
    buffer_init(&out, LIMIT_FRAME);
    buffer_init(&in, LIMIT_FRAME);
    snprintf(path, sizeof path, "%s/start.pb", run_dir);
    if (fs_read_file(path, &packed, NULL))
        return 90;
    Boost__AttemptStart *s = boost__attempt_start__unpack(NULL, packed.len, packed.data);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", s->rendezvous_socket);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    Boost__RankRequest r = BOOST__RANK_REQUEST__INIT;
    Boost__KvOp op = BOOST__KV_OP__INIT;
    r.has_id = r.has_job = r.has_attempt = r.has_rank = op.has_kind = op.has_timeout_ms = true;
    r.id = 77;
    r.job = s->job;
    r.attempt = s->attempt;
    r.rank = rank;
    r.op = &op;
    op.kind = BOOST__KV_OP__KIND__GET;
    op.group = "world";
    op.key = "address of 1";
    op.timeout_ms = 5000;
    if (set) {
        op.kind = BOOST__KV_OP__KIND__SET;
        op.has_value = true;
        op.value = (ProtobufCBinaryData){4, (uint8_t *)"mine"};
        r.id = 76;
        if (frame_append(&out, &r.base, NULL))
            return 91;
        op.kind = BOOST__KV_OP__KIND__GET;
        op.has_value = false;
        r.id = 77;
    }
    if (connect(fd, (struct sockaddr *)&address, sizeof address) < 0 || frame_append(&out, &r.base, NULL) ||
        fs_write_all(fd, out.data, out.len, NULL))
        return 91;
    const uint8_t *payload;
    for (int replies = 0; replies < 1 + set;) {
        size_t len, used;
        if (frame_next(in.data, in.len, &payload, &len, &used, NULL))
            return 93;
        if (!used) {
            uint8_t *at = buffer_reserve(&in, 4096);
            ssize_t n = read(fd, at, 4096);
            if (n <= 0)
                return 92;
            in.len += (size_t)n;
            continue;
        }
        Boost__RankReply *reply = boost__rank_reply__unpack(NULL, len, payload);
        printf("%d %d %.*s\n", (int)reply->id, reply->result->ok, (int)reply->result->value.len,
               reply->result->value.data);
        boost__rank_reply__free_unpacked(reply, NULL);
        buffer_consume(&in, used);
        replies++;
    }
    boost__attempt_start__free_unpacked(s, NULL);
    buffer_free(&packed);
    buffer_free(&out);
    buffer_free(&in);
    return 0;
}

HELPER volatile sig_atomic_t terminated;

HELPER void on_term(int sig)
{
    (void)sig;
    terminated = 1;
}

HELPER int worker(const char *what, const char *run_dir, int rank)
{
    struct rank_status *status = rank_file_map(run_dir, rank, "status", RANK_STATUS_MAGIC, 0, NULL);
    struct rank_control *control = rank_file_map(run_dir, rank, "control", RANK_CONTROL_MAGIC, 0, NULL);
    if (!status || !control)
        return 96;
    setvbuf(stdout, NULL, _IONBF, 0);
    printf("rank %d is up\n", rank);
    if (!strcmp(what, "environment")) {
        printf("NCCL_SOCKET_IFNAME=%s AGENT_TEST=%s\n", getenv("NCCL_SOCKET_IFNAME"), what);
        return 0;
    }
    if (!strcmp(what, "exit7"))
        return 7;
    if (!strcmp(what, "exit66")) {
        worker_wait(run_dir, "go");
        return RANK_EXIT_INFRA;
    }
    if (!strcmp(what, "steps")) {
        status->phase = BOOST__RANK_UPDATE__PHASE__TRAINING;
        status->progress = 1;
        status->step = 1;
        worker_wait(run_dir, "go");
        return 5;
    }
    if (!strcmp(what, "records")) {
        for (int i = 1; i <= 1000; i++)
            worker_metric(run_dir, rank, i);
        worker_shard(run_dir, rank, 1);
        worker_shard(run_dir, rank, 2);
        worker_touch(run_dir, "written");
        worker_wait(run_dir, "go");
        worker_metric(run_dir, rank, 1001);
        return 0;
    }
    if (!strcmp(what, "term")) {
        signal(SIGTERM, on_term);
        status->phase = BOOST__RANK_UPDATE__PHASE__TRAINING;
        while (!terminated || !control->stop || control->checkpoint != 1)
            poll(NULL, 0, 1);
        printf("stop %u checkpoint %u\n", control->stop, control->checkpoint);
        return 0;
    }
    if (!strcmp(what, "stubborn")) {
        signal(SIGTERM, SIG_IGN);
        status->phase = BOOST__RANK_UPDATE__PHASE__TRAINING;
    }
    if (!strcmp(what, "count")) {
        char path[PATH_MAX];
        snprintf(path, sizeof path, "%s/count", run_dir);
        int fd = open(path, O_WRONLY | O_CREAT | O_APPEND, 0644);
        return write(fd, "x", 1) == 1 ? 9 : 94;
    }
    if (!strcmp(what, "kv") || !strcmp(what, "kv set"))
        return worker_rendezvous(run_dir, rank, !strcmp(what, "kv set"));
    if (!strcmp(what, "escape") && fork() == 0) {
        setsid();
        struct procid id;
        char path[PATH_MAX];
        snprintf(path, sizeof path, "%s/escaped.id", run_dir);
        if (procid_get(getpid(), &id, NULL) || procid_save(path, &id, NULL))
            _exit(95);
    }
    if (!strcmp(what, "hang"))
        status->phase = BOOST__RANK_UPDATE__PHASE__TRAINING;
    for (;;)
        pause();
}

/* ---- fixture: the controller's side ---- */

struct fixture {
    char dir[PATH_MAX], socket[PATH_MAX], state[PATH_MAX], data[PATH_MAX], ckpt[PATH_MAX];
    const char *store_id;
    int listener, conn;
    struct buffer in;
    pid_t agent;
    int hang_ms;
    bool mute;                 /* acknowledge nothing */
    int64_t memory_mib;        /* that each rank of it asks for, 0: says nothing */
    const char *sets[6];       /* more of the agent's configuration, "field=value" */
    char nvml[PATH_MAX];       /* "": no GPUs */
    bool cuda;                 /* what order_start() orders is on CUDA */
    int64_t metrics, shards;   /* highest number received */
    int metric_count[MAX_SEQ]; /* how often each came */
    Boost__Register *registered;
};

HELPER void path_in(const struct fixture *f, const char *name, char out[PATH_MAX])
{
    assert_int_equal(fs_join(out, PATH_MAX, NULL, f->dir, name), 0);
}

HELPER int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);
    char data[4096];
    const char *base = getenv("BOOST_TEST_DIR");
    snprintf(f->dir, sizeof f->dir, "%s/agent-XXXXXX", base ? base : "/tmp");
    assert_non_null(mkdtemp(f->dir));
    path_in(f, "c.sock", f->socket);
    path_in(f, "state", f->state);
    path_in(f, "train.txt", f->data);
    path_in(f, "ckpt", f->ckpt);
    memset(data, 'a', sizeof data);
    assert_int_equal(fs_write_atomic(f->data, data, sizeof data, 0644, NULL), 0);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", f->socket);
    f->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(f->listener, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(listen(f->listener, 8), 0);
    f->conn = -1;
    f->store_id = store;
    buffer_init(&f->in, 8 << 20);
    *state = f;
    return 0;
}

HELPER void start_agent(struct fixture *f)
{
    char hang[64], log[PATH_MAX], nvml[PATH_MAX + 16];
    snprintf(nvml, sizeof nvml, "nvml_library=%s", f->nvml);
    snprintf(hang, sizeof hang, "hang_max_ms=%d", f->hang_ms ? f->hang_ms : 600000);
    path_in(f, "agent.log", log);
    f->agent = fork();
    assert_true(f->agent >= 0);
    if (f->agent == 0) {
        int fd = open(log, O_WRONLY | O_CREAT | O_APPEND, 0644);
        dup2(fd, 1);
        dup2(fd, 2);
        const char *argv[40] = {self_path,
                                "agent",
                                "--state-dir",
                                f->state,
                                "--controller-socket",
                                f->socket,
                                "--node",
                                "n1",
                                "--keeper",
                                self_path,
                                "--worker",
                                self_path,
                                "--cpu-slots",
                                "2",
                                "--log-level",
                                "debug",
                                "--set",
                                "hang_min_ms=100",
                                "--set",
                                hang,
                                "--set",
                                nvml};
        int n = 22;
        for (size_t i = 0; i < sizeof f->sets / sizeof *f->sets && f->sets[i]; i++) {
            argv[n++] = "--set";
            argv[n++] = f->sets[i];
        }
        execv(self_path, (char **)(uintptr_t)argv);
        _exit(127);
    }
}

HELPER void kill_agent(struct fixture *f, int sig)
{
    int status;
    kill(f->agent, sig);
    assert_int_equal(waitpid(f->agent, &status, 0), f->agent);
    if (sig == SIGTERM)
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    f->agent = 0;
    if (f->conn >= 0)
        close(f->conn);
    f->conn = -1;
    buffer_clear(&f->in);
}

HELPER void send_frame(struct fixture *f, const ProtobufCMessage *m)
{
    struct buffer out;
    buffer_init(&out, LIMIT_FRAME + FRAME_HEADER);
    assert_int_equal(frame_append(&out, m, NULL), 0);
    assert_int_equal(fs_write_all(f->conn, out.data, out.len, NULL), 0);
    buffer_free(&out);
}

HELPER void tell(struct fixture *f, Boost__ControllerMessage__BodyCase kind, const void *body)
{
    Boost__ControllerMessage m = BOOST__CONTROLLER_MESSAGE__INIT;
    m.body_case = kind;
    m.registered = (Boost__Registered *)(uintptr_t)body;
    send_frame(f, &m.base);
}

/* The next frame's payload, or NULL after `ms`; valid until the next call. */
static const uint8_t *next_frame(struct fixture *f, int ms, size_t *len, struct buffer *keep)
{
    int64_t deadline = clock_mono_ns() + ms * NS_PER_MS;
    for (;;) {
        const uint8_t *payload;
        size_t used;
        assert_int_equal(frame_next(f->in.data, f->in.len, &payload, len, &used, NULL), 0);
        if (used) {
            buffer_clear(keep);
            buffer_append(keep, payload, *len);
            buffer_consume(&f->in, used);
            return keep->data;
        }
        int64_t left = (deadline - clock_mono_ns()) / NS_PER_MS;
        struct pollfd p = {.fd = f->conn, .events = POLLIN};
        if (left <= 0 || poll(&p, 1, (int)left) <= 0)
            return NULL;
        uint8_t *at = buffer_reserve(&f->in, 64 << 10);
        ssize_t n = read(f->conn, at, 64 << 10);
        if (n <= 0)
            return NULL;
        f->in.len += (size_t)n;
    }
}

HELPER void acknowledge(struct fixture *f, int64_t job, int32_t attempt, int32_t rank, int64_t metrics, int64_t shards,
                        bool rank_end, bool node_end)
{
    Boost__Ack a = BOOST__ACK__INIT;
    if (f->mute)
        return;
    a.has_job = a.has_attempt = a.has_rank = true;
    a.job = job;
    a.attempt = attempt;
    a.rank = rank;
    a.has_metrics_seq = metrics > 0;
    a.metrics_seq = metrics;
    a.has_shards_seq = shards > 0;
    a.shards_seq = shards;
    a.has_rank_end = a.rank_end = rank_end;
    a.has_node_end = a.node_end = node_end;
    tell(f, BOOST__CONTROLLER_MESSAGE__BODY_ACK, &a);
}

HELPER void note_message(struct fixture *f, const Boost__AgentMessage *m)
{
    switch (m->body_case) {
    case BOOST__AGENT_MESSAGE__BODY_HEARTBEAT: {
        Boost__HeartbeatAck ack = BOOST__HEARTBEAT_ACK__INIT;
        tell(f, BOOST__CONTROLLER_MESSAGE__BODY_HEARTBEAT_ACK, &ack);
        break;
    }
    case BOOST__AGENT_MESSAGE__BODY_METRICS:
        for (size_t i = 0; i < m->metrics->n_records; i++) {
            int64_t seq = m->metrics->records[i]->seq;
            assert_in_range(seq, 1, f->metrics + 1); /* without a gap */
            f->metrics = seq > f->metrics ? seq : f->metrics;
            f->metric_count[seq]++;
        }
        acknowledge(f, m->metrics->job, m->metrics->attempt, m->metrics->rank, f->metrics, 0, false, false);
        break;
    case BOOST__AGENT_MESSAGE__BODY_SHARDS:
        for (size_t i = 0; i < m->shards->n_records; i++)
            f->shards = m->shards->records[i]->seq > f->shards ? m->shards->records[i]->seq : f->shards;
        acknowledge(f, m->shards->job, m->shards->attempt, m->shards->rank, 0, f->shards, false, false);
        break;
    case BOOST__AGENT_MESSAGE__BODY_RANK_END: {
        const Boost__ExitRecord *r = m->rank_end->record;
        acknowledge(f, r->job, r->attempt, r->rank, 0, 0, true, false);
        break;
    }
    case BOOST__AGENT_MESSAGE__BODY_NODE_END:
        acknowledge(f, m->node_end->job, m->node_end->attempt, 0, 0, 0, false, true);
        break;
    default:
        break;
    }
}

/* Takes messages until one of `kind` comes; NULL after `ms`. The caller frees it. */
HELPER Boost__AgentMessage *await(struct fixture *f, Boost__AgentMessage__BodyCase kind, int ms)
{
    struct buffer keep;
    size_t len;
    int64_t deadline = clock_mono_ns() + ms * NS_PER_MS;
    buffer_init(&keep, LIMIT_FRAME);
    for (;;) {
        int64_t left = (deadline - clock_mono_ns()) / NS_PER_MS;
        const uint8_t *payload = left > 0 ? next_frame(f, (int)left, &len, &keep) : NULL;
        Boost__AgentMessage *m = payload ? boost__agent_message__unpack(NULL, len, payload) : NULL;
        if (m)
            note_message(f, m);
        if (!m || m->body_case == kind) {
            buffer_free(&keep);
            return m;
        }
        boost__agent_message__free_unpacked(m, NULL);
    }
}

HELPER Boost__AgentMessage *expect(struct fixture *f, Boost__AgentMessage__BodyCase kind)
{
    Boost__AgentMessage *m = await(f, kind, WAIT_MS);
    assert_non_null(m);
    return m;
}

HELPER void pass(struct fixture *f, Boost__AgentMessage__BodyCase kind)
{
    boost__agent_message__free_unpacked(expect(f, kind), NULL);
}

HELPER void accept_agent(struct fixture *f, const Boost__Verdict *verdict)
{
    struct buffer keep;
    size_t len;
    struct pollfd p = {.fd = f->listener, .events = POLLIN};
    assert_int_equal(poll(&p, 1, WAIT_MS), 1);
    if (f->conn >= 0)
        close(f->conn);
    buffer_clear(&f->in);
    f->conn = accept4(f->listener, NULL, NULL, SOCK_CLOEXEC);
    buffer_init(&keep, LIMIT_FRAME);
    const uint8_t *payload = next_frame(f, WAIT_MS, &len, &keep);
    assert_non_null(payload);
    Boost__Hello *hello = boost__hello__unpack(NULL, len, payload);
    assert_int_equal(hello->component, BOOST__COMPONENT__VALUE__AGENT);
    assert_string_equal(hello->node, "n1");
    boost__hello__free_unpacked(hello, NULL);
    Boost__Hello answer = BOOST__HELLO__INIT;
    answer.has_protocol = answer.has_protocol_min = answer.has_component = true;
    answer.protocol = answer.protocol_min = 1;
    answer.component = BOOST__COMPONENT__VALUE__CONTROLLER;
    send_frame(f, &answer.base);
    payload = next_frame(f, WAIT_MS, &len, &keep);
    assert_non_null(payload);
    Boost__AgentMessage *m = boost__agent_message__unpack(NULL, len, payload);
    assert_int_equal(m->body_case, BOOST__AGENT_MESSAGE__BODY_REGISTER);
    if (f->registered)
        boost__register__free_unpacked(f->registered, NULL);
    f->registered = m->register_;
    m->body_case = BOOST__AGENT_MESSAGE__BODY__NOT_SET;
    boost__agent_message__free_unpacked(m, NULL);
    buffer_free(&keep);
    Boost__Registered registered = BOOST__REGISTERED__INIT;
    Boost__Verdict *verdicts[1] = {(Boost__Verdict *)(uintptr_t)verdict};
    registered.store_id = (char *)(uintptr_t)f->store_id;
    registered.has_heartbeat_ms = true;
    registered.heartbeat_ms = 200;
    registered.verdicts = verdicts;
    registered.n_verdicts = verdict ? 1 : 0;
    tell(f, BOOST__CONTROLLER_MESSAGE__BODY_REGISTERED, &registered);
}

HELPER void order_start(struct fixture *f, const char *what, int attempt, int ranks)
{
    Boost__StartAttempt order = BOOST__START_ATTEMPT__INIT;
    Boost__AttemptStart s = BOOST__ATTEMPT_START__INIT;
    Boost__JobSpec spec = BOOST__JOB_SPEC__INIT;
    Boost__Data data = BOOST__DATA__INIT;
    Boost__TokenFile file = BOOST__TOKEN_FILE__INIT, *files[] = {&file};
    Boost__Checkpoint checkpoint = BOOST__CHECKPOINT__INIT;
    Boost__KeyValue env = BOOST__KEY_VALUE__INIT, *envs[] = {&env};
    int32_t list[MAX_RANKS] = {0, 1, 2, 3};
    order.start = &s;
    s.has_job = s.has_attempt = s.has_world = s.has_uid = s.has_gid = true;
    s.job = 17;
    s.attempt = attempt;
    s.world = ranks;
    s.ranks = list;
    s.n_ranks = (size_t)ranks;
    s.uid = (uint32_t)geteuid();
    s.gid = (uint32_t)getegid();
    s.spec = &spec;
    s.store_id = (char *)(uintptr_t)f->store_id;
    spec.data = &data;
    spec.checkpoint = &checkpoint;
    spec.env = envs;
    spec.n_env = 1;
    data.has_format = data.has_seq_len = true;
    data.format = BOOST__FORMAT__VALUE__TEXT;
    data.seq_len = 64;
    data.train = files;
    data.n_train = 1;
    file.path = f->data;
    checkpoint.dir = f->ckpt;
    env.key = "AGENT_TEST";
    env.value = (char *)(uintptr_t)what;
    Boost__Resources resources = BOOST__RESOURCES__INIT;
    resources.has_device = true;
    resources.device = f->cuda ? BOOST__DEVICE__VALUE__CUDA : BOOST__DEVICE__VALUE__CPU;
    resources.has_memory_mib = f->memory_mib > 0;
    resources.memory_mib = f->memory_mib;
    spec.resources = &resources;
    tell(f, BOOST__CONTROLLER_MESSAGE__BODY_START, &order);
}

HELPER void order_stop(struct fixture *f, int attempt, Boost__StopAttempt__How how, int grace_ms)
{
    Boost__StopAttempt s = BOOST__STOP_ATTEMPT__INIT;
    s.has_job = s.has_attempt = s.has_how = s.has_grace_ms = true;
    s.job = 17;
    s.attempt = attempt;
    s.how = how;
    s.grace_ms = grace_ms;
    tell(f, BOOST__CONTROLLER_MESSAGE__BODY_STOP, &s);
}

HELPER void order_forget(struct fixture *f, int attempt)
{
    Boost__ForgetAttempt forget = BOOST__FORGET_ATTEMPT__INIT;
    forget.has_job = forget.has_attempt = true;
    forget.job = 17;
    forget.attempt = attempt;
    tell(f, BOOST__CONTROLLER_MESSAGE__BODY_FORGET, &forget);
}

HELPER void run_path(struct fixture *f, int attempt, const char *name, char out[PATH_MAX])
{
    int used = snprintf(out, PATH_MAX, "%s/attempts/%s-17.%d/%s", f->state, f->store_id, attempt, name);
    assert_in_range(used, 1, PATH_MAX - 1);
}

HELPER void await_path(const char *path, bool there)
{
    for (int64_t end = clock_mono_ns() + WAIT_MS * NS_PER_MS; fs_exists(path) != there;) {
        assert_true(clock_mono_ns() < end);
        poll(NULL, 0, 2);
    }
}

HELPER void touch(struct fixture *f, int attempt, const char *name)
{
    char path[PATH_MAX];
    run_path(f, attempt, name, path);
    assert_int_equal(fs_write_atomic(path, "", 0, 0644, NULL), 0);
}

HELPER void load_id(struct fixture *f, int attempt, const char *name, struct procid *id)
{
    char path[PATH_MAX];
    run_path(f, attempt, name, path);
    await_path(path, true);
    assert_int_equal(procid_load(path, id, NULL), 0);
}

HELPER void await_gone(const struct procid *id)
{
    for (int64_t end = clock_mono_ns() + WAIT_MS * NS_PER_MS; procid_alive(id);) {
        assert_true(clock_mono_ns() < end);
        poll(NULL, 0, 2);
    }
}

/* The keeper has the rank's first line on disk. */
HELPER void await_log(struct fixture *f, int attempt, int rank)
{
    char name[32], path[PATH_MAX];
    struct stat st = {0};
    snprintf(name, sizeof name, "rank-%d.log", rank);
    run_path(f, attempt, name, path);
    for (int64_t end = clock_mono_ns() + WAIT_MS * NS_PER_MS; stat(path, &st) < 0 || st.st_size == 0;) {
        assert_true(clock_mono_ns() < end);
        poll(NULL, 0, 2);
    }
}

HELPER void expect_end(struct fixture *f, int attempt, int code)
{
    Boost__AgentMessage *m = expect(f, BOOST__AGENT_MESSAGE__BODY_RANK_END);
    assert_int_equal(m->rank_end->record->attempt, attempt);
    assert_true(m->rank_end->record->has_exit_code && !m->rank_end->record->lost);
    assert_int_equal(m->rank_end->record->exit_code, code);
    boost__agent_message__free_unpacked(m, NULL);
    pass(f, BOOST__AGENT_MESSAGE__BODY_NODE_END);
}

/* Kills whatever a failed test has left in its run directories. */
HELPER int teardown(void **state)
{
    struct fixture *f = *state;
    char attempts[PATH_MAX], marker[PATH_MAX + 64];
    if (f->agent > 0) {
        kill(f->agent, SIGKILL);
        waitpid(f->agent, NULL, 0);
    }
    snprintf(attempts, sizeof attempts, "%s/attempts", f->state);
    DIR *dir = opendir(attempts);
    struct dirent *e;
    while (dir && (e = readdir(dir))) {
        char path[PATH_MAX + 300];
        struct procid keeper;
        snprintf(path, sizeof path, "%s/%s/keeper.id", attempts, e->d_name);
        if (e->d_name[0] != '.' && !procid_load(path, &keeper, NULL) && !procid_signal(&keeper, SIGTERM, NULL))
            await_gone(&keeper);
        snprintf(marker, sizeof marker, "BOOST_RUN_DIR=%s/%s", attempts, e->d_name);
        struct proc_sweep sweep = {.marker = marker};
        if (e->d_name[0] != '.')
            proc_sweep(&sweep, SIGKILL);
        struct buffer group;
        struct cgroup cg;
        buffer_init(&group, PATH_MAX);
        snprintf(path, sizeof path, "%s/%s/keeper.cgroup", attempts, e->d_name);
        if (!fs_read_file(path, &group, NULL) && group.len) {
            cgroup_adopt(&cg, (char *)group.data);
            cgroup_remove(&cg);
        }
        buffer_free(&group);
    }
    if (dir)
        closedir(dir);
    if (f->registered)
        boost__register__free_unpacked(f->registered, NULL);
    close(f->listener);
    if (f->conn >= 0)
        close(f->conn);
    buffer_free(&f->in);
    int rc = getenv("KEEP") ? 0 : fs_remove_tree(f->dir, NULL);
    free(f);
    return rc;
}

HELPER void read_log(struct fixture *f, int attempt, int64_t offset, int wait_ms)
{
    Boost__Task t = BOOST__TASK__INIT;
    Boost__ReadLog r = BOOST__READ_LOG__INIT;
    t.has_id = t.has_job = true;
    t.id = 5;
    t.job = 17;
    t.body_case = BOOST__TASK__BODY_READ_LOG;
    t.read_log = &r;
    r.has_attempt = r.has_rank = r.has_offset = r.has_wait_ms = true;
    r.attempt = attempt;
    r.offset = offset;
    r.wait_ms = wait_ms;
    tell(f, BOOST__CONTROLLER_MESSAGE__BODY_TASK, &t);
}

HELPER void expect_log(struct fixture *f, const char *text, bool finished)
{
    Boost__AgentMessage *m = expect(f, BOOST__AGENT_MESSAGE__BODY_TASK);
    assert_null(m->task->failure);
    assert_int_equal(m->task->id, 5);
    assert_int_equal(m->task->data.len, strlen(text));
    assert_memory_equal(m->task->data.data, text, strlen(text));
    assert_int_equal(m->task->finished, finished);
    boost__agent_message__free_unpacked(m, NULL);
}

HELPER void expect_refused(struct fixture *f, Boost__ExitClass__Value class_, Boost__Reason__Value reason,
                           const char *text)
{
    Boost__AgentMessage *m = expect(f, BOOST__AGENT_MESSAGE__BODY_ATTEMPT_REFUSED);
    assert_int_equal(m->attempt_refused->class_, class_);
    assert_int_equal(m->attempt_refused->reason, reason);
    if (!strstr(m->attempt_refused->text, text))
        fail_msg("'%s' is not in '%s'", text, m->attempt_refused->text);
    if (class_ == BOOST__EXIT_CLASS__VALUE__SPEC)
        assert_true(m->attempt_refused->hint && *m->attempt_refused->hint);
    boost__agent_message__free_unpacked(m, NULL);
}

HELPER void verdict_of(Boost__Verdict *v, int attempt, Boost__Verdict__What what)
{
    boost__verdict__init(v);
    v->has_job = v->has_attempt = v->has_what = true;
    v->job = 17;
    v->attempt = attempt;
    v->what = what;
}

/* -1: the test program itself, go on; else the status with which this process ends. */
HELPER int agent_world(int argc, char **argv)
{
    const char *what = getenv("AGENT_TEST");
    if (argc == 2 && !strcmp(argv[1], "--check-cuda"))
        return 0;
    if (what && argc == 5) /* --run-dir DIR --rank R */
        return worker(what, argv[2], (int)strtol(argv[4], NULL, 10));
    if (argc > 1 && !strcmp(argv[1], "agent"))
        _exit(agent_main(argc - 1, argv + 1));
    if (argc == 2 && argv[1][0] == '/')
        return keeper_main(argc, argv);
    if (readlink("/proc/self/exe", self_path, sizeof self_path - 1) <= 0)
        return 1;
    cmocka_set_test_filter(getenv("BOOST_TEST_FILTER"));
    signal(SIGPIPE, SIG_IGN); /* an agent that hangs up is a failed check, not the end of this program */
    return -1;
}
#define AGENT_TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

#endif
