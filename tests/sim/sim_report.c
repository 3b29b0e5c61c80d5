/* What an agent says: registering, progress, records, ends; again until acknowledged. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/sim/sim.h"

enum { HANG_S = 30, AGAIN_S = 5, FORWARD_AGAIN_S = 10, BATCH = 32 };

static void say(struct sim *s, struct sim_node *n, Boost__AgentMessage__BodyCase kind, void *body)
{
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    m.body_case = kind;
    m.heartbeat = body; /* whichever it is: the members of the union are pointers all */
    link_up(s, n, &m);
}
#define SAY(s, n, KIND, body) say(s, n, BOOST__AGENT_MESSAGE__BODY_##KIND, body)

/* ---- GPUs ---- */

const struct run *gpu_user(const struct sim_node *n, int gpu, int *rank)
{
    for (const struct run *r = n->runs; r; r = r->next)
        for (int i = 0; r->cuda && r->state != ENDED && i < r->n; i++)
            if (r->gpu[i] == gpu) {
                *rank = r->ranks[i].rank;
                return r;
            }
    return NULL;
}

struct device_list {
    Boost__DeviceReport report;
    Boost__DeviceInfo info[MAX_SLOTS], *list[MAX_SLOTS];
};

static Boost__DeviceReport *devices(const struct sim_node *n, struct device_list *d)
{
    boost__device_report__init(&d->report);
    d->report.devices = d->list;
    for (int g = 0; g < n->gpus; g++) {
        int rank = 0;
        const struct run *r = gpu_user(n, g, &rank);
        Boost__DeviceInfo *x = d->list[g] = &d->info[g];
        boost__device_info__init(x);
        x->has_index = x->has_memory_mib = true;
        x->index = g;
        x->memory_mib = 100000;
        x->uuid = (char *)(uintptr_t) "GPU-x";
        x->name = (char *)(uintptr_t) "NVIDIA H200";
        x->trouble = n->gpu_broken[g] ? (char *)(uintptr_t) "uncorrected memory errors" : NULL;
        x->has_job = x->has_attempt = x->has_rank = r != NULL;
        x->job = r ? r->job : 0;
        x->attempt = r ? r->attempt : 0;
        x->rank = rank;
        d->report.n_devices++;
    }
    return &d->report;
}

void report_devices(struct sim *s, struct sim_node *n)
{
    struct device_list d;
    if (n->gpus && n->registered)
        SAY(s, n, DEVICES, devices(n, &d));
}

/* ---- health ---- */

struct health {
    Boost__HealthReport report;
    Boost__FailedCheck failed, *list[1];
};

/* NULL: it checks nothing. */
static Boost__HealthReport *health(const struct sim_node *n, struct health *h)
{
    if (!n->checks)
        return NULL;
    boost__health_report__init(&h->report);
    boost__failed_check__init(&h->failed);
    h->failed.check = (char *)(uintptr_t) "memory";
    h->failed.text = (char *)(uintptr_t) "12 MiB available";
    h->list[0] = &h->failed;
    h->report.failed = h->list;
    h->report.n_failed = n->sick && !n->check_pending;
    h->report.has_pending = h->report.pending = n->check_pending;
    return &h->report;
}

void report_health(struct sim *s, struct sim_node *n)
{
    struct health h;
    if (n->checks && n->registered)
        SAY(s, n, HEALTH, health(n, &h));
}

/* ---- registering ---- */

void report_register(struct sim *s, struct sim_node *n)
{
    struct device_list d;
    struct health h;
    Boost__Register r = BOOST__REGISTER__INIT;
    Boost__LiveAttempt live[MAX_FORMER], *list[MAX_FORMER];
    int32_t ranks[MAX_FORMER][MAX_SLOTS];
    char boot[24], instance[32];
    snprintf(boot, sizeof boot, "boot-%d", n->boot);
    snprintf(instance, sizeof instance, "%llu", (unsigned long long)n->instance);
    r.node = n->name;
    r.boot_id = boot;
    r.instance = instance;
    r.has_cpu_slots = r.has_cores = r.has_memory_mib = r.has_uid = true;
    r.cpu_slots = n->slots;
    r.cores = 64;
    r.memory_mib = n->memory_mib;
    r.data_address = (char *)(uintptr_t) "127.0.0.1";
    r.attempts = list;
    r.devices = devices(n, &d);
    r.health = health(n, &h);
    for (const struct run *x = n->runs; x && r.n_attempts < MAX_FORMER; x = x->next) {
        Boost__LiveAttempt *l = &live[r.n_attempts];
        boost__live_attempt__init(l);
        l->has_job = l->has_attempt = l->has_alive = true;
        l->job = x->job;
        l->attempt = x->attempt;
        l->store_id = (char *)(uintptr_t)MEM_STORE_ID;
        l->alive = x->state != ENDED;
        l->n_ranks = (size_t)x->n;
        l->ranks = ranks[r.n_attempts];
        for (int i = 0; i < x->n; i++)
            l->ranks[i] = x->ranks[i].rank;
        l->has_cuda = true;
        l->cuda = x->cuda;
        list[r.n_attempts++] = l;
    }
    trace(s, "%s registers with %zu attempts", n->name, r.n_attempts);
    SAY(s, n, REGISTER, &r);
}

void report_node_end(struct sim *s, struct sim_node *n, int64_t job, int attempt)
{
    Boost__NodeEnd end = BOOST__NODE_END__INIT;
    end.has_job = end.has_attempt = true;
    end.job = job;
    end.attempt = attempt;
    trace(s, "%s -> node end of %lld.%d", n->name, (long long)job, attempt);
    SAY(s, n, NODE_END, &end);
}

void report_refused(struct sim *s, struct sim_node *n, int64_t job, int attempt, Boost__ExitClass__Value class,
                    Boost__Reason__Value reason, const char *text)
{
    Boost__AttemptRefused r = BOOST__ATTEMPT_REFUSED__INIT;
    r.has_job = r.has_attempt = r.has_class_ = r.has_reason = true;
    r.job = job;
    r.attempt = attempt;
    r.class_ = class;
    r.reason = reason;
    r.text = (char *)(uintptr_t)text;
    trace(s, "%s refuses %lld.%d: %s", n->name, (long long)job, attempt, text);
    if (n->registered)
        SAY(s, n, ATTEMPT_REFUSED, &r);
}

void report_kv(struct sim *s, struct sim_node *n, const struct run *r, const struct proc *p, bool set)
{
    Boost__KvOp op = BOOST__KV_OP__INIT;
    Boost__KvForward f = BOOST__KV_FORWARD__INIT;
    char key[24], value[32];
    if (!n->registered)
        return; /* when it is again */
    f.has_id = f.has_job = f.has_attempt = f.has_rank = true;
    f.id = p->pid * 2 + !set;
    f.job = r->job;
    f.attempt = r->attempt;
    f.rank = p->rank;
    f.op = &op;
    op.has_kind = true;
    op.kind = set ? BOOST__KV_OP__KIND__SET : BOOST__KV_OP__KIND__GET;
    op.group = (char *)(uintptr_t) "world";
    op.key = key;
    snprintf(key, sizeof key, "addr%d", set ? p->rank : (p->rank + 1) % r->world);
    if (set) {
        snprintf(value, sizeof value, "of %llu", (unsigned long long)p->pid);
        op.has_value = true;
        op.value.data = (uint8_t *)value;
        op.value.len = strlen(value);
    } else {
        op.has_timeout_ms = true;
        op.timeout_ms = r->rendezvous_ms;
    }
    SAY(s, n, KV, &f);
}

/* ---- progress ---- */

static void send_update(struct sim *s, struct sim_node *n, const struct run *r, struct proc *p)
{
    Boost__RankUpdate u = BOOST__RANK_UPDATE__INIT;
    u.has_job = u.has_attempt = u.has_rank = u.has_phase = u.has_step = u.has_progress = true;
    u.job = r->job;
    u.attempt = r->attempt;
    u.rank = p->rank;
    u.phase = (Boost__RankUpdate__Phase)p->phase;
    u.step = p->step;
    u.progress = (uint64_t)p->step * 4;
    p->told = true;
    p->told_phase = p->phase;
    p->told_step = p->step;
    p->told_ns = s->now;
    SAY(s, n, RANK_UPDATE, &u);
}

static void progress(struct sim *s, struct sim_node *n, const struct run *r, struct proc *p)
{
    if (p->ended || !p->pid)
        return;
    bool first = p->told_step <= r->from_step && p->step > r->from_step;
    if (!p->told || p->phase != p->told_phase || first || (p->step != p->told_step && s->now - p->told_ns >= S / 2))
        send_update(s, n, r, p);
    if (!p->alive || p->hang_told || p->phase < LOADING ||
        s->now - p->moved < (p->phase == LOADING ? 2 : 1) * HANG_S * S)
        return;
    Boost__HangReport h = BOOST__HANG_REPORT__INIT;
    h.has_job = h.has_attempt = h.has_rank = true;
    h.job = r->job;
    h.attempt = r->attempt;
    h.rank = p->rank;
    h.text = (char *)(uintptr_t) "no micro-batch for 30 s";
    p->hang_told = true;
    struct sim_job *job = job_by_id(s, r->job);
    if (job)
        job->app_failures++;
    trace(s, "%s -> rank %d of %lld.%d hangs", n->name, p->rank, (long long)r->job, r->attempt);
    SAY(s, n, HANG, &h);
}

/* ---- records ---- */

static void send_shards(struct sim *s, struct sim_node *n, const struct run *r, struct proc *p)
{
    Boost__ShardRecord records[BATCH], *list[BATCH];
    char dirs[BATCH][96], file[32];
    if (p->shards_sent > p->shards_acked && s->now - p->shards_ns > FORWARD_AGAIN_S * S)
        p->shards_sent = p->shards_acked;
    while (p->shards_sent < p->n_shards) {
        Boost__ShardBatch b = BOOST__SHARD_BATCH__INIT;
        snprintf(file, sizeof file, "shard-%d.safetensors", p->rank);
        b.has_job = b.has_attempt = b.has_rank = true;
        b.job = r->job;
        b.attempt = r->attempt;
        b.rank = p->rank;
        b.records = list;
        while (p->shards_sent < p->n_shards && b.n_records < BATCH) {
            const struct shard_record *x = &p->shards[p->shards_sent++];
            Boost__ShardRecord *y = &records[b.n_records];
            boost__shard_record__init(y);
            snprintf(dirs[b.n_records], sizeof dirs[0], "/ckpt/" MEM_STORE_ID "-%lld/step-%lld.a%d", (long long)r->job,
                     (long long)x->step, r->attempt);
            y->has_seq = y->has_step = y->has_rank = y->has_bytes = y->has_crc32c = y->has_write_ms = true;
            y->seq = p->shards_sent;
            y->step = x->step;
            y->rank = p->rank;
            y->file = file;
            y->bytes = 1000;
            y->crc32c = (uint32_t)x->step;
            y->write_ms = 20;
            y->dir = dirs[b.n_records];
            y->has_failed = y->failed = x->failed;
            y->error = x->failed ? (char *)(uintptr_t) "no space left on device" : NULL;
            list[b.n_records++] = y;
        }
        p->shards_ns = s->now;
        SAY(s, n, SHARDS, &b);
    }
}

static void send_metrics(struct sim *s, struct sim_node *n, const struct run *r, struct proc *p)
{
    Boost__MetricRecord records[BATCH], *list[BATCH];
    Boost__Metric value = BOOST__METRIC__INIT, *values = &value;
    value.name = (char *)(uintptr_t) "loss";
    value.has_value = true;
    value.value = 5;
    if (p->metrics_sent > p->metrics_acked && s->now - p->metrics_ns > FORWARD_AGAIN_S * S)
        p->metrics_sent = p->metrics_acked;
    while (p->metrics_sent < p->n_metrics) {
        Boost__MetricBatch b = BOOST__METRIC_BATCH__INIT;
        b.has_job = b.has_attempt = b.has_rank = true;
        b.job = r->job;
        b.attempt = r->attempt;
        b.rank = p->rank;
        b.records = list;
        while (p->metrics_sent < p->n_metrics && b.n_records < BATCH) {
            Boost__MetricRecord *y = &records[b.n_records];
            boost__metric_record__init(y);
            y->has_seq = y->has_step = true;
            y->seq = ++p->metrics_sent;
            y->step = r->from_step + y->seq;
            y->n_values = 1;
            y->values = &values;
            list[b.n_records++] = y;
        }
        p->metrics_ns = s->now;
        SAY(s, n, METRICS, &b);
    }
}

static void send_exit(struct sim *s, struct sim_node *n, const struct run *r, struct proc *p)
{
    Boost__ExitRecord x = BOOST__EXIT_RECORD__INIT;
    Boost__RankEnd end = BOOST__RANK_END__INIT;
    x.has_job = x.has_attempt = x.has_rank = x.has_seq = x.has_last_step = true;
    x.job = r->job;
    x.attempt = r->attempt;
    x.rank = p->rank;
    x.seq = p->seq;
    x.last_step = p->last_step;
    x.has_exit_code = !p->signal && !p->lost;
    x.exit_code = p->code;
    x.has_signal = p->signal != 0;
    x.signal = p->signal;
    x.has_killed_by_us = x.killed_by_us = p->killed;
    x.has_done = x.done = p->done;
    x.has_oom = x.oom = p->oom;
    x.has_lost = x.lost = p->lost;
    end.record = &x;
    p->exit_sent = true;
    trace(s, "%s -> end of rank %d of %lld.%d: code %d signal %d%s%s%s", n->name, p->rank, (long long)r->job,
          r->attempt, p->code, p->signal, p->done ? " done" : "", p->killed ? " killed" : "", p->lost ? " lost" : "");
    SAY(s, n, RANK_END, &end);
}

static void send_exits(struct sim *s, struct sim_node *n, struct run *r, bool again)
{
    bool repeated[MAX_SLOTS] = {false};
    for (;;) {
        int first = -1;
        for (int i = 0; i < r->n; i++) {
            const struct proc *p = &r->ranks[i];
            bool due = p->ended && (!p->exit_sent || (again && !p->exit_acked && !repeated[i]));
            if (due && (first < 0 || p->seq < r->ranks[first].seq))
                first = i;
        }
        if (first < 0)
            return;
        send_exit(s, n, r, &r->ranks[first]);
        r->report_ns = s->now;
        repeated[first] = true;
    }
}

bool report_all_acked(const struct run *r)
{
    for (int i = 0; i < r->n; i++) {
        const struct proc *p = &r->ranks[i];
        if ((p->ended && !p->exit_acked) || p->shards_acked < p->n_shards || p->metrics_acked < p->n_metrics)
            return false;
    }
    return r->end_acked;
}

void report_run(struct sim *s, struct sim_node *n, struct run *r)
{
    if (!n->registered || (r->state == ENDED && report_all_acked(r)))
        return;
    bool again = s->now - r->report_ns > AGAIN_S * S;
    for (int i = 0; i < r->n; i++) {
        if (r->state == LIVE)
            progress(s, n, r, &r->ranks[i]);
        send_shards(s, n, r, &r->ranks[i]);
        send_metrics(s, n, r, &r->ranks[i]);
    }
    send_exits(s, n, r, again);
    if (r->state == ENDED && (!r->end_sent || (again && !r->end_acked))) {
        r->end_sent = true;
        r->report_ns = s->now;
        report_node_end(s, n, r->job, r->attempt);
    }
}

void report_again(struct sim_node *n)
{
    for (struct run *r = n->runs; r; r = r->next) {
        r->end_sent = r->end_acked = false;
        for (int i = 0; i < r->n; i++) {
            struct proc *p = &r->ranks[i];
            p->shards_sent = p->shards_acked;
            p->metrics_sent = p->metrics_acked;
            p->exit_sent = p->exit_acked = p->told = p->hang_told = false;
        }
    }
}

void report_ack(struct sim_node *n, const Boost__Ack *ack)
{
    struct run *r = run_find(n, ack->job, ack->attempt);
    if (!r)
        return;
    if (ack->node_end)
        r->end_acked = true;
    for (int i = 0; i < r->n; i++) {
        struct proc *p = &r->ranks[i];
        if (!ack->has_rank || p->rank != ack->rank)
            continue;
        if (ack->has_shards_seq && ack->shards_seq > p->shards_acked && ack->shards_seq <= p->shards_sent)
            p->shards_acked = (int)ack->shards_seq;
        if (ack->has_metrics_seq && ack->metrics_seq > p->metrics_acked && ack->metrics_seq <= p->metrics_sent)
            p->metrics_acked = (int)ack->metrics_seq;
        if (ack->rank_end)
            p->exit_acked = true;
    }
}
