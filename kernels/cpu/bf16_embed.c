/* bf16.h: embedding and layout. What only moves elements is that of fp32_embed.c. */
#include "kernels/cpu/bf16.h"

void bf16_embed(struct kstream *ks, int64_t T, int64_t first, int64_t rows, int64_t width, int parts,
                const int32_t *tokens, const void *table, void *out)
{
    fp32_move_embed(ks, sizeof(uint16_t), T, first, rows, width, parts, tokens, table, out);
}

/* Pieces of tokens one after the other, so each row of the table is summed in token order. */
void bf16_embed_backward(struct kstream *ks, int64_t T, int64_t first, int64_t rows, int64_t width, int parts,
                         const int32_t *tokens, const void *dout, void *dtable)
{
    int64_t w = width / parts, step = bf16_rows(T, width);
    float *a = bf16_scratch(ks, step * width);
    if (!a)
        return;
    for (int64_t i = 0; i < T; i += step) {
        int64_t n = fp32_min(step, T - i);
        for (int p = 0; p < parts; p++)
            bf16_widen(ks, n, w, bf16_at(dout, (p * T + i) * w), w, a + p * n * w);
        fp32_embed_backward(ks, n, first, rows, width, parts, tokens + i, a, dtable);
    }
}

void bf16_copy_rows(struct kstream *ks, int64_t rows, int64_t w, const void *x, int64_t ldx, bool accumulate, void *y,
                    int64_t ldy)
{
    if (!accumulate) {
        fp32_move_rows(ks, sizeof(uint16_t), rows, w, x, ldx, y, ldy);
        return;
    }
    int64_t step = bf16_rows(rows, w);
    float *scratch = bf16_scratch(ks, 2 * step * w);
    if (!scratch)
        return;
    float *a = bf16_carve(&scratch, step * w), *b = scratch;
    for (int64_t i = 0; i < rows; i += step) {
        int64_t n = fp32_min(step, rows - i);
        bf16_widen(ks, n, w, bf16_at(x, i * ldx), ldx, a);
        bf16_widen(ks, n, w, bf16_at(y, i * ldy), ldy, b);
        fp32_copy_rows(ks, n, w, a, w, true, b, w);
        bf16_narrow(ks, n, w, b, bf16_to(y, i * ldy), ldy);
    }
}

void bf16_interleave(struct kstream *ks, int parts, int64_t T, int64_t w, const void *in, void *out)
{
    fp32_move_interleave(ks, sizeof(uint16_t), parts, T, w, in, out);
}
