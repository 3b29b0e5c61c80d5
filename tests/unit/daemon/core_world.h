/* A whole small world around the controller core, driven by hand: a store in memory
 * that commits when told to (and can lose what was not durable), agents that do what
 * they are told as real ones would, and a clock that only moves when asked. Each
 * test program includes it once. */
#ifndef BOOST_TESTS_CORE_WORLD_H
#define BOOST_TESTS_CORE_WORLD_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <poll.h>

#include "daemon/core.h"
#include "proto/base/clock.h"

#define HELPER    static __attribute__((unused))
#define STATE(s)  BOOST__JOB_STATE__VALUE__##s
#define REASON(r) BOOST__REASON__VALUE__##r
#define CKPT(s)   BOOST__CHECKPOINT_STATE__VALUE__##s

/* ---- the store ---------------------------------------------------------------------- */

enum { MEM_ROWS = 1 << 14 };

struct mem_txn {
    struct mem_txn *next;
    struct mem_store *store;
    struct store_job jobs[64];
    struct store_attempt attempts[64];
    struct store_node nodes[16];
    struct store_checkpoint checkpoints[128];
    struct store_shard shards[64];
    struct store_event events[64];
    int n_jobs, n_attempts, n_nodes, n_checkpoints, n_shards, n_events;
    bool is_metrics;
    int64_t metrics_job, metrics_seq;
    int metrics_attempt, metrics_rank, metrics_n;
    store_done_fn done;
    void *arg;
};

struct mem_store {
    struct arena mem;
    struct store_job jobs[256];
    struct store_attempt attempts[4096];
    struct store_node nodes[16];
    struct store_checkpoint checkpoints[4096];
    struct store_shard shards[8192];
    struct store_event events[MEM_ROWS];
    int n_jobs, n_attempts, n_nodes, n_checkpoints, n_shards, n_events;
    struct {
        int64_t job, seq;
        int attempt, rank;
    } metrics[4096];
    int n_metrics;
    struct mem_txn *pending, **tail;
    int sick; /* enum error_code: commits wait */
    bool stuck; /* commits wait, and nobody knows yet */
    int refuses; /* enum error_code: commits fail, and their rows are lost */
    int refused; /* so many did */
};

HELPER char *mem_text(struct mem_store *m, const char *s)
{
    char *copy = arena_strdup(&m->mem, s ? s : "");
    assert_non_null(copy);
    return copy;
}

HELPER void *mem_bytes(struct mem_store *m, const void *p, size_t len)
{
    void *copy = arena_alloc(&m->mem, len + 1);
    assert_non_null(copy);
    memcpy(copy, p, len);
    return copy;
}

HELPER const char *mem_id(void *arg)
{
    (void)arg;
    return "0badcafe";
}
HELPER int mem_health(void *arg, struct error *err)
{
    struct mem_store *m = arg;
    if (!m->sick)
        return ERR_OK;
    return error_set(err, (enum error_code)m->sick, "state.db cannot be written: no space left on device");
}
HELPER void *mem_begin(void *arg)
{
    struct mem_txn *t = calloc(1, sizeof *t);
    assert_non_null(t);
    t->store = arg;
    return t;
}
HELPER void mem_put_job(void *txn, const struct store_job *row)
{
    struct mem_txn *t = txn;
    assert_true(t->n_jobs < 64);
    struct store_job *r = &t->jobs[t->n_jobs++];
    *r = *row;
    r->name = mem_text(t->store, row->name);
    r->user = mem_text(t->store, row->user);
    r->reason_text = mem_text(t->store, row->reason_text);
    r->spec = mem_bytes(t->store, row->spec, row->spec_len);
    r->resolved = mem_bytes(t->store, row->resolved, row->resolved_len);
    r->next_spec = row->next_spec ? mem_bytes(t->store, row->next_spec, row->next_spec_len) : NULL;
    r->next_resolved = row->next_resolved ? mem_bytes(t->store, row->next_resolved, row->next_resolved_len) : NULL;
}
HELPER void mem_put_attempt(void *txn, const struct store_attempt *row)
{
    struct mem_txn *t = txn;
    assert_true(t->n_attempts < 64);
    struct store_attempt *r = &t->attempts[t->n_attempts++];
    *r = *row;
    r->placement = mem_text(t->store, row->placement);
    r->text = mem_text(t->store, row->text);
    r->spares = mem_text(t->store, row->spares);
}
HELPER void mem_put_node(void *txn, const struct store_node *row)
{
    struct mem_txn *t = txn;
    assert_true(t->n_nodes < 16);
    struct store_node *r = &t->nodes[t->n_nodes++];
    *r = *row;
    r->name = mem_text(t->store, row->name);
    r->boot_id = mem_text(t->store, row->boot_id);
    r->admin_reason = mem_text(t->store, row->admin_reason);
    r->admin_by = mem_text(t->store, row->admin_by);
    r->data_address = mem_text(t->store, row->data_address);
    r->gpu_name = mem_text(t->store, row->gpu_name);
}
HELPER void mem_put_checkpoint(void *txn, const struct store_checkpoint *row)
{
    struct mem_txn *t = txn;
    assert_true(t->n_checkpoints < 128);
    struct store_checkpoint *r = &t->checkpoints[t->n_checkpoints++];
    *r = *row;
    r->path = mem_text(t->store, row->path);
    r->note = mem_text(t->store, row->note);
}
HELPER void mem_put_shard(void *txn, const struct store_shard *row)
{
    struct mem_txn *t = txn;
    assert_true(t->n_shards < 64);
    struct store_shard *r = &t->shards[t->n_shards++];
    *r = *row;
    r->file = mem_text(t->store, row->file);
}
HELPER void mem_add_event(void *txn, const struct store_event *row)
{
    struct mem_txn *t = txn;
    assert_true(t->n_events < 64);
    struct store_event *r = &t->events[t->n_events++];
    *r = *row;
    r->node = mem_text(t->store, row->node);
    r->actor = mem_text(t->store, row->actor);
    r->kind = mem_text(t->store, row->kind);
    r->text = mem_text(t->store, row->text);
}
HELPER void mem_queue(struct mem_store *m, struct mem_txn *t)
{
    if (!m->pending)
        m->tail = &m->pending;
    *m->tail = t;
    m->tail = &t->next;
}
HELPER void mem_commit(void *txn, store_done_fn done, void *arg)
{
    struct mem_txn *t = txn;
    t->done = done;
    t->arg = arg;
    mem_queue(t->store, t);
}
HELPER void mem_add_metrics(void *arg, int64_t job, int attempt, int rank, const struct store_metric *rows, int n,
                            store_done_fn done, void *done_arg)
{
    struct mem_txn *t = mem_begin(arg);
    t->is_metrics = true;
    t->metrics_job = job;
    t->metrics_attempt = attempt;
    t->metrics_rank = rank;
    t->metrics_seq = rows[n - 1].seq;
    mem_commit(t, done, done_arg);
}

/* Replaces by key or appends. */
#define MEM_APPLY(rows, count, cap, row, same) \
    do {                                       \
        int at = 0;                            \
        while (at < (count) && !(same))        \
            at++;                              \
        assert_true(at < (cap));               \
        (rows)[at] = (row);                    \
        if (at == (count))                     \
            (count)++;                         \
    } while (0)

HELPER void mem_apply(struct mem_store *m, const struct mem_txn *t)
{
    for (int i = 0; i < t->n_jobs; i++)
        MEM_APPLY(m->jobs, m->n_jobs, 256, t->jobs[i], m->jobs[at].id == t->jobs[i].id);
    for (int i = 0; i < t->n_nodes; i++)
        MEM_APPLY(m->nodes, m->n_nodes, 16, t->nodes[i], strcmp(m->nodes[at].name, t->nodes[i].name) == 0);
    for (int i = 0; i < t->n_attempts; i++)
        MEM_APPLY(m->attempts, m->n_attempts, 4096, t->attempts[i],
                  m->attempts[at].job == t->attempts[i].job && m->attempts[at].attempt == t->attempts[i].attempt);
    for (int i = 0; i < t->n_checkpoints; i++)
        MEM_APPLY(m->checkpoints, m->n_checkpoints, 4096, t->checkpoints[i],
                  m->checkpoints[at].job == t->checkpoints[i].job &&
                      m->checkpoints[at].step == t->checkpoints[i].step &&
                      m->checkpoints[at].attempt == t->checkpoints[i].attempt);
    for (int i = 0; i < t->n_shards; i++)
        MEM_APPLY(m->shards, m->n_shards, 8192, t->shards[i],
                  m->shards[at].job == t->shards[i].job && m->shards[at].step == t->shards[i].step &&
                      m->shards[at].attempt == t->shards[i].attempt && m->shards[at].rank == t->shards[i].rank);
    for (int i = 0; i < t->n_events; i++) {
        assert_true(m->n_events < MEM_ROWS);
        if (m->n_events)
            assert_true(t->events[i].id > m->events[m->n_events - 1].id);
        m->events[m->n_events++] = t->events[i];
    }
    if (t->is_metrics) {
        int at = 0;
        while (at < m->n_metrics &&
               !(m->metrics[at].job == t->metrics_job && m->metrics[at].attempt == t->metrics_attempt &&
                 m->metrics[at].rank == t->metrics_rank))
            at++;
        m->metrics[at].job = t->metrics_job;
        m->metrics[at].attempt = t->metrics_attempt;
        m->metrics[at].rank = t->metrics_rank;
        m->metrics[at].seq = t->metrics_seq;
        if (at == m->n_metrics)
            m->n_metrics++;
    }
}

/* Commits what waits and calls back; false when nothing did. */
HELPER bool mem_settle(struct mem_store *m)
{
    if (m->sick || m->stuck || !m->pending)
        return false;
    struct mem_txn *t = m->pending;
    m->pending = NULL;
    while (t) {
        struct mem_txn *next = t->next;
        if (m->refuses) {
            struct error err;
            error_set(&err, (enum error_code)m->refuses, "state.db is damaged");
            m->refused++;
            t->done(t->arg, m->refuses, &err);
        } else {
            mem_apply(m, t);
            t->done(t->arg, ERR_OK, NULL);
        }
        free(t);
        t = next;
    }
    return true;
}

/* The controller dies: what was not durable is lost. */
HELPER void mem_crash(struct mem_store *m)
{
    while (m->pending) {
        struct mem_txn *t = m->pending;
        m->pending = t->next;
        free(t);
    }
}

HELPER int mem_load_jobs(void *arg, void (*each)(void *, const struct store_job *), void *x, struct error *err)
{
    struct mem_store *m = arg;
    (void)err;
    for (int i = 0; i < m->n_jobs; i++)
        each(x, &m->jobs[i]);
    return ERR_OK;
}
HELPER int mem_load_attempts(void *arg, void (*each)(void *, const struct store_attempt *), void *x, struct error *err)
{
    struct mem_store *m = arg;
    (void)err;
    for (int k = 0; k < m->n_attempts; k++) /* per job they arrive in order already */
        each(x, &m->attempts[k]);
    return ERR_OK;
}
HELPER int mem_load_nodes(void *arg, void (*each)(void *, const struct store_node *), void *x, struct error *err)
{
    struct mem_store *m = arg;
    (void)err;
    for (int i = 0; i < m->n_nodes; i++)
        each(x, &m->nodes[i]);
    return ERR_OK;
}
HELPER int mem_load_checkpoints(void *arg, void (*each)(void *, const struct store_checkpoint *), void *x,
                                struct error *err)
{
    struct mem_store *m = arg;
    (void)err;
    for (int i = 0; i < m->n_checkpoints; i++)
        each(x, &m->checkpoints[i]);
    return ERR_OK;
}
HELPER int mem_load_shards(void *arg, void (*each)(void *, const struct store_shard *), void *x, struct error *err)
{
    struct mem_store *m = arg;
    (void)err;
    for (int i = 0; i < m->n_shards; i++)
        each(x, &m->shards[i]);
    return ERR_OK;
}
HELPER int mem_load_metric_seqs(void *arg, void (*each)(void *, int64_t, int, int, int64_t), void *x, struct error *err)
{
    struct mem_store *m = arg;
    (void)err;
    for (int i = 0; i < m->n_metrics; i++)
        each(x, m->metrics[i].job, m->metrics[i].attempt, m->metrics[i].rank, m->metrics[i].seq);
    return ERR_OK;
}
HELPER int64_t mem_max_job_id(void *arg)
{
    struct mem_store *m = arg;
    return m->n_jobs ? m->jobs[m->n_jobs - 1].id : 0;
}
HELPER int64_t mem_max_event_id(void *arg)
{
    struct mem_store *m = arg;
    return m->n_events ? m->events[m->n_events - 1].id : 0;
}

/* ---- agents ------------------------------------------------------------------------------ */

struct end {
    int exit_code, signal;
    bool killed, done, oom, lost;
    const char *error, *log, *device;
    int64_t seq; /* 0: the next one */
};

struct fake_attempt {
    int64_t job;
    int attempt, world;
    int ranks[8], n_ranks;
    bool cuda;
    int gpus[8]; /* by index into ranks */
    int64_t from_step, step, steps;
    char resume[256], ckpt_dir[256];
    bool alive, forgotten, node_end_acked;
    bool ended[8]; /* by index into ranks */
    bool end_acked[8];
    struct end ends[8];
    int64_t seq; /* keeper's */
    int64_t metrics_seq[8], shards_seq[8];
    int terms, kills, starts, checkpoints_asked;
};

struct fake_agent {
    char name[32], boot[32], instance[32];
    int slots;
    int cores; /* 0: not told */
    int gpus;
    bool gpus_unknown; /* its driver has not answered yet */
    const char *gpu_trouble[8];
    bool gpu_taken[8]; /* by a process of somebody else */
    uint32_t uid;
    bool connected, beating;
    bool obeys_kill, obeys_term, answers; /* true: as a sound one */
    struct fake_attempt attempts[256];
    int n_attempts;
    int preflight_code; /* 0: fine */
    int verify_code;    /* for the paths that contain verify_bad; */
    char verify_bad[64];
    int manifest_code;
    int stacks_code; /* of CollectStacks */
    int shared_code; /* of ProveShared */
    int manifests, deletes, verifies, preflights, proofs;
    uint64_t last_task; /* id of the newest */
    char deleted[512];
    int64_t next_beat;
};

struct queued { /* a message on its way to the core */
    struct queued *next;
    char node[32];
    uint8_t *bytes;
    size_t len;
};

struct world {
    struct mem_store *store;
    struct store *real; /* instead of it, when not NULL */
    const char *store_id;
    struct core *core;
    struct core_store api;
    struct core_ops ops;
    Boost__BoostdConfig config;
    int64_t now, wall_offset;
    uint64_t seed;
    struct fake_agent agents[4];
    int n_agents;
    struct queued *queue, **tail;
    int changed;
    /* last answers */
    int reply_rc;
    int64_t reply_job;
    char reply_text[1024], reply_hint[512];
    int replies;
    char log[4096];
    int64_t kv_answers;
    char kv_text[256];
    bool kv_ok;
};

HELPER struct fake_agent *agent_of(struct world *w, const char *name)
{
    for (int i = 0; i < w->n_agents; i++)
        if (strcmp(w->agents[i].name, name) == 0)
            return &w->agents[i];
    return NULL;
}

HELPER struct fake_attempt *fake_find(struct fake_agent *a, int64_t job, int attempt)
{
    for (int i = 0; i < a->n_attempts; i++)
        if (a->attempts[i].job == job && a->attempts[i].attempt == attempt && !a->attempts[i].forgotten)
            return &a->attempts[i];
    return NULL;
}

HELPER void say(struct world *w, const char *node, const Boost__AgentMessage *m)
{
    struct queued *q = calloc(1, sizeof *q);
    assert_non_null(q);
    snprintf(q->node, sizeof q->node, "%s", node);
    q->len = boost__agent_message__get_packed_size(m);
    q->bytes = malloc(q->len + 1);
    boost__agent_message__pack(m, q->bytes);
    if (!w->queue)
        w->tail = &w->queue;
    *w->tail = q;
    w->tail = &q->next;
}

HELPER void say_update(struct world *w, struct fake_agent *a, struct fake_attempt *x, int i, int phase, int64_t step)
{
    Boost__RankUpdate u = BOOST__RANK_UPDATE__INIT;
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    u.has_job = u.has_attempt = u.has_rank = u.has_phase = u.has_step = u.has_progress = 1;
    u.job = x->job;
    u.attempt = x->attempt;
    u.rank = x->ranks[i];
    u.phase = (Boost__RankUpdate__Phase)phase;
    u.step = step;
    u.progress = (uint64_t)step * 4;
    m.body_case = BOOST__AGENT_MESSAGE__BODY_RANK_UPDATE;
    m.rank_update = &u;
    if (step > x->step)
        x->step = step;
    say(w, a->name, &m);
}

/* All ranks of the attempt on this node have done `step` steps. */
HELPER void say_step(struct world *w, struct fake_agent *a, struct fake_attempt *x, int64_t step)
{
    for (int i = 0; i < x->n_ranks; i++)
        if (!x->ended[i])
            say_update(w, a, x, i, BOOST__RANK_UPDATE__PHASE__TRAINING, step);
}

HELPER void say_end_of(struct world *w, struct fake_agent *a, struct fake_attempt *x, int i, struct end e)
{
    Boost__ExitRecord r = BOOST__EXIT_RECORD__INIT;
    Boost__RankEnd body = BOOST__RANK_END__INIT;
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    r.has_job = r.has_attempt = r.has_rank = r.has_seq = r.has_last_step = 1;
    r.job = x->job;
    r.attempt = x->attempt;
    r.rank = x->ranks[i];
    e.seq = e.seq ? e.seq : ++x->seq;
    x->ends[i] = e;
    r.seq = e.seq;
    r.has_exit_code = !e.signal && !e.lost;
    r.exit_code = e.exit_code;
    r.has_signal = e.signal != 0;
    r.signal = e.signal;
    r.has_killed_by_us = r.killed_by_us = e.killed;
    r.has_done = r.done = e.done;
    r.has_oom = r.oom = e.oom;
    r.has_lost = r.lost = e.lost;
    r.error = (char *)(uintptr_t)e.error;
    r.device = (char *)(uintptr_t)e.device;
    r.last_step = x->step;
    if (e.log) {
        r.has_log_tail = 1;
        r.log_tail.data = (uint8_t *)(uintptr_t)e.log;
        r.log_tail.len = strlen(e.log);
    }
    body.record = &r;
    m.body_case = BOOST__AGENT_MESSAGE__BODY_RANK_END;
    m.rank_end = &body;
    x->ended[i] = true;
    say(w, a->name, &m);
}

HELPER void say_node_end(struct world *w, struct fake_agent *a, struct fake_attempt *x)
{
    Boost__NodeEnd body = BOOST__NODE_END__INIT;
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    body.has_job = body.has_attempt = 1;
    body.job = x->job;
    body.attempt = x->attempt;
    m.body_case = BOOST__AGENT_MESSAGE__BODY_NODE_END;
    m.node_end = &body;
    x->alive = false;
    say(w, a->name, &m);
}

HELPER void say_shard(struct world *w, struct fake_agent *a, struct fake_attempt *x, int i, int64_t step,
                      const char *error)
{
    Boost__ShardRecord r = BOOST__SHARD_RECORD__INIT;
    Boost__ShardRecord *list = &r;
    Boost__ShardBatch body = BOOST__SHARD_BATCH__INIT;
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    char dir[512], file[64];
    snprintf(dir, sizeof dir, "%s/step-%lld.a%d", x->ckpt_dir, (long long)step, x->attempt);
    snprintf(file, sizeof file, "shard-%d.safetensors", x->ranks[i]);
    r.has_seq = r.has_step = r.has_rank = r.has_bytes = r.has_crc32c = r.has_write_ms = 1;
    r.seq = ++x->shards_seq[i];
    r.step = step;
    r.rank = x->ranks[i];
    r.file = file;
    r.bytes = 1000 + x->ranks[i];
    r.crc32c = (uint32_t)step;
    r.write_ms = 20;
    r.dir = dir;
    if (error) {
        r.has_failed = r.failed = 1;
        r.error = (char *)(uintptr_t)error;
    }
    body.has_job = body.has_attempt = body.has_rank = 1;
    body.job = x->job;
    body.attempt = x->attempt;
    body.rank = x->ranks[i];
    body.n_records = 1;
    body.records = &list;
    m.body_case = BOOST__AGENT_MESSAGE__BODY_SHARDS;
    m.shards = &body;
    say(w, a->name, &m);
}

HELPER void say_checkpoint(struct world *w, struct fake_agent *a, struct fake_attempt *x, int64_t step)
{
    for (int i = 0; i < x->n_ranks; i++)
        say_shard(w, a, x, i, step, NULL);
}

HELPER void say_metrics(struct world *w, struct fake_agent *a, struct fake_attempt *x, int i, int64_t step, double loss)
{
    Boost__Metric v = BOOST__METRIC__INIT;
    Boost__Metric *values = &v;
    Boost__MetricRecord r = BOOST__METRIC_RECORD__INIT;
    Boost__MetricRecord *list = &r;
    Boost__MetricBatch body = BOOST__METRIC_BATCH__INIT;
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    v.name = (char *)"loss";
    v.has_value = 1;
    v.value = loss;
    r.has_seq = r.has_step = 1;
    r.seq = ++x->metrics_seq[i];
    r.step = step;
    r.n_values = 1;
    r.values = &values;
    body.has_job = body.has_attempt = body.has_rank = 1;
    body.job = x->job;
    body.attempt = x->attempt;
    body.rank = x->ranks[i];
    body.n_records = 1;
    body.records = &list;
    m.body_case = BOOST__AGENT_MESSAGE__BODY_METRICS;
    m.metrics = &body;
    say(w, a->name, &m);
}

/* Every rank finishes its last step, checkpoints and ends clean. */
HELPER void say_finished(struct world *w, struct fake_agent *a, struct fake_attempt *x)
{
    say_step(w, a, x, x->steps);
    say_checkpoint(w, a, x, x->steps);
    for (int i = 0; i < x->n_ranks; i++)
        say_end_of(w, a, x, i, (struct end){.done = true});
    say_node_end(w, a, x);
}

HELPER void kill_all(struct world *w, struct fake_agent *a, struct fake_attempt *x)
{
    for (int i = 0; i < x->n_ranks; i++)
        if (!x->ended[i])
            say_end_of(w, a, x, i, (struct end){.signal = 9, .killed = true});
    say_node_end(w, a, x);
}

enum { GPU_MIB = 100000 };

/* Who has the GPU; NULL: nobody. *rank becomes its rank. */
HELPER const struct fake_attempt *gpu_user(const struct fake_agent *a, int gpu, int *rank)
{
    for (int i = 0; i < a->n_attempts; i++) {
        const struct fake_attempt *x = &a->attempts[i];
        for (int k = 0; x->alive && x->cuda && k < x->n_ranks; k++)
            if (x->gpus[k] == gpu) {
                *rank = x->ranks[k];
                return x;
            }
    }
    return NULL;
}

/* What a real agent tells of its GPUs, in memory of the next call's. */
HELPER Boost__DeviceReport *gpu_report(const struct fake_agent *a)
{
    static Boost__DeviceReport report;
    static Boost__DeviceInfo info[8], *list[8];
    boost__device_report__init(&report);
    report.devices = list;
    report.driver = (char *)(uintptr_t) "580.1";
    for (int g = 0; g < a->gpus; g++) {
        int rank;
        const struct fake_attempt *x = gpu_user(a, g, &rank);
        boost__device_info__init(&info[g]);
        info[g].has_index = info[g].has_memory_mib = 1;
        info[g].index = g;
        info[g].memory_mib = GPU_MIB;
        info[g].uuid = (char *)(uintptr_t) "GPU-x";
        info[g].name = (char *)(uintptr_t) "NVIDIA H200";
        info[g].trouble = (char *)(uintptr_t)a->gpu_trouble[g];
        info[g].has_taken = info[g].taken = a->gpu_taken[g];
        info[g].has_job = info[g].has_attempt = info[g].has_rank = x != NULL;
        info[g].job = x ? x->job : 0;
        info[g].attempt = x ? x->attempt : 0;
        info[g].rank = x ? rank : 0;
        list[report.n_devices++] = &info[g];
    }
    return &report;
}

HELPER void say_devices(struct world *w, struct fake_agent *a)
{
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    m.body_case = BOOST__AGENT_MESSAGE__BODY_DEVICES;
    m.devices = gpu_report(a);
    say(w, a->name, &m);
}

HELPER void on_start(struct world *w, struct fake_agent *a, const Boost__AttemptStart *s)
{
    struct fake_attempt *x = fake_find(a, s->job, s->attempt);
    /* Elsewhere an older attempt may only run on when its node was given up and it is fenced. */
    for (int i = 0; i < w->n_agents; i++) {
        const struct fake_agent *b = &w->agents[i];
        for (int k = 0; k < b->n_attempts; k++) {
            const struct fake_attempt *y = &b->attempts[k];
            if (y->job != s->job || y->attempt == s->attempt || !y->alive || y->forgotten)
                continue;
            assert_true(y->attempt < s->attempt);
            assert_true(job_attempt(core_job(w->core, y->job), y->attempt)->fenced);
        }
    }
    if (x) {
        x->starts++;
        return;
    }
    /* D7: a node that runs an attempt of a job must never be given its next one. */
    for (int i = 0; i < a->n_attempts; i++)
        if (a->attempts[i].job == s->job && a->attempts[i].alive && !a->attempts[i].forgotten)
            fail_msg("attempt %d of job %lld sent to %s, which still runs attempt %d", s->attempt, (long long)s->job,
                     a->name, a->attempts[i].attempt);
    int busy = 0;
    bool cuda = s->spec->resources && s->spec->resources->device == BOOST__DEVICE__VALUE__CUDA;
    for (int i = 0; i < a->n_attempts; i++)
        busy += a->attempts[i].alive && a->attempts[i].cuda == cuda ? a->attempts[i].n_ranks : 0;
    assert_true(busy + (int)s->n_ranks <= (cuda ? a->gpus : a->slots));
    assert_true(a->n_attempts < 256);
    x = &a->attempts[a->n_attempts++];
    memset(x, 0, sizeof *x);
    x->job = s->job;
    x->attempt = s->attempt;
    x->world = s->world;
    x->alive = true;
    x->starts = 1;
    x->steps = s->spec->run->steps;
    assert_true(s->n_ranks <= 8);
    for (size_t i = 0; i < s->n_ranks; i++)
        x->ranks[x->n_ranks++] = s->ranks[i];
    x->cuda = cuda;
    x->alive = false; /* none of its own yet */
    for (int i = 0, g = 0, rank; cuda && i < x->n_ranks; g++) {
        assert_true(g < a->gpus); /* else it was sent more than there is */
        if (!gpu_user(a, g, &rank) && !a->gpu_trouble[g] && !a->gpu_taken[g])
            x->gpus[i++] = g;
    }
    x->alive = true;
    if (cuda)
        say_devices(w, a);
    snprintf(x->ckpt_dir, sizeof x->ckpt_dir, "%s", s->checkpoint_dir);
    if (s->resume) {
        x->from_step = s->resume->step;
        snprintf(x->resume, sizeof x->resume, "%s", s->resume->path);
    }
    x->step = x->from_step;
}

HELPER void on_stop(struct world *w, struct fake_agent *a, const Boost__StopAttempt *s)
{
    struct fake_attempt *x = fake_find(a, s->job, s->attempt);
    if (!x)
        return;
    if (s->how == BOOST__STOP_ATTEMPT__HOW__KILL) {
        x->kills++;
        if (a->obeys_kill && x->alive)
            kill_all(w, a, x);
        return;
    }
    x->terms++;
    if (!a->obeys_term || !x->alive)
        return;
    say_step(w, a, x, x->step + 1);
    say_checkpoint(w, a, x, x->step);
    for (int i = 0; i < x->n_ranks; i++)
        if (!x->ended[i])
            say_end_of(w, a, x, i, (struct end){.done = true});
    say_node_end(w, a, x);
}

HELPER void on_task(struct world *w, struct fake_agent *a, const Boost__Task *t)
{
    Boost__TaskReply r = BOOST__TASK_REPLY__INIT;
    Boost__Failure f = BOOST__FAILURE__INIT;
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    Boost__RankStacks stacks[9], *stack_list[9];
    int code = 0;
    r.has_id = 1;
    r.id = a->last_task = t->id;
    switch (t->body_case) {
    case BOOST__TASK__BODY_PREFLIGHT:
        a->preflights++;
        code = a->preflight_code;
        break;
    case BOOST__TASK__BODY_VERIFY:
        a->verifies++;
        assert_true(t->verify->n_shards == 2 || t->verify->n_shards == 0); /* 0: what its manifest lists */
        if (a->verify_bad[0] && strstr(t->verify->dir, a->verify_bad))
            code = a->verify_code;
        break;
    case BOOST__TASK__BODY_WRITE_MANIFEST:
        a->manifests++;
        code = a->manifest_code;
        break;
    case BOOST__TASK__BODY_DELETE_CHECKPOINT:
        a->deletes++;
        snprintf(a->deleted, sizeof a->deleted, "%s", t->delete_checkpoint->dir);
        break;
    case BOOST__TASK__BODY_READ_LOG:
        r.has_data = r.has_next_offset = r.has_finished = 1;
        r.data.data = (uint8_t *)(uintptr_t) "hello\n";
        r.data.len = 6;
        r.next_offset = t->read_log->offset + 6;
        break;
    case BOOST__TASK__BODY_COLLECT_STACKS:
        code = a->stacks_code;
        for (size_t i = 0; i < t->collect_stacks->n_ranks && i < 8; i++) {
            boost__rank_stacks__init(&stacks[i]);
            stacks[i].has_rank = stacks[i].has_answered = stacks[i].answered = 1;
            stacks[i].rank = t->collect_stacks->ranks[i];
            stack_list[r.n_stacks++] = &stacks[i];
        }
        boost__rank_stacks__init(&stacks[8]); /* that nobody asked for */
        stacks[8].has_rank = 1;
        stacks[8].rank = 77;
        stack_list[r.n_stacks++] = &stacks[8];
        r.stacks = stack_list;
        break;
    case BOOST__TASK__BODY_PROVE_SHARED:
        a->proofs++;
        code = a->shared_code;
        break;
    default:
        fail_msg("unknown task");
    }
    if (!a->answers)
        return;
    if (code) {
        f.has_code = 1;
        f.code = code;
        f.message = (char *)(uintptr_t) "data.bin is not there";
        f.hint = (char *)(uintptr_t) "check the path";
        r.failure = &f;
    }
    m.body_case = BOOST__AGENT_MESSAGE__BODY_TASK;
    m.task = &r;
    say(w, a->name, &m);
}

HELPER void on_ack(struct fake_agent *a, const Boost__Ack *k)
{
    struct fake_attempt *x = fake_find(a, k->job, k->attempt);
    for (int i = 0; x && i < x->n_ranks; i++)
        if (k->rank_end && x->ranks[i] == k->rank)
            x->end_acked[i] = true;
    if (x && k->node_end)
        x->node_end_acked = true;
}

HELPER void on_verdicts(struct world *w, struct fake_agent *a, const Boost__Registered *r)
{
    for (size_t i = 0; i < r->n_verdicts; i++) {
        struct fake_attempt *x = fake_find(a, r->verdicts[i]->job, r->verdicts[i]->attempt);
        assert_non_null(x);
        if (r->verdicts[i]->what == BOOST__VERDICT__WHAT__FENCE) {
            x->kills++;
            if (a->obeys_kill && x->alive)
                kill_all(w, a, x);
        } else if (r->verdicts[i]->what == BOOST__VERDICT__WHAT__FORGET) {
            assert_false(x->alive);
            x->forgotten = true;
        }
    }
}

HELPER bool world_send(void *arg, const char *node, const Boost__ControllerMessage *m)
{
    struct world *w = arg;
    struct fake_agent *a = agent_of(w, node);
    assert_non_null(a);
    if (!a->connected)
        return false;
    /* A real one goes over a socket: everything in it has to pack. */
    size_t len = boost__controller_message__get_packed_size(m);
    uint8_t *bytes = malloc(len + 1);
    boost__controller_message__pack(m, bytes);
    Boost__ControllerMessage *copy = boost__controller_message__unpack(NULL, len, bytes);
    assert_non_null(copy);
    switch (copy->body_case) {
    case BOOST__CONTROLLER_MESSAGE__BODY_START:
        on_start(w, a, copy->start->start);
        break;
    case BOOST__CONTROLLER_MESSAGE__BODY_STOP:
        on_stop(w, a, copy->stop);
        break;
    case BOOST__CONTROLLER_MESSAGE__BODY_TASK:
        on_task(w, a, copy->task);
        break;
    case BOOST__CONTROLLER_MESSAGE__BODY_REGISTERED:
        on_verdicts(w, a, copy->registered);
        break;
    case BOOST__CONTROLLER_MESSAGE__BODY_ACK:
        on_ack(a, copy->ack);
        break;
    case BOOST__CONTROLLER_MESSAGE__BODY_FORGET: {
        struct fake_attempt *x = fake_find(a, copy->forget->job, copy->forget->attempt);
        if (x) {
            assert_false(x->alive);
            x->forgotten = true;
        }
        break;
    }
    case BOOST__CONTROLLER_MESSAGE__BODY_CHECKPOINT: {
        struct fake_attempt *x = fake_find(a, copy->checkpoint->job, copy->checkpoint->attempt);
        if (x)
            x->checkpoints_asked++;
        break;
    }
    case BOOST__CONTROLLER_MESSAGE__BODY_KV:
        w->kv_answers++;
        w->kv_ok = copy->kv->result->ok;
        snprintf(w->kv_text, sizeof w->kv_text, "%.*s",
                 (int)(copy->kv->result->ok ? copy->kv->result->value.len : strlen(copy->kv->result->error)),
                 copy->kv->result->ok ? (char *)copy->kv->result->value.data : copy->kv->result->error);
        break;
    default:
        break;
    }
    boost__controller_message__free_unpacked(copy, NULL);
    free(bytes);
    return true;
}

/* ---- the world ------------------------------------------------------------------------------ */

HELPER int64_t world_mono(void *arg)
{
    return ((struct world *)arg)->now;
}
HELPER int64_t world_wall(void *arg)
{
    return ((struct world *)arg)->now + ((struct world *)arg)->wall_offset;
}
HELPER uint64_t world_random(void *arg)
{
    struct world *w = arg;
    w->seed ^= w->seed << 13;
    w->seed ^= w->seed >> 7;
    w->seed ^= w->seed << 17;
    return w->seed;
}
HELPER void world_changed(void *arg, int64_t job)
{
    (void)job;
    ((struct world *)arg)->changed++;
}
HELPER void world_log(void *arg, enum core_log_level level, const char *text)
{
    struct world *w = arg;
    if (getenv("CORE_TRACE"))
        fprintf(stderr, "%9.3f %d %s\n", (double)w->now / 1e9, (int)level, text);
}

HELPER void boot(struct world *w)
{
    struct error err;
    assert_null(w->core);
    if (core_create(&w->config, &w->api, &w->ops, &w->core, &err))
        fail_msg("core_create: %s", err.message);
}

HELPER struct world *world_new(void)
{
    struct world *w = calloc(1, sizeof *w);
    assert_non_null(w);
    w->store = calloc(1, sizeof *w->store);
    assert_non_null(w->store);
    arena_init(&w->store->mem, (size_t)1 << 30);
    w->store_id = mem_id(NULL);
    w->now = 1000 * NS_PER_S;
    w->wall_offset = INT64_C(1700000000) * NS_PER_S;
    w->seed = 88172645463325252ULL;
    boost__boostd_config__init(&w->config);
    w->api = (struct core_store){.arg = w->store,
                                 .id = mem_id,
                                 .health = mem_health,
                                 .begin = mem_begin,
                                 .put_job = mem_put_job,
                                 .put_attempt = mem_put_attempt,
                                 .put_node = mem_put_node,
                                 .put_checkpoint = mem_put_checkpoint,
                                 .put_shard = mem_put_shard,
                                 .add_event = mem_add_event,
                                 .commit = mem_commit,
                                 .add_metrics = mem_add_metrics,
                                 .load_jobs = mem_load_jobs,
                                 .load_attempts = mem_load_attempts,
                                 .load_nodes = mem_load_nodes,
                                 .load_checkpoints = mem_load_checkpoints,
                                 .load_shards = mem_load_shards,
                                 .load_metric_seqs = mem_load_metric_seqs,
                                 .max_job_id = mem_max_job_id,
                                 .max_event_id = mem_max_event_id};
    w->ops = (struct core_ops){.arg = w,
                               .mono_ns = world_mono,
                               .wall_ns = world_wall,
                               .random = world_random,
                               .send = world_send,
                               .changed = world_changed,
                               .log = world_log,
                               .uid = 500};
    boot(w);
    return w;
}

HELPER void queue_drop(struct world *w)
{
    while (w->queue) {
        struct queued *q = w->queue;
        w->queue = q->next;
        free(q->bytes);
        free(q);
    }
}

HELPER void world_free(struct world *w)
{
    mem_crash(w->store);
    core_destroy(w->core);
    queue_drop(w);
    arena_free(&w->store->mem);
    free(w->store);
    free(w);
}

HELPER void deliver_one(struct world *w)
{
    struct queued *q = w->queue;
    w->queue = q->next;
    struct fake_agent *a = agent_of(w, q->node);
    if (a->connected && w->core) {
        Boost__AgentMessage *m = boost__agent_message__unpack(NULL, q->len, q->bytes);
        assert_non_null(m);
        core_agent_message(w->core, q->node, m);
        boost__agent_message__free_unpacked(m, NULL);
    }
    free(q->bytes);
    free(q);
}

HELPER bool settle(struct world *w)
{
    if (!w->real)
        return mem_settle(w->store);
    struct pollfd p = {.fd = store_fd(w->real), .events = POLLIN};
    if (poll(&p, 1, 50) <= 0)
        return false;
    store_dispatch(w->real);
    return true;
}

/* Until nothing moves without time passing. */
HELPER void pump(struct world *w)
{
    for (int i = 0; i < 10000; i++) {
        bool moved = false;
        core_run(w->core);
        if (w->queue) {
            deliver_one(w);
            moved = true;
        }
        moved = settle(w) || moved;
        if (!moved && core_run(w->core) > w->now)
            return;
    }
    fail_msg("the core never comes to rest");
}

HELPER void beat(struct world *w)
{
    for (int i = 0; i < w->n_agents; i++) {
        struct fake_agent *a = &w->agents[i];
        if (!a->connected || !a->beating || w->now < a->next_beat)
            continue;
        Boost__Heartbeat h = BOOST__HEARTBEAT__INIT;
        Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
        m.body_case = BOOST__AGENT_MESSAGE__BODY_HEARTBEAT;
        m.heartbeat = &h;
        say(w, a->name, &m);
        a->next_beat = w->now + NS_PER_S;
    }
}

HELPER void advance(struct world *w, int64_t ms)
{
    int64_t until = w->now + ms * NS_PER_MS;
    pump(w);
    while (w->now < until) {
        int64_t due = core_run(w->core);
        int64_t next = w->now + 500 * NS_PER_MS;
        if (due < next)
            next = due;
        if (next > until)
            next = until;
        if (next <= w->now)
            next = w->now + NS_PER_MS;
        w->now = next;
        beat(w);
        pump(w);
    }
}

HELPER struct fake_agent *agent_add(struct world *w, const char *name, int slots)
{
    struct fake_agent *a = &w->agents[w->n_agents++];
    memset(a, 0, sizeof *a);
    snprintf(a->name, sizeof a->name, "%s", name);
    snprintf(a->boot, sizeof a->boot, "boot-%s-1", name);
    snprintf(a->instance, sizeof a->instance, "instance-%s-1", name);
    a->slots = slots;
    a->beating = a->obeys_kill = a->obeys_term = a->answers = true;
    a->next_beat = w->now;
    return a;
}

/* Connects and registers, listing what it has. */
HELPER int try_register(struct world *w, struct fake_agent *a, struct error *err)
{
    Boost__Register r = BOOST__REGISTER__INIT;
    Boost__LiveAttempt live[256];
    Boost__LiveAttempt *list[256];
    r.node = a->name;
    r.boot_id = a->boot;
    r.instance = a->instance;
    r.has_cpu_slots = r.has_memory_mib = r.has_uid = 1;
    r.cpu_slots = a->slots;
    r.has_cores = a->cores > 0;
    r.cores = a->cores;
    r.memory_mib = 4096;
    r.uid = a->uid;
    r.data_address = (char *)(uintptr_t) "127.0.0.1";
    r.attempts = list;
    r.devices = a->gpus_unknown ? NULL : gpu_report(a);
    for (int i = 0; i < a->n_attempts; i++) {
        struct fake_attempt *x = &a->attempts[i];
        if (x->forgotten)
            continue;
        Boost__LiveAttempt *l = &live[r.n_attempts];
        boost__live_attempt__init(l);
        l->has_job = l->has_attempt = l->has_alive = 1;
        l->job = x->job;
        l->attempt = x->attempt;
        l->store_id = (char *)(uintptr_t)w->store_id;
        l->alive = x->alive;
        l->n_ranks = (size_t)x->n_ranks;
        l->ranks = x->ranks;
        l->has_cuda = 1;
        l->cuda = x->cuda;
        list[r.n_attempts++] = l;
    }
    a->connected = true;
    int rc = core_agent_register(w->core, &r, err);
    if (rc)
        return rc;
    a->next_beat = w->now + NS_PER_S;
    /* What is owed goes again. */
    for (int i = 0; i < a->n_attempts; i++) {
        struct fake_attempt *x = &a->attempts[i];
        for (int k = 0; k < x->n_ranks && !x->forgotten; k++)
            if (x->ended[k] && !x->end_acked[k])
                say_end_of(w, a, x, k, x->ends[k]);
        if (!x->forgotten && !x->alive && !x->node_end_acked)
            say_node_end(w, a, x);
    }
    return ERR_OK;
}

HELPER void join_world(struct world *w, struct fake_agent *a)
{
    struct error err;
    if (try_register(w, a, &err))
        fail_msg("register: %s", err.message);
}

HELPER void disconnect(struct world *w, struct fake_agent *a)
{
    if (a->connected && w->core)
        core_agent_disconnected(w->core, a->name);
    a->connected = false;
}

/* kill -9 of boostd and a new one; agents stay, with what they have. `lost`: what was not durable. */
HELPER void controller_restart(struct world *w)
{
    mem_crash(w->store);
    core_destroy(w->core);
    w->core = NULL;
    queue_drop(w);
    for (int i = 0; i < w->n_agents; i++)
        w->agents[i].connected = false;
    boot(w);
}

HELPER Boost__JobSpec *spec_new(struct arena *mem)
{
    Boost__JobSpec *s = arena_alloc(mem, sizeof *s);
    Boost__Model *model = arena_alloc(mem, sizeof *model);
    Boost__Parallel *parallel = arena_alloc(mem, sizeof *parallel);
    Boost__Data *data = arena_alloc(mem, sizeof *data);
    Boost__TokenFile *train = arena_alloc(mem, sizeof *train);
    Boost__TokenFile **trains = arena_alloc(mem, sizeof *trains);
    Boost__Optimizer *optimizer = arena_alloc(mem, sizeof *optimizer);
    Boost__Run *run = arena_alloc(mem, sizeof *run);
    Boost__Checkpoint *checkpoint = arena_alloc(mem, sizeof *checkpoint);
    Boost__Restart *restart = arena_alloc(mem, sizeof *restart);
    boost__job_spec__init(s);
    boost__model__init(model);
    boost__parallel__init(parallel);
    boost__data__init(data);
    boost__token_file__init(train);
    boost__optimizer__init(optimizer);
    boost__run__init(run);
    boost__checkpoint__init(checkpoint);
    boost__restart__init(restart);
    s->has_spec_version = 1;
    s->spec_version = 1;
    s->name = arena_strdup(mem, "tiny");
    s->model = model;
    s->parallel = parallel;
    s->data = data;
    s->optimizer = optimizer;
    s->run = run;
    s->checkpoint = checkpoint;
    s->restart = restart;
    model->has_factorization = model->has_hidden = model->has_layers = model->has_heads = 1;
    model->has_intermediate = model->has_rank = model->has_vocab = 1;
    model->factorization = BOOST__FACTORIZATION__VALUE__COLA;
    model->hidden = 64;
    model->layers = 2;
    model->heads = 4;
    model->intermediate = 128;
    model->rank = 16;
    model->vocab = 256;
    parallel->has_tp = parallel->has_micro_batch = parallel->has_global_batch = 1;
    parallel->tp = 2;
    parallel->micro_batch = 2;
    parallel->global_batch = 4;
    train->path = arena_strdup(mem, "/data/train.txt");
    trains[0] = train;
    data->n_train = 1;
    data->train = trains;
    data->has_seq_len = 1;
    data->seq_len = 32;
    optimizer->has_lr = 1;
    optimizer->lr = 1e-3;
    run->has_steps = 1;
    run->steps = 100;
    checkpoint->dir = arena_strdup(mem, "/ckpt");
    checkpoint->has_every_steps = 1;
    checkpoint->every_steps = 20;
    return s;
}

HELPER void on_submit(void *arg, int rc, const struct error *err, int64_t job)
{
    struct world *w = arg;
    w->replies++;
    w->reply_rc = rc;
    w->reply_job = job;
    snprintf(w->reply_text, sizeof w->reply_text, "%s", rc ? err->message : "");
    snprintf(w->reply_hint, sizeof w->reply_hint, "%s", rc ? err->hint : "");
}

HELPER void on_control(void *arg, int rc, const struct error *err, const char *text)
{
    struct world *w = arg;
    w->replies++;
    w->reply_rc = rc;
    snprintf(w->reply_text, sizeof w->reply_text, "%s", rc ? err->message : text);
}

static const struct core_user user_ann = {.uid = 1000, .gid = 1000, .name = "ann"};
static const struct core_user user_bob = {.uid = 1001, .gid = 1001, .name = "bob"};

HELPER int64_t submit_spec(struct world *w, const Boost__JobSpec *spec, bool held)
{
    w->reply_rc = -1;
    core_submit(w->core, spec, &user_ann, held, on_submit, w);
    pump(w);
    return w->reply_rc == ERR_OK ? w->reply_job : 0;
}

HELPER int64_t submit(struct world *w)
{
    struct arena mem;
    arena_init(&mem, 1 << 20);
    int64_t id = submit_spec(w, spec_new(&mem), false);
    arena_free(&mem);
    if (!id)
        fail_msg("submit: %d %s", w->reply_rc, w->reply_text);
    return id;
}

HELPER int control(struct world *w, Boost__ControlRequest__Verb verb, int64_t job, bool now)
{
    w->reply_rc = -1;
    core_control(w->core, verb, job, now, &user_ann, on_control, w);
    pump(w);
    return w->reply_rc;
}
#define CANCEL     BOOST__CONTROL_REQUEST__VERB__CANCEL
#define HOLD       BOOST__CONTROL_REQUEST__VERB__HOLD
#define RELEASE    BOOST__CONTROL_REQUEST__VERB__RELEASE
#define CHECKPOINT BOOST__CONTROL_REQUEST__VERB__CHECKPOINT

HELPER struct job *job_of(struct world *w, int64_t id)
{
    struct job *job = core_job(w->core, id);
    assert_non_null(job);
    return job;
}

#define assert_state(w, id, s)                                                                      \
    do {                                                                                            \
        if (job_of(w, id)->state != STATE(s))                                                       \
            fail_msg("%s:%d: job %lld is %s, not " #s " (%s)", __FILE__, __LINE__, (long long)(id), \
                     job_state_name(job_of(w, id)->state), job_of(w, id)->reason_text);             \
    } while (0)

/* The newest durable event of that kind; NULL when there is none. */
HELPER const struct store_event *event_of(struct world *w, int64_t job, const char *kind)
{
    for (int i = w->store->n_events - 1; i >= 0; i--)
        if (w->store->events[i].job == job && strcmp(w->store->events[i].kind, kind) == 0)
            return &w->store->events[i];
    return NULL;
}

HELPER int count_events(struct world *w, int64_t job, const char *kind)
{
    int n = 0;
    for (int i = 0; i < w->store->n_events; i++)
        n += w->store->events[i].job == job && strcmp(w->store->events[i].kind, kind) == 0;
    return n;
}

#define assert_says(text, part)                                                                \
    do {                                                                                       \
        if (!strstr((text), (part)))                                                           \
            fail_msg("%s:%d: \"%s\" does not say \"%s\"", __FILE__, __LINE__, (text), (part)); \
    } while (0)

/* The job's newest attempt on the agent. */
HELPER struct fake_attempt *newest(struct world *w, struct fake_agent *a, int64_t job)
{
    struct fake_attempt *x = fake_find(a, job, job_of(w, job)->n_attempts);
    assert_non_null(x);
    return x;
}

/* Submitted, placed, and every rank has made a step. */
HELPER struct fake_attempt *run_job(struct world *w, struct fake_agent *a, int64_t *id)
{
    *id = submit(w);
    pump(w);
    assert_state(w, *id, STARTING);
    struct fake_attempt *x = newest(w, a, *id);
    say_step(w, a, x, x->from_step + 1);
    pump(w);
    assert_state(w, *id, RUNNING);
    return x;
}

/* After a failure: back-off passes, the next attempt makes its first step. */
HELPER struct fake_attempt *recovered(struct world *w, struct fake_agent *a, int64_t id)
{
    for (int i = 0; i < 2000 && job_of(w, id)->state == STATE(RECOVERING); i++)
        advance(w, 250);
    assert_state(w, id, STARTING);
    struct fake_attempt *x = newest(w, a, id);
    say_step(w, a, x, x->from_step + 1);
    pump(w);
    assert_state(w, id, RUNNING);
    return x;
}

#endif
