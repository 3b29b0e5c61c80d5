/* Metrics on their way from agents to the store, and what the summaries show of them. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"

void send_ack(struct core *c, const char *node, Boost__Ack *ack)
{
    struct node *n = node_find(c, node);
    Boost__ControllerMessage m = BOOST__CONTROLLER_MESSAGE__INIT;
    m.body_case = BOOST__CONTROLLER_MESSAGE__BODY_ACK;
    m.ack = ack;
    if (n)
        send_to(c, n, &m);
}

/* What is owed for a batch once it is stored; c->metrics keeps it for core_destroy. */
struct metrics_owed {
    struct core *core;
    struct metrics_owed *next, *prev;
    int64_t job, seq;
    int attempt, rank;
    char node[65];
};

static void owed_unlink(struct metrics_owed *x)
{
    if (x->prev)
        x->prev->next = x->next;
    else
        x->core->metrics = x->next;
    if (x->next)
        x->next->prev = x->prev;
}

void metrics_free(struct core *c)
{
    while (c->metrics) {
        struct metrics_owed *x = c->metrics;
        c->metrics = x->next;
        free(x);
    }
}

static void stored(void *arg, int rc, const struct error *err)
{
    struct metrics_owed *x = arg;
    struct core *c = x->core;
    struct job *job = core_job(c, x->job);
    struct attempt *a = job ? job_attempt(job, x->attempt) : NULL;
    owed_unlink(x);
    if (rc) {
        c->stats.store_failures++;
        core_log_line(c, CORE_LOG_ERROR, "metrics of job %lld: %s", (long long)x->job, err ? err->message : "?");
    } else if (a && x->rank < a->world) {
        Boost__Ack ack = BOOST__ACK__INIT;
        if (x->seq > a->ranks[x->rank].metrics_seq)
            a->ranks[x->rank].metrics_seq = x->seq;
        ack.has_job = ack.has_attempt = ack.has_rank = ack.has_metrics_seq = true;
        ack.job = x->job;
        ack.attempt = x->attempt;
        ack.rank = x->rank;
        ack.metrics_seq = x->seq;
        send_ack(c, x->node, &ack);
        c->ops.changed(c->ops.arg, job->id);
    }
    free(x);
}

/* Rank 0 speaks for the job. */
static void show(struct job *job, const Boost__MetricRecord *record)
{
    for (size_t i = 0; i < record->n_values; i++) {
        const Boost__Metric *m = record->values[i];
        if (!m->name)
            continue;
        if (strcmp(m->name, "loss") == 0)
            job->loss = m->value;
        else if (strcmp(m->name, "eval_loss") == 0)
            job->eval_loss = m->value;
        else if (strcmp(m->name, "tokens_per_s") == 0)
            job->tokens_per_s = m->value;
        else if (strcmp(m->name, "mfu") == 0)
            job->mfu = m->value;
        else if (strcmp(m->name, "step_ms") == 0 && m->value > 0 && isfinite(m->value))
            job->step_ms = job->step_ms > 0 ? 0.9 * job->step_ms + 0.1 * m->value : m->value;
        else if (strcmp(m->name, "ckpt_ms") == 0 && isfinite(m->value))
            account_stall(job, m->value / 1e3);
        else if (strcmp(m->name, "ckpt_every_s") == 0)
            job->ckpt_every_s = m->value;
        else if (strcmp(m->name, "ckpt_cost_s") == 0)
            job->ckpt_cost_s = m->value;
        else if (strcmp(m->name, "mean_failure_s") == 0)
            job->mean_failure_s = m->value;
    }
}

/* As many as somebody would read, whatever a rank writes. */
static void warn(struct core *c, struct job *job, struct attempt *a, const struct node *n, const char *text)
{
    enum { WARNINGS_MAX = 16 };
    if (text && *text && a->warnings++ < WARNINGS_MAX)
        add_event(c, job, a->number, n->name, "rank 0", "warning", "%.1024s", text);
}

static bool row_of(const Boost__MetricRecord *record, struct arena *mem, struct store_metric *row)
{
    const char **names = arena_alloc(mem, (record->n_values + 1) * sizeof *names);
    double *values = arena_alloc(mem, (record->n_values + 1) * sizeof *values);
    if (!names || !values)
        return false;
    *row = (struct store_metric){.seq = record->seq, .step = record->step, .wall_ns = record->wall_ns};
    for (size_t i = 0; i < record->n_values; i++) {
        if (!record->values[i]->name)
            continue;
        names[row->n] = record->values[i]->name;
        values[row->n++] = record->values[i]->value;
    }
    row->names = names;
    row->values = values;
    return true;
}

void metrics_batch(struct core *c, struct job *job, struct attempt *a, struct node *n, const Boost__MetricBatch *b)
{
    struct arena mem;
    arena_init(&mem, 64 << 20);
    struct store_metric *rows = arena_alloc(&mem, (b->n_records + 1) * sizeof *rows);
    struct metrics_owed *owed = calloc(1, sizeof *owed);
    bool newest = a == job_attempt(job, job->n_attempts);
    bool ok = rows && owed;
    int64_t seq = 0;
    for (size_t i = 0; ok && i < b->n_records; i++) {
        ok = row_of(b->records[i], &mem, &rows[i]);
        if (b->records[i]->seq > seq)
            seq = b->records[i]->seq;
        if (ok && newest && b->records[i]->seq > a->ranks[b->rank].metrics_seq)
            pace_add(c, job, a, b->rank, b->records[i]);
        if (ok && b->rank == 0 && newest && b->records[i]->seq > a->metrics_shown) {
            show(job, b->records[i]);
            warn(c, job, a, n, b->records[i]->warning);
            a->metrics_shown = b->records[i]->seq;
            attempt_reached(job, a, b->records[i]->step);
        }
    }
    if (!ok || b->n_records == 0) {
        free(owed); /* not acknowledged: it comes again */
    } else {
        *owed = (struct metrics_owed){
            .core = c, .next = c->metrics, .job = job->id, .seq = seq, .attempt = a->number, .rank = b->rank};
        snprintf(owed->node, sizeof owed->node, "%s", n->name);
        if (owed->next)
            owed->next->prev = owed;
        c->metrics = owed;
        if (b->rank == 0) {
            job->version++;
            due_at(c, job_time_limit_due(job)); /* a longer step, an earlier end */
        }
        c->store.add_metrics(c->store.arg, job->id, a->number, b->rank, rows, (int)b->n_records, stored, owed);
    }
    arena_free(&mem);
}
