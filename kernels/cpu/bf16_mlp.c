/* bf16.h: the gated product of the MLP. */
#include "kernels/cpu/bf16.h"

/* Rows that lie close can be cut anywhere. */
static void unjoin(int64_t *rows, int64_t *n, int64_t *ld)
{
    if (*n == *ld) {
        *rows *= *n;
        *n = *ld = 1;
    }
}

void bf16_glu_forward(struct kstream *ks, int64_t rows, int64_t n, int64_t ld, bool silu, const void *gate,
                      const void *up, void *out)
{
    unjoin(&rows, &n, &ld);
    int64_t step = bf16_rows(rows, n);
    float *scratch = bf16_scratch(ks, 3 * step * n);
    if (!scratch)
        return;
    float *a = bf16_carve(&scratch, step * n), *b = bf16_carve(&scratch, step * n), *c = scratch;
    for (int64_t r = 0; r < rows; r += step) {
        int64_t count = fp32_min(step, rows - r);
        bf16_widen(ks, count, n, bf16_at(gate, r * ld), ld, a);
        bf16_widen(ks, count, n, bf16_at(up, r * ld), ld, b);
        fp32_glu_forward(ks, count, n, n, silu, a, b, c);
        bf16_narrow(ks, count, n, c, bf16_to(out, r * n), n);
    }
}

void bf16_glu_backward(struct kstream *ks, int64_t rows, int64_t n, int64_t ld, bool silu, const void *gate,
                       const void *up, const void *dout, void *dgate, void *dup, void *out)
{
    if (out)
        bf16_glu_forward(ks, rows, n, ld, silu, gate, up, out);
    unjoin(&rows, &n, &ld);
    int64_t step = bf16_rows(rows, n);
    float *scratch = bf16_scratch(ks, 3 * step * n);
    if (!scratch)
        return;
    float *a = bf16_carve(&scratch, step * n), *b = bf16_carve(&scratch, step * n), *c = scratch;
    for (int64_t r = 0; r < rows; r += step) {
        int64_t count = fp32_min(step, rows - r);
        bf16_widen(ks, count, n, bf16_at(gate, r * ld), ld, a);
        bf16_widen(ks, count, n, bf16_at(up, r * ld), ld, b);
        bf16_widen(ks, count, n, bf16_at(dout, r * n), n, c);
        fp32_glu_backward(ks, count, n, n, silu, a, b, c, a, b, NULL);
        bf16_narrow(ks, count, n, a, bf16_to(dgate, r * ld), ld);
        bf16_narrow(ks, count, n, b, bf16_to(dup, r * ld), ld);
    }
}
