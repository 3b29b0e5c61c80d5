/* kernels/dense.h */
#include "kernels/dense.h"

#include <dnnl.h>
#include <lapacke.h>
#include <math.h>
#include <stdlib.h>

int dense_product(int64_t m, int64_t n, int64_t k, const float *a, const float *b, float *out, struct error *err)
{
    if (dnnl_sgemm('N', 'N', m, n, k, 1, a, k, b, n, 0, out, n) == dnnl_success)
        return ERR_OK;
    return error_set(err, ERR_INTERNAL, "oneDNN refused a product");
}

int dense_truncate(int64_t m, int64_t n, int64_t r, float *w, float *b, float *a, struct error *err)
{
    int64_t least = m < n ? m : n;
    float *s = malloc((size_t)least * sizeof *s);
    float *u = malloc((size_t)(m * least) * sizeof *u), *vt = malloc((size_t)(least * n) * sizeof *vt);
    int rc = s && u && vt ? ERR_OK : error_set(err, ERR_NOMEM, "no memory for a singular value decomposition");
    lapack_int info = rc ? 0
                         : LAPACKE_sgesdd(LAPACK_ROW_MAJOR, 'S', (lapack_int)m, (lapack_int)n, w, (lapack_int)n, s, u,
                                          (lapack_int)least, vt, (lapack_int)n);
    if (!rc && info)
        rc = error_set(err, info == LAPACK_WORK_MEMORY_ERROR ? ERR_NOMEM : ERR_INVALID,
                       "a singular value decomposition failed (%d): the weights may not be finite", (int)info);
    for (int64_t j = 0; j < r && !rc; j++) {
        float root = sqrtf(s[j]);
        for (int64_t i = 0; i < m; i++)
            b[i * r + j] = u[i * least + j] * root;
        for (int64_t i = 0; i < n; i++)
            a[j * n + i] = vt[j * n + i] * root;
    }
    free(s);
    free(u);
    free(vt);
    return rc;
}
