/* bf16.h: cross-entropy over a sharded vocabulary; worker/README.md, "The edges". */
#include "kernels/cpu/bf16.h"

void bf16_ce_max(struct kstream *ks, int64_t T, int64_t ld, int64_t valid, const void *logits, void *m)
{
    int64_t step = bf16_rows(T, ld);
    float *a = bf16_scratch(ks, step * ld);
    for (int64_t i = 0; i < T && a; i += step) {
        int64_t rows = fp32_min(step, T - i);
        bf16_widen(ks, rows, ld, bf16_at(logits, i * ld), ld, a);
        fp32_ce_max(ks, rows, ld, valid, a, (float *)m + i);
    }
}

void bf16_ce_sums(struct kstream *ks, int64_t T, int64_t ld, int64_t valid, int64_t first, const void *logits,
                  const void *m, const int32_t *targets, void *sums)
{
    int64_t step = bf16_rows(T, ld);
    float *a = bf16_scratch(ks, step * ld);
    for (int64_t i = 0; i < T && a; i += step) {
        int64_t rows = fp32_min(step, T - i);
        bf16_widen(ks, rows, ld, bf16_at(logits, i * ld), ld, a);
        fp32_ce_sums(ks, rows, ld, valid, first, a, (const float *)m + i, targets + i, (float *)sums + 3 * i);
    }
}

void bf16_ce_backward(struct kstream *ks, int64_t T, int64_t ld, int64_t valid, int64_t first, void *logits,
                      const void *m, const void *sums, const int32_t *targets, double *loss, void *c)
{
    int64_t step = c ? bf16_rows(T, ld) : T; /* without c only the loss, of which the logits are no part */
    float *a = bf16_scratch(ks, c ? step * ld : 1);
    for (int64_t i = 0; i < T && a; i += step) {
        int64_t rows = fp32_min(step, T - i);
        if (c)
            bf16_widen(ks, rows, ld, bf16_at(logits, i * ld), ld, a);
        fp32_ce_backward(ks, rows, ld, valid, first, a, (const float *)m + i, (const float *)sums + 3 * i, targets + i,
                         loss, c ? (float *)c + i : NULL);
        if (c)
            bf16_narrow(ks, rows, ld, a, bf16_to(logits, i * ld), ld);
    }
}
