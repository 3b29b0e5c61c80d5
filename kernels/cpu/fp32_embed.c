/* fp32.h: embedding and layout. */
#include <string.h>

#include "kernels/cpu/fp32.h"

void fp32_move_embed(struct kstream *ks, size_t element, int64_t T, int64_t first, int64_t rows, int64_t width,
                     int parts, const int32_t *tokens, const void *table, void *out)
{
    size_t bytes = (size_t)(width / parts) * element;
#pragma omp parallel for num_threads(ks->threads) schedule(static) if (ks->threads > 1 && T > fp32_rows(width))
    for (int64_t i = 0; i < T; i++) {
        int64_t row = (int64_t)tokens[i] - first;
        for (int p = 0; p < parts; p++) {
            char *to = (char *)out + (size_t)(p * T + i) * bytes;
            if (row >= 0 && row < rows)
                memcpy(to, (const char *)table + (size_t)(row * parts + p) * bytes, bytes);
            else
                memset(to, 0, bytes);
        }
    }
}

void fp32_embed(struct kstream *ks, int64_t T, int64_t first, int64_t rows, int64_t width, int parts,
                const int32_t *tokens, const void *table, void *out)
{
    fp32_move_embed(ks, sizeof(float), T, first, rows, width, parts, tokens, table, out);
}

/* Threads share out columns, never tokens, so each row of the table is summed in token order. */
void fp32_embed_backward(struct kstream *ks, int64_t T, int64_t first, int64_t rows, int64_t width, int parts,
                         const int32_t *tokens, const void *dout, void *dtable)
{
    enum { COLUMNS = 64 };
    int64_t w = width / parts, per_part = (w + COLUMNS - 1) / COLUMNS;
#pragma omp parallel for num_threads(ks->threads) schedule(static) if (ks->threads > 1 && T > fp32_rows(width))
    for (int64_t strip = 0; strip < per_part * parts; strip++) {
        int64_t p = strip / per_part, begin = strip % per_part * COLUMNS, end = fp32_min(begin + COLUMNS, w);
        for (int64_t i = 0; i < T; i++) {
            int64_t row = (int64_t)tokens[i] - first;
            if (row < 0 || row >= rows)
                continue;
            const float *from = (const float *)dout + (p * T + i) * w;
            float *to = (float *)dtable + row * width + p * w;
#pragma omp simd
            for (int64_t j = begin; j < end; j++)
                to[j] += from[j];
        }
    }
}

void fp32_move_rows(struct kstream *ks, size_t element, int64_t rows, int64_t w, const void *x, int64_t ldx, void *y,
                    int64_t ldy)
{
#pragma omp parallel for num_threads(ks->threads) schedule(static) if (ks->threads > 1 && rows > fp32_rows(w))
    for (int64_t i = 0; i < rows; i++)
        memcpy((char *)y + (size_t)(i * ldy) * element, (const char *)x + (size_t)(i * ldx) * element,
               (size_t)w * element);
}

void fp32_copy_rows(struct kstream *ks, int64_t rows, int64_t w, const void *x, int64_t ldx, bool accumulate, void *y,
                    int64_t ldy)
{
    if (!accumulate) {
        fp32_move_rows(ks, sizeof(float), rows, w, x, ldx, y, ldy);
        return;
    }
#pragma omp parallel for num_threads(ks->threads) schedule(static) if (ks->threads > 1 && rows > fp32_rows(w))
    for (int64_t i = 0; i < rows; i++) {
        const float *from = (const float *)x + i * ldx;
        float *to = (float *)y + i * ldy;
#pragma omp simd
        for (int64_t j = 0; j < w; j++)
            to[j] += from[j];
    }
}

void fp32_move_interleave(struct kstream *ks, size_t element, int parts, int64_t T, int64_t w, const void *in,
                          void *out)
{
    size_t bytes = (size_t)w * element;
#pragma omp parallel for num_threads(ks->threads) schedule(static) if (ks->threads > 1 && T > fp32_rows(w * parts))
    for (int64_t i = 0; i < T; i++)
        for (int p = 0; p < parts; p++)
            memcpy((char *)out + (size_t)(i * parts + p) * bytes, (const char *)in + (size_t)(p * T + i) * bytes,
                   bytes);
}

void fp32_interleave(struct kstream *ks, int parts, int64_t T, int64_t w, const void *in, void *out)
{
    fp32_move_interleave(ks, sizeof(float), parts, T, w, in, out);
}
