/* The gates of a latent crossing: what a latent takes of p, that of the same projection in the block before.
 *
 *     IDENTITY G = p    LINEAR G = p W^T + b    TENSOR G = left P right^T, P being p as a matrix [m, n]
 *
 * Where latents are cut (VANILLA) p is gathered. worker/README.md, "Latent crossing". */
#include "worker/engine_internal.h"

/* Latents [T, c l] of all ranks as one [T, c r] tensor. */
static int gather(struct engine *e, const struct bundle *b, const void *part, void *whole, const char *what,
                  struct error *err)
{
    int64_t rows = e->rows.count * b->count, l = e->w.latent;
    void *parts = engine_buffer(e, BUF_PARTS, 0);
    int rc = comm_all_gather(&e->comms->tp, e->ks, part, parts, rows * l, e->k->act, what, err);
    if (!rc)
        e->k->interleave(e->ks, e->plan->tp, rows, l, parts, whole);
    return rc;
}

static void linear_forward(struct engine *e, const struct bundle *b, int64_t layer, const void *p, struct gated *out)
{
    int64_t r = e->plan->r, l = e->w.latent;
    struct param W = bundle_param(e, b, &e->layers[layer].site[b->site].gate, l * r);
    void *G = engine_buffer(e, BUF_GATE, 0);
    struct gemm g = {.m = e->rows.count,
                     .n = l,
                     .k = r,
                     .trans_b = true,
                     .lda = b->count * r,
                     .ldb = r,
                     .ldc = b->count * l,
                     .batch = b->count,
                     .stride_a = r,
                     .stride_b = l * r,
                     .stride_c = l};
    e->k->gemm(e->ks, &g, p, W.weight, G);
    *out = (struct gated){G, l};
}

/* dW = or += du^T p;  dp = du W, a sum over ranks where W is cut: part i is what rank i keeps of it. */
static int linear_backward(struct engine *e, const struct bundle *b, int64_t layer, const void *p, const void *du,
                           void *dp, struct error *err)
{
    int64_t T = e->rows.count, r = e->plan->r, l = e->w.latent, c = b->count;
    int parts = e->cut->latent ? e->plan->tp : 1;
    struct param W = bundle_param(e, b, &e->layers[layer].site[b->site].gate, l * r);
    struct gemm weight = {.m = l,
                          .n = r,
                          .k = T,
                          .trans_a = true,
                          .lda = c * l,
                          .ldb = c * r,
                          .ldc = r,
                          .batch = (int)c,
                          .stride_a = l,
                          .stride_b = r,
                          .stride_c = l * r,
                          .beta = gradient_beta(e, e->rows.first),
                          .c_grad = true};
    e->k->gemm(e->ks, &weight, du, p, W.grad);
    void *out = parts > 1 ? engine_buffer(e, BUF_PARTS, 0) : dp;
    struct gemm input = {.m = T,
                         .n = l,
                         .k = l,
                         .lda = c * l,
                         .ldb = r,
                         .ldc = c * l,
                         .batch = parts,
                         .stride_b = l,
                         .stride_c = T * c * l};
    for (int64_t j = 0; j < c; j++)
        e->k->gemm(e->ks, &input, act_at(e, du, j * l), act_at(e, W.weight, j * l * r), act_at(e, out, j * l));
    if (parts == 1)
        return ERR_OK;
    return comm_reduce_scatter(&e->comms->tp, e->ks, out, dp, T * c * l, e->k->act, "gradient of a gate's input", err);
}

/* A token's latent as a matrix [m, n]; here rows a of all tokens stand together, [m, T, n], so that both of the
 * gate's products are one GEMM over all tokens. */
struct tensor_gate {
    int64_t m, n;
    struct param right, left; /* of one branch: G = left P right^T */
    void *P, *M, *G;          /* P, M = P right^T, G = left M */
};
static struct tensor_gate tensor_of(const struct engine *e, const struct bundle *b, int64_t layer, int64_t j)
{
    struct tensor_gate t;
    const struct site_params *site = &e->layers[layer].site[b->site];
    int64_t elements = e->rows.count * e->plan->r;
    plan_gate_shape(e->plan->r, &t.m, &t.n);
    struct bundle one = {b->site, b->first + (int)j, 1};
    t.right = bundle_param(e, &one, &site->gate, t.n * t.n);
    t.left = bundle_param(e, &one, &site->gate_left, t.m * t.m);
    t.P = engine_buffer(e, BUF_TENSOR, 0);
    t.M = act_at(e, t.P, elements);
    t.G = act_at(e, t.M, elements);
    return t;
}

/* Branch j of a [T, c r] tensor to or from rows that stand together. */
static void rows_together(struct engine *e, const struct bundle *b, const struct tensor_gate *t, const void *x,
                          int64_t j, void *out)
{
    for (int64_t a = 0; a < t->m; a++)
        e->k->copy_rows(e->ks, e->rows.count, t->n, act_at(e, x, j * e->plan->r + a * t->n), b->count * e->plan->r,
                        false, act_at(e, out, a * e->rows.count * t->n), t->n);
}

static void rows_apart(struct engine *e, const struct bundle *b, const struct tensor_gate *t, const void *x, int64_t j,
                       void *out)
{
    for (int64_t a = 0; a < t->m; a++)
        e->k->copy_rows(e->ks, e->rows.count, t->n, act_at(e, x, a * e->rows.count * t->n), t->n, false,
                        act_at(e, out, j * e->plan->r + a * t->n), b->count * e->plan->r);
}

static void tensor_middle(struct engine *e, const struct bundle *b, const struct tensor_gate *t, const void *p,
                          int64_t j)
{
    rows_together(e, b, t, p, j, t->P);
    struct gemm right = {.m = t->m * e->rows.count,
                         .n = t->n,
                         .k = t->n,
                         .trans_b = true,
                         .lda = t->n,
                         .ldb = t->n,
                         .ldc = t->n,
                         .batch = 1};
    e->k->gemm(e->ks, &right, t->P, t->right.weight, t->M);
}

/* The whole output, of which this rank reads its columns. */
static void tensor_forward(struct engine *e, const struct bundle *b, int64_t layer, const void *p, struct gated *out)
{
    int64_t columns = e->rows.count, r = e->plan->r;
    void *whole = engine_buffer(e, BUF_GATE, 0);
    for (int64_t j = 0; j < b->count; j++) {
        struct tensor_gate t = tensor_of(e, b, layer, j);
        tensor_middle(e, b, &t, p, j);
        struct gemm left = {
            .m = t.m, .n = columns * t.n, .k = t.m, .lda = t.m, .ldb = columns * t.n, .ldc = columns * t.n, .batch = 1};
        e->k->gemm(e->ks, &left, t.left.weight, t.M, t.G);
        rows_apart(e, b, &t, t.G, j, whole);
    }
    *out = (struct gated){act_at(e, whole, e->cut->latent ? e->tp_rank * e->w.latent : 0), r};
}

/* From dG, whole: d left = or += dG M^T;  dM = left^T dG;  d right = or += dM^T P;  dP = dM right. */
static void tensor_branch_backward(struct engine *e, const struct bundle *b, int64_t layer, const void *p,
                                   const void *dG, int64_t j, void *dp)
{
    struct tensor_gate t = tensor_of(e, b, layer, j);
    int64_t row = e->rows.count * t.n;
    tensor_middle(e, b, &t, p, j);
    rows_together(e, b, &t, dG, j, t.G);
    struct gemm left = {.m = t.m,
                        .n = t.m,
                        .k = row,
                        .trans_b = true,
                        .lda = row,
                        .ldb = row,
                        .ldc = t.m,
                        .batch = 1,
                        .beta = gradient_beta(e, e->rows.first),
                        .c_grad = true};
    e->k->gemm(e->ks, &left, t.G, t.M, t.left.grad);
    struct gemm middle = {
        .m = t.m, .n = row, .k = t.m, .trans_a = true, .lda = t.m, .ldb = row, .ldc = row, .batch = 1};
    e->k->gemm(e->ks, &middle, t.left.weight, t.G, t.M);
    struct gemm right = {.m = t.n,
                         .n = t.n,
                         .k = t.m * e->rows.count,
                         .trans_a = true,
                         .lda = t.n,
                         .ldb = t.n,
                         .ldc = t.n,
                         .batch = 1,
                         .beta = gradient_beta(e, e->rows.first),
                         .c_grad = true};
    e->k->gemm(e->ks, &right, t.M, t.P, t.right.grad);
    struct gemm input = {.m = t.m * e->rows.count, .n = t.n, .k = t.n, .lda = t.n, .ldb = t.n, .ldc = t.n, .batch = 1};
    e->k->gemm(e->ks, &input, t.M, t.right.weight, t.G);
    rows_apart(e, b, &t, t.G, j, dp);
}

/* Both matrices are whole on every rank, and so are their gradients when du is: it is gathered, and this rank
 * keeps its columns of dp. */
static int tensor_backward(struct engine *e, const struct bundle *b, int64_t layer, const void *p, const void *du,
                           void *dp, struct error *err)
{
    int64_t rows = e->rows.count * b->count, r = e->plan->r, l = e->w.latent;
    bool cut = e->cut->latent && e->plan->tp > 1;
    void *whole = cut ? engine_buffer(e, BUF_GATE, 0) : dp;
    if (cut) {
        int rc = gather(e, b, du, whole, "gradient of a gate's output", err);
        if (rc)
            return rc;
        du = whole; /* a branch's columns are read before they are written */
    }
    for (int64_t j = 0; j < b->count; j++)
        tensor_branch_backward(e, b, layer, p, du, j, whole);
    if (cut)
        e->k->copy_rows(e->ks, rows, l, act_at(e, whole, e->tp_rank * l), r, false, dp, l);
    return ERR_OK;
}

/* A gate's input: the latents of the block before, whole. */
static void *gate_input(const struct engine *e, const struct bundle *b, int64_t layer)
{
    bool gathered = e->places.at[BUF_P_QKV + b->site].bytes > 0;
    return gathered ? bundle_part(e, BUF_P_QKV, b, layer, e->plan->r) : latent_z(e, b, layer - 1);
}

int gate_forward(struct engine *e, const struct bundle *b, int64_t layer, struct gated *out, struct error *err)
{
    void *before = latent_z(e, b, layer - 1), *p = gate_input(e, b, layer);
    if (e->plan->lax_gate == BOOST__LAX_GATE__VALUE__IDENTITY) {
        *out = (struct gated){before, e->w.latent};
        return ERR_OK;
    }
    int rc = p != before && !e->again ? gather(e, b, before, p, "a gate's input", err) : ERR_OK;
    if (rc)
        return rc;
    if (e->plan->lax_gate == BOOST__LAX_GATE__VALUE__LINEAR)
        linear_forward(e, b, layer, p, out);
    else
        tensor_forward(e, b, layer, p, out);
    return ERR_OK;
}

int gate_backward(struct engine *e, const struct bundle *b, int64_t layer, const void *du, void *dp, struct error *err)
{
    const void *p = gate_input(e, b, layer);
    switch (e->plan->lax_gate) {
    case BOOST__LAX_GATE__VALUE__LINEAR:
        return linear_backward(e, b, layer, p, du, dp, err);
    case BOOST__LAX_GATE__VALUE__TENSOR:
        return tensor_backward(e, b, layer, p, du, dp, err);
    default:
        e->k->copy_rows(e->ks, e->rows.count * b->count, e->w.latent, du, e->w.latent, false, dp, e->w.latent);
        return ERR_OK;
    }
}
