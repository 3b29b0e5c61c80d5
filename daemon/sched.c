/* sched.h: the picture, views of it, and placing one request. */
#include "daemon/sched.h"

#include <stdlib.h>
#include <string.h>

#include "daemon/sched_internal.h"

/* ---- views ------------------------------------------------------------------------------- */

static int bucket_of(int avail)
{
    return avail < 0 ? 0 : avail < TOP ? avail : TOP;
}

bool view_init(struct view *v, int n, int words)
{
    (void)words;
    memset(v, 0, sizeof *v);
    v->avail = malloc(((size_t)n + 1) * sizeof *v->avail);
    for (int i = 0; v->avail && i < n; i++)
        v->avail[i] = -1; /* in no bucket yet */
    return v->avail != NULL;
}

void view_free(struct view *v)
{
    free(v->avail);
    for (int b = 0; b < BUCKETS; b++)
        free(v->bits[b]);
    memset(v, 0, sizeof *v);
}

bool view_set(struct view *v, int words, int node, int avail)
{
    int was = v->avail[node], from = bucket_of(was), to = bucket_of(avail);
    v->avail[node] = avail < 0 ? 0 : avail;
    if (was >= 0 && from == to)
        return true;
    if (!v->bits[to])
        v->bits[to] = calloc((size_t)words, sizeof(uint64_t));
    if (was >= 0) {
        bit_put(v->bits[from], node, false);
        if (--v->count[from] == 0)
            bit_put(v->some, from, false);
    }
    if (!v->bits[to]) {
        v->avail[node] = -1; /* lost to this picture */
        return false;
    }
    bit_put(v->bits[to], node, true);
    v->count[to]++;
    bit_put(v->some, to, true);
    return true;
}

/* ---- the picture ------------------------------------------------------------------------- */

static bool add_part(struct sched *s, struct part part)
{
    if (s->n_parts == s->cap_parts) {
        int cap = s->cap_parts ? 2 * s->cap_parts : 256;
        struct part *parts = realloc(s->parts, (size_t)cap * sizeof *parts);
        if (!parts)
            return false;
        s->parts = parts;
        s->cap_parts = cap;
    }
    s->parts[s->n_parts++] = part;
    return true;
}

static bool picture_nodes(struct sched *s)
{
    bool ok = true;
    for (int i = 0; i < s->n; i++) {
        const struct sched_node *n = &s->nodes[i];
        bool takes = n->up && n->open;
        for (int p = 0; p < SCHED_POOLS; p++) {
            ok &= view_set(&s->slots[p], s->words, i, takes ? n->slots[p] : 0);
            ok &= view_set(&s->free[p], s->words, i, takes ? n->free[p] : 0);
        }
        s->free_mib[i] = n->free_mib;
        s->all_mib[i] = n->memory_mib;
        bit_put(s->idle, i, !n->used);
        s->everyone &= n->uid == 0;
        s->groups = n->group >= s->groups ? n->group + 1 : s->groups;
    }
    return ok;
}

struct sched *sched_new(const struct sched_node *nodes, int n_nodes, const struct sched_runner *runners, int n_runners,
                        const struct sched_held *held, int n_held, int64_t now)
{
    struct sched *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->nodes = nodes;
    s->n = n_nodes;
    s->words = n_nodes / 64 + 1;
    s->runners = runners;
    s->n_runners = n_runners;
    s->now = now;
    s->everyone = true;
    bool ok = true;
    for (int p = 0; p < SCHED_POOLS; p++)
        ok &= view_init(&s->slots[p], s->n, s->words) & view_init(&s->free[p], s->n, s->words);
    s->free_mib = calloc((size_t)s->n + 1, sizeof *s->free_mib);
    s->all_mib = calloc((size_t)s->n + 1, sizeof *s->all_mib);
    s->idle = calloc((size_t)s->words, sizeof *s->idle);
    s->mask = calloc((size_t)s->words, sizeof *s->mask);
    s->list = calloc((size_t)s->n + 1, sizeof *s->list);
    ok = ok && s->free_mib && s->all_mib && s->idle && s->mask && s->list && picture_nodes(s);
    s->group_count = calloc((size_t)s->groups + 1, sizeof *s->group_count);
    ok = ok && s->group_count;
    for (int i = 0; ok && i < n_held; i++) {
        const struct sched_held *h = &held[i];
        ok = add_part(s, (struct part){.node = h->node,
                                       .runner = h->runner,
                                       .pool = h->pool,
                                       .slots = h->slots,
                                       .mib = h->mib,
                                       .ends = runners[h->runner].ends,
                                       .exclusive = h->exclusive});
        s->counts_memory |= h->mib > 0;
    }
    if (ok)
        return s;
    sched_free(s);
    return NULL;
}

void sched_free(struct sched *s)
{
    if (!s)
        return;
    for (int p = 0; p < SCHED_POOLS; p++) {
        view_free(&s->slots[p]);
        view_free(&s->free[p]);
        view_free(&s->heads[p].late);
        free(s->heads[p].reserved);
        free(s->heads[p].spare);
        free(s->heads[p].spare_mib);
        free(s->heads[p].late_mib);
    }
    filters_free(s);
    free(s->parts);
    free(s->free_mib);
    free(s->all_mib);
    free(s->idle);
    free(s->mask);
    free(s->list);
    free(s->group_count);
    free(s);
}

bool sched_failed(const struct sched *s)
{
    return s->failed;
}

bool sched_full(const struct sched *s, enum sched_pool pool)
{
    const struct view *v = &s->free[pool];
    if (v->some[0] & ~UINT64_C(1))
        return false;
    for (size_t w = 1; w < sizeof v->some / sizeof v->some[0]; w++)
        if (v->some[w])
            return false;
    return true;
}

int64_t sched_head(const struct sched *s, enum sched_pool pool, int64_t *when)
{
    *when = s->heads[pool].when;
    return s->heads[pool].set ? s->heads[pool].request.id : -1;
}

/* ---- placing ------------------------------------------------------------------------------ */

int64_t request_mib(const struct sched_node *n, const struct sched_request *r)
{
    if (r->mib_per_rank > 0)
        return r->mib_per_rank * r->devices_per_node;
    if (r->pool != SCHED_CPU || n->slots[SCHED_CPU] <= 0)
        return 0;
    return n->memory_mib * r->devices_per_node / n->slots[SCHED_CPU];
}

bool request_late(const struct sched *s, const struct sched_request *r, enum sched_pool pool)
{
    const struct head *h = &s->heads[pool];
    if (!h->set || (r->id && r->id == h->request.id))
        return false;
    if (r->runs_ns == SCHED_ENDLESS || h->when == SCHED_ENDLESS)
        return r->runs_ns == SCHED_ENDLESS;
    return r->runs_ns > h->when - s->now;
}

static bool wants_memory(const struct sched_request *r)
{
    return r->mib_per_rank > 0 || r->pool == SCHED_CPU;
}

const uint64_t *request_mask(struct sched *s, const struct sched_request *r, const struct filter *f)
{
    const uint64_t *mask = f->bits;
    for (int p = 0; p < SCHED_POOLS; p++) {
        const struct head *h = &s->heads[p];
        bool own = p == (int)r->pool;
        /* What the pools share: the node as a whole, and its memory. */
        bool whole = r->exclusive || h->request.exclusive || (!own && wants_memory(r) && wants_memory(&h->request));
        if (!request_late(s, r, (enum sched_pool)p) || !(whole || (own && h->when == SCHED_ENDLESS)))
            continue;
        for (int w = 0; w < s->words; w++)
            s->mask[w] = mask[w] & ~h->reserved[w];
        mask = s->mask;
    }
    if (!r->n_avoid)
        return mask;
    if (mask != s->mask)
        memcpy(s->mask, mask, (size_t)s->words * sizeof *mask);
    for (int i = 0; i < r->n_avoid; i++)
        bit_put(s->mask, r->avoid[i], false);
    return s->mask;
}

void take(struct sched *s, const struct sched_request *r, const int *chosen)
{
    bool ok = true;
    for (int k = 0; k < r->nodes; k++) {
        int i = chosen[k];
        int64_t mib = request_mib(&s->nodes[i], r);
        s->free_mib[i] -= mib;
        bit_put(s->idle, i, false);
        for (int p = 0; p < SCHED_POOLS; p++) {
            struct head *h = &s->heads[p];
            bool own = p == (int)r->pool, late = request_late(s, r, (enum sched_pool)p);
            int left = r->exclusive ? 0 : s->free[p].avail[i] - (own ? r->devices_per_node : 0);
            ok &= view_set(&s->free[p], s->words, i, left);
            if (!h->set || h->when == SCHED_ENDLESS)
                continue;
            if (late && (own || r->exclusive))
                h->spare[i] = r->exclusive ? 0 : h->spare[i] - r->devices_per_node;
            if (late)
                h->spare_mib[i] -= mib;
            h->late_mib[i] = s->free_mib[i] < h->spare_mib[i] ? s->free_mib[i] : h->spare_mib[i];
            ok &= view_set(&h->late, s->words, i, left < h->spare[i] ? left : h->spare[i]);
        }
        ok &= add_part(s, (struct part){.node = i,
                                        .runner = -1,
                                        .pool = r->pool,
                                        .slots = r->devices_per_node,
                                        .mib = mib,
                                        .ends = r->runs_ns == SCHED_ENDLESS ? SCHED_ENDLESS : s->now + r->runs_ns,
                                        .exclusive = r->exclusive});
    }
    s->failed |= !ok;
}

bool possible(struct sched *s, const struct sched_request *r, struct shape *shape)
{
    if (!shape->possible && !shape->never) {
        shape->possible = choose(s, r, &s->slots[r->pool], shape->filter->bits, s->all_mib, NULL, NULL);
        shape->never = !shape->possible;
    }
    return shape->possible;
}

/* Whether it would fit were no head promised anything. */
static enum sched_verdict without_heads(struct sched *s, const struct sched_request *r, struct shape *shape)
{
    struct sched_request alone = *r;
    alone.runs_ns = 0;
    const uint64_t *mask = request_mask(s, &alone, shape->filter);
    if (choose(s, r, &s->free[r->pool], mask, s->free_mib, r->exclusive ? s->idle : NULL, NULL))
        return SCHED_BEHIND;
    shape->fails = shape->fails || !r->n_avoid;
    return SCHED_WAIT;
}

/* The verdict; chosen NULL: nothing is chosen. */
static enum sched_verdict judge(struct sched *s, const struct sched_request *r, struct shape *shape, int *chosen)
{
    bool memo = !r->n_avoid, late = request_late(s, r, r->pool);
    const struct head *h = &s->heads[r->pool];
    if (!possible(s, r, shape))
        return SCHED_NEVER;
    if (memo && shape->fails)
        return SCHED_WAIT;
    if (memo && late && shape->fails_late)
        return without_heads(s, r, shape);
    const uint64_t *mask = request_mask(s, r, shape->filter);
    bool masked = mask != shape->filter->bits, other = late && h->when != SCHED_ENDLESS;
    bool fits = choose(s, r, other ? &h->late : &s->free[r->pool], mask, other ? h->late_mib : s->free_mib,
                       r->exclusive ? s->idle : NULL, chosen);
    if (fits)
        return SCHED_PLACED;
    shape->fails_late = shape->fails_late || (memo && late);
    if (!masked && !other) {
        shape->fails = shape->fails || memo;
        return SCHED_WAIT;
    }
    return without_heads(s, r, shape);
}

enum sched_verdict sched_judge(struct sched *s, const struct sched_request *r, struct shape *shape)
{
    return judge(s, r, shape, NULL);
}

enum sched_verdict sched_place(struct sched *s, const struct sched_request *r, int *chosen)
{
    struct shape *shape = shape_of(s, r);
    if (!shape) {
        s->failed = true;
        return SCHED_WAIT;
    }
    enum sched_verdict v = judge(s, r, shape, chosen);
    if (v == SCHED_PLACED)
        take(s, r, chosen);
    return v;
}
