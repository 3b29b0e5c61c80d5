/* From the store to memory at a start. Timers are armed anew, nothing is sent: every
 * node is JOINING, and what its agent has and has not decides when it registers. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"

struct loader {
    struct core *c;
    struct error err; /* of the first row that did not load */
};

static void bad_row(struct loader *l, const char *fmt, ...) PRINTF_LIKE(2, 3);
static void bad_row(struct loader *l, const char *fmt, ...)
{
    va_list args;
    char text[512];
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    /* One bad row costs its job, not the daemon (D11). */
    core_log_line(l->c, CORE_LOG_ERROR, "state.db: %s: left out", text);
}

static bool is_this_boot(const struct core *c, const char *id)
{
    return id && *id && c->ops.boot_id && strcmp(id, c->ops.boot_id) == 0;
}

static void load_job(void *arg, const struct store_job *row)
{
    struct loader *l = arg;
    struct job *job = job_new();
    if (!job) {
        error_set(&l->err, ERR_NOMEM, "out of memory while loading jobs");
        return;
    }
    job->spec = boost__job_spec__unpack(NULL, row->spec_len, row->spec);
    job->resolved = boost__job_spec__unpack(NULL, row->resolved_len, row->resolved);
    if (!job->spec || !job->resolved || !job->resolved->run || row->state < 0 || row->state >= JOB_STATES) {
        bad_row(l, "job %" PRId64 " does not parse", row->id);
        job_free(job);
        return;
    }
    job->id = row->id;
    text_set(&job->name, row->name);
    job->uid = row->uid;
    job->gid = row->gid;
    text_set(&job->user, row->user);
    job->state = job->durable.state = (Boost__JobState__Value)row->state;
    job->stop_target = row->stop_target;
    job->reason = (Boost__Reason__Value)row->reason;
    text_set(&job->reason_text, row->reason_text);
    job->priority = row->priority;
    job->restarts_used = job->durable.restarts_used = row->restarts_used;
    job->stuck_attempts = row->stuck_attempts;
    job->backoff_count = row->backoff_count;
    job->step = row->step;
    job->checkpoint_step = row->checkpoint_step;
    job->submitted_ns = row->submitted_ns;
    job->started_ns = row->started_ns;
    job->ended_ns = row->ended_ns;
    job->run_s = row->run_s;
    job->productive_s = row->productive_s;
    job->detection_s = row->detection_s;
    job->restart_s = row->restart_s;
    job->replay_s = row->replay_s;
    job->queue_s = row->queue_s;
    job->loss = row->loss;
    job->eval_loss = row->eval_loss;
    job->stall_s = row->stall_s;
    job->accounted_ns = row->accounted_ns;
    job->accounted_boot_ns = is_this_boot(l->c, row->accounted_boot) ? row->accounted_boot_ns : 0;
    job->attempt_s = row->attempt_s;
    job->accounted_attempt = row->attempt;
    job->next_step = row->next_step;
    job->array_job = row->array_job;
    job->array_index = row->array_index;
    job->array_limit = row->array_limit;
    if (row->next_spec)
        job->next_spec = boost__job_spec__unpack(NULL, row->next_spec_len, row->next_spec);
    if (row->next_resolved)
        job->next_resolved = boost__job_spec__unpack(NULL, row->next_resolved_len, row->next_resolved);
    job->acknowledged = job->durable.row = true;
    job->version = 1;
    if (core_add_job(l->c, job)) {
        error_set(&l->err, ERR_NOMEM, "out of memory while loading jobs");
        job_free(job);
    }
}

static void load_attempt(void *arg, const struct store_attempt *row)
{
    struct loader *l = arg;
    struct job *job = core_job(l->c, row->job);
    struct error err;
    if (!job || row->attempt != job->n_attempts + 1) {
        bad_row(l, "attempt %d of job %" PRId64 " has no place", row->attempt, row->job);
        return;
    }
    struct attempt *a = job_add_attempt(job);
    if (!a) {
        error_set(&l->err, ERR_NOMEM, "out of memory while loading attempts");
        return;
    }
    a->from_step = row->from_step;
    a->to_step = row->to_step;
    a->start_ns = row->start_ns;
    a->running_ns = row->running_ns;
    a->end_ns = row->end_ns;
    a->reason = (Boost__Reason__Value)row->reason;
    text_set(&a->text, row->text);
    a->fenced = row->fenced;
    a->replay_until = row->replay_until;
    int rc = attempt_parse_placement(a, row->placement, &err);
    for (const char *s = row->spares ? row->spares : ""; *s && !rc;) {
        size_t len = strcspn(s, ",");
        if (attempt_add_spare(a, s, len))
            rc = error_set(&err, ERR_NOMEM, "out of memory while loading attempts");
        s += len + (s[len] == ',');
    }
    if (rc == ERR_CORRUPT)
        bad_row(l, "attempt %d of job %" PRId64 ": %s", row->attempt, row->job, err.message);
    else if (rc)
        l->err = err;
}

static void load_node(void *arg, const struct store_node *row)
{
    struct loader *l = arg;
    struct node *n = node_get(l->c, row->name);
    if (!n) {
        error_set(&l->err, ERR_NOMEM, "out of memory while loading nodes");
        return;
    }
    text_set(&n->boot_id, row->boot_id);
    n->admin = (Boost__NodeAdmin__Value)row->admin;
    text_set(&n->admin_reason, row->admin_reason);
    text_set(&n->admin_by, row->admin_by);
    n->admin_ns = row->admin_ns;
    n->cpu_slots = row->cpu_slots;
    n->memory_mib = row->memory_mib;
    n->gpus = row->gpus;
    text_set(&n->gpu_name, row->gpu_name ? row->gpu_name : "");
    n->gpu_mib = row->gpu_mib;
    if (row->drain_deadline_ns)
        n->drain_due = now_mono(l->c) + (row->drain_deadline_ns - now_wall(l->c));
    n->uid = row->uid;
    text_set(&n->data_address, row->data_address);
}

static void load_checkpoint(void *arg, const struct store_checkpoint *row)
{
    struct loader *l = arg;
    struct job *job = core_job(l->c, row->job);
    struct checkpoint *k = job && row->world > 0 ? job_add_checkpoint(job, row->step, row->attempt, row->world) : NULL;
    if (!k) {
        bad_row(l, "checkpoint %" PRId64 " of job %" PRId64 " has no place", row->step, row->job);
        return;
    }
    k->state = (Boost__CheckpointState__Value)row->state;
    text_set(&k->path, row->path);
    text_set(&k->note, row->note);
    k->mirror = (Boost__MirrorState__Value)row->mirror;
    text_set(&k->mirror_url, row->mirror_url ? row->mirror_url : "");
    text_set(&k->mirror_note, row->mirror_note ? row->mirror_note : "");
    k->changed_ns = row->changed_ns;
    k->damaged = strncmp(row->note, "damaged: ", 9) == 0;
    k->aside = strncmp(row->note, "set aside: ", 11) == 0;
    k->pinned = row->pinned;
    k->durable = checkpoint_row(k);
}

static void load_shard(void *arg, const struct store_shard *row)
{
    struct loader *l = arg;
    struct job *job = core_job(l->c, row->job);
    struct checkpoint *k = job ? job_checkpoint(job, row->step, row->attempt) : NULL;
    if (!k || row->rank < 0 || row->rank >= k->world) {
        bad_row(l, "shard %d of checkpoint %" PRId64 " of job %" PRId64 " has no place", row->rank, row->step,
                row->job);
        return;
    }
    struct checkpoint_shard *s = &k->shards[row->rank];
    k->n_shards += !s->have;
    s->have = true;
    text_set(&s->file, row->file);
    s->bytes = row->bytes;
    s->crc32c = row->crc32c;
    s->write_ms = row->write_ms;
}

static void load_metric_seq(void *arg, int64_t job_id, int attempt, int rank, int64_t seq)
{
    struct loader *l = arg;
    struct job *job = core_job(l->c, job_id);
    struct attempt *a = job ? job_attempt(job, attempt) : NULL;
    if (a && rank >= 0 && rank < a->world)
        a->ranks[rank].metrics_seq = seq;
    if (a && rank == 0)
        a->metrics_shown = seq;
}

/* ---- what state calls for ------------------------------------------------------------------ */

/* The time already spent, by this machine's own clock; a step of it back counts as none. */
static int64_t mono_of(struct core *c, int64_t wall_ns)
{
    int64_t ago = now_wall(c) - wall_ns;
    return now_mono(c) - (ago > 0 ? ago : 0);
}

static void adopt_attempt(struct core *c, struct job *job, struct attempt *a)
{
    int64_t now = now_mono(c);
    const struct checkpoint *from = NULL;
    bool checkpointed = false;
    for (int i = 0; i < job->n_checkpoints; i++) {
        const struct checkpoint *k = job->checkpoints[i];
        if (k->step == a->from_step && k->attempt < a->number && k->state == CKPT(COMMITTED))
            from = k;
        checkpointed = checkpointed || k->attempt == a->number;
        if (k->attempt == a->number && k->state == CKPT(COMMITTED) && k->step > a->from_step)
            a->committed = true;
    }
    a->advanced = checkpoints_highest(job, a->number) > checkpoints_highest(job, a->number - 1);
    a->from_attempt = from && a->from_step > 0 ? from->attempt : 0;
    a->progress_mono = now;
    a->start_durable = true;
    /* See attempt_mark_kill(): a reason in the row of a live attempt means that its end was decided. */
    a->decided = a->reason != REASON(NONE);
    a->failing = a->decided;
    a->kill = a->decided;
    if (job->state == STATE(STARTING))
        a->rendezvous_due = now + c->rendezvous_ns;
    if (job->state == STATE(STOPPING) && !a->kill)
        grace_arm(c, job, a);
    for (int p = 0; p < a->n_parts; p++) {
        struct node *n = node_get(c, a->parts[p].node);
        a->parts[p].heard = checkpointed; /* it cannot be that its start never arrived */
        if (n)
            node_hold(n, job->id, a->number, spec_pool(job->resolved), a->parts[p].n_ranks);
    }
    elastic_wanted(c, job);
}

/* How long ago the attempt began: what its job's row says, and what passed since. */
static void adopt_start(struct core *c, const struct job *job, struct attempt *a)
{
    int64_t ago = now_mono(c) - mono_of(c, a->start_ns);
    if (job->attempt_s >= 0 && job->accounted_ns && job->accounted_attempt == a->number)
        ago = (int64_t)(job->attempt_s * (double)NS_PER_S) + account_away(c, job);
    a->start_mono = now_mono(c) - ago;
    a->start_boot = now_boot(c) - ago;
    int64_t took = a->running_ns - a->start_ns;
    if (a->running_ns)
        a->running_mono = a->start_mono + (took < 0 ? 0 : took < ago ? took : ago);
}

static void adopt(struct core *c, struct job *job)
{
    struct attempt *newest = job_attempt(job, job->n_attempts);
    struct attempt *a = job_live_attempt(job);
    if (newest)
        adopt_start(c, job, newest);
    if (a)
        adopt_attempt(c, job, a);
    if (a && !a->n_parts) /* its row is damaged: whatever still runs of it is fenced when its agent registers */
        attempt_fail(c, job, a, CLASS(INFRA), REASON(NodeLost), "node-lost", NULL,
                     "where it ran is not known: its placement in state.db cannot be read");
    if (job->state == STATE(RECOVERING) && !a && newest) {
        int64_t delay = c->backoff_min_ns;
        for (int i = 1; i < job->backoff_count && delay < c->backoff_max_ns; i++)
            delay *= 2;
        int64_t ago = now_boot(c) - newest->start_boot - attempt_lasted(c, newest);
        job->backoff_from = now_mono(c) - (ago > 0 ? ago : 0);
        job->backoff_due = job->backoff_from + (delay < c->backoff_max_ns ? delay : c->backoff_max_ns);
    }
    if (job->state == STATE(STOPPING) && !a)
        job_fire(c, job, EV_ATTEMPT_GONE);
    spares_hold(c, job);
    account_adopted(c, job);
    share_add_past(c, job);
    job_pend(c, job);
    job_busy(c, job);
    if (checkpoint_file_work(job))
        list_add(&c->working, job, link_working);
}

void core_adopted(struct core *c, bool now)
{
    c->adopted = true;
    if (!now)
        return;
    c->settle_until = c->up_since + c->restart_grace_ns;
    c->next_job_id += CORE_ADOPTED_GAP;
    c->next_event_id += CORE_ADOPTED_GAP;
}

bool core_settling(struct core *c)
{
    if (!c->settle_until)
        return false;
    bool waits = false;
    for (const struct node *n = c->nodes; n; n = n->next)
        waits = waits || n->liveness == LIVENESS(JOINING);
    if (waits && now_mono(c) < c->settle_until) {
        due_at(c, c->settle_until);
        return true;
    }
    c->settle_until = 0;
    return false;
}

int core_load(struct core *c, struct error *err)
{
    struct loader l = {.c = c};
    error_clear(&l.err);
    const struct core_store *s = &c->store;
    int rc = s->load_jobs(s->arg, load_job, &l, err);
    if (!rc)
        rc = s->load_attempts(s->arg, load_attempt, &l, err);
    if (!rc)
        rc = s->load_nodes(s->arg, load_node, &l, err);
    if (!rc)
        rc = s->load_checkpoints(s->arg, load_checkpoint, &l, err);
    if (!rc)
        rc = s->load_shards(s->arg, load_shard, &l, err);
    if (!rc)
        rc = s->load_metric_seqs(s->arg, load_metric_seq, &l, err);
    if (!rc && l.err.code) {
        if (err)
            *err = l.err;
        rc = (int)l.err.code;
    }
    if (rc)
        return rc;
    c->next_job_id = s->max_job_id(s->arg) + 1;
    c->learn_below = c->next_job_id + 2 * CORE_ADOPTED_GAP;
    c->next_event_id = s->max_event_id(s->arg) + 1;
    for (int i = 0; i < c->n_jobs; i++)
        adopt(c, c->jobs[i]);
    depend_ended(c);
    return ERR_OK;
}
