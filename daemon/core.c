/* The controller core: making and ending it, its clock and its timers. */
#include "daemon/core.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "daemon/core_internal.h"
#include "proto/reflect.h"

/* ---- time, log ------------------------------------------------------------------- */

int64_t now_mono(struct core *c)
{
    return c->ops.mono_ns(c->ops.arg);
}

int64_t now_boot(struct core *c)
{
    return c->ops.boot_ns ? c->ops.boot_ns(c->ops.arg) : now_mono(c);
}

int64_t now_wall(struct core *c)
{
    return c->ops.wall_ns(c->ops.arg);
}

void core_log_line(struct core *c, enum core_log_level level, const char *fmt, ...)
{
    if (!c->ops.log)
        return;
    char line[1024];
    va_list args;
    va_start(args, fmt);
    vsnprintf(line, sizeof line, fmt, args);
    va_end(args);
    c->ops.log(c->ops.arg, level, line);
}

void due_at(struct core *c, int64_t mono_ns)
{
    if (mono_ns < c->due)
        c->due = mono_ns;
}

/* ---- timers --------------------------------------------------------------------------------- */

/* Looks at every timer there is; only when one is due. */
static void run_timers(struct core *c, int64_t now)
{
    c->due = INT64_MAX;
    due_at(c, nodes_run(c, now));
    due_at(c, tasks_run(c, now));
    due_at(c, changes_run(c, now));
    if (now >= c->kv_due)
        c->kv_due = kv_expire(c->kv, now);
    due_at(c, c->kv_due);
    for (struct job *job = c->busy.head, *next; job; job = next) {
        next = job->busy.next;
        due_at(c, attempt_run(c, job, now));
    }
    if (c->schedule_due && now >= c->schedule_due) {
        c->schedule = true;
        c->schedule_due = 0;
    } else if (c->schedule_due) {
        due_at(c, c->schedule_due);
    }
    parked_run(c, now);
    due_at(c, parked_due(c));
    c->work = c->work || c->working.head;
}

/* A pass over a large cluster takes milliseconds, and every job that ends asks for one: so that others are answered
 * meanwhile, one that took long is not followed by the next before three times as long has passed. */
static void pass(struct core *c, int64_t now)
{
    c->schedule = false;
    schedule_pass(c);
    int64_t took = now_mono(c) - now;
    c->pass_due = took > CORE_PASS_NS ? now + 4 * took : 0;
}

int64_t core_run(struct core *c)
{
    int64_t now = now_mono(c);
    bool may_pass = now >= c->pass_due;
    /* A pass may make more work; what it makes is due at once, so a bounded number of rounds. */
    for (int round = 0; round < 8 && (now >= c->due || (c->schedule && may_pass) || c->work); round++) {
        if (now >= c->due)
            run_timers(c, now);
        if (c->work) {
            c->work = false;
            checkpoints_run(c);
        }
        if (c->schedule && may_pass) {
            pass(c, now_mono(c));
            may_pass = !c->pass_due;
        }
        change_commit(c);
    }
    if (c->work || (c->schedule && !c->pass_due))
        return 0;
    return c->schedule && c->pass_due < c->due ? c->pass_due : c->due;
}

/* ---- making and ending ----------------------------------------------------------------------- */

int core_create(const Boost__BoostdConfig *config, const struct core_store *store, const struct core_ops *ops,
                struct core **out, struct error *err)
{
    int rc = ERR_NOMEM;
    struct core *c = calloc(1, sizeof *c);
    *out = NULL;
    if (!c)
        return error_set(err, ERR_NOMEM, "out of memory");
    c->ops = *ops;
    c->store = *store;
    c->heartbeat_ns = config->heartbeat_ms * NS_PER_MS;
    c->suspect_ns = config->suspect_ms * NS_PER_MS;
    c->node_timeout_ns = config->node_timeout_ms * NS_PER_MS;
    c->restart_grace_ns = config->restart_grace_ms * NS_PER_MS;
    c->backoff_min_ns = config->backoff_min_ms * NS_PER_MS;
    c->backoff_max_ns = config->backoff_max_ms * NS_PER_MS;
    c->fetch_tries = config->fetch_tries;
    c->rendezvous_ns = config->rendezvous_timeout_ms * NS_PER_MS;
    c->kill_confirm_ns = config->kill_confirm_ms * NS_PER_MS;
    c->config = (Boost__BoostdConfig *)reflect_clone(&config->base);
    if (!c->config) {
        error_set(err, ERR_NOMEM, "out of memory");
        goto out;
    }
    c->user_running_jobs = config->user_running_jobs;
    c->user_devices = config->user_devices;
    c->user_queued_jobs = config->user_queued_jobs;
    c->half_life_ns = config->fair_share_half_life_s * NS_PER_S;
    c->backfill = config->backfill;
    c->preempt = config->preempt;
    c->preempt_gap = config->preempt_gap;
    c->up_since = now_mono(c);
    c->kv_due = c->refused_due = INT64_MAX;
    /* Numbers of its own: an agent may still answer a task of an earlier run. */
    c->next_task = ops->random(ops->arg) << 24 | 1;
    c->schedule = true;
    c->work = true;
    c->kv = kv_create(kv_answered, c);
    if (!c->kv) {
        error_set(err, ERR_NOMEM, "out of memory");
        goto out;
    }
    rc = core_load(c, err);
    if (rc)
        goto out;
    change_commit(c);
    *out = c;
    c = NULL;
out:
    core_destroy(c);
    return rc;
}

void core_destroy(struct core *c)
{
    if (!c)
        return;
    while (c->changes) {
        struct change *ch = c->changes;
        c->changes = ch->next;
        while (ch->after) {
            struct after *a = ch->after;
            ch->after = a->next;
            a->drop(a->arg);
            free(a);
        }
        free(ch->jobs);
        free(ch);
    }
    while (c->after) {
        struct after *a = c->after;
        c->after = a->next;
        a->drop(a->arg);
        free(a);
    }
    while (c->tasks) {
        struct task *t = c->tasks;
        c->tasks = t->next;
        if (t->drop)
            t->drop(t->arg);
        free(t);
    }
    parked_free(c);
    metrics_free(c);
    for (int i = 0; i < c->n_jobs; i++) {
        if (c->jobs[i]->starting) {
            free(c->jobs[i]->starting->fetches);
            free(c->jobs[i]->starting->nodes);
        }
        free(c->jobs[i]->starting);
        job_free(c->jobs[i]);
    }
    free(c->jobs);
    shares_free(c);
    picture_free(c->picture);
    for (int i = 0; i < c->n_switches; i++)
        free(c->switches[i]);
    free(c->switches);
    free(c->dirty_jobs);
    free(c->node_index);
    while (c->nodes) {
        struct node *n = c->nodes;
        c->nodes = n->next;
        node_free(n);
    }
    kv_free(c->kv);
    if (c->config)
        boost__boostd_config__free_unpacked(c->config, NULL);
    free(c);
}

const struct core_stats *core_stats(const struct core *c)
{
    return &c->stats;
}

const char *core_store_id(const struct core *c)
{
    return c->store.id(c->store.arg);
}
