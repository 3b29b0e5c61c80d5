/* Dense matrices on the host, for the programs that turn checkpoints into other forms: no part of training. Row-major,
 * fp32, any thread. */
#ifndef BOOST_KERNELS_DENSE_H
#define BOOST_KERNELS_DENSE_H

#include <stdint.h>

#include "proto/base/error.h"

/* out [m, n] = a [m, k] b [k, n] */
MUST_USE int dense_product(int64_t m, int64_t n, int64_t k, const float *a, const float *b, float *out,
                           struct error *err);
/* The best approximation of rank r of w [m, n] (Eckart and Young): w ~ b a with b [m, r] = U sqrt(S) and a [r, n] =
 * sqrt(S) V^T of the r largest singular values. w is destroyed. r is at most the smaller of m and n. */
MUST_USE int dense_truncate(int64_t m, int64_t n, int64_t r, float *w, float *b, float *a, struct error *err);

#endif
