/* fp64.h: matrix products. */
#include "kernels/cpu/fp64.h"

/* Columns of op(B) = B^T that are worked on together: each is a chain of additions of its own. */
enum { CHAINS = 8 };

static double element_a(const struct gemm *g, const double *a, int64_t i, int64_t l)
{
    return g->trans_a ? a[l * g->lda + i] : a[i * g->lda + l];
}

/* One row of C, every element summed over k in ascending order. */
static void row_plain(const struct gemm *g, int64_t i, const double *a, const double *b, double *c)
{
    for (int64_t l = 0; l < g->k; l++) {
        double x = element_a(g, a, i, l);
        for (int64_t j = 0; j < g->n; j++)
            c[j] += x * b[l * g->ldb + j];
    }
}

static void row_transposed(const struct gemm *g, int64_t i, const double *a, const double *b, double *c)
{
    for (int64_t j = 0; j < g->n; j += CHAINS) {
        int64_t width = g->n - j < CHAINS ? g->n - j : CHAINS;
        for (int64_t l = 0; l < g->k; l++) {
            double x = element_a(g, a, i, l);
            for (int64_t jj = 0; jj < width; jj++)
                c[j + jj] += x * b[(j + jj) * g->ldb + l];
        }
    }
}

void fp64_gemm(struct kstream *ks, const struct gemm *g, const void *a, const void *b, void *c)
{
    if (!cpu_gemm_valid(ks, g))
        return;
    int64_t start = clock_mono_ns();
    for (int p = 0; p < g->batch; p++) {
        const double *pa = (const double *)a + p * g->stride_a;
        const double *pb = (const double *)b + p * g->stride_b;
        for (int64_t i = 0; i < g->m; i++) {
            int64_t at = p * g->stride_c + i * g->ldc;
            double *row = (double *)c + at;
            const double *add = g->add ? (const double *)g->add + at : row;
            for (int64_t j = 0; j < g->n; j++)
                row[j] = g->beta == 0 ? 0 : g->beta * add[j];
            if (g->trans_b)
                row_transposed(g, i, pa, pb, row);
            else
                row_plain(g, i, pa, pb, row);
        }
    }
    ks->gemm_ns += clock_mono_ns() - start;
}
