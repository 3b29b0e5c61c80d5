/* fp32.h: gradient norm and AdamW. */
#include <math.h>

#include "kernels/cpu/fp32.h"

/* A fixed number of pieces, so that the order of the sum does not depend on the threads. */
void fp32_grad_squares(struct kstream *ks, int64_t n, const void *grad, double *acc)
{
    enum { PIECES = 64 };
    double part[PIECES];
    int64_t size = (n + PIECES - 1) / PIECES;
#pragma omp parallel for num_threads(ks->threads) schedule(static) if (ks->threads > 1 && n > FP32_CHUNK)
    for (int p = 0; p < PIECES; p++) {
        int64_t begin = fp32_min(p * size, n), end = fp32_min(begin + size, n);
        part[p] = ks->loops->squares(end - begin, (const float *)grad + begin);
    }
    double sum = 0;
    for (int p = 0; p < PIECES; p++)
        sum += part[p];
    acc[0] += sum;
    acc[1] += isfinite(sum) ? 0 : 1;
}

void fp32_adamw(struct kstream *ks, int64_t n, const struct adamw *hyper, const struct step_block *block,
                const void *grad, void *m, void *v, void *master, void *weight)
{
    if (block->skip != 0)
        return;
    const struct adamw_factors factors = {
        .beta1 = (float)hyper->beta1,
        .rest1 = (float)(1 - hyper->beta1),
        .beta2 = (float)hyper->beta2,
        .rest2 = (float)(1 - hyper->beta2),
        .grad_scale = (float)block->grad_scale,
        .step = (float)(block->lr / block->bias1),
        .root = (float)(1 / sqrt(block->bias2)),
        .eps = (float)hyper->eps,
        .decay = (float)(block->lr * hyper->weight_decay),
    };
#pragma omp parallel for num_threads(ks->threads) schedule(static) if (ks->threads > 1 && n > FP32_CHUNK)
    for (int64_t i = 0; i < n; i += FP32_CHUNK)
        ks->loops->adamw(fp32_min(FP32_CHUNK, n - i), &factors, (const float *)grad + i, (float *)m + i, (float *)v + i,
                         (float *)master + i, (float *)weight + i);
}
