/* The scheduler's picture, made anew for every pass from what the nodes have and what is held of them. */
#include "daemon/core_picture.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void picture_free(struct picture *p)
{
    if (!p)
        return;
    sched_free(p->sched);
    free(p->nodes);
    free(p->of);
    free(p->runners);
    free(p->running);
    free(p->held);
    free(p->avoided);
    free(p->islands);
    free(p->scratch);
    free(p);
}

void picture_forget(struct core *c)
{
    picture_free(c->picture);
    c->picture = NULL;
    c->gpus.known = false;
}

/* Room for one more of *list; false: out of memory. */
static bool room(void **list, int n, int *cap, size_t size)
{
    if (n < *cap)
        return true;
    int more = *cap ? 2 * *cap : 64;
    void *grown = realloc(*list, (size_t)more * size);
    if (!grown)
        return false;
    *list = grown;
    *cap = more;
    return true;
}

static int switch_of(struct core *c, struct node *n)
{
    const char *name = node_switch(n);
    if (n->switch_id)
        return n->switch_id > 0 ? n->switch_id - 1 : -1;
    n->switch_id = -1;
    if (!*name)
        return -1;
    for (int i = 0; i < c->n_switches; i++)
        if (strcmp(c->switches[i], name) == 0) {
            n->switch_id = i + 1;
            return i;
        }
    char **list = realloc(c->switches, (size_t)(c->n_switches + 1) * sizeof *list);
    char *copy = list ? strdup(name) : NULL;
    if (list)
        c->switches = list;
    if (!copy)
        return -1;
    list[c->n_switches++] = copy;
    n->switch_id = c->n_switches;
    return c->n_switches - 1;
}

int64_t job_left_ns(struct core *c, const struct job *job)
{
    int64_t limit = job->resolved->time_limit_s;
    if (limit <= 0)
        return SCHED_ENDLESS;
    double left = (double)limit - job_elapsed_s(c, job);
    return left > 0 ? (int64_t)(left * (double)NS_PER_S) : 0;
}

/* When the job's devices come free at the latest, and whether they do so unasked. */
static struct sched_runner runner_of(struct core *c, const struct job *job)
{
    const struct attempt *a = job_live_attempt(job);
    int64_t now = now_mono(c), left = job_left_ns(c, job);
    struct sched_runner r = {.id = job->id,
                             .priority = job->priority,
                             .since = a ? a->start_mono : now,
                             .ends = left == SCHED_ENDLESS ? SCHED_ENDLESS : now + left,
                             .leaving = job->state == STATE(STOPPING) || job_state_terminal(job->state),
                             .firm = job->state != STATE(STARTING) && job->state != STATE(RUNNING)};
    if (r.leaving)
        r.ends = a && a->grace_due > now && !a->kill ? a->grace_due : now + c->kill_confirm_ns;
    return r;
}

void array_runs(struct core *c, const struct job *job)
{
    struct job *first = job->array_limit ? core_job(c, job->array_job) : NULL;
    if (!first)
        return;
    if (first->array_picture != c->pictures)
        first->array_running = 0;
    first->array_picture = c->pictures;
    first->array_running++;
}

bool array_keeps(struct core *c, const struct job *job, char *text, size_t cap)
{
    const struct job *first = job->array_limit ? core_job(c, job->array_job) : NULL;
    int running = first && first->array_picture == c->pictures ? first->array_running : 0;
    if (!first || running < job->array_limit)
        return false;
    if (text)
        snprintf(text, cap, "array limit: %d of %d tasks of array %" PRId64 " run", running, job->array_limit,
                 job->array_job);
    return true;
}

static int runner_index(struct core *c, struct picture *p, struct job *job)
{
    if (job->picture == c->pictures)
        return job->runner;
    int cap = p->cap_runners;
    if (!room((void **)&p->runners, p->n_runners, &p->cap_runners, sizeof *p->runners) ||
        !room((void **)&p->running, p->n_runners, &cap, sizeof(struct job *)))
        return -1;
    p->runners[p->n_runners] = runner_of(c, job);
    p->running[p->n_runners] = job;
    job->picture = c->pictures;
    job->runner = p->n_runners;
    return p->n_runners++;
}

/* Whose it is, and what of the job's request counts here. */
static void look_up(struct core *c, const struct node *n, struct holding *h)
{
    h->of = core_job(c, h->job);
    if (!h->of)
        return;
    const Boost__Resources *r = h->of->resolved->resources;
    h->exclusive = r && r->exclusive;
    if (r && r->memory_mib > 0)
        h->mib = r->memory_mib * h->slots;
    else
        h->mib = h->pool == SCHED_CPU && n->cpu_slots > 0 ? n->memory_mib * h->slots / n->cpu_slots : 0;
}

/* What is taken of node i, and by whom. */
static bool add_holdings(struct core *c, struct picture *p, int i)
{
    struct node *n = p->of[i];
    struct sched_node *s = &p->nodes[i];
    for (int k = 0; k < n->n_holdings; k++) {
        struct holding *h = &n->holdings[k];
        if (!h->of)
            look_up(c, n, h);
        s->used = true;
        if (!h->of)
            continue;
        struct job *job = h->of;
        s->free_mib -= h->mib;
        for (int pool = 0; h->exclusive && pool < SCHED_POOLS; pool++)
            s->free[pool] = 0;
        /* Of an attempt before the one that it waits for; its spares are for that one. */
        bool old = job->pending.in && !job->starting && !h->spare;
        job->share->devices += old ? 0 : h->slots;
        if (old) { /* attempt k+1 does not go where attempt k is not confirmed dead */
            if (!room((void **)&p->avoided, p->n_avoided, &p->cap_avoided, sizeof *p->avoided))
                return false;
            p->avoided[p->n_avoided++] = (struct avoided){job->id, i};
        }
        int runner = h->overdue ? -1 : runner_index(c, p, job);
        if (h->overdue)
            continue; /* nobody knows whether it ever comes free */
        if (runner < 0 || !room((void **)&p->held, p->n_held, &p->cap_held, sizeof *p->held))
            return false;
        p->held[p->n_held++] = (struct sched_held){i, runner, h->pool, h->slots, h->mib, h->exclusive};
    }
    return true;
}

/* Free GPUs by NVLink group; the list grows and may move: `islands` of the nodes is set at the end. */
static bool add_islands(struct picture *p, int i)
{
    const Boost__DeviceReport *r = p->of[i]->devices;
    int from = p->n_islands;
    for (size_t k = 0; r && k < r->n_devices; k++) {
        const Boost__DeviceInfo *d = r->devices[k];
        bool unused = (!d->trouble || !*d->trouble) && !d->taken && !d->has_job;
        int at = from;
        if (!d->has_nvlink_group)
            continue;
        /* Two numbers each: the group, and what is free of it. */
        while (at < p->n_islands && p->islands[at] != d->nvlink_group)
            at += 2;
        if (at == p->n_islands) {
            while (p->n_islands + 2 > p->cap_islands)
                if (!room((void **)&p->islands, p->cap_islands, &p->cap_islands, sizeof *p->islands))
                    return false;
            p->islands[p->n_islands++] = d->nvlink_group;
            p->islands[p->n_islands++] = 0;
        }
        p->islands[at + 1] += unused;
    }
    p->nodes[i].n_islands = (p->n_islands - from) / 2;
    return true;
}

static void set_islands(struct picture *p)
{
    int from = 0, at = 0;
    for (int k = 1; k < p->n_islands; k += 2) /* the groups' numbers have served */
        p->islands[k / 2] = p->islands[k];
    for (int i = 0; i < p->n; i++, from = at) {
        at = from + p->nodes[i].n_islands;
        p->nodes[i].islands = p->nodes[i].n_islands ? &p->islands[from] : NULL;
    }
}

static bool add_nodes(struct core *c, struct picture *p)
{
    int n = 0;
    for (struct node *node = c->nodes; node; node = node->next)
        n++;
    p->nodes = calloc((size_t)n + 1, sizeof *p->nodes);
    p->of = calloc((size_t)n + 1, sizeof(struct node *));
    p->scratch = calloc((size_t)n + 1, sizeof *p->scratch);
    if (!p->nodes || !p->of || !p->scratch)
        return false;
    for (struct node *node = c->nodes; node; node = node->next) {
        int i = p->n++;
        p->of[i] = node;
        p->nodes[i] = (struct sched_node){.name = node->name,
                                          .memory_mib = node->memory_mib,
                                          .free_mib = node->memory_mib,
                                          .up = node_usable(node),
                                          .open = node->admin == ADMIN(NONE),
                                          .uid = node->uid,
                                          .labels = node->told ? node->told->label : NULL,
                                          .n_labels = node->told ? node->told->n_label : 0,
                                          .group = switch_of(c, node)};
        for (int pool = 0; pool < SCHED_POOLS; pool++) {
            p->nodes[i].slots[pool] = node_slots(node, (enum sched_pool)pool);
            p->nodes[i].free[pool] = node_free_slots(node, (enum sched_pool)pool);
        }
        if (!add_holdings(c, p, i) || !add_islands(p, i))
            return false;
    }
    set_islands(p);
    return true;
}

struct picture *picture_make(struct core *c)
{
    struct picture *p = calloc(1, sizeof *p);
    shares_advance(c);
    for (int i = 0; i < c->n_shares; i++)
        c->shares[i]->devices = c->shares[i]->running = 0;
    c->pictures++;
    for (const struct job *job = c->busy.head; job; job = job->busy.next)
        if (job->starting || job_live_attempt(job)) {
            job->share->running++;
            array_runs(c, job);
        }
    if (p && add_nodes(c, p))
        p->sched = sched_new(p->nodes, p->n, p->runners, p->n_runners, p->held, p->n_held, now_mono(c));
    if (!p || !p->sched) {
        picture_free(p);
        return NULL;
    }
    picture_free(c->picture);
    c->picture = p;
    return p;
}
