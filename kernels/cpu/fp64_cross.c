/* fp64.h: crossing latents, their LayerNorm and its backward. */
#include <math.h>

#include "kernels/cpu/fp64.h"

struct row_norm {
    double mean, scale; /* scale = (variance + eps)^-1/2 */
};
static struct row_norm norm_of(const struct crossing *c, const void *sums, int64_t i)
{
    const double *s = (const double *)sums + 2 * i;
    bool whole = c->w == c->r;
    double mean = whole ? s[0] : s[0] / (double)c->r, variance = whole ? s[1] : s[1] / (double)c->r - mean * mean;
    return (struct row_norm){mean, 1 / sqrt((variance > 0 ? variance : 0) + c->eps)};
}

/* Of a whole row mean and variance, in two passes; of a cut one what ranks can add. */
static void sums_of(const struct crossing *c, const double *u, double *sums)
{
    double sum = 0, squares = 0;
    for (int64_t j = 0; j < c->w; j++)
        sum += u[j];
    double shift = c->w == c->r ? sum / (double)c->r : 0;
    for (int64_t j = 0; j < c->w; j++)
        squares += (u[j] - shift) * (u[j] - shift);
    sums[0] = c->w == c->r ? shift : sum;
    sums[1] = c->w == c->r ? squares / (double)c->r : squares;
}

static double sigma(double y)
{
    return 1 / (1 + exp(-y));
}

void fp64_cross_sum(struct kstream *ks, const struct crossing *c, const void *Y, const void *G, int64_t ldg,
                    const void *bias, void *u, void *sums)
{
    (void)ks;
    for (int64_t i = 0; i < c->rows; i++) {
        for (int64_t j = 0; j < c->w; j++) {
            double value = ((const double *)Y)[i * c->w + j] + ((const double *)G)[i * ldg + j];
            if (bias)
                value += ((const double *)bias)[i % c->branches * c->w + j];
            ((double *)u)[i * c->w + j] = value;
        }
        if (sums)
            sums_of(c, (const double *)u + i * c->w, (double *)sums + 2 * i);
    }
}

void fp64_cross_forward(struct kstream *ks, const struct crossing *c, const void *u, const void *sums, const void *gain,
                        const void *bias, void *z)
{
    (void)ks;
    for (int64_t i = 0; i < c->rows; i++) {
        struct row_norm n = norm_of(c, sums, i);
        for (int64_t j = 0; j < c->w; j++) {
            int64_t column = i % c->branches * c->w + j;
            double xhat = (((const double *)u)[i * c->w + j] - n.mean) * n.scale;
            double v = ((const double *)gain)[column] * xhat + ((const double *)bias)[column];
            ((double *)z)[i * c->w + j] = c->act == LATENT_SILU ? v * sigma(v) : v;
        }
    }
}

void fp64_cross_backward_sums(struct kstream *ks, const struct crossing *c, const void *u, const void *sums,
                              const void *gain, const void *bias, void *dz, void *back, void *dgain, void *dbias)
{
    (void)ks;
    for (int64_t i = 0; i < c->rows; i++) {
        struct row_norm n = norm_of(c, sums, i);
        double *b = (double *)back + 2 * i;
        b[0] = b[1] = 0;
        for (int64_t j = 0; j < c->w; j++) {
            int64_t column = i % c->branches * c->w + j;
            double xhat = (((const double *)u)[i * c->w + j] - n.mean) * n.scale;
            double v = ((const double *)gain)[column] * xhat + ((const double *)bias)[column], s = sigma(v);
            double *dv = (double *)dz + i * c->w + j;
            if (c->act == LATENT_SILU)
                *dv *= s + v * s * (1 - s);
            ((double *)dgain)[column] += *dv * xhat;
            ((double *)dbias)[column] += *dv;
            b[0] += *dv * ((const double *)gain)[column];
            b[1] += *dv * ((const double *)gain)[column] * xhat;
        }
    }
}

/* With g the gradient of xhat, its part along the constant and along xhat itself is lost in the norm. */
void fp64_cross_backward(struct kstream *ks, const struct crossing *c, const void *u, const void *sums,
                         const void *gain, const void *back, void *dv, void *dbias)
{
    (void)ks;
    for (int64_t i = 0; i < c->rows; i++) {
        struct row_norm n = norm_of(c, sums, i);
        const double *b = (const double *)back + 2 * i;
        for (int64_t j = 0; j < c->w; j++) {
            int64_t column = i % c->branches * c->w + j;
            double xhat = (((const double *)u)[i * c->w + j] - n.mean) * n.scale;
            double *du = (double *)dv + i * c->w + j;
            double g = *du * ((const double *)gain)[column];
            *du = n.scale * (g - b[0] / (double)c->r - xhat * b[1] / (double)c->r);
            if (dbias)
                ((double *)dbias)[column] += *du;
        }
    }
}
