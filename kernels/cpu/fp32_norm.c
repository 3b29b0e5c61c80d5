/* fp32.h: norm, residual and bottleneck. */
#include "kernels/cpu/fp32.h"

void fp32_residual_gain(struct kstream *ks, int64_t T, int64_t w, const void *x, const void *y, const void *gain,
                        void *x_out, void *n, void *S)
{
    int64_t step = fp32_rows(w);
#pragma omp parallel for num_threads(ks->threads) schedule(static) if (ks->threads > 1 && T > step)
    for (int64_t i = 0; i < T; i += step)
        ks->loops->residual_gain(fp32_min(step, T - i), w, (const float *)x + i * w,
                                 y ? (const float *)y + i * w : NULL, gain, (float *)x_out + i * w,
                                 n ? (float *)n + i * w : NULL, (float *)S + i);
}

void fp32_norm_apply(struct kstream *ks, int64_t T, int64_t w, int64_t d, double eps, const void *x, const void *gain,
                     const void *S, void *R, void *n)
{
    int64_t step = fp32_rows(w);
    float inv_d = (float)(1 / (double)d);
#pragma omp parallel for num_threads(ks->threads) schedule(static) if (ks->threads > 1 && T > step)
    for (int64_t i = 0; i < T; i += step)
        ks->loops->norm_apply(fp32_min(step, T - i), w, inv_d, (float)eps, (const float *)x + i * w, gain,
                              S ? (const float *)S + i : NULL, (float *)R + i, (float *)n + i * w);
}

/* Strips of columns, since dgain sums over rows. */
void fp32_gain_backward(struct kstream *ks, int64_t T, int64_t w, const void *x, const void *gain, const void *R,
                        const void *k, const void *dn, bool accumulate, void *dx, void *dgain)
{
#pragma omp parallel for num_threads(ks->threads) schedule(static) if (ks->threads > 1 && T * w > FP32_CHUNK)
    for (int64_t begin = 0; begin < w; begin += GAIN_COLUMNS)
        ks->loops->gain_backward(T, w, begin, fp32_min(begin + GAIN_COLUMNS, w), x, gain, R, k, dn, accumulate, dx,
                                 dgain);
}

void fp32_norm_forward(struct kstream *ks, int64_t T, int64_t d, double eps, const void *x, const void *y,
                       const void *gain, void *x_out, void *R, void *n)
{
    int64_t step = fp32_rows(d);
    float inv_d = (float)(1 / (double)d);
#pragma omp parallel for num_threads(ks->threads) schedule(static) if (ks->threads > 1 && T > step)
    for (int64_t i = 0; i < T; i += step) {
        int64_t rows = fp32_min(step, T - i);
        float *out = (float *)x_out + i * d, *r = (float *)R + i;
        ks->loops->residual_gain(rows, d, (const float *)x + i * d, y ? (const float *)y + i * d : NULL, NULL, out,
                                 NULL, r);
        ks->loops->norm_apply(rows, d, inv_d, (float)eps, out, gain, r, r, (float *)n + i * d);
    }
}

void fp32_norm_backward(struct kstream *ks, int64_t T, int64_t d, const void *x, const void *gain, const void *R,
                        const void *dn, void *dx, void *k, void *dgain)
{
    int64_t step = fp32_rows(d);
    float inv_d = (float)(1 / (double)d);
#pragma omp parallel for num_threads(ks->threads) schedule(static) if (ks->threads > 1 && T > step)
    for (int64_t i = 0; i < T; i += step)
        ks->loops->norm_k(fp32_min(step, T - i), d, inv_d, (const float *)x + i * d, gain, (const float *)R + i,
                          (const float *)dn + i * d, (float *)k + i);
    fp32_gain_backward(ks, T, d, x, gain, R, k, dn, true, dx, dgain);
}

void fp32_latent_forward(struct kstream *ks, int64_t T, int64_t n, int64_t d, double eps, enum latent_act act,
                         const void *H, const void *S, void *R, void *z)
{
    if (!R && z == H)
        return;
    int64_t step = fp32_rows(n);
    float inv_d = (float)(1 / (double)d);
#pragma omp parallel for num_threads(ks->threads) schedule(static) if (ks->threads > 1 && T > step)
    for (int64_t i = 0; i < T; i += step)
        ks->loops->latent_forward(fp32_min(step, T - i), n, inv_d, (float)eps, act == LATENT_SILU,
                                  (const float *)H + i * n, S ? (const float *)S + i : NULL, R ? (float *)R + i : NULL,
                                  (float *)z + i * n);
}

void fp32_latent_backward(struct kstream *ks, int64_t T, int64_t n, int64_t d, enum latent_act act, const void *latent,
                          const void *R, void *dz, void *k)
{
    if (!R && act == LATENT_IDENTITY)
        return;
    int64_t step = fp32_rows(n);
    float inv_d = (float)(1 / (double)d);
#pragma omp parallel for num_threads(ks->threads) schedule(static) if (ks->threads > 1 && T > step)
    for (int64_t i = 0; i < T; i += step)
        ks->loops->latent_backward(fp32_min(step, T - i), n, inv_d, act == LATENT_SILU, (const float *)latent + i * n,
                                   R ? (const float *)R + i : NULL, (float *)dz + i * n, k ? (float *)k + i : NULL);
}

void fp32_row_dot(struct kstream *ks, int64_t T, int64_t w, const void *a, const void *b, void *out)
{
    int64_t step = fp32_rows(w);
#pragma omp parallel for num_threads(ks->threads) schedule(static) if (ks->threads > 1 && T > step)
    for (int64_t i = 0; i < T; i += step)
        ks->loops->row_dot(fp32_min(step, T - i), w, (const float *)a + i * w, (const float *)b + i * w,
                           (float *)out + i);
}

void fp32_norm_k(struct kstream *ks, int64_t T, int64_t d, const void *R, const void *c, void *k)
{
    (void)ks;
    float inv_d = (float)(1 / (double)d);
    for (int64_t i = 0; i < T; i++) {
        float r = ((const float *)R)[i];
        ((float *)k)[i] = r * r * inv_d * ((const float *)c)[i];
    }
}
