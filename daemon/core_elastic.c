/* More nodes than a job needs, and fewer than it asked for: spare nodes, which it holds so that a
 * lost one is replaced at once; and, while nodes are missing, an attempt of fewer replicas, which
 * gives way to a whole one at a checkpoint when nodes are there again. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"
#include "worker/plan/plan.h"

int job_spares(const struct job *job)
{
    return job->resolved->resources ? job->resolved->resources->spares : 0;
}

static int fewest(const struct job *job)
{
    int least = job->resolved->resources ? job->resolved->resources->min_nodes : 0;
    return least > 0 && least < job_nodes(job) ? least : job_nodes(job);
}

bool job_is_elastic(const struct job *job)
{
    return job_spares(job) > 0 || fewest(job) < job_nodes(job);
}

const Boost__JobSpec *core_attempt_spec(const struct job *job, struct attempt *a)
{
    struct error err;
    if (a->n_parts == 0 || a->n_parts == job_nodes(job))
        return job->resolved;
    if (a->spec && a->spec_of != job->resolved) { /* a restart has changed what it is made of */
        boost__job_spec__free_unpacked(a->spec, NULL);
        a->spec = NULL;
    }
    if (!a->spec && plan_on_fewer_nodes(job->resolved, a->n_parts, &a->spec, &err))
        return NULL;
    a->spec_of = job->resolved;
    return a->spec;
}

/* ---- how many nodes ----------------------------------------------------------------------- */

/* Every node that is known is up or given up: what is missing is not merely late. */
static bool settled(struct core *c)
{
    for (const struct node *n = c->nodes; n; n = n->next)
        if ((n->liveness != LIVENESS(DOWN) && !node_usable(n)) || (n->health && n->health->pending && node_usable(n)))
            return false;
    return true;
}

int elastic_most(const struct job *job)
{
    return job_nodes(job) + job_spares(job);
}

int elastic_fewer(struct core *c, const struct job *job, int nodes, enum sched_verdict v)
{
    bool again = job->state == STATE(RECOVERING); /* it has run, and is to go on running */
    if (again && nodes > job_nodes(job))
        return nodes - 1;
    /* All nodes are looked at last: most jobs have no fewer, and every job that waits asks. */
    if (nodes - 1 < fewest(job) || (!again && v != SCHED_NEVER) || !settled(c))
        return 0;
    for (int n = nodes - 1; n >= fewest(job); n--)
        if (n >= job_nodes(job) || plan_replicas_on(job->resolved, n))
            return n;
    return 0;
}

void elastic_wanted(struct core *c, const struct job *job)
{
    const struct attempt *a = job_live_attempt(job);
    if (a && (a->n_parts < job_nodes(job) || a->n_spares < job_spares(job)))
        c->elastic = true;
}

/* ---- spares ---------------------------------------------------------------------------------- */

enum { SPARE = 0 }; /* the attempt of a spare's holding: there is none of that number */

struct attempt *job_spare_holder(const struct job *job)
{
    struct attempt *a = job_attempt(job, job->n_attempts);
    return a && job_state_live(job->state) ? a : NULL;
}

bool spare_hold(struct core *c, struct job *job, struct node *n)
{
    struct holding *h = node_hold(n, job->id, SPARE, spec_pool(job->resolved), job_devices_per_node(job));
    if (h)
        h->spare = c->spares_used = true;
    return h != NULL;
}

bool spare_add(struct core *c, struct job *job, struct node *n)
{
    struct attempt *a = job_live_attempt(job);
    if (!spare_hold(c, job, n))
        return false;
    if (attempt_add_spare(a, n->name, strlen(n->name))) {
        node_release(c, n, job->id, SPARE);
        return false;
    }
    c->spares_used = true;
    mark_attempt(c, job, a);
    add_event(c, job, a->number, n->name, "controller", "spare-held", "%s is held as a spare", n->name);
    return true;
}

void spares_release(struct core *c, struct job *job)
{
    struct attempt *a = job_attempt(job, job->n_attempts);
    for (int i = 0; a && i < a->n_spares; i++) {
        struct node *n = node_find(c, a->spares[i]);
        if (n)
            node_release(c, n, job->id, SPARE);
    }
}

void spares_hold(struct core *c, struct job *job)
{
    struct attempt *a = job_spare_holder(job);
    for (int i = 0; a && i < a->n_spares; i++) {
        struct node *n = node_get(c, a->spares[i]);
        if (n) /* also out of use: whoever took it out and wanted it back struck it off the list */
            spare_hold(c, job, n);
    }
}

static void spare_remove(struct attempt *a, const char *node)
{
    for (int i = 0; i < a->n_spares; i++)
        if (strcmp(a->spares[i], node) == 0) {
            free(a->spares[i]);
            a->spares[i--] = a->spares[--a->n_spares];
        }
}

static void spare_lost(struct core *c, struct node *n, int64_t job_id, const char *why)
{
    struct job *job = core_job(c, job_id);
    struct attempt *a = job ? job_attempt(job, job->n_attempts) : NULL;
    node_release(c, n, job_id, SPARE);
    if (!a)
        return;
    spare_remove(a, n->name);
    mark_attempt(c, job, a);
    add_event(c, job, a->number, n->name, "controller", "spare-lost", "%s is no spare any more: %s", n->name, why);
    elastic_wanted(c, job);
}

void spares_lost(struct core *c, struct node *n, const char *why)
{
    for (int i = n->n_holdings - 1; i >= 0; i--)
        if (n->holdings[i].spare)
            spare_lost(c, n, n->holdings[i].job, why);
}

void spares_give_way(struct core *c, struct node *n)
{
    for (int i = n->n_holdings - 1; i >= 0; i--)
        if (n->holdings[i].spare && node_room(n, n->holdings[i].pool) < 0)
            spare_lost(c, n, n->holdings[i].job, "others have its devices");
}

bool job_has_spares(const struct job *job)
{
    const struct attempt *a = job_attempt(job, job->n_attempts);
    return a && a->n_spares > 0;
}

/* ---- growing back ------------------------------------------------------------------------- */

void elastic_committed(struct core *c, struct job *job)
{
    const struct attempt *a = job_live_attempt(job);
    if (!a || a->n_parts >= job_nodes(job) || job->state != STATE(RUNNING))
        return;
    job->may_grow = true;
    c->elastic = true;
    c->schedule = true;
    due_at(c, now_mono(c));
}

int elastic_more(const struct job *job, int nodes, int upto)
{
    for (int n = upto; n > nodes; n--)
        if (n == job_nodes(job) || plan_replicas_on(job->resolved, n))
            return n;
    return 0;
}

void elastic_grow(struct core *c, struct job *job, int nodes)
{
    struct attempt *a = job_live_attempt(job);
    int from = a->n_parts;
    job_reason(job, REASON(NONE), "grows from %d to %d nodes at step %" PRId64, from, nodes, job->step);
    add_event(c, job, a->number, NULL, "controller", "growing",
              "%d more node%s free: checkpoints and goes on in attempt %d on %d instead of %d", nodes - from,
              nodes - from == 1 ? " is" : "s are", a->number + 1, nodes, from);
    job_fire(c, job, EV_RESTART);
}
