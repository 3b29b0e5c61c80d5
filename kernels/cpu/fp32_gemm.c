/* fp32.h: matrix products, by dnnl_sgemm (row-major; it does not read C when beta is 0). */
#include <omp.h>
#include <oneapi/dnnl/dnnl.h>
#include <string.h>

#include "kernels/cpu/fp32.h"

/* dnnl_sgemm adds to C in place. */
static void put_addend(const struct gemm *g, const float *add, float *c)
{
    for (int64_t i = 0; i < g->m; i++)
        memcpy(c + i * g->ldc, add + i * g->ldc, (size_t)g->n * sizeof *c);
}

void fp32_gemm(struct kstream *ks, const struct gemm *g, const void *a, const void *b, void *c)
{
    if (!cpu_gemm_valid(ks, g))
        return;
    int64_t start = clock_mono_ns();
    /* oneDNN takes its thread count from OpenMP's per-thread setting; the caller's is put back. */
    int before = omp_get_max_threads();
    if (before != ks->threads)
        omp_set_num_threads(ks->threads);
    for (int p = 0; p < g->batch; p++) {
        float *out = (float *)c + p * g->stride_c;
        if (g->add)
            put_addend(g, (const float *)g->add + p * g->stride_c, out);
        dnnl_status_t status = dnnl_sgemm(
            g->trans_a ? 'T' : 'N', g->trans_b ? 'T' : 'N', g->m, g->n, g->k, 1.0f, (const float *)a + p * g->stride_a,
            g->lda, (const float *)b + p * g->stride_b, g->ldb, (float)g->beta, out, g->ldc);
        if (status != dnnl_success) {
            cpu_fault(ks, ERR_INTERNAL, "dnnl_sgemm refused a product with m=%lld n=%lld k=%lld: status %d",
                      (long long)g->m, (long long)g->n, (long long)g->k, (int)status);
            break;
        }
    }
    if (before != ks->threads)
        omp_set_num_threads(before);
    ks->gemm_ns += clock_mono_ns() - start;
}
