/* fp32.h: rotary positions and causal attention.
 *
 * A task is one key-value head of one sequence. It walks blocks of BLOCK query rows; the scores of a block
 * against all keys that it may see are one tile [BLOCK, s] in the workspace, so the s x s matrix never exists.
 * All products are dnnl_sgemm calls on the strided heads in place; nothing is packed or transposed here. The
 * products above the diagonal inside a block's last BLOCK columns are computed and thrown away. */
#include <math.h>
#include <omp.h>
#include <oneapi/dnnl/dnnl.h>
#include <stdlib.h>

#include "kernels/cpu/fp32.h"

enum { BLOCK = 64, MAX_TASKS = 64 /* that run at the same time and have tiles of their own */ };

/* ---- rope ------------------------------------------------------------------------ */

/* Angles in fp64: position * theta^(-2j/e) loses all its digits in fp32 at large positions. */
static bool rope_table(struct kstream *ks, int64_t s, int64_t e, double theta)
{
    struct rope_table *t = &ks->rope;
    if (t->cosine && t->s == s && t->e == e && t->theta == theta)
        return true;
    free(t->cosine);
    free(t->sine);
    int64_t half = e / 2;
    size_t bytes = (size_t)(s * half) * sizeof(float);
    *t = (struct rope_table){.s = s, .e = e, .theta = theta, .cosine = malloc(bytes), .sine = malloc(bytes)};
    if (!t->cosine || !t->sine) {
        free(t->cosine);
        free(t->sine);
        *t = (struct rope_table){0};
        cpu_fault(ks, ERR_NOMEM, "out of memory for the rotary table of %lld positions", (long long)s);
        return false;
    }
    for (int64_t j = 0; j < half; j++) {
        double frequency = pow(theta, -2.0 * (double)j / (double)e);
        for (int64_t i = 0; i < s; i++) {
            t->cosine[i * half + j] = (float)cos((double)i * frequency);
            t->sine[i * half + j] = (float)sin((double)i * frequency);
        }
    }
    return true;
}

void fp32_rope(struct kstream *ks, int64_t T, int64_t s, int64_t heads, int64_t e, int64_t ld, double theta,
               bool inverse, void *x)
{
    if (!rope_table(ks, s, e, theta))
        return;
    int64_t half = e / 2;
#pragma omp parallel for num_threads(ks->threads) schedule(static) if (ks->threads > 1 && T > fp32_rows(heads * e))
    for (int64_t i = 0; i < T; i++)
        ks->loops->rope(heads, e, ks->rope.cosine + i % s * half, ks->rope.sine + i % s * half, inverse,
                        (float *)x + i * ld);
}

/* ---- attention ------------------------------------------------------------------- */

/* One task's view: pointers to row 0 of the sequence at this head, and its tiles. */
struct head {
    const struct attention *a;
    const struct fp32_loops *loops;
    const float *q, *k, *v, *o, *d_o;
    float *out, *lse;
    float *dq, *dk, *dv;
    float *score; /* [BLOCK, s] */
    float *dp;    /* [BLOCK, s], backward only */
    float *sum;   /* [BLOCK] */
    dnnl_status_t status;
};

static int64_t tasks(const struct attention *a)
{
    return fp32_min(a->b * a->hk, MAX_TASKS);
}

/* Floats of one task's tiles, padded to 256 bytes. */
static int64_t tile_floats(const struct attention *a, bool backward)
{
    int64_t rows = fp32_min(BLOCK, a->s);
    int64_t floats = (backward ? 2 : 1) * rows * a->s + BLOCK;
    return (floats + 63) / 64 * 64;
}

size_t fp32_attention_workspace(const struct attention *a, bool backward)
{
    return (size_t)(tasks(a) * tile_floats(a, backward)) * sizeof(float);
}

static float scale_of(const struct attention *a)
{
    return (float)(1 / sqrt((double)a->e));
}

/* C := alpha op(A) op(B) + beta C, remembering the first refusal. */
static void multiply(struct head *t, char trans_a, char trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                     const float *a, int64_t lda, const float *b, int64_t ldb, float beta, float *c, int64_t ldc)
{
    dnnl_status_t status = dnnl_sgemm(trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    if (t->status == dnnl_success)
        t->status = status;
}

static void forward_head(struct head *t)
{
    const struct attention *a = t->a;
    float scale = scale_of(a);
    for (int64_t j = 0; j < a->s; j += BLOCK) {
        int64_t rows = fp32_min(BLOCK, a->s - j), seen = j + rows;
        float *out = t->out + j * a->ldo;
        multiply(t, 'N', 'T', rows, seen, a->e, scale, t->q + j * a->ldq, a->ldq, t->k, a->ldk, 0, t->score, a->s);
        t->loops->softmax(rows, seen, a->s, j, t->score, t->sum, t->lse + j);
        multiply(t, 'N', 'N', rows, a->e, seen, 1, t->score, a->s, t->v, a->ldv, 0, out, a->ldo);
        t->loops->divide_rows(rows, a->e, a->ldo, t->sum, out);
    }
}

/* From the last block to the first, so that the first visit writes every row of dk and dv. */
static void backward_head(struct head *t, bool first_of_group)
{
    const struct attention *a = t->a;
    float scale = scale_of(a);
    float beta = first_of_group ? 0 : 1;
    for (int64_t j = (a->s - 1) / BLOCK * BLOCK; j >= 0; j -= BLOCK) {
        int64_t rows = fp32_min(BLOCK, a->s - j), seen = j + rows;
        const float *q = t->q + j * a->ldq, *d_o = t->d_o + j * a->ldo;
        multiply(t, 'N', 'T', rows, seen, a->e, scale, q, a->ldq, t->k, a->ldk, 0, t->score, a->s);
        multiply(t, 'N', 'T', rows, seen, a->e, 1, d_o, a->ldo, t->v, a->ldv, 0, t->dp, a->s);
        t->loops->softmax_backward(rows, seen, a->s, j, a->e, a->ldo, t->lse + j, t->o + j * a->ldo, d_o, t->score,
                                   t->dp);
        multiply(t, 'N', 'N', rows, a->e, seen, scale, t->dp, a->s, t->k, a->ldk, 0, t->dq + j * a->ldq, a->ldq);
        multiply(t, 'T', 'N', seen, a->e, rows, scale, t->dp, a->s, q, a->ldq, beta, t->dk, a->ldk);
        multiply(t, 'T', 'N', seen, a->e, rows, 1, t->score, a->s, d_o, a->ldo, beta, t->dv, a->ldv);
        beta = 1;
    }
}

/* Everything both directions point at; NULL where a direction has none. */
struct tensors {
    const float *q, *k, *v, *o, *d_o;
    float *out, *lse, *dq, *dk, *dv;
};

static const float *shifted(const float *p, int64_t offset)
{
    return p ? p + offset : NULL;
}

static float *shifted_out(float *p, int64_t offset)
{
    return p ? p + offset : NULL;
}

/* All query heads of key-value head nk in sequence i. */
static dnnl_status_t run_task(struct kstream *ks, const struct attention *a, const struct tensors *x, int64_t i,
                              int64_t nk, bool backward, float *tiles)
{
    int64_t group = a->h / a->hk, row = i * a->s;
    int64_t at_k = row * a->ldk + nk * a->e, at_v = row * a->ldv + nk * a->e;
    dnnl_status_t status = dnnl_success;
    for (int64_t n = nk * group; n < (nk + 1) * group && status == dnnl_success; n++) {
        int64_t at_q = row * a->ldq + n * a->e, at_o = row * a->ldo + n * a->e;
        struct head t = {
            .a = a,
            .loops = ks->loops,
            .q = x->q + at_q,
            .k = x->k + at_k,
            .v = x->v + at_v,
            .o = shifted(x->o, at_o),
            .d_o = shifted(x->d_o, at_o),
            .out = shifted_out(x->out, at_o),
            .lse = x->lse + (i * a->h + n) * a->s,
            .dq = shifted_out(x->dq, at_q),
            .dk = shifted_out(x->dk, at_k),
            .dv = shifted_out(x->dv, at_v),
            .sum = tiles,
            .score = tiles + BLOCK,
            .dp = tiles + BLOCK + fp32_min(BLOCK, a->s) * a->s,
            .status = dnnl_success,
        };
        if (backward)
            backward_head(&t, n == nk * group);
        else
            forward_head(&t);
        status = t.status;
    }
    return status;
}

static void run(struct kstream *ks, const struct attention *a, const struct tensors *x, bool backward,
                float *workspace)
{
    int64_t all = a->b * a->hk, together = tasks(a), floats = tile_floats(a, backward);
    int threads = (int)fp32_min(ks->threads, together);
    dnnl_status_t refused = dnnl_success;
#pragma omp parallel num_threads(threads)
    {
        /* One thread to each dnnl_sgemm: the tasks are the parallelism. */
        int before = omp_get_max_threads();
        omp_set_num_threads(1);
        float *tiles = workspace + omp_get_thread_num() * floats;
#pragma omp for schedule(static)
        for (int64_t task = 0; task < all; task++) {
            dnnl_status_t status = run_task(ks, a, x, task / a->hk, task % a->hk, backward, tiles);
            if (status != dnnl_success) {
#pragma omp atomic write
                refused = status;
            }
        }
        omp_set_num_threads(before);
    }
    if (refused != dnnl_success)
        cpu_fault(ks, ERR_INTERNAL, "dnnl_sgemm refused a product of attention (s=%lld e=%lld): status %d",
                  (long long)a->s, (long long)a->e, (int)refused);
}

void fp32_attention_forward(struct kstream *ks, const struct attention *a, const void *q, const void *k,
                            const void *v, void *o, void *lse, void *workspace)
{
    const struct tensors x = {.q = q, .k = k, .v = v, .out = o, .lse = lse};
    run(ks, a, &x, false, workspace);
}

void fp32_attention_backward(struct kstream *ks, const struct attention *a, const void *q, const void *k,
                             const void *v, const void *o, const void *lse, const void *d_o, void *dq, void *dk,
                             void *dv, void *workspace)
{
    /* lse is only read in this direction. */
    const struct tensors x = {
        .q = q, .k = k, .v = v, .o = o, .d_o = d_o, .lse = (float *)lse, .dq = dq, .dk = dk, .dv = dv};
    run(ks, a, &x, true, workspace);
}
