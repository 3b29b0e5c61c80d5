/* fp32.h: the gated product of the MLP. */
#include "kernels/cpu/fp32.h"

/* Rows that lie close are one long row. */
static void join(int64_t *rows, int64_t *n, int64_t ld)
{
    if (*n == ld) {
        *n *= *rows;
        *rows = 1;
    }
}

void fp32_glu_forward(struct kstream *ks, int64_t rows, int64_t n, int64_t ld, bool silu, const void *gate,
                      const void *up, void *out)
{
    join(&rows, &n, ld);
#pragma omp parallel for collapse(2) num_threads(ks->threads) \
    schedule(static) if (ks->threads > 1 && rows * n > FP32_CHUNK)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < n; i += FP32_CHUNK)
            ks->loops->glu_forward(fp32_min(FP32_CHUNK, n - i), silu, (const float *)gate + r * ld + i,
                                   (const float *)up + r * ld + i, (float *)out + r * n + i);
}

void fp32_glu_backward(struct kstream *ks, int64_t rows, int64_t n, int64_t ld, bool silu, const void *gate,
                       const void *up, const void *dout, void *dgate, void *dup, void *out)
{
    if (out)
        fp32_glu_forward(ks, rows, n, ld, silu, gate, up, out);
    join(&rows, &n, ld);
#pragma omp parallel for collapse(2) num_threads(ks->threads) \
    schedule(static) if (ks->threads > 1 && rows * n > FP32_CHUNK)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < n; i += FP32_CHUNK) {
            int64_t at = r * ld + i;
            ks->loops->glu_backward(fp32_min(FP32_CHUNK, n - i), silu, (const float *)gate + at, (const float *)up + at,
                                    (const float *)dout + r * n + i, (float *)dgate + at, (float *)dup + at);
        }
}
