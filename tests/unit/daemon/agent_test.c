/* The agent as a process, with a controller made of a socket and this test, and with this
 * program again as keeper and as worker (what to do is in AGENT_TEST). */
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

enum { WAIT_MS = 15000, MAX_RANKS = 4, MAX_SEQ = 4096 };
static const char store[] = "0badcafe";
static char self_path[PATH_MAX];

/* ---- the rank's side ---- */

static void worker_append(const char *run_dir, int rank, const char *suffix, const ProtobufCMessage *m, bool durable)
{
    char path[PATH_MAX];
    uint8_t packed[512];
    struct reclog_writer w;
    if (rank_file_path(path, sizeof path, run_dir, rank, suffix, NULL) || reclog_open(&w, path, NULL) ||
        reclog_append(&w, packed, protobuf_c_message_pack(m, packed), durable, NULL))
        _exit(98);
    reclog_close(&w);
}

static void worker_metric(const char *run_dir, int rank, int64_t seq)
{
    Boost__MetricRecord m = BOOST__METRIC_RECORD__INIT;
    m.has_seq = m.has_step = true;
    m.seq = m.step = seq;
    worker_append(run_dir, rank, "metrics", &m.base, false);
}

static void worker_shard(const char *run_dir, int rank, int64_t seq)
{
    Boost__ShardRecord m = BOOST__SHARD_RECORD__INIT;
    m.has_seq = m.has_step = m.has_rank = true;
    m.seq = seq;
    m.step = seq * 10;
    m.rank = rank;
    worker_append(run_dir, rank, "shards", &m.base, true);
}

static void worker_wait(const char *run_dir, const char *name)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", run_dir, name);
    while (!fs_exists(path))
        poll(NULL, 0, 2);
}

static void worker_touch(const char *run_dir, const char *name)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", run_dir, name);
    if (fs_write_atomic(path, "", 0, 0644, NULL))
        _exit(97);
}

/* One request over the rendezvous socket, with `set` a SET before it; prints what it got. */
static int worker_rendezvous(const char *run_dir, int rank, bool set)
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

static volatile sig_atomic_t terminated;

static void on_term(int sig)
{
    (void)sig;
    terminated = 1;
}

static int worker(const char *what, const char *run_dir, int rank)
{
    struct rank_status *status = rank_file_map(run_dir, rank, "status", RANK_STATUS_MAGIC, 0, NULL);
    struct rank_control *control = rank_file_map(run_dir, rank, "control", RANK_CONTROL_MAGIC, 0, NULL);
    if (!status || !control)
        return 96;
    setvbuf(stdout, NULL, _IONBF, 0);
    printf("rank %d is up\n", rank);
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
    char nvml[PATH_MAX];       /* "": no GPUs */
    bool cuda;                 /* what order_start() orders is on CUDA */
    int64_t metrics, shards;   /* highest number received */
    int metric_count[MAX_SEQ]; /* how often each came */
    Boost__Register *registered;
};

static void path_in(const struct fixture *f, const char *name, char out[PATH_MAX])
{
    assert_int_equal(fs_join(out, PATH_MAX, NULL, f->dir, name), 0);
}

static int setup(void **state)
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

static void start_agent(struct fixture *f)
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
        execl(self_path, self_path, "agent", "--state-dir", f->state, "--controller-socket", f->socket, "--node", "n1",
              "--keeper", self_path, "--worker", self_path, "--cpu-slots", "2", "--set", "hang_min_ms=100", "--set",
              hang, "--set", nvml, "--log-level", "debug", (char *)NULL);
        _exit(127);
    }
}

static void kill_agent(struct fixture *f, int sig)
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

static void send_frame(struct fixture *f, const ProtobufCMessage *m)
{
    struct buffer out;
    buffer_init(&out, LIMIT_FRAME + FRAME_HEADER);
    assert_int_equal(frame_append(&out, m, NULL), 0);
    assert_int_equal(fs_write_all(f->conn, out.data, out.len, NULL), 0);
    buffer_free(&out);
}

static void tell(struct fixture *f, Boost__ControllerMessage__BodyCase kind, const void *body)
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

static void acknowledge(struct fixture *f, int64_t job, int32_t attempt, int32_t rank, int64_t metrics, int64_t shards,
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

static void note_message(struct fixture *f, const Boost__AgentMessage *m)
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
static Boost__AgentMessage *await(struct fixture *f, Boost__AgentMessage__BodyCase kind, int ms)
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

static Boost__AgentMessage *expect(struct fixture *f, Boost__AgentMessage__BodyCase kind)
{
    Boost__AgentMessage *m = await(f, kind, WAIT_MS);
    assert_non_null(m);
    return m;
}

static void pass(struct fixture *f, Boost__AgentMessage__BodyCase kind)
{
    boost__agent_message__free_unpacked(expect(f, kind), NULL);
}

static void accept_agent(struct fixture *f, const Boost__Verdict *verdict)
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

static void order_start(struct fixture *f, const char *what, int attempt, int ranks)
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
    spec.resources = &resources;
    tell(f, BOOST__CONTROLLER_MESSAGE__BODY_START, &order);
}

static void order_stop(struct fixture *f, int attempt, Boost__StopAttempt__How how, int grace_ms)
{
    Boost__StopAttempt s = BOOST__STOP_ATTEMPT__INIT;
    s.has_job = s.has_attempt = s.has_how = s.has_grace_ms = true;
    s.job = 17;
    s.attempt = attempt;
    s.how = how;
    s.grace_ms = grace_ms;
    tell(f, BOOST__CONTROLLER_MESSAGE__BODY_STOP, &s);
}

static void order_forget(struct fixture *f, int attempt)
{
    Boost__ForgetAttempt forget = BOOST__FORGET_ATTEMPT__INIT;
    forget.has_job = forget.has_attempt = true;
    forget.job = 17;
    forget.attempt = attempt;
    tell(f, BOOST__CONTROLLER_MESSAGE__BODY_FORGET, &forget);
}

static void run_path(struct fixture *f, int attempt, const char *name, char out[PATH_MAX])
{
    int used = snprintf(out, PATH_MAX, "%s/attempts/%s-17.%d/%s", f->state, f->store_id, attempt, name);
    assert_in_range(used, 1, PATH_MAX - 1);
}

static void await_path(const char *path, bool there)
{
    for (int64_t end = clock_mono_ns() + WAIT_MS * NS_PER_MS; fs_exists(path) != there;) {
        assert_true(clock_mono_ns() < end);
        poll(NULL, 0, 2);
    }
}

static void touch(struct fixture *f, int attempt, const char *name)
{
    char path[PATH_MAX];
    run_path(f, attempt, name, path);
    assert_int_equal(fs_write_atomic(path, "", 0, 0644, NULL), 0);
}

static void load_id(struct fixture *f, int attempt, const char *name, struct procid *id)
{
    char path[PATH_MAX];
    run_path(f, attempt, name, path);
    await_path(path, true);
    assert_int_equal(procid_load(path, id, NULL), 0);
}

static void await_gone(const struct procid *id)
{
    for (int64_t end = clock_mono_ns() + WAIT_MS * NS_PER_MS; procid_alive(id);) {
        assert_true(clock_mono_ns() < end);
        poll(NULL, 0, 2);
    }
}

/* The keeper has the rank's first line on disk. */
static void await_log(struct fixture *f, int attempt, int rank)
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

static void expect_end(struct fixture *f, int attempt, int code)
{
    Boost__AgentMessage *m = expect(f, BOOST__AGENT_MESSAGE__BODY_RANK_END);
    assert_int_equal(m->rank_end->record->attempt, attempt);
    assert_true(m->rank_end->record->has_exit_code && !m->rank_end->record->lost);
    assert_int_equal(m->rank_end->record->exit_code, code);
    boost__agent_message__free_unpacked(m, NULL);
    pass(f, BOOST__AGENT_MESSAGE__BODY_NODE_END);
}

/* Kills whatever a failed test has left in its run directories. */
static int teardown(void **state)
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

/* ---- tests ---- */

static void read_log(struct fixture *f, int attempt, int64_t offset, int wait_ms)
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

static void expect_log(struct fixture *f, const char *text, bool finished)
{
    Boost__AgentMessage *m = expect(f, BOOST__AGENT_MESSAGE__BODY_TASK);
    assert_null(m->task->failure);
    assert_int_equal(m->task->id, 5);
    assert_int_equal(m->task->data.len, strlen(text));
    assert_memory_equal(m->task->data.data, text, strlen(text));
    assert_int_equal(m->task->finished, finished);
    boost__agent_message__free_unpacked(m, NULL);
}

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

static void expect_refused(struct fixture *f, Boost__ExitClass__Value class_, Boost__Reason__Value reason,
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

static void verdict_of(Boost__Verdict *v, int attempt, Boost__Verdict__What what)
{
    boost__verdict__init(v);
    v->has_job = v->has_attempt = v->has_what = true;
    v->job = 17;
    v->attempt = attempt;
    v->what = what;
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

/* ---- GPUs ---- */

static void fake_gpus(struct fixture *f, const char *lines)
{
    char dir[PATH_MAX], path[PATH_MAX];
    path_in(f, "gpus", path);
    assert_int_equal(fs_write_atomic(path, lines, strlen(lines), 0644, NULL), 0);
    setenv("FAKE_NVML", path, 1);
    assert_int_equal(fs_self_dir(dir, sizeof dir, NULL), 0);
    assert_int_equal(fs_join(f->nvml, sizeof f->nvml, NULL, dir, "../fakes/nvml.so"), 0);
    f->cuda = true;
}

/* Of the start order that an attempt is run by. */
static Boost__AttemptStart *order_on_disk(struct fixture *f, int attempt)
{
    char path[PATH_MAX];
    struct buffer packed;
    run_path(f, attempt, "start.pb", path);
    await_path(path, true);
    buffer_init(&packed, LIMIT_FRAME);
    assert_int_equal(fs_read_file(path, &packed, NULL), 0);
    Boost__AttemptStart *s = boost__attempt_start__unpack(NULL, packed.len, packed.data);
    assert_non_null(s);
    buffer_free(&packed);
    return s;
}

static void test_gpus_are_given_and_remembered(void **state)
{
    struct fixture *f = *state;
    fake_gpus(f, "count 4\n1 ecc 1\n");
    start_agent(f);
    accept_agent(f, NULL);
    assert_int_equal(f->registered->devices->n_devices, 4);
    assert_string_equal(f->registered->devices->devices[1]->trouble, "1 uncorrected memory error since its last reset");
    order_start(f, "steps", 1, 2);
    Boost__AttemptStart *s = order_on_disk(f, 1);
    assert_int_equal(s->n_devices, 2);
    assert_true(s->devices[0]->index == 0 && s->devices[1]->index == 2);
    assert_string_equal(s->devices[1]->uuid, "GPU-fake-2");
    assert_string_equal(s->device_name, "NVIDIA H200");
    assert_true(s->peak_flops == 989.4e12);
    assert_int_equal(s->threads_per_rank, 1);
    boost__attempt_start__free_unpacked(s, NULL);
    await_log(f, 1, 1);
    kill_agent(f, SIGKILL);
    start_agent(f);
    Boost__Verdict keep = BOOST__VERDICT__INIT;
    keep.has_job = keep.has_attempt = true;
    keep.job = 17;
    keep.attempt = 1;
    accept_agent(f, &keep);
    Boost__DeviceReport *d = f->registered->devices;
    assert_true(d->devices[0]->has_job && d->devices[0]->job == 17 && d->devices[0]->rank == 0);
    assert_true(d->devices[2]->has_job && d->devices[2]->rank == 1 && d->devices[2]->attempt == 1);
    assert_false(d->devices[1]->has_job || d->devices[3]->has_job);
    assert_true(f->registered->attempts[0]->cuda);
    touch(f, 1, "go");
    /* Its end frees them, and the controller hears so. */
    for (bool freed = false; !freed;) {
        Boost__AgentMessage *m = expect(f, BOOST__AGENT_MESSAGE__BODY_DEVICES);
        freed = !m->devices->devices[0]->has_job && !m->devices->devices[2]->has_job;
        boost__agent_message__free_unpacked(m, NULL);
    }
    kill_agent(f, SIGTERM);
}

static void test_gpus_that_cannot_be_had_are_named(void **state)
{
    struct fixture *f = *state;
    char lines[96], pid[32];
    snprintf(lines, sizeof lines, "count 2\n0 ecc 2\n1 pid %ld\n", (long)getpid());
    snprintf(pid, sizeof pid, "process %ld uses it", (long)getpid());
    fake_gpus(f, lines);
    start_agent(f);
    accept_agent(f, NULL);
    assert_true(f->registered->devices->devices[1]->taken);
    order_start(f, "exit7", 1, 1);
    Boost__AgentMessage *m = expect(f, BOOST__AGENT_MESSAGE__BODY_ATTEMPT_REFUSED);
    assert_int_equal(m->attempt_refused->class_, BOOST__EXIT_CLASS__VALUE__INFRA);
    assert_int_equal(m->attempt_refused->reason, BOOST__REASON__VALUE__NoDevices);
    assert_non_null(strstr(m->attempt_refused->text, "0 of 1 GPUs can be had on node n1"));
    assert_non_null(strstr(m->attempt_refused->text, "gpu 0: 2 uncorrected memory errors"));
    assert_non_null(strstr(m->attempt_refused->text, pid));
    boost__agent_message__free_unpacked(m, NULL);
    /* The CPU is not concerned. */
    f->cuda = false;
    order_start(f, "exit7", 2, 1);
    expect_end(f, 2, 7);
    kill_agent(f, SIGTERM);
}

/* The end of a rank whose device failed waits until the driver was asked why. */
static void test_the_device_of_a_failed_rank_is_named(void **state)
{
    struct fixture *f = *state;
    char path[PATH_MAX];
    fake_gpus(f, "count 1\n");
    start_agent(f);
    accept_agent(f, NULL);
    order_start(f, "exit66", 1, 1);
    await_log(f, 1, 0);
    path_in(f, "gpus", path);
    assert_int_equal(fs_write_atomic(path, "count 1\n0 xid 79\n", 17, 0644, NULL), 0);
    touch(f, 1, "go");
    Boost__AgentMessage *m = expect(f, BOOST__AGENT_MESSAGE__BODY_RANK_END);
    assert_int_equal(m->rank_end->record->exit_code, 66);
    assert_string_equal(m->rank_end->record->device, "gpu 0 (NVIDIA H200): Xid 79 (fell off the bus)");
    boost__agent_message__free_unpacked(m, NULL);
    kill_agent(f, SIGTERM);
}

int main(int argc, char **argv)
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
    ssize_t n = readlink("/proc/self/exe", self_path, sizeof self_path - 1);
    if (n <= 0)
        return 1;
    cmocka_set_test_filter(getenv("BOOST_TEST_FILTER"));
    signal(SIGPIPE, SIG_IGN); /* an agent that hangs up is a failed check, not the end of this program */
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_from_start_to_forget),
        TEST(test_updates_and_repeated_start),
        TEST(test_next_attempt_waits_for_the_kill),
        TEST(test_refusals),
        TEST(test_agent_killed_while_ranks_run),
        TEST(test_agent_away_when_ranks_end),
        TEST(test_keeper_killed),
        TEST(test_reused_pid_is_left_alone),
        TEST(test_fence_kills),
        TEST(test_quarantine),
        TEST(test_metrics_and_shards_survive),
        TEST(test_acknowledged_is_not_sent_again),
        TEST(test_stop_gently),
        TEST(test_grace_runs_out),
        TEST(test_rendezvous_outlives_the_link),
        TEST(test_sets_are_repeated_to_a_new_controller),
        TEST(test_long_state_directory),
        TEST(test_hang_is_reported),
        TEST(test_other_store_is_left_alone),
        TEST(test_agent_killed_at_any_moment),
        TEST(test_one_agent_a_state_directory),
        TEST(test_gpus_are_given_and_remembered),
        TEST(test_gpus_that_cannot_be_had_are_named),
        TEST(test_the_device_of_a_failed_rank_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
