/* The controller core: making and ending it, the open change, transitions, timers. */
#include "daemon/core.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"

/* ---- time, log ------------------------------------------------------------------- */

int64_t now_mono(struct core *c)
{
    return c->ops.mono_ns(c->ops.arg);
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

/* ---- lists of jobs ------------------------------------------------------------------ */

struct job_link *link_active(struct job *job)
{
    return &job->active;
}

struct job_link *link_pending(struct job *job)
{
    return &job->pending;
}

struct job_link *link_working(struct job *job)
{
    return &job->working;
}

/* The scheduler's order: priority, then submit. The other lists have none: new ones come first. */
static bool before(const struct job *x, const struct job *y, struct job_link *(*link)(struct job *))
{
    if (link != link_pending)
        return false;
    return x->priority != y->priority ? x->priority > y->priority : x->id < y->id;
}

void list_add(struct job **list, struct job *job, struct job_link *(*link)(struct job *))
{
    struct job_link *l = link(job);
    if (l->in)
        return;
    struct job *prev = NULL, *next = *list;
    while (next && before(next, job, link)) {
        prev = next;
        next = link(next)->next;
    }
    *l = (struct job_link){ .next = next, .prev = prev, .in = true };
    if (prev)
        link(prev)->next = job;
    else
        *list = job;
    if (next)
        link(next)->prev = job;
}

void list_remove(struct job **list, struct job *job, struct job_link *(*link)(struct job *))
{
    struct job_link *l = link(job);
    if (!l->in)
        return;
    if (l->prev)
        link(l->prev)->next = l->next;
    else
        *list = l->next;
    if (l->next)
        link(l->next)->prev = l->prev;
    *l = (struct job_link){ .in = false };
}

int core_add_job(struct core *c, struct job *job)
{
    if (c->n_jobs == c->cap_jobs) {
        int cap = c->cap_jobs ? 2 * c->cap_jobs : 64;
        struct job **jobs = realloc(c->jobs, (size_t)cap * sizeof *jobs);
        if (!jobs)
            return ERR_NOMEM;
        c->jobs = jobs;
        c->cap_jobs = cap;
    }
    c->jobs[c->n_jobs++] = job;
    if (!job_state_terminal(job->state))
        list_add(&c->active, job, link_active);
    return ERR_OK;
}

void core_forget_job(struct core *c, struct job *job)
{
    list_remove(&c->active, job, link_active);
    list_remove(&c->pending, job, link_pending);
    list_remove(&c->working, job, link_working);
    for (int i = 0; i < c->n_jobs; i++) {
        if (c->jobs[i] == job) {
            memmove(&c->jobs[i], &c->jobs[i + 1], (size_t)(c->n_jobs - i - 1) * sizeof *c->jobs);
            c->n_jobs--;
            break;
        }
    }
    for (int i = 0; i < c->n_dirty; i++)
        if (c->dirty_jobs[i] == job)
            c->dirty_jobs[i--] = c->dirty_jobs[--c->n_dirty];
    job_free(job);
}

/* Index of the first job with an id above. */
static int upper_bound(const struct core *c, int64_t id)
{
    int lo = 0, hi = c->n_jobs;
    while (lo < hi) {
        int mid = lo + (hi - lo) / 2;
        if (c->jobs[mid]->id <= id)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

struct job *core_next_job(struct core *c, int64_t after_id)
{
    int i = upper_bound(c, after_id);
    return i < c->n_jobs ? c->jobs[i] : NULL;
}

struct job *core_job(struct core *c, int64_t id)
{
    int i = upper_bound(c, id);
    return i > 0 && c->jobs[i - 1]->id == id ? c->jobs[i - 1] : NULL;
}

/* ---- the open change ------------------------------------------------------------------ */

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

void mark_node(struct core *c, struct node *n)
{
    n->dirty = true;
    (void)c;
}

static bool open_change(struct core *c)
{
    if (!c->txn)
        c->txn = c->store.begin(c->store.arg);
    if (!c->txn)
        core_log_line(c, CORE_LOG_ERROR, "out of memory: a change is written later");
    return c->txn != NULL;
}

void put_shard(struct core *c, struct job *job, struct checkpoint *k, int rank)
{
    const struct checkpoint_shard *s = &k->shards[rank];
    if (!open_change(c))
        return;
    c->store.put_shard(c->txn, &(struct store_shard){ .job = job->id,
                                                      .step = k->step,
                                                      .attempt = k->attempt,
                                                      .rank = rank,
                                                      .file = s->file,
                                                      .bytes = s->bytes,
                                                      .crc32c = s->crc32c,
                                                      .write_ms = s->write_ms });
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
    core_log_line(c, CORE_LOG_INFO, "job %lld%s%s: %s: %s", job ? (long long)job->id : 0LL, node ? " node " : "",
                  node ? node : "", kind, text);
    if (!open_change(c))
        return;
    c->store.add_event(c->txn, &(struct store_event){ .id = c->next_event_id++,
                                                      .wall_ns = now_wall(c),
                                                      .job = job ? job->id : 0,
                                                      .attempt = attempt,
                                                      .node = node,
                                                      .actor = actor,
                                                      .kind = kind,
                                                      .text = text });
    if (job)
        mark_job(c, job);
    else
        c->jobless = true;
}

void after_durable(struct core *c, void (*fn)(struct core *, void *, int, const struct error *), void *arg,
                   void (*drop)(void *))
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
    *a = (struct after){ .fn = fn, .arg = arg, .drop = drop };
    while (*end)
        end = &(*end)->next;
    *end = a;
}

void progress_changed(struct core *c, struct job *job)
{
    job->version++;
    c->ops.changed(c->ops.arg, job->id);
}

static void put_job_row(struct core *c, const struct job *job)
{
    Boost__Goodput g = BOOST__GOODPUT__INIT;
    account_totals(c, job, &g);
    size_t spec_len = boost__job_spec__get_packed_size(job->spec);
    size_t resolved_len = boost__job_spec__get_packed_size(job->resolved);
    uint8_t *spec = malloc(spec_len + resolved_len + 1);
    if (!spec) {
        core_log_line(c, CORE_LOG_ERROR, "out of memory: the row of job %lld is not written", (long long)job->id);
        return;
    }
    uint8_t *resolved = spec + spec_len;
    boost__job_spec__pack(job->spec, spec);
    boost__job_spec__pack(job->resolved, resolved);
    c->store.put_job(c->txn, &(struct store_job){ .id = job->id,
                                                  .name = job->name,
                                                  .uid = job->uid,
                                                  .gid = job->gid,
                                                  .user = job->user,
                                                  .state = (int)job->state,
                                                  .stop_target = job->stop_target,
                                                  .reason = (int)job->reason,
                                                  .reason_text = job->reason_text ? job->reason_text : "",
                                                  .spec = spec,
                                                  .spec_len = spec_len,
                                                  .resolved = resolved,
                                                  .resolved_len = resolved_len,
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
                                                  .loss = job->loss,
                                                  .eval_loss = job->eval_loss });
    free(spec);
}

static void put_attempt_row(struct core *c, const struct job *job, const struct attempt *a)
{
    char *placement = attempt_placement(a);
    c->store.put_attempt(c->txn, &(struct store_attempt){ .job = job->id,
                                                          .attempt = a->number,
                                                          .from_step = a->from_step,
                                                          .to_step = a->to_step,
                                                          .placement = placement ? placement : "",
                                                          .start_ns = a->start_ns,
                                                          .running_ns = a->running_ns,
                                                          .end_ns = a->end_ns,
                                                          .reason = (int)a->reason,
                                                          .text = a->text ? a->text : "",
                                                          .fenced = a->fenced });
    free(placement);
}

static void put_checkpoint_row(struct core *c, const struct job *job, const struct checkpoint *k)
{
    c->store.put_checkpoint(c->txn, &(struct store_checkpoint){ .job = job->id,
                                                                .step = k->step,
                                                                .attempt = k->attempt,
                                                                .state = (int)k->state,
                                                                .path = k->path ? k->path : "",
                                                                .world = k->world,
                                                                .changed_ns = k->changed_ns,
                                                                .note = k->note ? k->note : "" });
}

static void put_node_row(struct core *c, const struct node *n)
{
    c->store.put_node(c->txn, &(struct store_node){ .name = n->name,
                                                    .boot_id = n->boot_id ? n->boot_id : "",
                                                    .admin = (int)n->admin,
                                                    .admin_reason = n->admin_reason ? n->admin_reason : "",
                                                    .admin_by = n->admin_by ? n->admin_by : "",
                                                    .admin_ns = n->admin_ns,
                                                    .cpu_slots = n->cpu_slots,
                                                    .memory_mib = n->memory_mib,
                                                    .uid = n->uid,
                                                    .data_address = n->data_address ? n->data_address : "" });
}

static void put_job_rows(struct core *c, struct job *job)
{
    put_job_row(c, job);
    for (int i = 0; i < job->n_attempts; i++) {
        if (job->attempts[i]->dirty)
            put_attempt_row(c, job, job->attempts[i]);
        job->attempts[i]->dirty = false;
    }
    for (int i = 0; i < job->n_checkpoints; i++) {
        if (job->checkpoints[i]->dirty)
            put_checkpoint_row(c, job, job->checkpoints[i]);
        job->checkpoints[i]->dirty = false;
    }
    job->dirty = false;
    job->unsettled++;
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
    if (a && actions)
        attempt_send(c, job, actions, NULL);
    c->work = c->work || job->working.in;
    c->schedule = c->schedule || job->pending.in;
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
    for (int i = 0; i < ch->n_jobs; i++) {
        struct job *job = ch->jobs[i];
        c->ops.changed(c->ops.arg, job->id);
        if (--job->unsettled == 0)
            job_act(c, job);
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
    free(ch);
    change_commit(c);
}

void change_commit(struct core *c)
{
    bool nodes = false;
    for (struct node *n = c->nodes; n; n = n->next)
        nodes = nodes || n->dirty;
    if (!c->n_dirty && !c->txn && !c->after && !nodes)
        return;
    struct change *ch = calloc(1, sizeof *ch);
    if (!ch || !open_change(c)) {
        free(ch);
        due_at(c, now_mono(c) + NS_PER_S);
        return;
    }
    for (struct node *n = c->nodes; n; n = n->next) {
        if (n->dirty)
            put_node_row(c, n);
        n->dirty = false;
    }
    ch->core = c;
    ch->jobs = c->dirty_jobs;
    ch->n_jobs = c->n_dirty;
    ch->after = c->after;
    ch->jobless = c->jobless || nodes;
    for (int i = 0; i < c->n_dirty; i++)
        put_job_rows(c, c->dirty_jobs[i]);
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

/* ---- transitions ------------------------------------------------------------------------ */

void job_reason(struct job *job, Boost__Reason__Value reason, const char *fmt, ...)
{
    char text[4096];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    job->reason = reason;
    text_set(&job->reason_text, text);
}

void job_pend(struct core *c, struct job *job)
{
    bool pend = job->state == STATE(QUEUED) ||
                (job->state == STATE(RECOVERING) && !job_live_attempt(job) && !job->backoff_due);
    if (pend == job->pending.in)
        return;
    if (pend)
        list_add(&c->pending, job, link_pending);
    else
        list_remove(&c->pending, job, link_pending);
    c->schedule = true;
}

static void job_finish(struct core *c, struct job *job)
{
    job->ended_ns = now_wall(c);
    job->backoff_due = 0;
    job->tokens_per_s = NAN;
    if (c->parked)
        due_at(c, 0);
}

bool job_fire(struct core *c, struct job *job, enum job_event event)
{
    struct job_transition t = job_step(job->state, job->stop_target, event);
    if (!t.legal) {
        c->stats.illegal_transitions++;
        core_log_line(c, CORE_LOG_WARN, "job %lld: %s in state %s is not in the table", (long long)job->id,
                      job_event_name(event), job_state_name(job->state));
        return false;
    }
    if (job_state_live(job->state) && !job_state_live(t.next))
        job->run_s = job_elapsed_s(c, job);
    if (t.actions & ACT_CLOSE_ATTEMPT)
        attempt_close(c, job);
    job->state = t.next;
    if (t.next != STATE(STOPPING))
        job->stop_target = 0;
    else if (t.stop_target >= 0)
        job->stop_target = t.stop_target;
    if (job->starting && event != EV_PLACED)
        start_cancel(c, job);
    if (t.next != STATE(RECOVERING))
        job->backoff_due = 0;
    if ((t.actions & ACT_KILL) && job_live_attempt(job))
        attempt_mark_kill(c, job, job_live_attempt(job));
    if ((t.actions & ACT_STOP_TERM) && job_live_attempt(job))
        grace_arm(c, job, job_live_attempt(job));
    if (t.actions & ACT_BACKOFF)
        backoff_arm(c, job);
    if (t.actions & ACT_FINISH)
        job_finish(c, job);
    if (t.actions & ACT_SCHEDULE)
        c->schedule = true;
    job->actions |= t.actions & (ACT_START | ACT_STOP_TERM | ACT_KILL);
    account_state(c, job);
    job_pend(c, job);
    if (job_state_terminal(t.next))
        list_remove(&c->active, job, link_active);
    mark_job(c, job);
    if (job->state == STATE(STOPPING) && !job_live_attempt(job))
        return job_fire(c, job, EV_ATTEMPT_GONE);
    return true;
}

/* ---- timers --------------------------------------------------------------------------------- */

int64_t core_run(struct core *c)
{
    int64_t now = now_mono(c);
    /* A pass may make more work; what it makes is due at once, so a bounded number of rounds. */
    for (int round = 0; round < 8 && (now >= c->due || c->schedule || c->work); round++) {
        c->due = INT64_MAX;
        due_at(c, nodes_run(c, now));
        due_at(c, tasks_run(c, now));
        if (now >= c->kv_due)
            c->kv_due = kv_expire(c->kv, now);
        due_at(c, c->kv_due);
        for (struct job *job = c->active, *next; job; job = next) {
            next = job->active.next;
            due_at(c, attempt_run(c, job, now));
        }
        c->work = false;
        due_at(c, checkpoints_run(c, now));
        if (c->schedule) {
            c->schedule = false;
            schedule_pass(c);
        }
        parked_run(c, now);
        due_at(c, parked_due(c));
        change_commit(c);
    }
    return c->due;
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
    c->rendezvous_ns = config->rendezvous_timeout_ms * NS_PER_MS;
    c->kill_confirm_ns = config->kill_confirm_ms * NS_PER_MS;
    c->up_since = now_mono(c);
    c->kv_due = INT64_MAX;
    c->next_task = 1;
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
        if (c->jobs[i]->starting)
            free(c->jobs[i]->starting->nodes);
        free(c->jobs[i]->starting);
        job_free(c->jobs[i]);
    }
    free(c->jobs);
    free(c->dirty_jobs);
    while (c->nodes) {
        struct node *n = c->nodes;
        c->nodes = n->next;
        node_free(n);
    }
    kv_free(c->kv);
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
