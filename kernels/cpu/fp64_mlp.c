/* fp64.h: the gated product of the MLP. */
#include <math.h>

#include "kernels/cpu/fp64.h"

void fp64_glu_forward(struct kstream *ks, int64_t n, bool silu, const void *gate, const void *up, void *out)
{
    (void)ks;
    for (int64_t i = 0; i < n; i++) {
        double g = ((const double *)gate)[i];
        double f = silu ? g / (1 + exp(-g)) : g;
        ((double *)out)[i] = f * ((const double *)up)[i];
    }
}

void fp64_glu_backward(struct kstream *ks, int64_t n, bool silu, const void *gate, const void *up, const void *dout,
                       void *dgate, void *dup)
{
    (void)ks;
    for (int64_t i = 0; i < n; i++) {
        double g = ((const double *)gate)[i], u = ((const double *)up)[i], dy = ((const double *)dout)[i];
        double sigma = 1 / (1 + exp(-g));
        double f = silu ? g * sigma : g;
        double slope = silu ? sigma + g * sigma * (1 - sigma) : 1;
        ((double *)dgate)[i] = dy * u * slope;
        ((double *)dup)[i] = dy * f;
    }
}
