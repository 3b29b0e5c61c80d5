/* bf16.h: the gated product of the MLP. */
#include "kernels/cpu/bf16.h"

void bf16_glu_forward(struct kstream *ks, int64_t n, bool silu, const void *gate, const void *up, void *out)
{
    int64_t step = bf16_rows(n, 1);
    float *scratch = bf16_scratch(ks, 3 * step);
    if (!scratch)
        return;
    float *a = bf16_carve(&scratch, step), *b = bf16_carve(&scratch, step), *c = scratch;
    for (int64_t i = 0; i < n; i += step) {
        int64_t count = fp32_min(step, n - i);
        bf16_widen(ks, count, 1, bf16_at(gate, i), 1, a);
        bf16_widen(ks, count, 1, bf16_at(up, i), 1, b);
        fp32_glu_forward(ks, count, silu, a, b, c);
        bf16_narrow(ks, count, 1, c, bf16_to(out, i), 1);
    }
}

void bf16_glu_backward(struct kstream *ks, int64_t n, bool silu, const void *gate, const void *up, const void *dout,
                       void *dgate, void *dup)
{
    int64_t step = bf16_rows(n, 1);
    float *scratch = bf16_scratch(ks, 3 * step);
    if (!scratch)
        return;
    float *a = bf16_carve(&scratch, step), *b = bf16_carve(&scratch, step), *c = scratch;
    for (int64_t i = 0; i < n; i += step) {
        int64_t count = fp32_min(step, n - i);
        bf16_widen(ks, count, 1, bf16_at(gate, i), 1, a);
        bf16_widen(ks, count, 1, bf16_at(up, i), 1, b);
        bf16_widen(ks, count, 1, bf16_at(dout, i), 1, c);
        fp32_glu_backward(ks, count, silu, a, b, c, a, b);
        bf16_narrow(ks, count, 1, a, bf16_to(dgate, i), 1);
        bf16_narrow(ks, count, 1, b, bf16_to(dup, i), 1);
    }
}
