/* The parameters of a rank: names, global shapes, slices, and where the slices lie. */
#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "worker/plan/internal.h"
#include "worker/plan/plan.h"

/* Canonical order within a layer. */
struct entry {
    enum plan_role role;
    int projection;
    const char *name;
    bool first_of_group; /* starts on an aligned offset; the rest of a group follows without a gap */
};
/* clang-format off */
static const struct entry layer_entries[] = {
    {ROLE_GAIN, PROJ_Q, "norm1", true},
    {ROLE_DOWN, PROJ_Q, "q.A", true},
    {ROLE_DOWN, PROJ_K, "k.A", false},
    {ROLE_DOWN, PROJ_V, "v.A", false},
    {ROLE_UP, PROJ_Q, "q.B", true},
    {ROLE_UP, PROJ_K, "k.B", false},
    {ROLE_UP, PROJ_V, "v.B", false},
    {ROLE_DOWN, PROJ_O, "o.A", true},
    {ROLE_UP, PROJ_O, "o.B", true},
    {ROLE_GAIN, PROJ_GATE, "norm2", true},
    {ROLE_DOWN, PROJ_GATE, "gate.A", true},
    {ROLE_DOWN, PROJ_UP, "up.A", false},
    {ROLE_UP, PROJ_GATE, "gate.B", true},
    {ROLE_UP, PROJ_UP, "up.B", false},
    {ROLE_DOWN, PROJ_DOWN, "down.A", true},
    {ROLE_UP, PROJ_DOWN, "down.B", true},
};
/* clang-format on */
enum { PER_LAYER = sizeof layer_entries / sizeof layer_entries[0], ELEMENT_ALIGN = 128 };

/* Width of the dense layer that a pair stands for. */
static int64_t in_width(const struct plan *p, int projection)
{
    return projection == PROJ_DOWN ? p->f : p->d;
}

static int64_t out_width(const struct plan *p, int projection)
{
    switch (projection) {
    case PROJ_K:
    case PROJ_V:
        return p->hk * p->e;
    case PROJ_GATE:
    case PROJ_UP:
        return p->f;
    default:
        return p->d;
    }
}

/* The part of [0, valid) in block `rank` of `parts` equal blocks of `padded`. */
static void vocabulary_rows(const struct plan *p, int tp_rank, struct plan_tensor *t)
{
    int64_t block = p->V_pad / p->tp;
    t->row0 = block * tp_rank < p->V ? block * tp_rank : p->V;
    t->nrows = p->V - t->row0 < block ? p->V - t->row0 : block;
}

/* Elements that the tensor takes in a parameter-shaped buffer: as its slice, but a vocabulary
 * shard always with its padding rows, so that the head is one GEMM of one width everywhere. */
static int64_t stored_elements(const struct plan *p, const struct plan_tensor *t)
{
    bool by_vocabulary = t->role == ROLE_HEAD || (t->role == ROLE_EMBEDDING && p->tied);
    return (by_vocabulary ? p->V_pad / p->tp : t->nrows) * t->ncols;
}

static void embedding_at(const struct plan *p, int tp_rank, struct plan_tensor *t)
{
    snprintf(t->name, sizeof t->name, "embedding");
    t->role = ROLE_EMBEDDING;
    t->rows = p->V;
    t->cols = p->d;
    t->ncols = p->d;
    if (p->tied) {
        vocabulary_rows(p, tp_rank, t);
    } else {
        t->nrows = p->V;
        t->ncols = p->d / p->tp;
        t->col0 = t->ncols * tp_rank;
    }
}

static void gain_at(const struct plan *p, int tp_rank, struct plan_tensor *t)
{
    t->role = ROLE_GAIN;
    t->rows = t->nrows = 1;
    t->cols = p->d;
    t->ncols = p->d / p->tp;
    t->col0 = t->ncols * tp_rank;
}

static void factor_at(const struct plan *p, int tp_rank, const struct entry *entry, struct plan_tensor *t)
{
    int64_t in = in_width(p, entry->projection), out = out_width(p, entry->projection);
    t->role = entry->role;
    /* Variance 1/(in + out) of the product's entries: r sigma^4 = 1/(in + out). */
    t->init_std = pow((double)p->r * (double)(in + out), -0.25);
    if (entry->role == ROLE_DOWN) {
        t->rows = t->nrows = p->r;
        t->cols = in;
        t->ncols = in / p->tp;
        t->col0 = t->ncols * tp_rank;
    } else {
        t->rows = out;
        t->nrows = out / p->tp;
        t->row0 = t->nrows * tp_rank;
        t->cols = t->ncols = p->r;
    }
}

/* All but the offset. */
static void describe(const struct plan *p, int rank, int64_t i, struct plan_tensor *t, bool *first_of_group)
{
    int tp_rank = plan_tp_rank(p, rank);
    int64_t in_layers = p->L * PER_LAYER;
    memset(t, 0, sizeof *t);
    t->layer = t->projection = -1;
    t->counted = true; /* every tensor of BTP is a slice that one rank owns */
    *first_of_group = true;
    if (i == 0) {
        embedding_at(p, tp_rank, t);
    } else if (i <= in_layers) {
        int64_t layer = (i - 1) / PER_LAYER;
        const struct entry *entry = &layer_entries[(i - 1) % PER_LAYER];
        if (entry->role == ROLE_GAIN)
            gain_at(p, tp_rank, t);
        else
            factor_at(p, tp_rank, entry, t);
        t->layer = (int)layer;
        t->projection = entry->projection;
        snprintf(t->name, sizeof t->name, "layers.%lld.%s", (long long)layer, entry->name);
        *first_of_group = entry->first_of_group;
    } else if (i == in_layers + 1) {
        gain_at(p, tp_rank, t);
        snprintf(t->name, sizeof t->name, "norm");
    } else {
        t->role = ROLE_HEAD;
        snprintf(t->name, sizeof t->name, "head");
        t->rows = p->V;
        t->cols = t->ncols = p->d;
        vocabulary_rows(p, tp_rank, t);
    }
    bool edge = t->role == ROLE_EMBEDDING || t->role == ROLE_HEAD;
    if (edge)
        t->init_std = 0.02;
    t->decay = edge ? p->decay_embeddings : t->role != ROLE_GAIN;
}

int64_t plan_tensor_count(const struct plan *p)
{
    return 1 + p->L * PER_LAYER + 1 + (p->tied ? 0 : 1);
}

/* Where tensor number i ends, counted from where number `from` (the first of a group) begins at `offset`. */
static int64_t advance(const struct plan *p, int64_t from, int64_t to, int64_t offset)
{
    for (int64_t i = from; i < to; i++) {
        struct plan_tensor t;
        bool first;
        describe(p, 0, i, &t, &first);
        if (first)
            offset = round_up(offset, ELEMENT_ALIGN);
        offset += stored_elements(p, &t);
    }
    return offset;
}

/* Start of tensor i: all layers are alike, so only one of them is walked. */
static int64_t offset_of(const struct plan *p, int64_t i)
{
    int64_t layers_at = round_up(advance(p, 0, 1, 0), ELEMENT_ALIGN);
    int64_t layer_elements = round_up(advance(p, 1, 1 + PER_LAYER, 0), ELEMENT_ALIGN);
    int64_t in_layers = p->L * PER_LAYER;
    if (i == 0)
        return 0;
    if (i <= in_layers) {
        int64_t within = (i - 1) % PER_LAYER;
        int64_t at = advance(p, 1, 1 + within, 0);
        if (layer_entries[within].first_of_group)
            at = round_up(at, ELEMENT_ALIGN);
        return layers_at + (i - 1) / PER_LAYER * layer_elements + at;
    }
    int64_t rest = layers_at + p->L * layer_elements;
    return round_up(advance(p, in_layers + 1, i, rest), ELEMENT_ALIGN);
}

void plan_tensor_at(const struct plan *p, int rank, int64_t i, struct plan_tensor *out)
{
    assert(i >= 0 && i < plan_tensor_count(p));
    bool first_of_group;
    describe(p, rank, i, out, &first_of_group);
    out->offset = offset_of(p, i);
}

int64_t plan_parameter_elements(const struct plan *p)
{
    return offset_of(p, plan_tensor_count(p));
}

int64_t plan_parameters(const struct plan *p)
{
    int64_t per_layer = 2 * p->d;
    for (int j = 0; j < PROJ_COUNT; j++)
        per_layer += (in_width(p, j) + out_width(p, j)) * p->r;
    return (p->tied ? 1 : 2) * p->V * p->d + p->L * per_layer + p->d;
}
