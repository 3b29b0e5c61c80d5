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
    enum plan_projection projection;
    const char *suffix;  /* behind the projection's name; a gain's name */
    bool first_of_group; /* starts on an aligned offset; the rest of a group follows without a gap */
};
/* clang-format off */
static const struct entry low_rank_entries[] = {
    {ROLE_GAIN, PROJ_Q, "norm1", true},
    {ROLE_DOWN, PROJ_Q, "A", true},
    {ROLE_DOWN, PROJ_K, "A", false},
    {ROLE_DOWN, PROJ_V, "A", false},
    {ROLE_UP, PROJ_Q, "B", true},
    {ROLE_UP, PROJ_K, "B", false},
    {ROLE_UP, PROJ_V, "B", false},
    {ROLE_DOWN, PROJ_O, "A", true},
    {ROLE_UP, PROJ_O, "B", true},
    {ROLE_GAIN, PROJ_GATE, "norm2", true},
    {ROLE_DOWN, PROJ_GATE, "A", true},
    {ROLE_DOWN, PROJ_UP, "A", false},
    {ROLE_UP, PROJ_GATE, "B", true},
    {ROLE_UP, PROJ_UP, "B", false},
    {ROLE_DOWN, PROJ_DOWN, "A", true},
    {ROLE_UP, PROJ_DOWN, "B", true},
};
static const struct entry full_rank_entries[] = {
    {ROLE_GAIN, PROJ_Q, "norm1", true},
    {ROLE_DENSE, PROJ_Q, "W", true},
    {ROLE_DENSE, PROJ_K, "W", false},
    {ROLE_DENSE, PROJ_V, "W", false},
    {ROLE_DENSE, PROJ_O, "W", true},
    {ROLE_GAIN, PROJ_GATE, "norm2", true},
    {ROLE_DENSE, PROJ_GATE, "W", true},
    {ROLE_DENSE, PROJ_UP, "W", false},
    {ROLE_DENSE, PROJ_DOWN, "W", true},
};
/* clang-format on */
enum {
    LOW_RANK_ENTRIES = sizeof low_rank_entries / sizeof low_rank_entries[0],
    FULL_RANK_ENTRIES = sizeof full_rank_entries / sizeof full_rank_entries[0]
};

/* What LAX adds to a layer that has one before it, each for all seven projections. */
enum { CROSSING_KINDS = 4 };
static const struct {
    enum plan_role role;
    const char *suffix;
} crossing_kinds[][CROSSING_KINDS] = {
    [BOOST__LAX_GATE__VALUE__IDENTITY] = {{ROLE_CROSS_GAIN, "cross.gain"}, {ROLE_CROSS_BIAS, "cross.bias"}},
    [BOOST__LAX_GATE__VALUE__LINEAR] = {{ROLE_CROSS_GAIN, "cross.gain"},
                                        {ROLE_CROSS_BIAS, "cross.bias"},
                                        {ROLE_GATE, "cross.W"},
                                        {ROLE_GATE_BIAS, "cross.b"}},
    [BOOST__LAX_GATE__VALUE__TENSOR] = {{ROLE_CROSS_GAIN, "cross.gain"},
                                        {ROLE_CROSS_BIAS, "cross.bias"},
                                        {ROLE_GATE, "cross.right"},
                                        {ROLE_GATE_LEFT, "cross.left"}},
};

static bool full_rank(const struct plan *p)
{
    return p->factorization == BOOST__FACTORIZATION__VALUE__FULL_RANK;
}

static int64_t layer_entries(const struct plan *p, int64_t layer)
{
    int64_t kinds = 0;
    while (p->lax && layer > 0 && kinds < CROSSING_KINDS && crossing_kinds[p->lax_gate][kinds].suffix)
        kinds++;
    return (full_rank(p) ? FULL_RANK_ENTRIES : LOW_RANK_ENTRIES) + kinds * PROJ_COUNT;
}

static struct entry entry_at(const struct plan *p, int64_t i)
{
    if (full_rank(p))
        return full_rank_entries[i];
    if (i < LOW_RANK_ENTRIES)
        return low_rank_entries[i];
    enum plan_projection j = (i - LOW_RANK_ENTRIES) % PROJ_COUNT;
    int64_t kind = (i - LOW_RANK_ENTRIES) / PROJ_COUNT;
    return (struct entry){crossing_kinds[p->lax_gate][kind].role, j, crossing_kinds[p->lax_gate][kind].suffix,
                          plan_branches(plan_site_of(j)).first == j};
}

void plan_gate_shape(int64_t r, int64_t *m, int64_t *n)
{
    *m = 1;
    for (int64_t i = 2; i * i <= r; i++)
        if (r % i == 0)
            *m = i;
    *n = r / *m;
}

/* Of embedding, head and dense layers. */
static const double plain_std = 0.02;

/* The part of [0, valid) in block `rank` of `parts` equal blocks of `padded`. */
static void vocabulary_rows(const struct plan *p, int tp_rank, struct plan_tensor *t)
{
    int64_t block = p->V_pad / p->tp;
    t->row0 = block * tp_rank < p->V ? block * tp_rank : p->V;
    t->nrows = p->V - t->row0 < block ? p->V - t->row0 : block;
}

/* An embedding cut like the residual stream needs no call; one that is the head too, or that feeds a stream
 * which is whole on every rank, is cut along the vocabulary. */
bool plan_embedding_by_hidden(const struct plan *p)
{
    return plan_cut(p)->hidden && !p->tied;
}

/* Elements that the tensor takes in a parameter-shaped buffer: as its slice, but a vocabulary
 * shard always with its padding rows, so that the head is one GEMM of one width everywhere. */
static int64_t stored_elements(const struct plan *p, const struct plan_tensor *t)
{
    bool by_vocabulary = t->role == ROLE_HEAD || (t->role == ROLE_EMBEDDING && !plan_embedding_by_hidden(p));
    return (by_vocabulary ? p->V_pad / p->tp : t->nrows) * t->ncols;
}

/* A tensor [rows, cols] of which this rank holds [nrows, ncols]: block number tp_rank where they differ. */
static void slice(struct plan_tensor *t, int tp_rank, int64_t rows, int64_t cols, int64_t nrows, int64_t ncols)
{
    t->rows = rows;
    t->cols = cols;
    t->nrows = nrows;
    t->ncols = ncols;
    t->row0 = nrows < rows ? nrows * tp_rank : 0;
    t->col0 = ncols < cols ? ncols * tp_rank : 0;
}

static void embedding_at(const struct plan *p, int tp_rank, struct plan_tensor *t)
{
    snprintf(t->name, sizeof t->name, "embedding");
    t->role = ROLE_EMBEDDING;
    if (plan_embedding_by_hidden(p)) {
        slice(t, tp_rank, p->V, p->d, p->V, p->d / p->tp);
    } else {
        slice(t, tp_rank, p->V, p->d, p->V, p->d);
        vocabulary_rows(p, tp_rank, t);
    }
}

static void head_at(const struct plan *p, int tp_rank, struct plan_tensor *t)
{
    snprintf(t->name, sizeof t->name, "head");
    t->role = ROLE_HEAD;
    slice(t, tp_rank, p->V, p->d, p->V, p->d);
    vocabulary_rows(p, tp_rank, t);
}

static void gain_at(const struct plan *p, int tp_rank, struct plan_tensor *t)
{
    struct plan_widths w;
    plan_widths(p, &w);
    t->role = ROLE_GAIN;
    t->init = INIT_ONE;
    slice(t, tp_rank, 1, p->d, 1, w.x);
}

/* A slice follows from the widths on both sides of a layer. Where the latent is cut, B gives partial sums of
 * its whole output, whatever part of their sum the rank keeps. */
static void projection_at(const struct plan *p, int tp_rank, const struct entry *entry, struct plan_tensor *t)
{
    struct plan_widths w;
    plan_widths(p, &w);
    int64_t in = plan_in_width(p, entry->projection), out = plan_out_width(p, entry->projection);
    int64_t local_in = w.in[plan_site_of(entry->projection)];
    int64_t local_out = plan_cut(p)->latent ? out : w.out[entry->projection];
    /* Variance 1/(in + out) of the product's entries: r sigma^4 = 1/(in + out). */
    double factor_std = pow((double)p->r * (double)(in + out), -0.25);
    t->role = entry->role;
    t->init_std = entry->role == ROLE_DENSE ? plain_std : factor_std;
    if (entry->role == ROLE_DENSE)
        slice(t, tp_rank, out, in, local_out, local_in);
    else if (entry->role == ROLE_DOWN)
        slice(t, tp_rank, p->r, in, w.latent, local_in);
    else
        slice(t, tp_rank, out, p->r, local_out, w.latent);
}

/* Uniform within 1/sqrt(n), n the inputs of a gate: the usual start of a linear layer (He and others' rule with
 * negative slope sqrt(5)). */
static void gate_at(int tp_rank, int64_t rows, int64_t n, int64_t nrows, struct plan_tensor *t)
{
    t->init = INIT_UNIFORM;
    t->init_std = 1 / sqrt(3 * (double)n);
    slice(t, tp_rank, rows, n, nrows, n);
}

static void crossing_at(const struct plan *p, int tp_rank, const struct entry *entry, struct plan_tensor *t)
{
    struct plan_widths w;
    int64_t m, n;
    plan_widths(p, &w);
    plan_gate_shape(p->r, &m, &n);
    t->role = entry->role;
    if (entry->role == ROLE_GATE_LEFT) {
        gate_at(tp_rank, m, m, m, t);
    } else if (entry->role == ROLE_GATE && p->lax_gate == BOOST__LAX_GATE__VALUE__TENSOR) {
        gate_at(tp_rank, n, n, n, t);
    } else if (entry->role == ROLE_GATE) {
        gate_at(tp_rank, p->r, p->r, w.latent, t);
    } else {
        t->init = entry->role == ROLE_CROSS_GAIN ? INIT_ONE : INIT_ZERO;
        slice(t, tp_rank, 1, p->r, 1, w.latent);
    }
}

/* Tensors of a layer's entries stand behind the embedding, layer by layer; all but the first are alike. */
static int64_t first_of_layer(const struct plan *p, int64_t layer)
{
    return layer == 0 ? 1 : 1 + layer_entries(p, 0) + (layer - 1) * layer_entries(p, 1);
}

static int64_t layer_of(const struct plan *p, int64_t i)
{
    int64_t second = first_of_layer(p, 1);
    return i < second ? 0 : 1 + (i - second) / layer_entries(p, 1);
}

static void layer_tensor(const struct plan *p, int tp_rank, int64_t i, struct plan_tensor *t, bool *first_of_group)
{
    static const char *const names[PROJ_COUNT] = {"q", "k", "v", "o", "gate", "up", "down"};
    int64_t layer = layer_of(p, i);
    struct entry entry = entry_at(p, i - first_of_layer(p, layer));
    if (entry.role == ROLE_GAIN)
        gain_at(p, tp_rank, t);
    else if (entry.role >= ROLE_CROSS_GAIN)
        crossing_at(p, tp_rank, &entry, t);
    else
        projection_at(p, tp_rank, &entry, t);
    t->layer = (int)layer;
    t->projection = (int)entry.projection;
    if (entry.role == ROLE_GAIN)
        snprintf(t->name, sizeof t->name, "layers.%lld.%s", (long long)layer, entry.suffix);
    else
        snprintf(t->name, sizeof t->name, "layers.%lld.%s.%s", (long long)layer, names[entry.projection], entry.suffix);
    *first_of_group = entry.first_of_group;
}

/* All but the offset. */
static void describe(const struct plan *p, int rank, int64_t i, struct plan_tensor *t, bool *first_of_group)
{
    int tp_rank = plan_tp_rank(p, rank);
    int64_t behind_layers = first_of_layer(p, p->L);
    memset(t, 0, sizeof *t);
    t->layer = t->projection = -1;
    *first_of_group = true;
    if (i == 0) {
        embedding_at(p, tp_rank, t);
    } else if (i < behind_layers) {
        layer_tensor(p, tp_rank, i, t, first_of_group);
    } else if (i == behind_layers) {
        gain_at(p, tp_rank, t);
        snprintf(t->name, sizeof t->name, "norm");
    } else {
        head_at(p, tp_rank, t);
    }
    bool edge = t->role == ROLE_EMBEDDING || t->role == ROLE_HEAD;
    if (edge)
        t->init_std = plain_std;
    bool drawn = t->init == INIT_NORMAL || t->init == INIT_UNIFORM; /* gains and biases are not, and never decay */
    t->decay = edge ? p->decay_embeddings : drawn;
    /* A slice has one owner; of a tensor that all ranks hold whole it is the first. */
    t->counted = tp_rank == 0 || t->nrows < t->rows || t->ncols < t->cols;
}

int64_t plan_tensor_count(const struct plan *p)
{
    return first_of_layer(p, p->L) + 1 + (p->tied ? 0 : 1);
}

/* Where tensor number `to` may begin, counted from where number `from` (the first of a group) begins at `offset`. */
static int64_t advance(const struct plan *p, int64_t from, int64_t to, int64_t offset)
{
    for (int64_t i = from; i < to; i++) {
        struct plan_tensor t;
        bool first;
        describe(p, 0, i, &t, &first);
        if (first)
            offset = round_up(offset, PLAN_ELEMENT_ALIGN);
        offset += stored_elements(p, &t);
    }
    return offset;
}

static int64_t layer_elements(const struct plan *p, int64_t layer)
{
    return round_up(advance(p, first_of_layer(p, layer), first_of_layer(p, layer + 1), 0), plan_unit_align(p));
}

/* Elements in front of a layer; all but the first are alike, so only one of them is walked. */
static int64_t layer_offset(const struct plan *p, int64_t layer)
{
    int64_t layers_at = round_up(advance(p, 0, 1, 0), plan_unit_align(p));
    int64_t first = layer > 0 ? layer_elements(p, 0) : 0, others = layer > 1 ? layer_elements(p, 1) : 0;
    return layers_at + first + (layer - 1) * others;
}

/* Where tensor number i begins; for i = plan_tensor_count() where all end. */
static int64_t offset_of(const struct plan *p, int64_t i)
{
    int64_t behind_layers = first_of_layer(p, p->L);
    if (i == 0)
        return 0;
    if (i >= behind_layers)
        return round_up(advance(p, behind_layers, i, layer_offset(p, p->L)),
                        i == plan_tensor_count(p) ? plan_unit_align(p) : PLAN_ELEMENT_ALIGN);
    int64_t layer = layer_of(p, i), first = first_of_layer(p, layer);
    int64_t at = advance(p, first, i, 0);
    if (entry_at(p, i - first).first_of_group)
        at = round_up(at, PLAN_ELEMENT_ALIGN);
    return layer_offset(p, layer) + at;
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

static int64_t whole_elements(const struct plan *p, int64_t from, int64_t to)
{
    int64_t sum = 0;
    for (int64_t i = from; i < to; i++) {
        struct plan_tensor t;
        bool first;
        describe(p, 0, i, &t, &first);
        sum += t.rows * t.cols;
    }
    return sum;
}

int64_t plan_parameters(const struct plan *p)
{
    int64_t second = first_of_layer(p, 1), behind_layers = first_of_layer(p, p->L);
    int64_t others = p->L > 1 ? whole_elements(p, second, first_of_layer(p, 2)) : 0;
    return whole_elements(p, 0, second) + (p->L - 1) * others + whole_elements(p, behind_layers, plan_tensor_count(p));
}
