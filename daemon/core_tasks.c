/* Work on files that agents do for the core: numbered, with a deadline. What a task
 * was for is derived from state again, so a lost one is only failed, never resent. */
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"

uint64_t task_send(struct core *c, struct node *n, const struct job *job, uint32_t uid, uint32_t gid, Boost__Task *body,
                   int64_t limit_ns, task_done_fn done, struct task **out)
{
    struct task *t = calloc(1, sizeof *t);
    if (!t)
        return 0;
    *t = (struct task){.id = c->next_task++, .node = n, .job = job ? job->id : 0, .done = done};
    body->has_id = body->has_uid = body->has_gid = true;
    body->id = t->id;
    body->uid = uid;
    body->gid = gid;
    if (job) {
        body->has_job = true;
        body->job = job->id;
    }
    Boost__ControllerMessage m = BOOST__CONTROLLER_MESSAGE__INIT;
    m.body_case = BOOST__CONTROLLER_MESSAGE__BODY_TASK;
    m.task = body;
    if (!send_to(c, n, &m)) {
        free(t);
        return 0;
    }
    t->since = now_mono(c);
    t->limit = limit_ns;
    t->deadline = t->since + limit_ns;
    t->next = c->tasks;
    c->tasks = t;
    due_at(c, t->deadline);
    if (out)
        *out = t;
    return t->id;
}

struct task *task_find(struct core *c, uint64_t id)
{
    for (struct task *t = c->tasks; id && t; t = t->next)
        if (t->id == id)
            return t;
    return NULL;
}

static struct task *task_take(struct core *c, uint64_t id)
{
    for (struct task **at = &c->tasks; *at; at = &(*at)->next) {
        if ((*at)->id == id) {
            struct task *t = *at;
            *at = t->next;
            return t;
        }
    }
    return NULL;
}

static void task_free(struct task *t)
{
    if (t->drop)
        t->drop(t->arg);
    free(t);
}

void task_cancel(struct core *c, uint64_t id)
{
    struct task *t = task_take(c, id);
    if (t)
        task_free(t);
}

void task_stop(struct core *c, uint64_t id)
{
    Boost__ControllerMessage m = BOOST__CONTROLLER_MESSAGE__INIT;
    Boost__CancelTask body = BOOST__CANCEL_TASK__INIT;
    struct task *t = task_find(c, id);
    m.body_case = BOOST__CONTROLLER_MESSAGE__BODY_CANCEL_TASK;
    m.cancel_task = &body;
    body.has_id = true;
    body.id = id;
    if (t)
        (void)send_to(c, t->node, &m); /* one that is away goes on for nothing */
    task_cancel(c, id);
}

static void task_end(struct core *c, struct task *t, int rc, const struct error *err, const Boost__TaskReply *reply)
{
    t->done(c, t, rc, err, reply);
    task_free(t);
}

void task_reply(struct core *c, struct node *n, const Boost__TaskReply *reply)
{
    struct task *t = task_find(c, reply->id);
    if (!t || t->node != n)
        return; /* too late, or of an earlier run of the controller */
    task_take(c, t->id);
    struct error err;
    error_clear(&err);
    if (!reply->failure) {
        task_end(c, t, ERR_OK, &err, reply);
        return;
    }
    enum error_code code = (enum error_code)reply->failure->code;
    if (code <= ERR_OK || code >= ERR_CODE_COUNT)
        code = ERR_INTERNAL;
    error_set(&err, code, "%s", reply->failure->message ? reply->failure->message : "no reason given");
    if (reply->failure->hint)
        error_hint(&err, "%s", reply->failure->hint);
    task_end(c, t, (int)code, &err, reply);
}

void task_progress(struct core *c, struct node *n, const Boost__TaskProgress *m)
{
    struct task *t = task_find(c, m->id);
    if (!t || t->node != n || m->done < 0 || m->total < 0)
        return;
    t->bytes_done = m->done;
    t->bytes_total = m->total;
    t->deadline = now_mono(c) + t->limit;
    struct job *job = t->job ? core_job(c, t->job) : NULL;
    if (job)
        progress_changed(c, job);
}

void tasks_lost(struct core *c, struct node *n)
{
    /* What `done` sends anew goes to the head of the list, so begin again after each. */
    for (struct task *t = c->tasks; t;) {
        if (t->node != n) {
            t = t->next;
            continue;
        }
        struct error err;
        task_take(c, t->id);
        error_set(&err, ERR_UNREACHABLE, "node %s cannot be reached", n->name);
        task_end(c, t, ERR_UNREACHABLE, &err, NULL);
        t = c->tasks;
    }
}

int64_t tasks_run(struct core *c, int64_t now)
{
    int64_t next = INT64_MAX;
    for (struct task *t = c->tasks; t;) {
        if (t->deadline > now) {
            if (t->deadline < next)
                next = t->deadline;
            t = t->next;
            continue;
        }
        struct error err;
        task_take(c, t->id);
        error_set(&err, ERR_TIMEOUT, "node %s did not answer in %.0f s", t->node->name,
                  (double)(now - t->since) / (double)NS_PER_S);
        task_end(c, t, ERR_TIMEOUT, &err, NULL);
        t = c->tasks;
        next = INT64_MAX;
    }
    return next;
}

static bool takes(const struct node *n, uint32_t uid)
{
    return node_usable(n) && (n->uid == 0 || n->uid == uid);
}

struct node *task_node(struct core *c, const struct job *job, uint32_t uid, enum sched_pool pool)
{
    const struct attempt *a = job ? job_attempt(job, job->n_attempts) : NULL;
    for (int p = 0; a && p < a->n_parts; p++) {
        struct node *n = node_find(c, a->parts[p].node);
        if (n && takes(n, uid))
            return n;
    }
    struct node *any = NULL;
    for (struct node *n = c->nodes; n; n = n->next) {
        if (takes(n, uid) && node_slots(n, pool) > 0)
            return n;
        if (takes(n, uid) && !any)
            any = n;
    }
    return any;
}
