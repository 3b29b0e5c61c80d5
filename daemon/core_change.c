/* The open change: what one input has changed becomes one transaction, and what was to
 * wait for its durability runs when the store says so. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"
#include "proto/base/utf8.h"

void mark_job(struct core *c, struct job *job)
{
    job->version++;
    if (job->dirty)
        return;
    if (c->n_dirty == c->cap_dirty) {
        int cap = c->cap_dirty ? 2 * c->cap_dirty : 16;
        struct job **list = realloc(c->dirty_jobs, (size_t)cap * sizeof *list);
        if (!list) {
            core_log_line(c, CORE_LOG_ERROR, "out of memory: job %lld is written later", (long long)job->id);
            return;
        }
        c->dirty_jobs = list;
        c->cap_dirty = cap;
    }
    job->dirty = true;
    c->dirty_jobs[c->n_dirty++] = job;
}

void mark_attempt(struct core *c, struct job *job, struct attempt *a)
{
    a->dirty = true;
    mark_job(c, job);
}

void mark_checkpoint(struct core *c, struct job *job, struct checkpoint *k)
{
    k->changed_ns = now_wall(c);
    k->dirty = true;
    mark_job(c, job);
    if (checkpoint_file_work(job))
        list_add(&c->working, job, link_working);
    else
        list_remove(&c->working, job, link_working);
    c->work = true;
}

struct checkpoint_durable checkpoint_row(const struct checkpoint *k)
{
    return (struct checkpoint_durable){
        .state = k->state, .mirror = k->mirror, .pinned = k->pinned, .changed_ns = k->changed_ns};
}

void mark_node(struct core *c, struct node *n)
{
    if (n->dirty)
        return;
    n->dirty = true;
    n->next_dirty = c->dirty_nodes;
    c->dirty_nodes = n;
}

static bool open_change(struct core *c)
{
    if (!c->txn)
        c->txn = c->store.begin(c->store.arg);
    if (!c->txn)
        core_log_line(c, CORE_LOG_ERROR, "out of memory: a change is written later");
    return c->txn != NULL;
}

static void put_shard_row(struct core *c, const struct job *job, const struct checkpoint *k, int rank)
{
    const struct checkpoint_shard *s = &k->shards[rank];
    c->store.put_shard(c->txn, &(struct store_shard){.job = job->id,
                                                     .step = k->step,
                                                     .attempt = k->attempt,
                                                     .rank = rank,
                                                     .file = s->file,
                                                     .bytes = s->bytes,
                                                     .crc32c = s->crc32c,
                                                     .write_ms = s->write_ms});
}

void put_shard(struct core *c, struct job *job, struct checkpoint *k, int rank)
{
    if (open_change(c))
        put_shard_row(c, job, k, rank);
    else
        k->shards_dirty = true;
    mark_job(c, job);
}

void add_event(struct core *c, struct job *job, int attempt, const char *node, const char *actor, const char *kind,
               const char *fmt, ...)
{
    char text[4096];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    text[utf8_whole(text, strlen(text))] = '\0';
    if (job)
        core_log_line(c, CORE_LOG_INFO, "job %lld%s%s: %s: %s", (long long)job->id, node ? " node " : "",
                      node ? node : "", kind, text);
    else
        core_log_line(c, CORE_LOG_INFO, "%s: %s", kind, text);
    if (!open_change(c))
        return;
    c->store.add_event(c->txn, &(struct store_event){.id = c->next_event_id++,
                                                     .wall_ns = now_wall(c),
                                                     .job = job ? job->id : 0,
                                                     .attempt = attempt,
                                                     .node = node,
                                                     .actor = actor,
                                                     .kind = kind,
                                                     .text = text});
    if (job)
        mark_job(c, job);
    else
        c->jobless = true;
}

void after_durable(struct core *c, void (*fn)(struct core *, void *, int, const struct error *), void *arg,
                   void (*drop)(void *))
{
    after_durable_or_late(c, fn, NULL, arg, drop);
}

void after_durable_or_late(struct core *c, void (*fn)(struct core *, void *, int, const struct error *),
                           void (*late)(struct core *, void *, const struct error *), void *arg, void (*drop)(void *))
{
    struct after *a = calloc(1, sizeof *a);
    struct after **end = &c->after;
    if (!a) {
        struct error err;
        error_set(&err, ERR_NOMEM, "out of memory");
        fn(c, arg, ERR_NOMEM, &err);
        drop(arg);
        return;
    }
    *a = (struct after){.fn = fn, .late = late, .arg = arg, .drop = drop};
    while (*end)
        end = &(*end)->next;
    *end = a;
    if (late)
        due_at(c, now_mono(c) + CORE_STORE_NS);
}

/* ---- what the store refuses for good ------------------------------------------------- */

/* A change is lost with its rows: those of the job are all written again, with whatever is decided next and at the
 * latest in a second. (Its events are lost: they are in the log.) Until that is durable the job stays unsettled, so
 * that no order goes out for a row that is not on disk. */
static void job_refused(struct core *c, struct job *job)
{
    for (int i = 0; i < job->n_attempts; i++)
        job->attempts[i]->dirty = true;
    for (int i = 0; i < job->n_checkpoints; i++) {
        struct checkpoint *k = job->checkpoints[i];
        k->dirty = true;
        k->shards_dirty = k->state == CKPT(WRITING) || k->state == CKPT(COMMITTED);
    }
    if (job->refused)
        job->unsettled--;
    job->refused = true;
    c->refused_due = now_mono(c) + NS_PER_S;
    due_at(c, c->refused_due);
}

static void write_refused(struct core *c, int64_t now)
{
    c->refused_due = INT64_MAX;
    for (struct node *n = c->nodes; n && c->refused_nodes; n = n->next)
        mark_node(c, n);
    c->refused_nodes = false;
    for (int i = 0; i < c->n_jobs; i++) {
        if (!c->jobs[i]->refused)
            continue;
        mark_job(c, c->jobs[i]);
        if (!c->jobs[i]->dirty)
            c->refused_due = now + NS_PER_S;
    }
}

int64_t changes_run(struct core *c, int64_t now)
{
    if (now >= c->refused_due)
        write_refused(c, now);
    int64_t next = c->refused_due;
    struct error err;
    bool sick = c->store.health(c->store.arg, &err) != ERR_OK;
    for (struct change *ch = c->changes; ch; ch = ch->next) {
        bool over = sick && now >= ch->since + CORE_STORE_NS;
        for (struct after *a = ch->after; a; a = a->next) {
            if (!a->late)
                continue;
            if (over) {
                a->late(c, a->arg, &err);
                a->late = NULL;
            } else {
                int64_t due = ch->since + CORE_STORE_NS;
                if (due <= now) /* only slow so far */
                    due = now + NS_PER_S;
                next = due < next ? due : next;
            }
        }
    }
    return next;
}

void progress_changed(struct core *c, struct job *job)
{
    job->version++;
    c->ops.changed(c->ops.arg, job->id);
}

/* A copy, packed; empty for NULL. */
struct packed {
    uint8_t *bytes;
    size_t len;
};

static bool pack(const Boost__JobSpec *spec, struct packed *out)
{
    *out = (struct packed){0};
    if (!spec)
        return true;
    out->len = boost__job_spec__get_packed_size(spec);
    out->bytes = malloc(out->len + 1);
    if (out->bytes)
        boost__job_spec__pack(spec, out->bytes);
    return out->bytes != NULL;
}

/* Of the newest attempt, over or not. */
static double since_start_s(struct core *c, const struct job *job)
{
    const struct attempt *newest = job_attempt(job, job->n_attempts);
    return newest ? (double)(now_boot(c) - newest->start_boot) / (double)NS_PER_S : -1;
}

/* False: it is not written. */
static bool put_job_row(struct core *c, const struct job *job)
{
    Boost__Goodput g = BOOST__GOODPUT__INIT;
    struct packed spec, resolved, next_spec, next_resolved;
    account_totals(c, job, &g);
    bool packed = pack(job->spec, &spec);
    packed = pack(job->resolved, &resolved) && packed;
    packed = pack(job->next_spec, &next_spec) && packed;
    packed = pack(job->next_resolved, &next_resolved) && packed;
    if (packed)
        c->store.put_job(c->txn, &(struct store_job){.id = job->id,
                                                     .name = job->name,
                                                     .uid = job->uid,
                                                     .gid = job->gid,
                                                     .user = job->user,
                                                     .state = (int)job->state,
                                                     .stop_target = job->stop_target,
                                                     .reason = (int)job->reason,
                                                     .reason_text = job->reason_text ? job->reason_text : "",
                                                     .spec = spec.bytes,
                                                     .spec_len = spec.len,
                                                     .resolved = resolved.bytes,
                                                     .resolved_len = resolved.len,
                                                     .priority = job->priority,
                                                     .attempt = job->n_attempts,
                                                     .restarts_used = job->restarts_used,
                                                     .stuck_attempts = job->stuck_attempts,
                                                     .backoff_count = job->backoff_count,
                                                     .step = job->step,
                                                     .checkpoint_step = job->checkpoint_step,
                                                     .submitted_ns = job->submitted_ns,
                                                     .started_ns = job->started_ns,
                                                     .ended_ns = job->ended_ns,
                                                     .run_s = job->run_s,
                                                     .productive_s = g.productive_s,
                                                     .detection_s = g.detection_s,
                                                     .restart_s = g.restart_s,
                                                     .replay_s = g.replay_s,
                                                     .queue_s = g.queue_s,
                                                     .stall_s = g.stall_s,
                                                     .accounted_ns = now_wall(c),
                                                     .accounted_boot_ns = now_boot(c),
                                                     .accounted_boot = c->ops.boot_id ? c->ops.boot_id : "",
                                                     .attempt_s = since_start_s(c, job),
                                                     .loss = job->loss,
                                                     .eval_loss = job->eval_loss,
                                                     .next_spec = next_spec.bytes,
                                                     .next_spec_len = next_spec.len,
                                                     .next_resolved = next_resolved.bytes,
                                                     .next_resolved_len = next_resolved.len,
                                                     .next_step = job->next_step,
                                                     .array_job = job->array_job,
                                                     .array_index = job->array_index,
                                                     .array_limit = job->array_limit});
    else
        core_log_line(c, CORE_LOG_ERROR, "out of memory: the row of job %lld is not written", (long long)job->id);
    free(spec.bytes);
    free(resolved.bytes);
    free(next_spec.bytes);
    free(next_resolved.bytes);
    return packed;
}

static void put_attempt_row(struct core *c, const struct job *job, const struct attempt *a)
{
    char *placement = attempt_placement(a), *spares = attempt_spares(a);
    c->store.put_attempt(c->txn, &(struct store_attempt){.job = job->id,
                                                         .attempt = a->number,
                                                         .from_step = a->from_step,
                                                         .to_step = a->to_step,
                                                         .placement = placement ? placement : "",
                                                         .start_ns = a->start_ns,
                                                         .running_ns = a->running_ns,
                                                         .end_ns = a->end_ns,
                                                         .reason = (int)a->reason,
                                                         .text = a->text ? a->text : "",
                                                         .fenced = a->fenced,
                                                         .replay_until = a->replay_until,
                                                         .spares = spares});
    free(placement);
    free(spares);
}

static void put_checkpoint_row(struct core *c, const struct job *job, const struct checkpoint *k)
{
    c->store.put_checkpoint(c->txn, &(struct store_checkpoint){.job = job->id,
                                                               .step = k->step,
                                                               .attempt = k->attempt,
                                                               .state = (int)k->state,
                                                               .path = k->path ? k->path : "",
                                                               .world = k->world,
                                                               .changed_ns = k->changed_ns,
                                                               .note = k->note ? k->note : "",
                                                               .mirror = (int)k->mirror,
                                                               .mirror_url = k->mirror_url ? k->mirror_url : "",
                                                               .mirror_note = k->mirror_note ? k->mirror_note : "",
                                                               .pinned = k->pinned});
}

static int64_t drain_deadline(struct core *c, const struct node *n)
{
    return n->drain_due ? now_wall(c) + (n->drain_due - now_mono(c)) : 0;
}

static void put_node_row(struct core *c, const struct node *n)
{
    c->store.put_node(c->txn, &(struct store_node){.name = n->name,
                                                   .boot_id = n->boot_id ? n->boot_id : "",
                                                   .admin = (int)n->admin,
                                                   .admin_reason = n->admin_reason ? n->admin_reason : "",
                                                   .admin_by = n->admin_by ? n->admin_by : "",
                                                   .admin_ns = n->admin_ns,
                                                   .cpu_slots = n->cpu_slots,
                                                   .memory_mib = n->memory_mib,
                                                   .gpus = n->gpus,
                                                   .gpu_name = n->gpu_name ? n->gpu_name : "",
                                                   .gpu_mib = n->gpu_mib,
                                                   .drain_deadline_ns = drain_deadline(c, n),
                                                   .uid = n->uid,
                                                   .data_address = n->data_address ? n->data_address : ""});
}

static void put_job_rows(struct core *c, struct change *ch, struct job *job)
{
    if (put_job_row(c, job))
        ch->rows[ch->n_rows++] =
            (struct change_row){.job = job->id, .state = job->state, .restarts_used = job->restarts_used};
    for (int i = 0; i < job->n_attempts; i++) {
        if (job->attempts[i]->dirty)
            put_attempt_row(c, job, job->attempts[i]);
        job->attempts[i]->dirty = false;
    }
    for (int i = 0; i < job->n_checkpoints; i++) {
        struct checkpoint *k = job->checkpoints[i];
        if (k->dirty) {
            put_checkpoint_row(c, job, k);
            ch->rows[ch->n_rows++] = (struct change_row){
                .job = job->id, .step = k->step, .attempt = k->attempt, .checkpoint = checkpoint_row(k)};
        }
        for (int r = 0; k->shards_dirty && r < k->world; r++)
            if (k->shards[r].have)
                put_shard_row(c, job, k, r);
        k->dirty = k->shards_dirty = false;
    }
    job->dirty = false;
    job->unsettled += !job->refused; /* a refused one is so already */
    job->refused = false;
}

static size_t count_rows(const struct core *c)
{
    size_t n = (size_t)c->n_dirty;
    for (int i = 0; i < c->n_dirty; i++)
        for (int k = 0; k < c->dirty_jobs[i]->n_checkpoints; k++)
            n += c->dirty_jobs[i]->checkpoints[k]->dirty;
    return n;
}

/* By numbers: what a row was of may be forgotten meanwhile. */
static void row_durable(struct core *c, const struct change_row *row)
{
    struct job *job = core_job(c, row->job);
    struct checkpoint *k = job && row->attempt ? job_checkpoint(job, row->step, row->attempt) : NULL;
    if (job && !row->attempt) {
        c->n_ending -= job_state_terminal(row->state) && !job_state_terminal(job->durable.state);
        job->durable.row = true;
        job->durable.state = row->state;
        job->durable.restarts_used = row->restarts_used;
    } else if (k) {
        bool news = k->durable.state != CKPT(COMMITTED) && row->checkpoint.state == CKPT(COMMITTED);
        k->durable = row->checkpoint;
        if (news)
            checkpoints_retain(c, job); /* others may have waited for it */
    }
}

/* The job has no change on its way: what the table asked for may run. */
static void job_act(struct core *c, struct job *job)
{
    struct attempt *a = job_live_attempt(job);
    unsigned actions = job->actions;
    job->actions = 0;
    job->acknowledged = true;
    if (a)
        a->start_durable = true;
    for (int i = 0; i < job->n_attempts; i++) {
        if (job->attempts[i]->acks_owed)
            ack_attempt_ends(c, job, job->attempts[i]);
        job->attempts[i]->acks_owed = false;
    }
    if (a && actions)
        attempt_send(c, job, actions, NULL);
    if (a && a->close_due && checkpoints_open(job, a) == 1) /* the manifests' time begins now */
        attempt_close_anew(c, a);
    c->work = c->work || job->working.in;
    if (job->pending.in && !depend_hold(c, job))
        queue_settled(c, job);
    if (job_state_terminal(job->state) && c->dependent.head) { /* they may have waited for its end */
        depend_ended(c);
        c->schedule = true;
    }
}

static void change_done(void *arg, int rc, const struct error *err)
{
    struct change *ch = arg;
    struct core *c = ch->core;
    if (ch->prev)
        ch->prev->next = ch->next;
    else
        c->changes = ch->next;
    if (ch->next)
        ch->next->prev = ch->prev;
    if (rc) {
        c->stats.store_failures++;
        core_log_line(c, CORE_LOG_ERROR, "the store refused a change: %s", err ? err->message : "?");
    }
    for (int i = 0; i < ch->n_rows && !rc; i++)
        row_durable(c, &ch->rows[i]);
    for (int i = 0; i < ch->n_jobs; i++) {
        struct job *job = ch->jobs[i];
        c->ops.changed(c->ops.arg, job->id);
        if (rc)
            job_refused(c, job);
        else if (--job->unsettled == 0)
            job_act(c, job);
    }
    if (rc && ch->jobless) {
        c->refused_nodes = true;
        c->refused_due = now_mono(c) + NS_PER_S;
        due_at(c, c->refused_due);
    }
    if (ch->jobless)
        c->ops.changed(c->ops.arg, 0);
    while (ch->after) {
        struct after *a = ch->after;
        ch->after = a->next;
        a->fn(c, a->arg, rc, err);
        a->drop(a->arg);
        free(a);
    }
    free(ch->jobs);
    free(ch->rows);
    free(ch);
    change_commit(c);
}

void change_commit(struct core *c)
{
    bool nodes = c->dirty_nodes != NULL;
    if (!c->n_dirty && !c->txn && !c->after && !nodes)
        return;
    struct change *ch = calloc(1, sizeof *ch);
    if (ch)
        ch->rows = malloc((count_rows(c) + 1) * sizeof *ch->rows);
    if (!ch || !ch->rows || !open_change(c)) {
        free(ch ? ch->rows : NULL);
        free(ch);
        due_at(c, now_mono(c) + NS_PER_S);
        return;
    }
    for (struct node *n; (n = c->dirty_nodes);) {
        c->dirty_nodes = n->next_dirty;
        put_node_row(c, n);
        n->dirty = false;
    }
    ch->core = c;
    ch->since = now_mono(c);
    ch->jobs = c->dirty_jobs;
    ch->n_jobs = c->n_dirty;
    ch->after = c->after;
    ch->jobless = c->jobless || nodes;
    for (int i = 0; i < c->n_dirty; i++)
        put_job_rows(c, ch, c->dirty_jobs[i]);
    ch->next = c->changes;
    if (ch->next)
        ch->next->prev = ch;
    c->changes = ch;
    void *txn = c->txn;
    c->txn = NULL;
    c->dirty_jobs = NULL;
    c->n_dirty = c->cap_dirty = 0;
    c->after = NULL;
    c->jobless = false;
    c->store.commit(txn, change_done, ch);
}
