/* bf16.h: norm, residual and bottleneck. */
#include "kernels/cpu/bf16.h"

void bf16_residual_gain(struct kstream *ks, int64_t T, int64_t w, const void *x, const void *y, const void *gain,
                        void *x_out, void *n, void *S)
{
    int64_t step = bf16_rows(T, w);
    float *scratch = bf16_scratch(ks, w + 2 * step * w);
    if (!scratch)
        return;
    float *g = bf16_carve(&scratch, w), *a = bf16_carve(&scratch, step * w), *b = scratch;
    if (n)
        bf16_widen(ks, 1, w, gain, w, g);
    for (int64_t i = 0; i < T; i += step) {
        int64_t rows = fp32_min(step, T - i);
        float *s = (float *)S + i;
        bf16_widen(ks, rows, w, bf16_at(x, i * w), w, a);
        if (y) {
            bf16_widen(ks, rows, w, bf16_at(y, i * w), w, b);
            fp32_residual_gain(ks, rows, w, a, b, NULL, a, NULL, s);
        }
        bf16_narrow(ks, rows, w, a, bf16_to(x_out, i * w), w);
        bf16_widen(ks, rows, w, bf16_at(x_out, i * w), w, a);
        fp32_residual_gain(ks, rows, w, a, NULL, n ? g : NULL, a, n ? b : NULL, s);
        if (n)
            bf16_narrow(ks, rows, w, b, bf16_to(n, i * w), w);
    }
}

void bf16_norm_apply(struct kstream *ks, int64_t T, int64_t w, int64_t d, double eps, const void *x, const void *gain,
                     const void *S, void *R, void *n)
{
    int64_t step = bf16_rows(T, w);
    float *scratch = bf16_scratch(ks, w + 2 * step * w);
    if (!scratch)
        return;
    float *g = bf16_carve(&scratch, w), *a = bf16_carve(&scratch, step * w), *b = scratch;
    bf16_widen(ks, 1, w, gain, w, g);
    for (int64_t i = 0; i < T; i += step) {
        int64_t rows = fp32_min(step, T - i);
        bf16_widen(ks, rows, w, bf16_at(x, i * w), w, a);
        fp32_norm_apply(ks, rows, w, d, eps, a, g, S ? (const float *)S + i : NULL, (float *)R + i, b);
        bf16_narrow(ks, rows, w, b, bf16_to(n, i * w), w);
    }
}

/* dgain sums over rows in blocks of GAIN_ROWS within a piece, and over pieces. */
void bf16_gain_backward(struct kstream *ks, int64_t T, int64_t w, const void *x, const void *gain, const void *R,
                        const void *k, const void *dn, bool accumulate, void *dx, void *dgain)
{
    int64_t step = bf16_rows(T, w);
    float *scratch = bf16_scratch(ks, w + 3 * step * w);
    if (!scratch)
        return;
    float *g = bf16_carve(&scratch, w), *a = bf16_carve(&scratch, step * w), *b = bf16_carve(&scratch, step * w);
    bf16_widen(ks, 1, w, gain, w, g);
    for (int64_t i = 0; i < T; i += step) {
        int64_t rows = fp32_min(step, T - i);
        bf16_widen(ks, rows, w, bf16_at(x, i * w), w, a);
        bf16_widen(ks, rows, w, bf16_at(dn, i * w), w, b);
        if (accumulate)
            bf16_widen(ks, rows, w, bf16_at(dx, i * w), w, scratch);
        fp32_gain_backward(ks, rows, w, a, g, R ? (const float *)R + i : NULL, (const float *)k + i, b, accumulate,
                           scratch, dgain);
        bf16_narrow(ks, rows, w, scratch, bf16_to(dx, i * w), w);
    }
}

void bf16_norm_forward(struct kstream *ks, int64_t T, int64_t d, double eps, const void *x, const void *y,
                       const void *gain, void *x_out, void *R, void *n)
{
    int64_t step = bf16_rows(T, d);
    float *scratch = bf16_scratch(ks, d + 2 * step * d);
    if (!scratch)
        return;
    float *g = bf16_carve(&scratch, d), *a = bf16_carve(&scratch, step * d), *b = scratch;
    bf16_widen(ks, 1, d, gain, d, g);
    for (int64_t i = 0; i < T; i += step) {
        int64_t rows = fp32_min(step, T - i);
        float *r = (float *)R + i;
        bf16_widen(ks, rows, d, bf16_at(x, i * d), d, a);
        if (y) {
            bf16_widen(ks, rows, d, bf16_at(y, i * d), d, b);
            fp32_residual_gain(ks, rows, d, a, b, NULL, a, NULL, r);
        }
        bf16_narrow(ks, rows, d, a, bf16_to(x_out, i * d), d);
        bf16_widen(ks, rows, d, bf16_at(x_out, i * d), d, a);
        fp32_norm_forward(ks, rows, d, eps, a, NULL, g, a, r, b);
        bf16_narrow(ks, rows, d, b, bf16_to(n, i * d), d);
    }
}

void bf16_norm_backward(struct kstream *ks, int64_t T, int64_t d, const void *x, const void *gain, const void *R,
                        const void *dn, void *dx, void *k, void *dgain)
{
    int64_t step = bf16_rows(T, d);
    float *scratch = bf16_scratch(ks, d + 3 * step * d);
    if (!scratch)
        return;
    float *g = bf16_carve(&scratch, d), *a = bf16_carve(&scratch, step * d), *b = bf16_carve(&scratch, step * d);
    bf16_widen(ks, 1, d, gain, d, g);
    for (int64_t i = 0; i < T; i += step) {
        int64_t rows = fp32_min(step, T - i);
        bf16_widen(ks, rows, d, bf16_at(x, i * d), d, a);
        bf16_widen(ks, rows, d, bf16_at(dn, i * d), d, b);
        bf16_widen(ks, rows, d, bf16_at(dx, i * d), d, scratch);
        fp32_norm_backward(ks, rows, d, a, g, (const float *)R + i, b, scratch, (float *)k + i, dgain);
        bf16_narrow(ks, rows, d, scratch, bf16_to(dx, i * d), d);
    }
}

/* H := Y = R H, of values that bf16 holds. spare: as much again. */
static void factored(struct kstream *ks, int64_t rows, int64_t n, int64_t d, double eps, const float *S, float *R,
                     float *H, float *spare)
{
    fp32_latent_forward(ks, rows, n, d, eps, LATENT_IDENTITY, H, S, R, H);
    bf16_narrow(ks, rows, n, H, spare, n);
    bf16_widen(ks, rows, n, spare, n, H);
}

void bf16_latent_forward(struct kstream *ks, int64_t T, int64_t n, int64_t d, double eps, enum latent_act act,
                         const void *H, const void *S, void *R, void *z)
{
    if (!R && z == H)
        return;
    int64_t step = bf16_rows(T, n);
    float *scratch = bf16_scratch(ks, 2 * step * n);
    if (!scratch)
        return;
    float *a = bf16_carve(&scratch, step * n), *b = scratch;
    for (int64_t i = 0; i < T; i += step) {
        int64_t rows = fp32_min(step, T - i);
        bf16_widen(ks, rows, n, bf16_at(H, i * n), n, a);
        if (R)
            factored(ks, rows, n, d, eps, S ? (const float *)S + i : NULL, (float *)R + i, a, b);
        fp32_latent_forward(ks, rows, n, d, eps, act, a, NULL, NULL, b);
        bf16_narrow(ks, rows, n, b, bf16_to(z, i * n), n);
    }
}

void bf16_latent_backward(struct kstream *ks, int64_t T, int64_t n, int64_t d, enum latent_act act, const void *latent,
                          const void *R, void *dz, void *k)
{
    if (!R && act == LATENT_IDENTITY)
        return;
    int64_t step = bf16_rows(T, n);
    float *scratch = bf16_scratch(ks, 2 * step * n);
    if (!scratch)
        return;
    float *a = bf16_carve(&scratch, step * n), *b = scratch;
    for (int64_t i = 0; i < T; i += step) {
        int64_t rows = fp32_min(step, T - i);
        float *r = R ? (float *)R + i : NULL;
        bf16_widen(ks, rows, n, bf16_at(latent, i * n), n, a);
        if (r && act != LATENT_IDENTITY)
            factored(ks, rows, n, d, 0, NULL, r, a, b);
        bf16_widen(ks, rows, n, bf16_at(dz, i * n), n, b);
        fp32_latent_backward(ks, rows, n, d, act, a, NULL, b, NULL); /* of Y */
        if (r)
            fp32_latent_backward(ks, rows, n, d, LATENT_IDENTITY, a, r, b, (float *)k + i);
        bf16_narrow(ks, rows, n, b, bf16_to(dz, i * n), n);
    }
}

void bf16_row_dot(struct kstream *ks, int64_t T, int64_t w, const void *a, const void *b, void *out)
{
    int64_t step = bf16_rows(T, w);
    float *scratch = bf16_scratch(ks, 2 * step * w);
    if (!scratch)
        return;
    float *x = bf16_carve(&scratch, step * w), *y = scratch;
    for (int64_t i = 0; i < T; i += step) {
        int64_t rows = fp32_min(step, T - i);
        bf16_widen(ks, rows, w, bf16_at(a, i * w), w, x);
        bf16_widen(ks, rows, w, bf16_at(b, i * w), w, y);
        fp32_row_dot(ks, rows, w, x, y, (float *)out + i);
    }
}
