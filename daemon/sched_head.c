/* The head of a pool: when it can start, where, and what it leaves to others; and who has to go for it. */
#include <stdlib.h>
#include <string.h>

#include "daemon/sched_internal.h"

/* ---- nodes with parts given back ------------------------------------------------------------ */

static bool node_fits(const struct sched *s, const struct sched_request *r, const struct later *l, int i)
{
    const struct sched_node *n = &s->nodes[i];
    bool memory = (s->counts_memory || r->mib_per_rank > 0) && n->memory_mib > 0;
    return bit_get(l->bits, i) && l->free[i] >= r->devices_per_node && !(r->exclusive && l->parts[i] > 0) &&
           !(memory && request_mib(n, r) > l->mib[i]);
}

bool later_init(struct sched *s, const struct sched_request *r, const uint64_t *bits, struct later *l)
{
    size_t n = (size_t)s->n + 1;
    *l = (struct later){.free = malloc(n * sizeof *l->free),
                        .mib = malloc(n * sizeof *l->mib),
                        .parts = calloc(n, sizeof *l->parts),
                        .bits = bits};
    if (!l->free || !l->mib || !l->parts) {
        later_free(l);
        return false;
    }
    memcpy(l->free, s->free[r->pool].avail, (size_t)s->n * sizeof *l->free);
    memcpy(l->mib, s->free_mib, (size_t)s->n * sizeof *l->mib);
    for (int k = 0; k < s->n_parts; k++)
        l->parts[s->parts[k].node]++;
    /* Something that is nobody's part (a stranger's GPU, a kill that is not confirmed) does not come back. */
    for (int i = 0; i < s->n; i++) {
        if (s->nodes[i].used && !l->parts[i])
            l->parts[i] = 1;
        l->fits += node_fits(s, r, l, i);
    }
    return true;
}

void later_free(struct later *l)
{
    free(l->free);
    free(l->mib);
    free(l->parts);
    *l = (struct later){0};
}

void later_give(const struct sched *s, const struct sched_request *r, struct later *l, const struct part *p, bool back)
{
    int i = p->node, sign = back ? 1 : -1;
    l->fits -= node_fits(s, r, l, i);
    l->parts[i] -= sign;
    l->mib[i] += sign * p->mib;
    /* Who has a node whole gives all of it back; its devices count for nobody else meanwhile. */
    if (p->exclusive)
        l->free[i] = back && s->nodes[i].up && s->nodes[i].open ? s->nodes[i].slots[r->pool] : 0;
    else if (p->pool == r->pool)
        l->free[i] += sign * p->slots;
    if (l->free[i] > s->slots[r->pool].avail[i])
        l->free[i] = s->slots[r->pool].avail[i]; /* what broke under it does not come back */
    l->fits += node_fits(s, r, l, i);
}

/* ---- the head ------------------------------------------------------------------------------- */

static int by_end(const void *x, const void *y)
{
    const struct part *a = *(const struct part *const *)x, *b = *(const struct part *const *)y;
    return (a->ends > b->ends) - (a->ends < b->ends);
}

/* The parts that end some time, the first first; *n of them. NULL: none, or out of memory (*n -1). */
static const struct part **ending(const struct sched *s, int *n)
{
    const struct part **list = malloc(((size_t)s->n_parts + 1) * sizeof *list);
    *n = list ? 0 : -1;
    for (int k = 0; list && k < s->n_parts; k++)
        if (s->parts[k].ends != SCHED_ENDLESS)
            list[(*n)++] = &s->parts[k];
    if (list)
        qsort(list, (size_t)*n, sizeof *list, by_end);
    return list;
}

/* Gives back until the request fits; the time of that, SCHED_ENDLESS: never. */
static int64_t wait_until(struct sched *s, const struct sched_request *r, struct later *l)
{
    int n;
    const struct part **list = ending(s, &n);
    int64_t when = SCHED_ENDLESS;
    s->failed |= n < 0;
    for (int k = 0; k < n;) {
        int64_t at = list[k]->ends;
        for (; k < n && list[k]->ends == at; k++)
            later_give(s, r, l, list[k], true);
        if (l->fits >= r->nodes) {
            when = at > s->now ? at : s->now;
            break;
        }
    }
    free(list);
    return when;
}

/* Chooses the head's nodes among what is free then, and what is left beside it. */
static bool promise(struct sched *s, const struct sched_request *r, struct head *h, const struct later *l)
{
    struct view then;
    uint64_t *idle = calloc((size_t)s->words, sizeof *idle);
    int *chosen = calloc((size_t)r->nodes, sizeof *chosen);
    bool ok = view_init(&then, s->n, s->words) && idle && chosen;
    for (int i = 0; ok && i < s->n; i++) {
        ok = view_set(&then, s->words, i, l->free[i]);
        bit_put(idle, i, l->parts[i] == 0);
        h->spare[i] = l->free[i];
        h->spare_mib[i] = l->mib[i];
    }
    ok = ok && choose(s, r, &then, l->bits, l->mib, r->exclusive ? idle : NULL, chosen);
    for (int k = 0; ok && k < r->nodes; k++) {
        int i = chosen[k];
        bit_put(h->reserved, i, true);
        h->spare[i] = r->exclusive ? 0 : h->spare[i] - r->devices_per_node;
        h->spare_mib[i] -= request_mib(&s->nodes[i], r);
    }
    const int *now = s->free[r->pool].avail;
    for (int i = 0; ok && i < s->n; i++) {
        ok = view_set(&h->late, s->words, i, now[i] < h->spare[i] ? now[i] : h->spare[i]);
        h->late_mib[i] = s->free_mib[i] < h->spare_mib[i] ? s->free_mib[i] : h->spare_mib[i];
    }
    view_free(&then);
    free(idle);
    free(chosen);
    return ok;
}

/* All that it could use were they empty: nobody knows which of them will be. */
static void claim_all(const struct sched *s, const struct sched_request *r, struct head *h)
{
    for (int i = 0; i < s->n; i++) {
        const struct sched_node *n = &s->nodes[i];
        bool memory = r->mib_per_rank > 0 && n->memory_mib > 0 && request_mib(n, r) > n->memory_mib;
        bit_put(h->reserved, i,
                bit_get(h->filter->bits, i) && s->slots[r->pool].avail[i] >= r->devices_per_node && !memory);
    }
}

void sched_reserve(struct sched *s, const struct sched_request *r)
{
    struct head *h = &s->heads[r->pool];
    struct later l = {0};
    if (h->set)
        return;
    *h = (struct head){.request = *r, .filter = filter_of(s, r), .when = SCHED_ENDLESS};
    h->request.avoid = NULL;
    h->request.n_avoid = 0;
    h->reserved = calloc((size_t)s->words, sizeof *h->reserved);
    h->spare = calloc((size_t)s->n + 1, sizeof *h->spare);
    h->spare_mib = calloc((size_t)s->n + 1, sizeof *h->spare_mib);
    h->late_mib = calloc((size_t)s->n + 1, sizeof *h->late_mib);
    bool ok =
        h->filter && h->reserved && h->spare && h->spare_mib && h->late_mib && view_init(&h->late, s->n, s->words);
    if (ok) {
        /* Nodes to avoid are for it once they confirm, and nobody knows when. */
        const uint64_t *mask = request_mask(s, r, h->filter);
        ok = later_init(s, r, mask, &l);
        if (ok)
            h->when = wait_until(s, r, &l);
        if (ok && h->when != SCHED_ENDLESS)
            ok = promise(s, r, h, &l);
        else if (ok)
            claim_all(s, r, h);
        later_free(&l);
    }
    h->set = h->reserved && h->filter; /* with memory out nobody is let by */
    s->failed |= !ok;
    if (!ok && h->set) {
        h->when = SCHED_ENDLESS;
        claim_all(s, r, h);
    }
    h->request.constraint = h->filter ? h->filter->constraint : "";
    h->request.nodelist = h->filter ? h->filter->nodelist : "";
    h->request.exclude = h->filter ? h->filter->exclude : "";
}

/* ---- preemption ----------------------------------------------------------------------------- */

struct candidate {
    int runner;
    bool gone;
    const struct sched_runner *is;
};

static int cheapest_first(const void *x, const void *y)
{
    const struct candidate *a = x, *b = y;
    if (a->is->priority != b->is->priority)
        return a->is->priority < b->is->priority ? -1 : 1;
    if (a->is->since != b->is->since)
        return a->is->since > b->is->since ? -1 : 1;
    return a->runner - b->runner;
}

static int by_runner(const void *x, const void *y)
{
    const struct part *a = *(const struct part *const *)x, *b = *(const struct part *const *)y;
    return a->runner - b->runner;
}

struct stage { /* the parts by runner, so that one runner's are together */
    const struct part **parts;
    int n;
};

static void give_all(struct sched *s, const struct sched_request *r, struct later *l, const struct stage *st,
                     int runner, bool back)
{
    int lo = 0, hi = st->n;
    while (lo < hi) {
        int mid = lo + (hi - lo) / 2;
        if (st->parts[mid]->runner < runner)
            lo = mid + 1;
        else
            hi = mid;
    }
    for (; lo < st->n && st->parts[lo]->runner == runner; lo++)
        later_give(s, r, l, st->parts[lo], back);
}

/* Whether some part of the runner is where the request could use it. */
static bool of_use(const struct sched *s, const struct sched_request *r, const struct later *l, const struct part *p)
{
    bool pool = p->pool == r->pool || p->exclusive || r->exclusive || (p->mib > 0 && r->mib_per_rank > 0);
    return pool && bit_get(l->bits, p->node) && s->slots[r->pool].avail[p->node] >= r->devices_per_node;
}

static int pick_victims(struct sched *s, const struct sched_request *r, struct later *l, const struct stage *st,
                        struct candidate *list, int n, int *victims)
{
    int upto = 0, count = 0;
    for (; upto < n && l->fits < r->nodes; upto++) {
        list[upto].gone = true;
        give_all(s, r, l, st, list[upto].runner, true);
    }
    if (l->fits < r->nodes)
        return 0;
    for (int k = upto - 1; k >= 0; k--) { /* the dearest is spared first */
        give_all(s, r, l, st, list[k].runner, false);
        if (l->fits < r->nodes)
            give_all(s, r, l, st, list[k].runner, true);
        else
            list[k].gone = false;
    }
    for (int k = 0; k < upto; k++)
        if (list[k].gone)
            victims[count++] = list[k].runner;
    return count;
}

int sched_preempt(struct sched *s, const struct sched_request *r, int priority, int gap, int *victims)
{
    const struct filter *f = filter_of(s, r);
    struct later l = {0};
    struct stage st = {.parts = malloc(((size_t)s->n_parts + 1) * sizeof *st.parts)};
    struct candidate *list = calloc((size_t)s->n_runners + 1, sizeof *list);
    bool *useful = calloc((size_t)s->n_runners + 1, sizeof *useful);
    int n = 0, count = 0;
    if (!f || !st.parts || !list || !useful || !later_init(s, r, request_mask(s, r, f), &l)) {
        s->failed = true;
        goto out;
    }
    for (int k = 0; k < s->n_parts; k++) {
        const struct part *p = &s->parts[k];
        if (p->runner < 0)
            continue;
        st.parts[st.n++] = p;
        useful[p->runner] |= of_use(s, r, &l, p);
    }
    qsort(st.parts, (size_t)st.n, sizeof *st.parts, by_runner);
    for (int k = 0; k < s->n_runners; k++) {
        const struct sched_runner *x = &s->runners[k];
        if (x->leaving)
            give_all(s, r, &l, &st, k, true);
        else if (!x->firm && useful[k] && x->priority <= priority - gap)
            list[n++] = (struct candidate){.runner = k, .is = x};
    }
    qsort(list, (size_t)n, sizeof *list, cheapest_first);
    count = l.fits >= r->nodes ? 0 : pick_victims(s, r, &l, &st, list, n, victims);
out:
    later_free(&l);
    free(st.parts);
    free(list);
    free(useful);
    return count;
}
