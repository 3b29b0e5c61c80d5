/* fp64.h: embedding and layout. */
#include "kernels/cpu/fp64.h"

void fp64_embed(struct kstream *ks, int64_t T, int64_t first, int64_t rows, int64_t width, int parts,
                const int32_t *tokens, const void *table, void *out)
{
    (void)ks;
    int64_t w = width / parts;
    for (int p = 0; p < parts; p++) {
        for (int64_t i = 0; i < T; i++) {
            int64_t row = tokens[i] - first;
            double *to = (double *)out + (p * T + i) * w;
            for (int64_t j = 0; j < w; j++)
                to[j] = row >= 0 && row < rows ? ((const double *)table)[row * width + p * w + j] : 0;
        }
    }
}

void fp64_embed_backward(struct kstream *ks, int64_t T, int64_t first, int64_t rows, int64_t width, int parts,
                         const int32_t *tokens, const void *dout, void *dtable)
{
    (void)ks;
    int64_t w = width / parts;
    for (int p = 0; p < parts; p++) {
        for (int64_t i = 0; i < T; i++) {
            int64_t row = tokens[i] - first;
            if (row < 0 || row >= rows)
                continue;
            const double *from = (const double *)dout + (p * T + i) * w;
            for (int64_t j = 0; j < w; j++)
                ((double *)dtable)[row * width + p * w + j] += from[j];
        }
    }
}

void fp64_copy_rows(struct kstream *ks, int64_t rows, int64_t w, const void *x, int64_t ldx, bool accumulate, void *y,
                    int64_t ldy)
{
    (void)ks;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < w; j++) {
            double *to = (double *)y + i * ldy + j;
            *to = (accumulate ? *to : 0) + ((const double *)x)[i * ldx + j];
        }
}

void fp64_interleave(struct kstream *ks, int parts, int64_t T, int64_t w, const void *in, void *out)
{
    (void)ks;
    for (int p = 0; p < parts; p++)
        for (int64_t i = 0; i < T; i++)
            for (int64_t j = 0; j < w; j++)
                ((double *)out)[(i * parts + p) * w + j] = ((const double *)in)[(p * T + i) * w + j];
}
