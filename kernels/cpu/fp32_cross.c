/* fp32.h: crossing latents. Rows are spread over the threads in whole groups of branches, sums over rows by
 * columns. */
#include "kernels/cpu/fp32.h"

static int64_t rows_of(const struct crossing *c)
{
    return fp32_rows(c->w * c->branches) * c->branches;
}

void fp32_cross_sum(struct kstream *ks, const struct crossing *c, const void *Y, const void *G, int64_t ldg,
                    const void *bias, void *u, void *sums)
{
    int64_t step = rows_of(c), w = c->w;
#pragma omp parallel for num_threads(ks->threads) schedule(static) if (ks->threads > 1 && c->rows > step)
    for (int64_t i = 0; i < c->rows; i += step)
        ks->loops->cross_sum(fp32_min(step, c->rows - i), c->branches, w, c->r, (const float *)Y + i * w,
                             (const float *)G + i * ldg, ldg, bias, (float *)u + i * w,
                             sums ? (float *)sums + 2 * i : NULL);
}

void fp32_cross_forward(struct kstream *ks, const struct crossing *c, const void *u, const void *sums, const void *gain,
                        const void *bias, void *z)
{
    int64_t step = rows_of(c), w = c->w;
#pragma omp parallel for num_threads(ks->threads) schedule(static) if (ks->threads > 1 && c->rows > step)
    for (int64_t i = 0; i < c->rows; i += step)
        ks->loops->cross_forward(fp32_min(step, c->rows - i), c->branches, w, c->r, (float)c->eps,
                                 c->act == LATENT_SILU, (const float *)u + i * w, (const float *)sums + 2 * i, gain,
                                 bias, (float *)z + i * w);
}

/* total [branches, w] += sums of x over the rows of a branch, along likewise with xhat (u NULL: none). */
static void columns(struct kstream *ks, const struct crossing *c, const void *u, const void *sums, const void *x,
                    void *total, void *along)
{
    int64_t strips = (c->w + GAIN_COLUMNS - 1) / GAIN_COLUMNS;
#pragma omp parallel for num_threads(ks->threads) schedule(static) if (ks->threads > 1 && c->rows * c->w > FP32_CHUNK)
    for (int64_t k = 0; k < c->branches * strips; k++) {
        int64_t begin = k % strips * GAIN_COLUMNS;
        ks->loops->cross_columns(c->rows, c->branches, (int)(k / strips), c->w, begin,
                                 fp32_min(begin + GAIN_COLUMNS, c->w), c->r, (float)c->eps, u, sums, x, total, along);
    }
}

void fp32_cross_backward_sums(struct kstream *ks, const struct crossing *c, const void *u, const void *sums,
                              const void *gain, const void *bias, void *dz, void *back, void *dgain, void *dbias)
{
    int64_t step = rows_of(c), w = c->w;
#pragma omp parallel for num_threads(ks->threads) schedule(static) if (ks->threads > 1 && c->rows > step)
    for (int64_t i = 0; i < c->rows; i += step)
        ks->loops->cross_backward_sums(fp32_min(step, c->rows - i), c->branches, w, c->r, (float)c->eps,
                                       c->act == LATENT_SILU, (const float *)u + i * w, (const float *)sums + 2 * i,
                                       gain, bias, (float *)dz + i * w, (float *)back + 2 * i);
    columns(ks, c, u, sums, dz, dbias, dgain);
}

void fp32_cross_backward(struct kstream *ks, const struct crossing *c, const void *u, const void *sums,
                         const void *gain, const void *back, void *dv, void *dbias)
{
    int64_t step = rows_of(c), w = c->w;
#pragma omp parallel for num_threads(ks->threads) schedule(static) if (ks->threads > 1 && c->rows > step)
    for (int64_t i = 0; i < c->rows; i += step)
        ks->loops->cross_backward(fp32_min(step, c->rows - i), c->branches, w, c->r, (float)c->eps,
                                  (const float *)u + i * w, (const float *)sums + 2 * i, gain,
                                  (const float *)back + 2 * i, (float *)dv + i * w);
    if (dbias)
        columns(ks, c, NULL, sums, dv, dbias, NULL);
}
