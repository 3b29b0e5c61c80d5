/* A control for what a precision may cost: the fp64 engine, where every stored activation, every gradient of one, every
 * sum of latents over ranks and every weight that a product reads is off by a rounding to `digits` binary digits (8:
 * bf16, 24: fp32). The roundings are drawn, uniform within half a unit in the last place, so that runs with different
 * draws show how far the model carries them; the arithmetic between them is exact, and none of the code of the
 * precision in question runs. An error of its size is the model's, not the code's. */
#ifndef BOOST_TESTS_WORKER_TINY_ROUNDED_H
#define BOOST_TESTS_WORKER_TINY_ROUNDED_H

#include "tests/unit/worker/tiny_grads.h"

enum { BF16_DIGITS = 8, FP32_DIGITS = 24 };

static struct {
    const struct kernels *exact;
    int digits;
    uint64_t draw;
    bool sums; /* latents and their gradients are sums over ranks, rounded as such */
} rounded;

/* A function of the value, so that one that is read twice is off by the same; none of one that needs no rounding. */
static inline double rounded_value(double x)
{
    uint64_t bits, power_bits;
    double power; /* of two, at most |x| */
    memcpy(&bits, &x, sizeof bits);
    if (!(bits << (11 + rounded.digits)) || !isfinite(x))
        return x;
    power_bits = bits & UINT64_C(0x7ff0000000000000);
    memcpy(&power, &power_bits, sizeof power);
    uint64_t z = bits + rounded.draw * UINT64_C(0x9e3779b97f4a7c15); /* splitmix64 */
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    double uniform = (double)((z ^ z >> 31) >> 11) * 0x1p-53 - 0.5;
    return x + uniform * power * (2.0 / (double)(UINT64_C(1) << rounded.digits));
}

static inline void rounded_rows(void *x, int64_t rows, int64_t w, int64_t ld)
{
    for (int64_t i = 0; i < rows * w; i++) {
        double *at = (double *)x + i / w * ld + i % w;
        *at = rounded_value(*at);
    }
}

static inline void rounded_gemm(struct kstream *ks, const struct gemm *g, const void *a, const void *b, void *c)
{
    rounded.exact->gemm(ks, g, a, b, c);
    for (int p = 0; p < g->batch && !g->c_grad; p++)
        rounded_rows((double *)c + p * g->stride_c, g->m, g->n, g->ldc);
}

static inline void rounded_residual_gain(struct kstream *ks, int64_t T, int64_t w, const void *x, const void *y,
                                         const void *gain, void *x_out, void *n, void *S)
{
    rounded.exact->residual_gain(ks, T, w, x, y, gain, x_out, n, S);
    if (y) {
        rounded_rows(x_out, T, w, w);
        rounded.exact->residual_gain(ks, T, w, x_out, NULL, gain, x_out, n, S);
    }
    if (n)
        rounded_rows(n, T, w, w);
}

static inline void rounded_norm_apply(struct kstream *ks, int64_t T, int64_t w, int64_t d, double eps, const void *x,
                                      const void *gain, const void *S, void *R, void *n)
{
    rounded.exact->norm_apply(ks, T, w, d, eps, x, gain, S, R, n);
    rounded_rows(n, T, w, w);
}

static inline void rounded_gain_backward(struct kstream *ks, int64_t T, int64_t w, const void *x, const void *gain,
                                         const void *R, const void *k, const void *dn, bool accumulate, void *dx,
                                         void *dgain)
{
    rounded.exact->gain_backward(ks, T, w, x, gain, R, k, dn, accumulate, dx, dgain);
    rounded_rows(dx, T, w, w);
}

static inline void rounded_norm_forward(struct kstream *ks, int64_t T, int64_t d, double eps, const void *x,
                                        const void *y, const void *gain, void *x_out, void *R, void *n)
{
    rounded_residual_gain(ks, T, d, x, y, NULL, x_out, NULL, R);
    rounded_norm_apply(ks, T, d, d, eps, x_out, gain, R, R, n);
}

static inline void rounded_norm_backward(struct kstream *ks, int64_t T, int64_t d, const void *x, const void *gain,
                                         const void *R, const void *dn, void *dx, void *k, void *dgain)
{
    rounded.exact->norm_backward(ks, T, d, x, gain, R, dn, dx, k, dgain);
    rounded_rows(dx, T, d, d);
}

/* Y of H: both are functions of the product as it left the GEMM, so they are the same whenever they are made. */
static inline void rounded_y(struct kstream *ks, int64_t T, int64_t n, int64_t d, double eps, const void *H,
                             const void *S, void *R, void *Y)
{
    if (Y != H)
        memcpy(Y, H, (size_t)(T * n) * sizeof(double));
    if (rounded.sums)
        rounded_rows(Y, T, n, n);
    rounded.exact->latent_forward(ks, T, n, d, eps, LATENT_IDENTITY, Y, S, R, Y);
    if (R)
        rounded_rows(Y, T, n, n);
}

static inline void rounded_latent_forward(struct kstream *ks, int64_t T, int64_t n, int64_t d, double eps,
                                          enum latent_act act, const void *H, const void *S, void *R, void *z)
{
    rounded_y(ks, T, n, d, eps, H, S, R, z);
    if (act == LATENT_IDENTITY)
        return;
    rounded.exact->latent_forward(ks, T, n, d, eps, LATENT_SILU, z, NULL, NULL, z);
    rounded_rows(z, T, n, n);
}

static inline void rounded_latent_backward(struct kstream *ks, int64_t T, int64_t n, int64_t d, enum latent_act act,
                                           const void *latent, const void *R, void *dz, void *k)
{
    double *Y = calloc((size_t)(T * n), sizeof *Y);
    memcpy(Y, latent, (size_t)(T * n) * sizeof *Y);
    if (act != LATENT_IDENTITY)
        rounded_y(ks, T, n, d, 0, latent, NULL, (void *)R, Y);
    if (rounded.sums)
        rounded_rows(dz, T, n, n);
    rounded.exact->latent_backward(ks, T, n, d, act, Y, NULL, dz, NULL);
    if (R)
        rounded.exact->latent_backward(ks, T, n, d, LATENT_IDENTITY, Y, R, dz, k);
    rounded_rows(dz, T, n, n);
    free(Y);
}

/* The sums are of the stored u. */
static inline void rounded_cross_sum(struct kstream *ks, const struct crossing *c, const void *Y, const void *G,
                                     int64_t ldg, const void *bias, void *u, void *sums)
{
    rounded.exact->cross_sum(ks, c, Y, G, ldg, bias, u, NULL);
    rounded_rows(u, c->rows, c->w, c->w);
    if (!sums)
        return;
    double *zeros = calloc((size_t)c->w, sizeof *zeros), *again = calloc((size_t)(c->rows * c->w), sizeof *again);
    rounded.exact->cross_sum(ks, c, u, zeros, 0, NULL, again, sums);
    free(zeros);
    free(again);
}

static inline void rounded_cross_forward(struct kstream *ks, const struct crossing *c, const void *u, const void *sums,
                                         const void *gain, const void *bias, void *z)
{
    rounded.exact->cross_forward(ks, c, u, sums, gain, bias, z);
    rounded_rows(z, c->rows, c->w, c->w);
}

/* And of the stored dv. */
static inline void rounded_cross_backward_sums(struct kstream *ks, const struct crossing *c, const void *u,
                                               const void *sums, const void *gain, const void *bias, void *dz,
                                               void *back, void *dgain, void *dbias)
{
    struct crossing plain = *c;
    if (c->act != LATENT_IDENTITY) {
        double *unused = calloc((size_t)(2 * c->branches * c->w), sizeof *unused);
        rounded.exact->cross_backward_sums(ks, c, u, sums, gain, bias, dz, back, unused, unused + c->branches * c->w);
        free(unused);
        rounded_rows(dz, c->rows, c->w, c->w);
        plain.act = LATENT_IDENTITY;
    }
    rounded.exact->cross_backward_sums(ks, &plain, u, sums, gain, bias, dz, back, dgain, dbias);
}

static inline void rounded_cross_backward(struct kstream *ks, const struct crossing *c, const void *u, const void *sums,
                                          const void *gain, const void *back, void *dv, void *dbias)
{
    rounded.exact->cross_backward(ks, c, u, sums, gain, back, dv, dbias);
    rounded_rows(dv, c->rows, c->w, c->w);
}

static inline void rounded_rope(struct kstream *ks, int64_t T, int64_t s, int64_t heads, int64_t e, int64_t ld,
                                double theta, bool inverse, void *x)
{
    rounded.exact->rope(ks, T, s, heads, e, ld, theta, inverse, x);
    rounded_rows(x, T, heads * e, ld);
}

static inline void rounded_attention_forward(struct kstream *ks, const struct attention *a, const void *q,
                                             const void *k, const void *v, void *o, void *lse, void *workspace)
{
    rounded.exact->attention_forward(ks, a, q, k, v, o, lse, workspace);
    rounded_rows(o, a->b * a->s, a->h * a->e, a->ldo);
}

static inline void rounded_attention_backward(struct kstream *ks, const struct attention *a, const void *q,
                                              const void *k, const void *v, const void *o, const void *lse,
                                              const void *d_o, void *dq, void *dk, void *dv, void *workspace)
{
    rounded.exact->attention_backward(ks, a, q, k, v, o, lse, d_o, dq, dk, dv, workspace);
    rounded_rows(dq, a->b * a->s, a->h * a->e, a->ldq);
    rounded_rows(dk, a->b * a->s, a->hk * a->e, a->ldk);
    rounded_rows(dv, a->b * a->s, a->hk * a->e, a->ldv);
}

static inline void rounded_glu_forward(struct kstream *ks, int64_t rows, int64_t n, int64_t ld, bool silu,
                                       const void *gate, const void *up, void *out)
{
    rounded.exact->glu_forward(ks, rows, n, ld, silu, gate, up, out);
    rounded_rows(out, rows, n, n);
}

static inline void rounded_glu_backward(struct kstream *ks, int64_t rows, int64_t n, int64_t ld, bool silu,
                                        const void *gate, const void *up, const void *dout, void *dgate, void *dup,
                                        void *out)
{
    rounded.exact->glu_backward(ks, rows, n, ld, silu, gate, up, dout, dgate, dup, out);
    if (out)
        rounded_rows(out, rows, n, n);
    rounded_rows(dgate, rows, n, ld);
    rounded_rows(dup, rows, n, ld);
}

static inline void rounded_ce_backward(struct kstream *ks, int64_t T, int64_t ld, int64_t valid, int64_t first,
                                       void *logits, const void *m, const void *sums, const int32_t *targets,
                                       double *loss, void *c)
{
    rounded.exact->ce_backward(ks, T, ld, valid, first, logits, m, sums, targets, loss, c);
    if (c)
        rounded_rows(logits, T, valid, ld);
}

static inline void rounded_copy_rows(struct kstream *ks, int64_t rows, int64_t w, const void *x, int64_t ldx,
                                     bool accumulate, void *y, int64_t ldy)
{
    rounded.exact->copy_rows(ks, rows, w, x, ldx, accumulate, y, ldy);
    if (accumulate)
        rounded_rows(y, rows, w, ldy);
}

/* For a run of c. */
static inline const struct kernels *rounded_kernels(const struct tiny *c, int digits, uint64_t draw)
{
    static struct kernels table;
    rounded.exact = kernels_cpu_fp64();
    rounded.digits = digits;
    rounded.draw = draw;
    rounded.sums = c->tp > 1 && c->way.strategy == BTP;
    table = *rounded.exact;
    table.gemm = rounded_gemm;
    table.residual_gain = rounded_residual_gain;
    table.norm_apply = rounded_norm_apply;
    table.gain_backward = rounded_gain_backward;
    table.norm_forward = rounded_norm_forward;
    table.norm_backward = rounded_norm_backward;
    table.latent_forward = rounded_latent_forward;
    table.latent_backward = rounded_latent_backward;
    table.cross_sum = rounded_cross_sum;
    table.cross_forward = rounded_cross_forward;
    table.cross_backward_sums = rounded_cross_backward_sums;
    table.cross_backward = rounded_cross_backward;
    table.rope = rounded_rope;
    table.attention_forward = rounded_attention_forward;
    table.attention_backward = rounded_attention_backward;
    table.glu_forward = rounded_glu_forward;
    table.glu_backward = rounded_glu_backward;
    table.ce_backward = rounded_ce_backward;
    table.copy_rows = rounded_copy_rows;
    return &table;
}

/* Rounds every weight of the engine; what each was goes to `before`, one array a tensor, which the caller frees. */
static inline void rounded_weights(struct engine *e, double *before[TINY_TENSORS])
{
    for (int64_t i = 0; i < engine_tensor_count(e); i++) {
        struct state_tensor t;
        engine_tensor(e, i, STATE_WEIGHT, &t);
        int64_t n = t.tensor.nrows * t.tensor.ncols;
        before[i] = calloc((size_t)n, sizeof(double));
        for (int64_t k = 0; k < n; k++) {
            before[i][k] = tiny_get(&t, k);
            tiny_put(&t, k, rounded_value(before[i][k]));
        }
    }
}

/* After an update: takes the roundings off again, so that it has been one of the master weights, and frees `before`. */
static inline void rounded_masters(struct engine *e, double *before[TINY_TENSORS])
{
    for (int64_t i = 0; i < engine_tensor_count(e); i++) {
        struct state_tensor t;
        engine_tensor(e, i, STATE_WEIGHT, &t);
        for (int64_t k = 0; k < t.tensor.nrows * t.tensor.ncols; k++)
            tiny_put(&t, k, tiny_get(&t, k) - (rounded_value(before[i][k]) - before[i][k]));
        free(before[i]);
    }
}

static inline int rounded_collect(struct engine *e, int rank, void *arg, struct error *err)
{
    double *before[TINY_TENSORS];
    int rc = grads_weights(e, arg, err);
    rounded_weights(e, before);
    for (int64_t i = 0; i < engine_tensor_count(e); i++)
        free(before[i]);
    return rc ? rc : grads_collect(e, rank, arg, err);
}

/* gradients_at() of the control, with roundings number `draw`. */
static inline void rounded_gradients(const struct tiny *c, bool initial, int digits, uint64_t draw, struct grads *out)
{
    struct plan p;
    *out = (struct grads){.c = *c, .initial = initial, .lock = PTHREAD_MUTEX_INITIALIZER};
    out->c.fp64 = true;
    out->c.bf16 = false;
    tiny_plan(&out->c, &p);
    struct tiny_device device = {.kernels = rounded_kernels(c, digits, draw)};
    tiny_run_on(&p, device, 1, rounded_collect, out, NULL);
}

#endif
