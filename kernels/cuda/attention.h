/* Between the files of the CUDA backend's attention: the two ways to compute it and what the start-up check needs.
 * Shapes are those of kernels.h; all tensors bf16 but lse, which is fp32. */
#ifndef BOOST_KERNELS_CUDA_ATTENTION_H
#define BOOST_KERNELS_CUDA_ATTENTION_H

#include "kernels/cuda/attention_size.h"
#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Everything that a pass points at; what it does not know is NULL. The forward writes o and lse. */
struct attention_tensors {
    const void *q, *k, *v;
    void *o, *lse;
    const void *d_o;
    void *dq, *dk, *dv;
};

/* attention_own.cu: e up to 256, any s and leading dimensions; rows: attention_rows_bytes(). */
void attention_own_forward(struct kstream *ks, const struct attention *a, const struct attention_tensors *t);
void attention_own_backward(struct kstream *ks, const struct attention *a, const struct attention_tensors *t,
                            float *rows);

/* attention_probe.cu */

/* x [rows, ld]: about normal numbers, the same for the same seed; column 0 of each head of e columns is `offset`
 * unless that is 0. */
void attention_probe_fill(struct kstream *ks, int64_t rows, int64_t ld, int64_t e, uint64_t seed, float offset,
                          void *x);
/* Of the first `columns` columns of `rows` rows: sums of (got - want)^2 and of want^2, and how many of got are not
 * finite. Columns whose place in a head of e columns is below `skip` count for the last only. */
struct attention_distance {
    double error, size, not_finite;
};
void attention_probe_compare(struct kstream *ks, enum dtype type, int64_t rows, int64_t columns, int64_t ld, int64_t e,
                             int skip, const void *got, const void *want, struct attention_distance *out);

#ifdef __cplusplus
}
#endif

#endif
