/* What the controller's core costs by itself on a large cluster: no socket, no disk.
 *
 *   core_bench NODES JOBS
 *
 * NODES nodes of 8 devices on switches of 32, labelled; JOBS jobs of some hundred shapes (1 to 64 nodes, 1 to 8 devices
 * of a node, with and without time limits, labels, lists and memory, of 50 users and 5 priorities) queued before any
 * node is there. The first pass goes over all of them and starts what fits; the later ones find a full cluster whose
 * head waits. Prints one JSON object. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "daemon/core.h"
#include "proto/base/clock.h"

enum { PASSES = 15, SUBMITS = 500, USERS = 50 };

struct bench_txn {
    struct bench_txn *next;
    store_done_fn done;
    void *arg;
};

static struct bench_txn *waiting, **last = &waiting;
static int64_t now_ns = 1000 * NS_PER_S;
static long starts, refused;

/* ---- a store that keeps nothing, durable when told ------------------------------------ */

static const char *bench_id(void *arg)
{
    (void)arg;
    return "0badcafe";
}
static int healthy(void *arg, struct error *err)
{
    (void)arg;
    (void)err;
    return ERR_OK;
}
static void *begin(void *arg)
{
    (void)arg;
    return calloc(1, sizeof(struct bench_txn));
}
static void commit(void *txn, store_done_fn done, void *arg)
{
    struct bench_txn *t = txn;
    t->done = done;
    t->arg = arg;
    *last = t;
    last = &t->next;
}
#define PUT(name, type)                                 \
    static void name(void *txn, const struct type *row) \
    {                                                   \
        (void)txn;                                      \
        (void)row;                                      \
    }
PUT(put_job, store_job)
PUT(put_attempt, store_attempt)
PUT(put_node, store_node)
PUT(put_checkpoint, store_checkpoint)
PUT(put_shard, store_shard)
PUT(add_event, store_event)
static void add_metrics(void *arg, int64_t job, int attempt, int rank, const struct store_metric *rows, int n,
                        store_done_fn done, void *done_arg)
{
    (void)arg, (void)job, (void)attempt, (void)rank, (void)rows, (void)n, (void)done, (void)done_arg;
}
#define LOAD(name, type)                                                                                     \
    static int name(void *arg, void (*each)(void *, const struct type *), void *each_arg, struct error *err) \
    {                                                                                                        \
        (void)arg, (void)each, (void)each_arg, (void)err;                                                    \
        return ERR_OK;                                                                                       \
    }
LOAD(load_jobs, store_job)
LOAD(load_attempts, store_attempt)
LOAD(load_nodes, store_node)
LOAD(load_checkpoints, store_checkpoint)
LOAD(load_shards, store_shard)
static int load_seqs(void *arg, void (*each)(void *, int64_t, int, int, int64_t), void *each_arg, struct error *err)
{
    (void)arg, (void)each, (void)each_arg, (void)err;
    return ERR_OK;
}
static int64_t max_id(void *arg)
{
    (void)arg;
    return 0;
}

static void settle(void)
{
    while (waiting) {
        struct bench_txn *t = waiting;
        waiting = t->next;
        last = waiting ? last : &waiting;
        t->done(t->arg, ERR_OK, NULL);
        free(t);
    }
}

/* ---- the rest of the world --------------------------------------------------------------- */

static int64_t mono(void *arg)
{
    (void)arg;
    return now_ns;
}
static uint64_t random_bits(void *arg)
{
    (void)arg;
    static uint64_t s = 88172645463325252ULL;
    s ^= s << 13;
    s ^= s >> 7;
    s ^= s << 17;
    return s;
}
static bool send_out(void *arg, const char *node, const Boost__ControllerMessage *m)
{
    (void)arg;
    (void)node;
    if (m->body_case == BOOST__CONTROLLER_MESSAGE__BODY_START && m->start->start->ranks[0] == 0)
        starts++; /* of a job */
    return m->body_case != BOOST__CONTROLLER_MESSAGE__BODY_TASK;
}
static void changed(void *arg, int64_t job)
{
    (void)arg;
    (void)job;
}
static void answered(void *arg, int rc, const struct error *err, int64_t job)
{
    (void)arg;
    (void)job;
    if (rc && !refused++)
        fprintf(stderr, "core_bench: %s\n", err->message);
}

static void add_node(struct core *c, int i)
{
    Boost__Register r = BOOST__REGISTER__INIT;
    Boost__KeyValue kv[2] = {BOOST__KEY_VALUE__INIT, BOOST__KEY_VALUE__INIT}, *list[2] = {&kv[0], &kv[1]};
    char name[32], net[32], rack[32];
    struct error err;
    snprintf(name, sizeof name, "node%05d", i);
    snprintf(net, sizeof net, "s%d", i / 32);
    snprintf(rack, sizeof rack, "r%d", i / 64);
    kv[0].key = (char *)(uintptr_t) "rack";
    kv[0].value = rack;
    kv[1].key = (char *)(uintptr_t) "gpu";
    kv[1].value = (char *)(uintptr_t)(i % 3 ? "h200" : "h100");
    r.node = name;
    r.boot_id = (char *)(uintptr_t) "boot";
    r.instance = (char *)(uintptr_t) "instance";
    r.has_cpu_slots = r.has_memory_mib = r.has_uid = 1;
    r.cpu_slots = 8;
    r.memory_mib = 1 << 20;
    r.data_address = (char *)(uintptr_t) "127.0.0.1";
    r.label = list;
    r.n_label = 2;
    r.switch_ = net;
    if (core_agent_register(c, &r, &err))
        fprintf(stderr, "core_bench: %s\n", err.message);
}

static Boost__JobSpec *spec_new(struct arena *mem)
{
    Boost__JobSpec *s = arena_alloc(mem, sizeof *s);
#define SUB(field, init)                           \
    s->field = arena_alloc(mem, sizeof *s->field); \
    init(s->field)
    boost__job_spec__init(s);
    SUB(model, boost__model__init);
    SUB(parallel, boost__parallel__init);
    SUB(data, boost__data__init);
    SUB(optimizer, boost__optimizer__init);
    SUB(run, boost__run__init);
    SUB(checkpoint, boost__checkpoint__init);
    SUB(resources, boost__resources__init);
    s->has_spec_version = s->spec_version = 1;
    s->name = arena_strdup(mem, "bench");
    s->model->has_factorization = s->model->has_hidden = s->model->has_layers = s->model->has_heads = 1;
    s->model->has_intermediate = s->model->has_vocab = 1;
    s->model->factorization = BOOST__FACTORIZATION__VALUE__FULL_RANK;
    s->model->hidden = 64;
    s->model->layers = 2;
    s->model->heads = 8;
    s->model->intermediate = 128;
    s->model->vocab = 256;
    s->parallel->has_micro_batch = s->parallel->has_global_batch = s->parallel->has_dp = s->parallel->has_tp = 1;
    s->parallel->micro_batch = 1;
    s->data->n_train = 1;
    s->data->train = arena_alloc(mem, sizeof *s->data->train);
    s->data->train[0] = arena_alloc(mem, sizeof **s->data->train);
    boost__token_file__init(s->data->train[0]);
    s->data->train[0]->path = arena_strdup(mem, "/data/train.txt");
    s->data->has_seq_len = 1;
    s->data->seq_len = 32;
    s->optimizer->has_lr = 1;
    s->optimizer->lr = 1e-3;
    s->run->has_steps = 1;
    s->run->steps = 100;
    s->checkpoint->dir = arena_strdup(mem, "/ckpt");
    s->has_priority = s->has_time_limit_s = 1;
    s->resources->has_nodes = s->resources->has_memory_mib = 1;
    return s;
}

static void submit(struct core *c, struct arena *mem, Boost__JobSpec *s, int k)
{
    static const int devices[] = {1, 2, 4, 8};
    char name[32], constraint[64] = "", list[64] = "";
    struct core_user user = {.uid = (uint32_t)(1000 + k % USERS), .gid = 1000, .name = name};
    snprintf(name, sizeof name, "user%d", k % USERS);
    s->parallel->tp = devices[k % 4];
    s->parallel->dp = s->resources->nodes = k % 11 ? 1 : 1 << (k % 7);
    s->parallel->global_batch = s->parallel->dp;
    s->priority = 10 * (k % 5);
    s->time_limit_s = k % 3 ? 600 * (1 + k % 17) : 0;
    s->resources->memory_mib = k % 13 ? 0 : 1000 * (1 + k % 5);
    if (k % 5 == 1)
        snprintf(constraint, sizeof constraint, "gpu=h200&!rack=r%d", k % 20);
    if (k % 19 == 1)
        snprintf(list, sizeof list, "node0[%d000-%d999]", k % 2, k % 2);
    s->resources->constraint = arena_strdup(mem, constraint);
    s->resources->nodelist = arena_strdup(mem, list);
    core_submit(c, s, &user, false, answered, NULL);
}

/* Of this process: others on the machine do not count. */
static int64_t cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return t.tv_sec * NS_PER_S + t.tv_nsec;
}

/* Milliseconds of the pass that is due. */
static double pass_ms(struct core *c)
{
    int64_t from = cpu_ns();
    core_run(c);
    return (double)(cpu_ns() - from) / NS_PER_MS;
}

static int ascending(const void *x, const void *y)
{
    double a = *(const double *)x, b = *(const double *)y;
    return (a > b) - (a < b);
}

static int number(const char *text)
{
    char *end;
    errno = 0;
    long v = strtol(text, &end, 10);
    return errno || *end || v < 1 || v > 1000000 ? 0 : (int)v;
}

int main(int argc, char **argv)
{
    int nodes = argc == 3 ? number(argv[1]) : 0, jobs = argc == 3 ? number(argv[2]) : 0;
    if (!nodes || !jobs) {
        fprintf(stderr, "usage: core_bench NODES JOBS\n");
        return 2;
    }
    const struct core_store store = {.id = bench_id,
                                     .health = healthy,
                                     .begin = begin,
                                     .put_job = put_job,
                                     .put_attempt = put_attempt,
                                     .put_node = put_node,
                                     .put_checkpoint = put_checkpoint,
                                     .put_shard = put_shard,
                                     .add_event = add_event,
                                     .commit = commit,
                                     .add_metrics = add_metrics,
                                     .load_jobs = load_jobs,
                                     .load_attempts = load_attempts,
                                     .load_nodes = load_nodes,
                                     .load_checkpoints = load_checkpoints,
                                     .load_shards = load_shards,
                                     .load_metric_seqs = load_seqs,
                                     .max_job_id = max_id,
                                     .max_event_id = max_id};
    const struct core_ops ops = {
        .mono_ns = mono, .wall_ns = mono, .random = random_bits, .send = send_out, .changed = changed};
    Boost__BoostdConfig config = BOOST__BOOSTD_CONFIG__INIT;
    struct arena mem;
    struct core *c;
    struct error err;
    arena_init(&mem, (size_t)1 << 30);
    if (core_create(&config, &store, &ops, &c, &err)) {
        fprintf(stderr, "core_bench: %s\n", err.message);
        return 1;
    }
    Boost__JobSpec *spec = spec_new(&mem);
    for (int k = 0; k < jobs; k++)
        submit(c, &mem, spec, k);
    settle();
    core_run(c);
    int64_t from = cpu_ns();
    for (int i = 0; i < nodes; i++)
        add_node(c, i);
    double register_us = (double)(cpu_ns() - from) / 1000 / nodes;
    double first = pass_ms(c), later[PASSES];
    settle();
    core_run(c);
    settle();
    for (int k = 0; k < PASSES; k++) {
        now_ns += NS_PER_S / 100;
        core_agent_disconnected(c, "node00000"); /* a pass is due */
        settle();
        add_node(c, 0);
        settle();
        later[k] = pass_ms(c);
        settle();
    }
    from = cpu_ns();
    for (int k = 0; k < SUBMITS; k++) {
        submit(c, &mem, spec, 7 + 35 * k); /* one that has no time limit and fits nowhere */
        core_run(c);
        settle();
        core_run(c);
    }
    double submit_us = (double)(cpu_ns() - from) / 1000 / SUBMITS;
    int queued = 0;
    from = cpu_ns();
    for (struct job *job = core_next_job(c, 0); job; job = core_next_job(c, job->id)) {
        struct arena row;
        if (job->state != BOOST__JOB_STATE__VALUE__QUEUED)
            continue;
        arena_init(&row, 1 << 20);
        queued += core_summary(c, job, &row) != NULL;
        arena_free(&row);
    }
    double summary_us = (double)(cpu_ns() - from) / 1000 / (queued ? queued : 1);
    qsort(later, PASSES, sizeof *later, ascending);
    from = cpu_ns();
    for (int k = 0; k < 1000; k++) {
        Boost__Heartbeat beat = BOOST__HEARTBEAT__INIT;
        Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
        char name[32];
        snprintf(name, sizeof name, "node%05d", k * 7 % nodes);
        m.body_case = BOOST__AGENT_MESSAGE__BODY_HEARTBEAT;
        m.heartbeat = &beat;
        core_agent_message(c, name, &m);
        core_run(c);
    }
    double beat_us = (double)(cpu_ns() - from) / 1000 / 1000;
    printf("{\"nodes\":%d,\"jobs\":%d,\"refused\":%ld,\"first_ms\":%.3f,\"started_jobs\":%ld,\"median_ms\":%.3f,"
           "\"max_ms\":%.3f,\"submit_us\":%.2f,\"summary_us\":%.2f,\"register_us\":%.2f,\"heartbeat_us\":%.2f}\n",
           nodes, jobs, refused, first, starts, later[PASSES / 2], later[PASSES - 1], submit_us, summary_us,
           register_us, beat_us);
    core_destroy(c);
    arena_free(&mem);
    return 0;
}
