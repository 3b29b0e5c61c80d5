/* fp64.h: the gated product of the MLP. */
#include <math.h>

#include "kernels/cpu/fp64.h"

void fp64_glu_forward(struct kstream *ks, int64_t rows, int64_t n, int64_t ld, bool silu, const void *gate,
                      const void *up, void *out)
{
    (void)ks;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < n; i++) {
            double g = ((const double *)gate)[r * ld + i];
            double f = silu ? g / (1 + exp(-g)) : g;
            ((double *)out)[r * n + i] = f * ((const double *)up)[r * ld + i];
        }
}

void fp64_glu_backward(struct kstream *ks, int64_t rows, int64_t n, int64_t ld, bool silu, const void *gate,
                       const void *up, const void *dout, void *dgate, void *dup, void *out)
{
    if (out)
        fp64_glu_forward(ks, rows, n, ld, silu, gate, up, out);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < n; i++) {
            int64_t at = r * ld + i;
            double g = ((const double *)gate)[at], u = ((const double *)up)[at], dy = ((const double *)dout)[r * n + i];
            double sigma = 1 / (1 + exp(-g));
            double f = silu ? g * sigma : g;
            double slope = silu ? sigma + g * sigma * (1 - sigma) : 1;
            ((double *)dgate)[at] = dy * u * slope;
            ((double *)dup)[at] = dy * f;
        }
}
