/* Where a rank stands: its pipeline stage, the layers and tensors of that stage, the gradient
 * buckets, and which replica owns which elements. */
#include <assert.h>
#include <string.h>

#include "worker/plan/internal.h"
#include "worker/plan/plan.h"
#include "worker/plan/saturate.h"

/* ---- rank = (pp_rank * dp + dp_rank) * tp + tp_rank ---- */

int plan_tp_rank(const struct plan *p, int rank)
{
    return rank % p->tp;
}

int plan_dp_rank(const struct plan *p, int rank)
{
    return rank / p->tp % p->dp;
}

int plan_pp_rank(const struct plan *p, int rank)
{
    return rank / p->tp / p->dp;
}

int plan_rank(const struct plan *p, int pp_rank, int dp_rank, int tp_rank)
{
    return (pp_rank * p->dp + dp_rank) * p->tp + tp_rank;
}

/* ---- stages ---- */

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

int64_t plan_unit_align(const struct plan *p)
{
    int64_t align = PLAN_ELEMENT_ALIGN, a = align, b = p->dp;
    if (!p->zero)
        return align;
    while (b) { /* the least common multiple: every bucket then divides into dp equal pieces */
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return align / a * p->dp;
}

/* Number of the first tensor of a layer (L: of the first one behind the blocks). Layers ascend. */
static int64_t first_tensor(const struct plan *p, int64_t layer)
{
    int64_t low = 1, high = plan_tensor_count(p);
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        struct plan_tensor t;
        plan_tensor_at(p, 0, middle, &t);
        if (t.layer >= 0 && t.layer < layer)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Where it lies in the buffer of the whole model. */
static int64_t offset_of(const struct plan *p, int64_t tensor)
{
    struct plan_tensor t;
    if (tensor == plan_tensor_count(p))
        return plan_parameter_elements(p);
    plan_tensor_at(p, 0, tensor, &t);
    return t.offset;
}

void plan_stage_at(const struct plan *p, int index, struct plan_stage *out)
{
    assert(index >= 0 && index < p->pp);
    int64_t each = p->L / p->pp, more = p->L % p->pp;
    *out = (struct plan_stage){
        .index = index,
        .first = index == 0,
        .last = index == p->pp - 1,
        .layer0 = index * each + smaller(index, more),
        .layers = each + (index < more),
        .slots = smaller(p->pp - index, p->accumulation),
    };
    out->embedding = out->first || (out->last && p->tied);
    out->tensor0 = first_tensor(p, out->layer0);
    int64_t end = out->last ? plan_tensor_count(p) : first_tensor(p, out->layer0 + out->layers);
    int64_t table = out->embedding ? offset_of(p, 1) : 0;
    out->tensors = out->embedding + end - out->tensor0;
    out->shift = offset_of(p, out->tensor0) - table;
    out->elements = offset_of(p, end) - out->shift;
}

void plan_stage_tensor_at(const struct plan *p, const struct plan_stage *stage, int rank, int64_t i,
                          struct plan_tensor *out)
{
    assert(i >= 0 && i < stage->tensors);
    bool table = stage->embedding && i == 0;
    plan_tensor_at(p, rank, table ? 0 : stage->tensor0 + i - stage->embedding, out);
    if (!table)
        out->offset -= stage->shift;
    else if (!stage->first)
        out->counted = false; /* the first stage counts a tied table */
}

int plan_writer(const struct plan *p, const struct plan_stage *stage, int rank, int64_t i, int replica)
{
    struct plan_tensor t;
    bool table = stage->embedding && i == 0;
    plan_tensor_at(p, rank, table ? 0 : stage->tensor0 + i - stage->embedding, &t);
    return plan_rank(p, table ? 0 : stage->index, replica, t.counted ? plan_tp_rank(p, rank) : 0);
}

/* ---- buckets ---- */

int64_t plan_buckets(const struct plan *p, const struct plan_stage *stage, int64_t element_bytes,
                     struct plan_bucket *out)
{
    int64_t count = 0, end = stage->elements;
    /* Backward order: what follows the blocks, then the layers from the last one on. */
    for (int64_t layer = stage->layer0 + stage->layers - !stage->last; layer >= stage->layer0; layer--) {
        int64_t first = offset_of(p, first_tensor(p, layer)) - stage->shift;
        bool full = (end - first) * element_bytes >= p->bucket_bytes;
        if (!full && layer > stage->layer0)
            continue;
        if (out)
            out[count] = (struct plan_bucket){.first = first, .elements = end - first, .after = layer};
        count++;
        end = first;
    }
    if (stage->embedding) { /* by itself, so that a tied table is cut alike on both of its stages */
        if (out)
            out[count] = (struct plan_bucket){.first = 0, .elements = end, .after = -1};
        count++;
    }
    return count;
}

void plan_piece(const struct plan *p, const struct plan_bucket *bucket, int dp_rank, int64_t *first, int64_t *count)
{
    int64_t n = bucket->elements, from = n / p->dp * dp_rank + smaller(dp_rank, n % p->dp);
    *first = bucket->first + from;
    *count = n / p->dp + (dp_rank < n % p->dp);
}

void plan_owned(const struct plan *p, const struct plan_bucket *buckets, int64_t n, int dp_rank,
                const struct plan_tensor *t, int64_t *first, int64_t *count)
{
    int64_t begin = t->offset, end = t->offset + t->nrows * t->ncols;
    *first = *count = 0;
    for (int64_t b = 0; b < n; b++) {
        if (begin < buckets[b].first || begin >= buckets[b].first + buckets[b].elements)
            continue;
        int64_t piece, size;
        plan_piece(p, &buckets[b], dp_rank, &piece, &size);
        int64_t from = piece > begin ? piece : begin, to = smaller(piece + size, end);
        if (to > from) {
            *first = from - begin;
            *count = to - from;
        }
        return;
    }
}

/* ---- communication ---- */

static void count(struct plan_comm *c, int64_t calls, int64_t elements)
{
    c->calls += calls;
    c->elements = add(c->elements, elements);
}

int64_t plan_boundary_elements(const struct plan *p)
{
    struct plan_widths w;
    plan_widths(p, &w);
    return p->T * (w.x + (p->lax ? PROJ_COUNT * w.latent : 0));
}

/* What crosses the borders of a stage: the residual stream, Td (BTP Td/t) a micro-batch each way, and with LAX the
 * latents, 7Tr. */
static void pipeline_counts(const struct plan *p, const struct plan_stage *stage, struct plan_comm_counts *out)
{
    int64_t n = p->accumulation, elements = plan_boundary_elements(p);
    if (!stage->last) {
        count(&out->pp[PLAN_SEND][PLAN_FORWARD], n, mul(n, elements));
        count(&out->pp[PLAN_RECV][PLAN_BACKWARD], n, mul(n, elements));
        count(&out->pp[PLAN_SEND][PLAN_EVAL], 1, elements);
    }
    if (!stage->first) {
        count(&out->pp[PLAN_RECV][PLAN_FORWARD], n, mul(n, elements));
        count(&out->pp[PLAN_SEND][PLAN_BACKWARD], n, mul(n, elements));
        count(&out->pp[PLAN_RECV][PLAN_EVAL], 1, elements);
    }
}

/* Once a step: the gradients of the stage's parameters, in buckets. */
static void replica_counts(const struct plan *p, const struct plan_stage *stage, struct plan_comm_counts *out)
{
    struct plan_backend backend;
    plan_backend_estimate(p, &backend);
    int64_t calls = plan_buckets(p, stage, (int64_t)dtype_size(backend.grad), NULL);
    if (!p->zero) {
        count(&out->dp[PLAN_ALL_REDUCE][PLAN_STEP], calls, stage->elements);
        return;
    }
    count(&out->dp[PLAN_REDUCE_SCATTER][PLAN_STEP], calls, stage->elements);
    count(&out->dp[PLAN_ALL_GATHER][PLAN_STEP], calls, stage->elements);
}

void plan_parallel_counts(const struct plan *p, const struct plan_stage *stage, struct plan_comm_counts *out)
{
    if (p->pp > 1)
        pipeline_counts(p, stage, out);
    if (p->dp > 1)
        replica_counts(p, stage, out);
    if (p->pp > 1 && p->tied && stage->embedding) {
        int64_t table = offset_of(p, 1); /* with its padding; under zero 1 every replica sums its own piece */
        count(&out->ends[PLAN_ALL_REDUCE][PLAN_STEP], 1, p->zero ? table / p->dp : table);
    }
}
