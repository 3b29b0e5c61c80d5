/* fp64.h: norm, residual and bottleneck. */
#include <math.h>

#include "kernels/cpu/fp64.h"

void fp64_residual_gain(struct kstream *ks, int64_t T, int64_t w, const void *x, const void *y, const void *gain,
                        void *x_out, void *n, void *S)
{
    (void)ks;
    for (int64_t i = 0; i < T; i++) {
        double sum = 0;
        for (int64_t j = 0; j < w; j++) {
            double value = ((const double *)x)[i * w + j] + (y ? ((const double *)y)[i * w + j] : 0);
            ((double *)x_out)[i * w + j] = value;
            sum += value * value;
            if (n)
                ((double *)n)[i * w + j] = value * ((const double *)gain)[j];
        }
        ((double *)S)[i] = sum;
    }
}

void fp64_norm_apply(struct kstream *ks, int64_t T, int64_t w, int64_t d, double eps, const void *x, const void *gain,
                     const void *S, void *R, void *n)
{
    (void)ks;
    for (int64_t i = 0; i < T; i++) {
        if (S)
            ((double *)R)[i] = 1 / sqrt(((const double *)S)[i] / (double)d + eps);
        double r = ((const double *)R)[i];
        for (int64_t j = 0; j < w; j++)
            ((double *)n)[i * w + j] = r * ((const double *)x)[i * w + j] * ((const double *)gain)[j];
    }
}

void fp64_gain_backward(struct kstream *ks, int64_t T, int64_t w, const void *x, const void *gain, const void *R,
                        const void *k, const void *dn, bool accumulate, void *dx, void *dgain)
{
    (void)ks;
    for (int64_t i = 0; i < T; i++) {
        double r = R ? ((const double *)R)[i] : 1;
        for (int64_t j = 0; j < w; j++) {
            double xij = ((const double *)x)[i * w + j];
            double u = r * ((const double *)dn)[i * w + j];
            double *to = (double *)dx + i * w + j;
            double value = u * ((const double *)gain)[j] - ((const double *)k)[i] * xij;
            *to = accumulate ? *to + value : value;
            ((double *)dgain)[j] += xij * u;
        }
    }
}

void fp64_norm_forward(struct kstream *ks, int64_t T, int64_t d, double eps, const void *x, const void *y,
                       const void *gain, void *x_out, void *R, void *n)
{
    fp64_residual_gain(ks, T, d, x, y, NULL, x_out, NULL, R);
    fp64_norm_apply(ks, T, d, d, eps, x_out, gain, R, R, n);
}

void fp64_norm_backward(struct kstream *ks, int64_t T, int64_t d, const void *x, const void *gain, const void *R,
                        const void *dn, void *dx, void *k, void *dgain)
{
    for (int64_t i = 0; i < T; i++) {
        double r = ((const double *)R)[i], c = 0;
        for (int64_t j = 0; j < d; j++)
            c += r * ((const double *)dn)[i * d + j] * ((const double *)x)[i * d + j] * ((const double *)gain)[j];
        ((double *)k)[i] = r * r / (double)d * c;
    }
    fp64_gain_backward(ks, T, d, x, gain, R, k, dn, true, dx, dgain);
}

/* SiLU(y) = y sigma(y); its derivative is sigma + y sigma (1 - sigma). */
static double sigma(double y)
{
    return 1 / (1 + exp(-y));
}

void fp64_latent_forward(struct kstream *ks, int64_t T, int64_t n, int64_t d, double eps, enum latent_act act,
                         const void *H, const void *S, void *R, void *z)
{
    (void)ks;
    for (int64_t i = 0; i < T; i++) {
        if (S)
            ((double *)R)[i] = 1 / sqrt(((const double *)S)[i] / (double)d + eps);
        double r = R ? ((const double *)R)[i] : 1;
        for (int64_t j = 0; j < n; j++) {
            double y = r * ((const double *)H)[i * n + j];
            ((double *)z)[i * n + j] = act == LATENT_SILU ? y * sigma(y) : y;
        }
    }
}

void fp64_latent_backward(struct kstream *ks, int64_t T, int64_t n, int64_t d, enum latent_act act, const void *latent,
                          const void *R, void *dz, void *k)
{
    (void)ks;
    for (int64_t i = 0; i < T; i++) {
        double r = R ? ((const double *)R)[i] : 1, pending = act == LATENT_IDENTITY ? 1 : r;
        double c = 0;
        for (int64_t j = 0; j < n; j++) {
            double y = pending * ((const double *)latent)[i * n + j];
            double *to = (double *)dz + i * n + j;
            double sig = sigma(y);
            double dy = act == LATENT_SILU ? *to * (sig + y * sig * (1 - sig)) : *to;
            c += dy * y;
            *to = r * dy;
        }
        if (k)
            ((double *)k)[i] = r * r / (double)d * c;
    }
}

void fp64_row_dot(struct kstream *ks, int64_t T, int64_t w, const void *a, const void *b, void *out)
{
    (void)ks;
    for (int64_t i = 0; i < T; i++) {
        double sum = 0;
        for (int64_t j = 0; j < w; j++)
            sum += ((const double *)a)[i * w + j] * ((const double *)b)[i * w + j];
        ((double *)out)[i] = sum;
    }
}

void fp64_norm_k(struct kstream *ks, int64_t T, int64_t d, const void *R, const void *c, void *k)
{
    (void)ks;
    for (int64_t i = 0; i < T; i++) {
        double r = ((const double *)R)[i];
        ((double *)k)[i] = r * r / (double)d * ((const double *)c)[i];
    }
}
