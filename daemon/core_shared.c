/* Before an attempt over several nodes: do they all see one checkpoint directory? The first node's agent leaves a file
 * there that nobody can know of, the others look for it, it is taken away again. Nodes that have passed once for a job
 * are not asked again while boostd runs. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"

static void ask(struct core *c, struct job *job, int node, Boost__ProveShared__What what);

static bool proven(const struct job *job, const char *node)
{
    for (int i = 0; i < job->n_shared; i++)
        if (strcmp(job->shared[i], node) == 0)
            return true;
    return false;
}

/* Forgetting one for want of memory only means that it is asked again. */
static void remember(struct job *job, const char *node)
{
    char **list = proven(job, node) ? NULL : realloc(job->shared, ((size_t)job->n_shared + 1) * sizeof *list);
    char *name = list ? strdup(node) : NULL;
    if (list)
        job->shared = list;
    if (name)
        job->shared[job->n_shared++] = name;
}

static const char *dir_of(const struct job *job)
{
    const Boost__Checkpoint *x = job->resolved->checkpoint;
    return x && x->dir ? x->dir : "";
}

/* No rank of it ever starts: the attempt is there to say why. */
static void not_shared(struct core *c, struct job *job, const char *node, const char *first)
{
    char text[1024];
    snprintf(text, sizeof text,
             "checkpoint.dir %.400s is not one directory on all nodes: what %s writes there %s does not see; mount the "
             "same file system on both, or set resources.nodes: 1",
             dir_of(job), first, node);
    start_commit(c, job);
    struct attempt *a = job_live_attempt(job);
    if (!a)
        return;
    for (int p = 0; p < a->n_parts; p++) {
        struct node *n = node_find(c, a->parts[p].node);
        a->parts[p].gone = true;
        if (n)
            node_release(c, n, job->id, a->number);
    }
    /* One that has trained was right: a mount is missing, which passes, or it comes to be HELD. */
    attempt_fail(c, job, a, job_has_trained(job) ? CLASS(INFRA) : CLASS(SPEC), REASON(SpecError), "preflight", node,
                 text);
}

static void removed(struct core *c, struct task *t, int rc, const struct error *err, const Boost__TaskReply *reply)
{
    (void)c, (void)t, (void)rc, (void)err, (void)reply; /* the next proof there takes away what was left */
}

static void answered(struct core *c, struct task *t, int rc, const struct error *err, const Boost__TaskReply *reply)
{
    struct job *job = core_job(c, t->job);
    (void)reply;
    if (!job || !job->starting || job->starting->task != t->id)
        return;
    struct core_start *s = job->starting;
    int at = s->proving;
    s->task = 0;
    if (rc == ERR_UNREACHABLE || rc == ERR_TIMEOUT || rc == ERR_NOMEM) {
        char why[512];
        snprintf(why, sizeof why, "it cannot be seen yet whether its nodes share the checkpoint directory: %.300s",
                 err->message);
        start_later(c, job, why);
        return;
    }
    bool apart = at > 0 && (rc == ERR_NOT_FOUND || rc == ERR_CORRUPT);
    if (at > 0 && !rc)
        remember(job, s->nodes[at]->name);
    /* Whatever else is wrong with the directory the attempt's own preflight says better. */
    if (!rc) {
        bool first = proven(job, s->nodes[0]->name); /* then who has passed before has seen what it sees */
        do
            s->proving++;
        while (first && s->proving < s->n_nodes && proven(job, s->nodes[s->proving]->name));
    }
    if (!rc && s->proving < s->n_nodes) {
        ask(c, job, s->proving, BOOST__PROVE_SHARED__WHAT__LOOK);
        return;
    }
    if (at > 0) {
        remember(job, s->nodes[0]->name);
        ask(c, job, 0, BOOST__PROVE_SHARED__WHAT__REMOVE);
    }
    s->proving = s->n_nodes;
    if (apart)
        not_shared(c, job, s->nodes[at]->name, s->nodes[0]->name);
    else
        start_proven(c, job);
}

static void ask(struct core *c, struct job *job, int node, Boost__ProveShared__What what)
{
    struct core_start *s = job->starting;
    Boost__ProveShared prove = BOOST__PROVE_SHARED__INIT;
    Boost__Task body = BOOST__TASK__INIT;
    prove.dir = (char *)(uintptr_t)dir_of(job);
    prove.nonce = s->nonce;
    prove.has_what = true;
    prove.what = what;
    body.body_case = BOOST__TASK__BODY_PROVE_SHARED;
    body.prove_shared = &prove;
    bool last = what == BOOST__PROVE_SHARED__WHAT__REMOVE;
    uint64_t task = task_send(c, s->nodes[node], job, job->uid, job->gid, &body, CORE_SHARED_NS,
                              last ? removed : answered, NULL);
    if (last)
        return;
    s->task = task;
    if (!task)
        start_later(c, job, "its nodes cannot be reached to see whether they share the checkpoint directory");
    else
        progress_changed(c, job);
}

void shared_prove(struct core *c, struct job *job)
{
    struct core_start *s = job->starting;
    bool all = true;
    for (int i = 0; s->n_nodes > 1 && i < s->n_nodes; i++)
        all = all && proven(job, s->nodes[i]->name);
    if (all) {
        s->proving = s->n_nodes;
        start_proven(c, job);
        return;
    }
    snprintf(s->nonce, sizeof s->nonce, "%s-%" PRId64 ".%016" PRIx64, core_store_id(c), job->id,
             c->ops.random(c->ops.arg));
    s->proving = 0;
    ask(c, job, 0, BOOST__PROVE_SHARED__WHAT__PUT);
}
