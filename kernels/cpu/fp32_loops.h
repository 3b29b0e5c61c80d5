/* The inner loops of the fp32 backend: one table per instruction set, built from one source
 * (fp32_loops.inc) and chosen when a stream is made. Each function works on one range of rows or elements on
 * the calling thread; fp32*.c splits the work. Contracts as in kernels.h, with plain float pointers.
 *
 * A result depends on the instruction set (lanes of a sum, fused multiply-add), never on the number of
 * threads: ranges are cut by shape alone. */
#ifndef BOOST_KERNELS_CPU_FP32_LOOPS_H
#define BOOST_KERNELS_CPU_FP32_LOOPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/error.h"

/* Columns and rows that gain_backward sums at a time: dgain is summed in blocks of this many rows, so its
 * rounding error grows with GAIN_ROWS + T / GAIN_ROWS and not with T. */
enum { GAIN_COLUMNS = 64, GAIN_ROWS = 64 };

struct adamw_factors {
    float beta1, rest1, beta2, rest2; /* rest = 1 - beta, from fp64 */
    float grad_scale;
    float step;       /* lr / bias1 */
    float root;       /* bias2^-1/2 */
    float eps, decay; /* decay = lr * weight_decay */
};

struct fp32_loops {
    const char *isa;

    void (*exponential)(int64_t n, const float *x, float *y); /* for tests of its accuracy */

    void (*residual_gain)(int64_t rows, int64_t w, const float *x, const float *y, const float *gain, float *x_out,
                          float *n, float *S);
    void (*norm_apply)(int64_t rows, int64_t w, float inv_d, float eps, const float *x, const float *gain,
                       const float *S, float *R, float *n);
    void (*row_dot)(int64_t rows, int64_t w, const float *a, const float *b, float *out);
    /* Of norm_backward. */
    void (*norm_k)(int64_t rows, int64_t d, float inv_d, const float *x, const float *gain, const float *R,
                   const float *dn, float *k);
    /* Columns [begin, end) of all T rows, at most GAIN_COLUMNS of them. */
    void (*gain_backward)(int64_t T, int64_t w, int64_t begin, int64_t end, const float *x, const float *gain,
                          const float *R, const float *k, const float *dn, bool accumulate, float *dx, float *dgain);
    void (*latent_forward)(int64_t rows, int64_t n, float inv_d, float eps, bool silu, const float *H, const float *S,
                           float *R, float *z);
    void (*latent_backward)(int64_t rows, int64_t n, float inv_d, bool silu, const float *H, const float *R, float *dz,
                            float *k);

    /* Crossing latents: rows of w columns out of r, the first of branch 0. */
    void (*cross_sum)(int64_t rows, int branches, int64_t w, int64_t r, const float *Y, const float *G, int64_t ldg,
                      const float *bias, float *u, float *sums);
    void (*cross_forward)(int64_t rows, int branches, int64_t w, int64_t r, float eps, bool silu, const float *u,
                          const float *sums, const float *gain, const float *bias, float *z);
    void (*cross_backward_sums)(int64_t rows, int branches, int64_t w, int64_t r, float eps, bool silu, const float *u,
                                const float *sums, const float *gain, const float *bias, float *dz, float *back);
    void (*cross_backward)(int64_t rows, int branches, int64_t w, int64_t r, float eps, const float *u,
                           const float *sums, const float *gain, const float *back, float *dv);
    /* Columns [begin, end) of one branch, at most GAIN_COLUMNS, over all rows: total += sum of x, and unless u is
     * NULL along += sum of x * xhat. */
    void (*cross_columns)(int64_t rows, int branches, int branch, int64_t w, int64_t begin, int64_t end, int64_t r,
                          float eps, const float *u, const float *sums, const float *x, float *total, float *along);

    /* One token row: all heads, with the cos and sin [e/2] of its position. */
    void (*rope)(int64_t heads, int64_t e, const float *cosine, const float *sine, bool inverse, float *x);
    /* dst [columns, ldd] := the transpose of src [rows, lds]. */
    void (*transpose)(int64_t rows, int64_t columns, const float *src, int64_t lds, float *dst, int64_t ldd);
    /* The products of attention, small and on operands that are in cache, where dnnl_sgemm's packing costs as much as
     * its arithmetic: C[m, n] := scale A B (+ C when add), A(i, l) at a[i*a_row + l*a_column], B [k, ldb], C [m, ldc].
     */
    void (*product)(int64_t m, int64_t n, int64_t k, float scale, const float *a, int64_t a_row, int64_t a_column,
                    const float *b, int64_t ldb, bool add, float *c, int64_t ldc);
    /* `rows` rows of scaled scores [rows, ld], row r seeing columns [0, first + r]: score := exp(score - max),
     * 0 in the rest of [0, columns); sum[r] of them and lse[r]. */
    void (*softmax)(int64_t rows, int64_t columns, int64_t ld, int64_t first, float *score, float *sum, float *lse);
    /* o[r] *= 1 / sum[r] over e columns. */
    void (*divide_rows)(int64_t rows, int64_t e, int64_t ld, const float *sum, float *o);
    /* Recomputes p := exp(score - lse) (0 where masked) in place and ds := p (dp - <do, o>) over dp. */
    void (*softmax_backward)(int64_t rows, int64_t columns, int64_t ld, int64_t first, int64_t e, int64_t ldo,
                             const float *lse, const float *o, const float *d_o, float *score, float *dp);

    void (*glu_forward)(int64_t n, bool silu, const float *gate, const float *up, float *out);
    void (*glu_backward)(int64_t n, bool silu, const float *gate, const float *up, const float *dout, float *dgate,
                         float *dup);

    void (*ce_max)(int64_t rows, int64_t ld, int64_t valid, const float *logits, float *m);
    void (*ce_sums)(int64_t rows, int64_t ld, int64_t valid, int64_t first, const float *logits, const float *m,
                    const int32_t *targets, float *sums);
    void (*ce_backward)(int64_t rows, int64_t ld, int64_t valid, int64_t first, float *logits, const float *m,
                        const float *sums, const int32_t *targets, float *c);

    double (*squares)(int64_t n, const float *x);
    void (*adamw)(int64_t n, const struct adamw_factors *f, const float *grad, float *m, float *v, float *master,
                  float *weight);
};

/* The widest set that this processor has, or the one that $BOOST_CPU_ISA names (baseline, avx2, avx512: for
 * tests, and to get the same bits on unlike machines). ERR_INVALID for a name this machine does not have. */
MUST_USE int fp32_loops_choose(const struct fp32_loops **out, struct error *err);

extern const struct fp32_loops fp32_loops_baseline;
#if defined(__x86_64__)
extern const struct fp32_loops fp32_loops_avx2;
extern const struct fp32_loops fp32_loops_avx512;
#endif

#endif
