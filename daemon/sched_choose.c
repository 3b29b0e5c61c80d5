/* Choosing nodes: best fit, switches kept together, and the filters that say which nodes come into question. */
#include <stdlib.h>
#include <string.h>

#include "daemon/sched_internal.h"
#include "proto/constraint.h"
#include "proto/nodelist.h"

/* ---- choosing ----------------------------------------------------------------------------- */

/* Whether the node's free GPUs cannot give every tensor parallel group an NVLink group of its own. */
static bool splits(const struct sched_node *n, const struct sched_request *r)
{
    if (r->pool != SCHED_GPU || r->tp < 2 || n->n_islands < 2 || r->devices_per_node % r->tp)
        return false;
    int whole = 0;
    for (int i = 0; i < n->n_islands; i++)
        whole += n->islands[i] / r->tp;
    return whole < r->devices_per_node / r->tp;
}

struct search {
    struct sched *s;
    const struct sched_request *r;
    const struct view *v;
    const uint64_t *mask, *idle;
    const int64_t *free_mib;
    bool joined; /* only nodes that do not split */
};

/* The nodes in question in order of what they have left, into s->list; at most `most`. */
static int gather(const struct search *x, int most)
{
    struct sched *s = x->s;
    int n = 0, d = x->r->devices_per_node;
    bool memory = x->free_mib && (s->counts_memory || x->r->mib_per_rank > 0);
    for (int b = d < TOP ? d : TOP; b < BUCKETS; b++) {
        if (!x->v->count[b])
            continue;
        for (int w = 0; w < s->words; w++) {
            uint64_t bits = x->v->bits[b][w] & x->mask[w] & (x->idle ? x->idle[w] : ~UINT64_C(0));
            for (; bits; bits &= bits - 1) {
                int i = w * 64 + __builtin_ctzll(bits);
                const struct sched_node *node = &s->nodes[i];
                if ((b == TOP && x->v->avail[i] < d) || (x->joined && splits(node, x->r)))
                    continue;
                if (memory && node->memory_mib > 0 && request_mib(node, x->r) > x->free_mib[i])
                    continue;
                s->list[n++] = i;
                if (n == most)
                    return n;
            }
        }
    }
    return n;
}

static int ascending(const void *x, const void *y)
{
    int a = *(const int *)x, b = *(const int *)y;
    return (a > b) - (a < b);
}

/* Appends up to `want` nodes of the group from the list of n. */
static int pick_group(const struct sched *s, int n, int group, int want, int *out)
{
    int got = 0;
    for (int k = 0; k < n && got < want; k++)
        if (s->nodes[s->list[k]].group == group)
            out[got++] = s->list[k];
    qsort(out, (size_t)got, sizeof *out, ascending);
    return got;
}

/* From the switch that has enough with the least to spare; where none has, the largest first. */
static void pick_switches(struct sched *s, int n, int want, int *out)
{
    memset(s->group_count, 0, (size_t)s->groups * sizeof *s->group_count);
    for (int k = 0; k < n; k++)
        if (s->nodes[s->list[k]].group >= 0)
            s->group_count[s->nodes[s->list[k]].group]++;
    for (int got = 0; got < want;) {
        int best = -1;
        for (int g = 0; g < s->groups; g++) {
            int have = s->group_count[g], most = best >= 0 ? s->group_count[best] : 0;
            bool enough = have >= want - got, was_enough = most >= want - got;
            if (have && (best < 0 || (enough ? !was_enough || have < most : !was_enough && have > most)))
                best = g;
        }
        got += pick_group(s, n, best, want - got, out + got); /* -1: those that hang nobody knows where */
        if (best >= 0)
            s->group_count[best] = 0;
    }
}

bool choose(struct sched *s, const struct sched_request *r, const struct view *v, const uint64_t *mask,
            const int64_t *free_mib, const uint64_t *idle, int *chosen)
{
    struct search x = {.s = s, .r = r, .v = v, .mask = mask, .idle = idle, .free_mib = free_mib};
    int d = r->devices_per_node < TOP ? r->devices_per_node : TOP, there = 0;
    for (int b = d; b < BUCKETS && there < r->nodes; b++)
        there += v->count[b];
    if (there < r->nodes)
        return false;
    bool switches = chosen && s->groups > 0 && r->nodes > 1;
    x.joined = chosen && r->pool == SCHED_GPU && r->tp > 1;
    int n = gather(&x, switches ? s->n + 1 : r->nodes);
    if (n < r->nodes && x.joined) {
        x.joined = false;
        n = gather(&x, switches ? s->n + 1 : r->nodes);
    }
    if (n < r->nodes)
        return false;
    if (switches) {
        pick_switches(s, n, r->nodes, chosen);
    } else if (chosen) {
        memcpy(chosen, s->list, (size_t)r->nodes * sizeof *chosen);
        qsort(chosen, (size_t)r->nodes, sizeof *chosen, ascending);
    }
    return true;
}

/* ---- filters ------------------------------------------------------------------------------ */

static const char *value_of(const void *arg, const char *key, size_t len)
{
    const struct sched_node *n = arg;
    for (size_t i = 0; i < n->n_labels; i++) {
        const Boost__KeyValue *kv = n->labels[i];
        if (kv->key && strlen(kv->key) == len && memcmp(kv->key, key, len) == 0)
            return kv->value ? kv->value : "";
    }
    return NULL;
}

/* Nodes that one text lets through; NULL: out of memory. The texts are kept: a job may go before the picture. */
static struct part_filter *part_of(struct sched *s, enum filter_kind kind, const char *text)
{
    struct part_filter *f = s->part_filters;
    while (f && (f->kind != kind || strcmp(f->text, text) != 0))
        f = f->next;
    if (f)
        return f;
    f = calloc(1, sizeof *f);
    struct constraint *c = malloc(sizeof *c);
    if (f) {
        f->kind = kind;
        f->text = strdup(text);
        f->bits = calloc((size_t)s->words, sizeof *f->bits);
    }
    if (!f || !c || !f->text || !f->bits) {
        if (f) {
            free(f->text);
            free(f->bits);
        }
        free(f);
        free(c);
        return NULL;
    }
    struct error err;
    bool compiled = kind != FILTER_CONSTRAINT || constraint_compile(f->text, c, &err) == ERR_OK; /* checked at submit */
    for (int i = 0; compiled && i < s->n; i++) {
        const struct sched_node *n = &s->nodes[i];
        bool on = kind == FILTER_CONSTRAINT ? constraint_holds(c, value_of, n)
                  : kind == FILTER_LIST     ? !*text || nodelist_has(text, n->name)
                                            : !nodelist_has(text, n->name);
        bit_put(f->bits, i, on);
    }
    free(c);
    f->next = s->part_filters;
    s->part_filters = f;
    return f;
}

static struct filter *make_filter(struct sched *s, const struct filter *of)
{
    const struct part_filter *parts[] = {part_of(s, FILTER_CONSTRAINT, of->constraint),
                                         part_of(s, FILTER_LIST, of->nodelist),
                                         part_of(s, FILTER_EXCLUDE, of->exclude)};
    struct filter *f = calloc(1, sizeof *f);
    uint64_t *bits = calloc((size_t)s->words, sizeof *bits);
    if (!f || !bits || !parts[0] || !parts[1] || !parts[2]) {
        free(f);
        free(bits);
        return NULL;
    }
    *f = (struct filter){.next = s->filters,
                         .constraint = parts[0]->text,
                         .nodelist = parts[1]->text,
                         .exclude = parts[2]->text,
                         .uid = of->uid,
                         .bits = bits};
    for (int i = 0; i < s->n; i++) {
        const struct sched_node *n = &s->nodes[i];
        bit_put(bits, i, n->up && n->open && (n->uid == 0 || n->uid == of->uid));
    }
    for (int w = 0; w < s->words; w++)
        bits[w] &= parts[0]->bits[w] & parts[1]->bits[w] & parts[2]->bits[w];
    s->filters = f;
    return f;
}

const struct filter *filter_of(struct sched *s, const struct sched_request *r)
{
    struct filter want = {.constraint = r->constraint ? r->constraint : "",
                          .nodelist = r->nodelist ? r->nodelist : "",
                          .exclude = r->exclude ? r->exclude : "",
                          .uid = s->everyone ? 0 : r->uid};
    bool plain = s->everyone && !*want.constraint && !*want.nodelist && !*want.exclude;
    if (plain && s->plain)
        return s->plain;
    struct filter *f = s->filters;
    while (f && (f->uid != want.uid || strcmp(f->constraint, want.constraint) != 0 ||
                 strcmp(f->nodelist, want.nodelist) != 0 || strcmp(f->exclude, want.exclude) != 0))
        f = f->next;
    if (!f)
        f = make_filter(s, &want);
    if (plain)
        s->plain = f;
    return f;
}

struct shape *shape_of(struct sched *s, const struct sched_request *r)
{
    const struct filter *f = filter_of(s, r);
    if (!f)
        return NULL;
    s->counts_memory |= r->mib_per_rank > 0;
    uint64_t key = (uint64_t)(uintptr_t)f ^ (uint64_t)r->mib_per_rank << 40;
    key = (key ^ ((uint64_t)r->nodes << 32 | (uint64_t)r->devices_per_node << 8 | (uint64_t)r->tp << 2 |
                  (uint64_t)r->exclusive << 1 | (uint64_t)r->pool)) *
          UINT64_C(0x9E3779B97F4A7C15);
    struct shape **at = &s->shapes[key >> 54];
    for (struct shape *x = *at; x; x = x->next)
        if (x->filter == f && x->pool == r->pool && x->nodes == r->nodes && x->devices == r->devices_per_node &&
            x->tp == r->tp && x->mib == r->mib_per_rank && x->exclusive == r->exclusive)
            return x;
    struct shape *x = calloc(1, sizeof *x);
    if (!x)
        return NULL;
    *x = (struct shape){.next = *at,
                        .filter = f,
                        .pool = r->pool,
                        .nodes = r->nodes,
                        .devices = r->devices_per_node,
                        .tp = r->tp,
                        .mib = r->mib_per_rank,
                        .exclusive = r->exclusive};
    *at = x;
    return x;
}

void filters_free(struct sched *s)
{
    while (s->filters) {
        struct filter *f = s->filters;
        s->filters = f->next;
        free(f->bits);
        free(f);
    }
    while (s->part_filters) {
        struct part_filter *f = s->part_filters;
        s->part_filters = f->next;
        free(f->text);
        free(f->bits);
        free(f);
    }
    for (size_t i = 0; i < sizeof s->shapes / sizeof s->shapes[0]; i++)
        while (s->shapes[i]) {
            struct shape *x = s->shapes[i];
            s->shapes[i] = x->next;
            free(x);
        }
}
