/* bf16.h: matrix products, in blocks of C; k is cut too, the sums go on in fp32. */
#include "kernels/cpu/bf16.h"

enum { BLOCK = 512 };

/* A block [rows, columns] of a stored matrix. */
struct block {
    int64_t row, column, rows, columns;
};

/* That of op(X) = X or its transpose. */
static struct block stored(bool transposed, struct block b)
{
    return transposed ? (struct block){b.column, b.row, b.columns, b.rows} : b;
}

static void widen_block(struct kstream *ks, const void *x, int64_t ld, struct block b, float *to)
{
    bf16_widen(ks, b.rows, b.columns, bf16_at(x, b.row * ld + b.column), ld, to);
}

/* C's block [m, n] at (i, j) of one product; c [m, n] with ldc is where it is summed. */
static void sum_block(struct kstream *ks, const struct gemm *g, const void *a, const void *b, int64_t i, int64_t j,
                      const struct gemm *size, float *scratch, float *c)
{
    float *block_a = bf16_carve(&scratch, BLOCK * BLOCK), *block_b = bf16_carve(&scratch, BLOCK * BLOCK);
    for (int64_t l = 0; l < g->k; l += BLOCK) {
        struct gemm part = *size;
        part.k = fp32_min(BLOCK, g->k - l);
        part.lda = g->trans_a ? part.m : part.k;
        part.ldb = g->trans_b ? part.k : part.n;
        part.beta = l ? 1 : g->beta;
        widen_block(ks, a, g->lda, stored(g->trans_a, (struct block){i, l, part.m, part.k}), block_a);
        widen_block(ks, b, g->ldb, stored(g->trans_b, (struct block){l, j, part.k, part.n}), block_b);
        fp32_gemm(ks, &part, block_a, block_b, c);
    }
}

static void product(struct kstream *ks, const struct gemm *g, const void *a, const void *b, void *c, float *scratch)
{
    float *sums = bf16_carve(&scratch, BLOCK * BLOCK);
    for (int64_t i = 0; i < g->m; i += BLOCK) {
        for (int64_t j = 0; j < g->n; j += BLOCK) {
            struct gemm size = *g;
            size.batch = 1;
            size.m = fp32_min(BLOCK, g->m - i);
            size.n = fp32_min(BLOCK, g->n - j);
            int64_t at = i * g->ldc + j;
            if (g->c_grad) {
                sum_block(ks, g, a, b, i, j, &size, scratch, (float *)c + at);
                continue;
            }
            size.ldc = size.n;
            size.add = NULL; /* the block's sums begin with it */
            if (g->beta != 0)
                bf16_widen(ks, size.m, size.n, bf16_at(g->add ? g->add : c, at), g->ldc, sums);
            sum_block(ks, g, a, b, i, j, &size, scratch, sums);
            bf16_narrow(ks, size.m, size.n, sums, bf16_to(c, at), g->ldc);
        }
    }
}

void bf16_gemm(struct kstream *ks, const struct gemm *g, const void *a, const void *b, void *c)
{
    float *scratch = cpu_gemm_valid(ks, g) ? bf16_scratch(ks, 3 * BLOCK * BLOCK) : NULL;
    for (int p = 0; p < g->batch && scratch; p++) {
        int64_t at = p * g->stride_c;
        struct gemm one = *g;
        one.add = g->add ? bf16_at(g->add, at) : NULL;
        product(ks, &one, bf16_at(a, p * g->stride_a), bf16_at(b, p * g->stride_b),
                g->c_grad ? (void *)((float *)c + at) : bf16_to(c, at), scratch);
    }
}
