/* fp32.h: the gated product of the MLP. */
#include "kernels/cpu/fp32.h"

void fp32_glu_forward(struct kstream *ks, int64_t n, bool silu, const void *gate, const void *up, void *out)
{
#pragma omp parallel for num_threads(ks->threads) schedule(static) if (ks->threads > 1 && n > FP32_CHUNK)
    for (int64_t i = 0; i < n; i += FP32_CHUNK)
        ks->loops->glu_forward(fp32_min(FP32_CHUNK, n - i), silu, (const float *)gate + i, (const float *)up + i,
                               (float *)out + i);
}

void fp32_glu_backward(struct kstream *ks, int64_t n, bool silu, const void *gate, const void *up, const void *dout,
                       void *dgate, void *dup)
{
#pragma omp parallel for num_threads(ks->threads) schedule(static) if (ks->threads > 1 && n > FP32_CHUNK)
    for (int64_t i = 0; i < n; i += FP32_CHUNK)
        ks->loops->glu_backward(fp32_min(FP32_CHUNK, n - i), silu, (const float *)gate + i, (const float *)up + i,
                                (const float *)dout + i, (float *)dgate + i, (float *)dup + i);
}
