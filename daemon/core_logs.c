/* Logs: asked of the node's agent, which keeps the files; what the controller kept of
 * a rank's last words when the node cannot be reached (D39). */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"

typedef void (*log_reply_fn)(void *arg, int rc, const struct error *err, const struct core_log *log);

struct log_read {
    log_reply_fn reply;
    void *arg;
    int attempt, rank;
    int64_t offset;
    bool has_offset;
};

/* A reader of a job that has not started waits here. */
struct parked_log {
    struct parked_log *next;
    int64_t job, deadline;
    Boost__LogsRequest request; /* numbers only */
    log_reply_fn reply;
    void *arg;
};

static void drop_read(void *arg)
{
    free(arg);
}

enum { TAIL_BYTES = 4 << 10, KEPT_BYTES = 4 << 20 };

void log_tail(struct attempt *a, const Boost__LogTail *tail)
{
    struct rank *r = &a->ranks[tail->rank];
    size_t len = tail->data.len < TAIL_BYTES ? tail->data.len : TAIL_BYTES;
    uint8_t *copy = len && !r->end ? malloc(len) : NULL;
    if (!copy)
        return;
    memcpy(copy, tail->data.data + (tail->data.len - len), len);
    free(r->tail);
    r->tail = copy;
    r->tail_len = len;
}

/* The last words that came with the rank's end; of one whose end was never told, what it had printed before. */
static bool last_words(const struct rank *r, const uint8_t **data, size_t *len)
{
    bool end = r->end && r->end->log_tail_len;
    *data = end ? r->end->log_tail : r->tail;
    *len = end ? r->end->log_tail_len : r->tail_len;
    return *len > 0;
}

void logs_keep(struct core *c, const struct job *job, const struct attempt *a)
{
    Boost__KeptLogs all = BOOST__KEPT_LOGS__INIT;
    Boost__KeptLog *logs = c->ops.keep_logs ? calloc((size_t)a->world + 1, sizeof *logs) : NULL;
    Boost__KeptLog **list = logs ? calloc((size_t)a->world + 1, sizeof *list) : NULL;
    size_t total = 0;
    for (int i = 0; list && i < a->world; i++) {
        const uint8_t *data;
        size_t len;
        if (!last_words(&a->ranks[i], &data, &len) || (total += len + 16) > KEPT_BYTES)
            continue;
        Boost__KeptLog *x = &logs[all.n_logs];
        boost__kept_log__init(x);
        x->has_rank = x->has_data = true;
        x->rank = i;
        x->data.data = (uint8_t *)(uintptr_t)data;
        x->data.len = len;
        list[all.n_logs++] = x;
    }
    all.logs = list;
    size_t len = all.n_logs ? boost__kept_logs__get_packed_size(&all) : 0;
    uint8_t *packed = len ? malloc(len) : NULL;
    if (packed) {
        boost__kept_logs__pack(&all, packed);
        c->ops.keep_logs(c->ops.arg, job->id, a->number, packed, len);
    }
    free(packed);
    free(list);
    free(logs);
}

static void reply_words(const struct job *job, const struct log_read *x, const char *why, const uint8_t *data,
                        size_t len)
{
    const struct attempt *a = job_attempt(job, x->attempt);
    struct core_log log = {.attempt = x->attempt, .newest_attempt = job->n_attempts, .finished = a->end_ns != 0};
    char note[512];
    if (len) {
        size_t skip = x->has_offset && x->offset > 0 ? (size_t)x->offset : 0;
        if (skip > len)
            skip = len;
        log.data = data + skip;
        log.len = len - skip;
        log.next_offset = (int64_t)len;
        snprintf(note, sizeof note, "%s: the last %zu bytes that the controller kept", why, len);
    } else {
        log.next_offset = x->offset;
        snprintf(note, sizeof note, "%s, and the controller kept nothing of this rank's output", why);
    }
    log.note = note;
    x->reply(x->arg, ERR_OK, NULL, &log);
}

/* A reader that waits for what earlier runs of the controller kept. */
struct kept_read {
    struct core *core;
    int64_t job;
    struct log_read read;
    char why[320];
};

static void on_kept(void *arg, const void *packed, size_t len)
{
    struct kept_read *k = arg;
    const struct job *job = core_job(k->core, k->job);
    Boost__KeptLogs *all = packed ? boost__kept_logs__unpack(NULL, len, packed) : NULL;
    const Boost__KeptLog *found = NULL;
    for (size_t i = 0; all && i < all->n_logs; i++)
        if (all->logs[i]->rank == k->read.rank)
            found = all->logs[i];
    if (job)
        reply_words(job, &k->read, k->why, found ? found->data.data : NULL, found ? found->data.len : 0);
    if (all)
        boost__kept_logs__free_unpacked(all, NULL);
    free(k);
}

static void reply_kept(struct core *c, const struct job *job, const struct log_read *x, const char *why)
{
    const uint8_t *data;
    size_t len;
    const struct attempt *a = job_attempt(job, x->attempt);
    bool known = last_words(&a->ranks[x->rank], &data, &len);
    struct kept_read *k = !known && a->end_ns && c->ops.kept_logs ? calloc(1, sizeof *k) : NULL;
    if (!k) {
        reply_words(job, x, why, data, len);
        return;
    }
    *k = (struct kept_read){.core = c, .job = job->id, .read = *x};
    snprintf(k->why, sizeof k->why, "%s", why);
    c->ops.kept_logs(c->ops.arg, job->id, a->number, on_kept, k);
}

static void log_done(struct core *c, struct task *t, int rc, const struct error *err, const Boost__TaskReply *reply)
{
    const struct log_read *x = t->arg;
    struct job *job = core_job(c, t->job);
    if (!job)
        return;
    if (rc == ERR_UNREACHABLE || rc == ERR_TIMEOUT) {
        char why[320];
        snprintf(why, sizeof why, "node %s cannot be reached", t->node->name);
        reply_kept(c, job, x, why);
    } else if (rc) {
        x->reply(x->arg, rc, err, NULL);
    } else {
        struct core_log log = {.data = reply->data.data,
                               .len = reply->data.len,
                               .next_offset = reply->next_offset,
                               .attempt = x->attempt,
                               .newest_attempt = job->n_attempts,
                               .finished = reply->finished};
        x->reply(x->arg, ERR_OK, NULL, &log);
    }
}

static void ask(struct core *c, struct job *job, struct attempt *a, const Boost__LogsRequest *request,
                struct log_read *x)
{
    struct node *n = node_find(c, a->parts[a->ranks[x->rank].part].node);
    Boost__ReadLog body = BOOST__READ_LOG__INIT;
    Boost__Task task = BOOST__TASK__INIT;
    struct task *t = NULL;
    body.has_attempt = body.has_rank = body.has_max_bytes = body.has_wait_ms = true;
    body.attempt = x->attempt;
    body.rank = x->rank;
    body.has_offset = request->has_offset;
    body.offset = request->offset;
    body.has_age_ms = request->has_age_ms;
    body.age_ms = request->age_ms;
    body.has_tail_lines = request->has_tail_lines;
    body.tail_lines = request->tail_lines;
    body.max_bytes = request->max_bytes;
    body.wait_ms = request->wait_ms;
    task.body_case = BOOST__TASK__BODY_READ_LOG;
    task.read_log = &body;
    int64_t limit = request->wait_ms * NS_PER_MS + CORE_LOG_EXTRA_NS;
    if (n && task_send(c, n, job, job->uid, job->gid, &task, limit, log_done, &t)) {
        t->arg = x;
        t->drop = drop_read;
        return;
    }
    char why[320];
    snprintf(why, sizeof why, "node %s cannot be reached", a->parts[a->ranks[x->rank].part].node);
    reply_kept(c, job, x, why);
    free(x);
}

/* Of a job without an attempt: nothing yet, or never. */
static void reply_none(const struct job *job, log_reply_fn reply, void *arg)
{
    char note[128];
    struct core_log log = {.finished = job_state_terminal(job->state)};
    snprintf(note, sizeof note, "job %" PRId64 " is %s and has not started", job->id, job_state_name(job->state));
    log.note = note;
    reply(arg, ERR_OK, NULL, &log);
}

static void park(struct core *c, const struct job *job, const Boost__LogsRequest *request, log_reply_fn reply,
                 void *arg)
{
    struct parked_log *p = request->wait_ms > 0 && !job_state_terminal(job->state) ? calloc(1, sizeof *p) : NULL;
    if (!p) {
        reply_none(job, reply, arg);
        return;
    }
    *p = (struct parked_log){.next = c->parked,
                             .job = job->id,
                             .deadline = now_mono(c) + request->wait_ms * NS_PER_MS,
                             .request = *request,
                             .reply = reply,
                             .arg = arg};
    p->request.job = NULL;
    c->parked = p;
    due_at(c, p->deadline);
}

void core_read_log(struct core *c, const struct job *const_job, const Boost__LogsRequest *request, log_reply_fn reply,
                   void *arg)
{
    struct error err;
    struct job *job = core_job(c, const_job->id);
    int number = request->has_attempt ? request->attempt : job->n_attempts;
    struct attempt *a = job_attempt(job, number);
    if (!a && !request->has_attempt) {
        park(c, job, request, reply, arg);
        return;
    }
    if (!a || request->rank < 0 || request->rank >= a->world) {
        if (!a)
            error_set(&err, ERR_NOT_FOUND, "job %" PRId64 " has no attempt %d (the newest is %d)", job->id, number,
                      job->n_attempts);
        else
            error_set(&err, ERR_NOT_FOUND, "attempt %d of job %" PRId64 " has ranks 0 to %d", number, job->id,
                      a->world - 1);
        reply(arg, ERR_NOT_FOUND, &err, NULL);
        return;
    }
    struct log_read *x = calloc(1, sizeof *x);
    if (!x) {
        error_set(&err, ERR_NOMEM, "out of memory");
        reply(arg, ERR_NOMEM, &err, NULL);
        return;
    }
    *x = (struct log_read){.reply = reply,
                           .arg = arg,
                           .attempt = number,
                           .rank = request->rank,
                           .offset = request->has_offset ? request->offset : 0,
                           .has_offset = request->has_offset};
    ask(c, job, a, request, x);
}

void parked_run(struct core *c, int64_t now)
{
    for (struct parked_log **at = &c->parked; *at;) {
        struct parked_log *p = *at;
        struct job *job = core_job(c, p->job);
        bool ready = !job || job->n_attempts > 0 || job_state_terminal(job->state) || now >= p->deadline;
        if (!ready) {
            at = &p->next;
            continue;
        }
        *at = p->next;
        if (job && job->n_attempts > 0)
            core_read_log(c, job, &p->request, p->reply, p->arg);
        else if (job)
            reply_none(job, p->reply, p->arg);
        free(p);
        at = &c->parked; /* the answer may have changed the list */
    }
}

int64_t parked_due(struct core *c)
{
    int64_t next = INT64_MAX;
    for (const struct parked_log *p = c->parked; p; p = p->next)
        if (p->deadline < next)
            next = p->deadline;
    return next;
}

void parked_free(struct core *c)
{
    while (c->parked) {
        struct parked_log *p = c->parked;
        c->parked = p->next;
        free(p);
    }
}
