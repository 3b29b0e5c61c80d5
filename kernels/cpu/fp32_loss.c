/* fp32.h: cross-entropy over a sharded vocabulary; worker/README.md, "The edges". */
#include <math.h>

#include "kernels/cpu/fp32.h"

void fp32_ce_max(struct kstream *ks, int64_t T, int64_t ld, int64_t valid, const void *logits, void *m)
{
    int64_t step = fp32_rows(ld);
#pragma omp parallel for num_threads(ks->threads) schedule(static) if (ks->threads > 1 && T > step)
    for (int64_t i = 0; i < T; i += step)
        ks->loops->ce_max(fp32_min(step, T - i), ld, valid, (const float *)logits + i * ld, (float *)m + i);
}

void fp32_ce_sums(struct kstream *ks, int64_t T, int64_t ld, int64_t valid, int64_t first, const void *logits,
                  const void *m, const int32_t *targets, void *sums)
{
    int64_t step = fp32_rows(ld);
#pragma omp parallel for num_threads(ks->threads) schedule(static) if (ks->threads > 1 && T > step)
    for (int64_t i = 0; i < T; i += step)
        ks->loops->ce_sums(fp32_min(step, T - i), ld, valid, first, (const float *)logits + i * ld,
                           (const float *)m + i, targets + i, (float *)sums + i * 3);
}

void fp32_ce_backward(struct kstream *ks, int64_t T, int64_t ld, int64_t valid, int64_t first, void *logits,
                      const void *m, const void *sums, const int32_t *targets, double *loss, void *c)
{
    const float *sum = sums, *top = m;
    /* One thread and fp64: the loss is what users compare between runs. */
    for (int64_t i = 0; loss && i < T; i++) {
        if (targets[i] < 0)
            continue;
        loss[0] += (double)top[i] + log((double)sum[i * 3]) - (double)sum[i * 3 + 2];
        loss[1] += 1;
    }
    if (!c)
        return;
    int64_t step = fp32_rows(ld);
#pragma omp parallel for num_threads(ks->threads) schedule(static) if (ks->threads > 1 && T > step)
    for (int64_t i = 0; i < T; i += step)
        ks->loops->ce_backward(fp32_min(step, T - i), ld, valid, first, (float *)logits + i * ld, top + i, sum + i * 3,
                               targets + i, (float *)c + i);
}
