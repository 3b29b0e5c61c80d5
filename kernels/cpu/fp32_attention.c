/* fp32.h: rotary positions and causal attention.
 *
 * A task is one key-value head of one sequence. It walks blocks of BLOCK query rows; the scores of a block
 * against all keys that it may see are one tile [BLOCK, s] in the workspace, so the s x s matrix never exists.
 * Keys and values are copied once a task, dense and transposed as the products want them, and dk and dv are summed
 * dense: a head in place has rows a power of two apart, which fall on few sets of a cache. Inside a
 * block the scores are computed in strips of STRIP rows, each up to its own diagonal rounded up to PAD; what lies above
 * the diagonal is masked. */
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/fp32.h"

enum {
    BLOCK = 32, /* a multiple of STRIP; also the depth of the sums into dk and dv */
    STRIP = 8,
    PAD = 32,      /* columns of scores are rounded up to it, so that whole vectors fit */
    SKEW = 16,     /* and rows of scores are that much longer, so that they fall on all sets of a cache */
    MAX_TASKS = 64 /* that run at the same time and have tiles of their own */
};

/* ---- rope ------------------------------------------------------------------------ */

/* Angles in fp64: position * theta^(-2j/e) in fp32 would be off by position * 2^-24, which at 4096 is 2e-4. */
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

/* One task's view: row 0 of the sequence at this head, and its scratch. */
struct head {
    const struct attention *a;
    const struct fp32_loops *loops;
    const float *q, *o, *d_o;
    float *out, *lse, *dq;
    int64_t ld;     /* of kt, vt, score and dp: what lies behind column s is read and never used */
    float *sum;     /* [BLOCK] */
    float *score;   /* [BLOCK, ld] */
    float *kt;      /* K^T [e, ld] */
    float *v;       /* [s, e], forward only; the rest backward only */
    float *dp;      /* [BLOCK, ld] */
    float *vt;      /* V^T [e, ld] */
    float *k;       /* [s, e] */
    float *dk, *dv; /* [s, e] */
};

static int64_t padded(int64_t n)
{
    return (n + PAD - 1) / PAD * PAD;
}

static int64_t tasks(const struct attention *a)
{
    return fp32_min(a->b * a->hk, MAX_TASKS);
}

/* Hands out the scratch of one task and returns its size in floats; with base NULL only the size. */
static int64_t place_scratch(const struct attention *a, bool backward, float *base, struct head *t)
{
    int64_t used = 0, ld = padded(a->s) + SKEW, dense = padded(a->s * a->e);
    const struct {
        float **where;
        int64_t floats;
    } parts[] = {
        {&t->sum, BLOCK},
        {&t->score, BLOCK * ld},
        {&t->kt, a->e * ld},
        {&t->v, backward ? 0 : dense},
        {&t->dp, backward ? BLOCK * ld : 0},
        {&t->vt, backward ? a->e * ld : 0},
        {&t->k, backward ? dense : 0},
        {&t->dk, backward ? dense : 0},
        {&t->dv, backward ? dense : 0},
    };
    t->ld = ld;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        *parts[i].where = base ? base + used : NULL;
        used += parts[i].floats;
    }
    return used;
}

static int64_t scratch_floats(const struct attention *a, bool backward)
{
    struct head unused;
    return place_scratch(a, backward, NULL, &unused);
}

size_t fp32_attention_workspace(const struct attention *a, bool backward)
{
    return (size_t)(tasks(a) * scratch_floats(a, backward)) * sizeof(float);
}

static float scale_of(const struct attention *a)
{
    return (float)(1 / sqrt((double)a->e));
}

/* to [rows, ld] := scale x bt for the rows from query j on, each strip up to its diagonal. The columns are rounded up
 * to whole vectors, which the padding allows; what they hold is masked. */
static void scores(const struct head *t, int64_t j, int64_t rows, float scale, const float *x, int64_t ldx,
                   const float *bt, float *to)
{
    for (int64_t r = 0; r < rows; r += STRIP) {
        int64_t height = fp32_min(STRIP, rows - r);
        t->loops->product(height, padded(j + r + height), t->a->e, scale, x + (j + r) * ldx, ldx, 1, bt, t->ld, false,
                          to + r * t->ld, t->ld);
    }
}

/* to[j + r] := scale w[r] y for `rows` rows of w, which see the keys up to j + r; y is dense [s, e]. */
static void weighted(const struct head *t, int64_t j, int64_t rows, float scale, const float *w, const float *y,
                     float *to, int64_t ld_to)
{
    for (int64_t r = 0; r < rows; r += STRIP) {
        int64_t height = fp32_min(STRIP, rows - r);
        t->loops->product(height, t->a->e, j + r + height, scale, w + r * t->ld, t->ld, 1, y, t->a->e, false,
                          to + (j + r) * ld_to, ld_to);
    }
}

/* The rows of a head lie apart, which no hardware prefetcher follows, and a product that waits for its first operand
 * has nothing else to do: so the block from row j on (if there is one) is asked for a block ahead. */
static void prefetch(const struct attention *a, int64_t j, const float *x, int64_t ld)
{
    enum { LINE = 16 /* floats */ };
    for (int64_t i = j < 0 ? a->s : j; i < fp32_min(j + BLOCK, a->s); i++)
        for (int64_t l = 0; l < a->e; l += LINE)
            __builtin_prefetch(x + i * ld + l);
}

static void forward_head(const struct head *t)
{
    const struct attention *a = t->a;
    for (int64_t j = 0; j < a->s; j += BLOCK) {
        int64_t rows = fp32_min(BLOCK, a->s - j);
        prefetch(a, j + BLOCK, t->q, a->ldq);
        prefetch(a, j, t->out, a->ldo);
        scores(t, j, rows, scale_of(a), t->q, a->ldq, t->kt, t->score);
        t->loops->softmax(rows, j + rows, t->ld, j, t->score, t->sum, t->lse + j);
        weighted(t, j, rows, 1, t->score, t->v, t->out, a->ldo);
        t->loops->divide_rows(rows, a->e, a->ldo, t->sum, t->out + j * a->ldo);
    }
}

/* From the last block to the first, so that the first visit writes every row of dk and dv. */
static void backward_head(const struct head *t, bool first_of_group)
{
    const struct attention *a = t->a;
    float scale = scale_of(a);
    bool add = !first_of_group;
    for (int64_t j = (a->s - 1) / BLOCK * BLOCK; j >= 0; j -= BLOCK) {
        int64_t rows = fp32_min(BLOCK, a->s - j), seen = j + rows;
        const float *q = t->q + j * a->ldq, *d_o = t->d_o + j * a->ldo;
        prefetch(a, j - BLOCK, t->q, a->ldq);
        prefetch(a, j - BLOCK, t->d_o, a->ldo);
        prefetch(a, j - BLOCK, t->o, a->ldo);
        prefetch(a, j, t->dq, a->ldq);
        scores(t, j, rows, scale, t->q, a->ldq, t->kt, t->score);
        scores(t, j, rows, 1, t->d_o, a->ldo, t->vt, t->dp);
        t->loops->softmax_backward(rows, seen, t->ld, j, a->e, a->ldo, t->lse + j, t->o + j * a->ldo, d_o, t->score,
                                   t->dp);
        weighted(t, j, rows, scale, t->dp, t->k, t->dq, a->ldq);
        t->loops->product(seen, a->e, rows, scale, t->dp, 1, t->ld, q, a->ldq, add, t->dk, a->e);
        t->loops->product(seen, a->e, rows, 1, t->score, 1, t->ld, d_o, a->ldo, add, t->dv, a->e);
        add = true;
    }
}

/* Everything both directions point at; NULL where a direction has none. */
struct tensors {
    const float *q, *k, *v, *o, *d_o;
    float *out, *lse, *dq, *dk, *dv;
};

/* Rows of e floats between a head in place and a dense copy. */
static void copy_rows(const struct attention *a, const float *from, int64_t ld_from, float *to, int64_t ld_to)
{
    for (int64_t i = 0; i < a->s; i++)
        memcpy(to + i * ld_to, from + i * ld_from, (size_t)a->e * sizeof *to);
}

/* All query heads of key-value head nk in sequence i. */
static void run_task(struct kstream *ks, const struct attention *a, const struct tensors *x, int64_t i, int64_t nk,
                     bool backward, float *scratch)
{
    int64_t group = a->h / a->hk, row = i * a->s;
    const float *k = x->k + row * a->ldk + nk * a->e, *v = x->v + row * a->ldv + nk * a->e;
    struct head t = {.a = a, .loops = ks->loops};
    place_scratch(a, backward, scratch, &t);
    ks->loops->transpose(a->s, a->e, k, a->ldk, t.kt, t.ld);
    if (backward) {
        ks->loops->transpose(a->s, a->e, v, a->ldv, t.vt, t.ld);
        copy_rows(a, k, a->ldk, t.k, a->e);
    } else {
        copy_rows(a, v, a->ldv, t.v, a->e);
    }
    for (int64_t n = nk * group; n < (nk + 1) * group; n++) {
        int64_t at_q = row * a->ldq + n * a->e, at_o = row * a->ldo + n * a->e;
        t.q = x->q + at_q;
        t.lse = x->lse + (i * a->h + n) * a->s;
        if (backward) {
            t.o = x->o + at_o;
            t.d_o = x->d_o + at_o;
            t.dq = x->dq + at_q;
            backward_head(&t, n == nk * group);
        } else {
            t.out = x->out + at_o;
            forward_head(&t);
        }
    }
    if (backward) {
        copy_rows(a, t.dk, a->e, x->dk + row * a->ldk + nk * a->e, a->ldk);
        copy_rows(a, t.dv, a->e, x->dv + row * a->ldv + nk * a->e, a->ldv);
    }
}

static void run(struct kstream *ks, const struct attention *a, const struct tensors *x, bool backward, float *workspace)
{
    int64_t all = a->b * a->hk, together = tasks(a), floats = scratch_floats(a, backward);
#pragma omp parallel num_threads((int)fp32_min(ks->threads, together))
    {
        float *scratch = workspace + omp_get_thread_num() * floats;
#pragma omp for schedule(static)
        for (int64_t task = 0; task < all; task++)
            run_task(ks, a, x, task / a->hk, task % a->hk, backward, scratch);
    }
}

void fp32_attention_forward(struct kstream *ks, const struct attention *a, const void *q, const void *k, const void *v,
                            void *o, void *lse, void *workspace)
{
    const struct tensors x = {.q = q, .k = k, .v = v, .out = o, .lse = lse};
    run(ks, a, &x, false, workspace);
}

void fp32_attention_backward(struct kstream *ks, const struct attention *a, const void *q, const void *k, const void *v,
                             const void *o, const void *lse, const void *d_o, void *dq, void *dk, void *dv,
                             void *workspace)
{
    /* lse is only read in this direction. */
    const struct tensors x = {
        .q = q, .k = k, .v = v, .o = o, .d_o = d_o, .lse = (float *)lse, .dq = dq, .dk = dk, .dv = dv};
    run(ks, a, &x, true, workspace);
}
