/* fp64.h: gradient norm and AdamW (Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2). */
#include <math.h>

#include "kernels/cpu/fp64.h"

void fp64_grad_squares(struct kstream *ks, int64_t n, const void *grad, double *acc)
{
    (void)ks;
    double sum = 0;
    bool finite = true;
    for (int64_t i = 0; i < n; i++) {
        double g = ((const double *)grad)[i];
        sum += g * g;
        finite = finite && isfinite(g);
    }
    acc[0] += sum;
    acc[1] += finite ? 0 : 1;
}

void fp64_adamw(struct kstream *ks, int64_t n, const struct adamw *hyper, const struct step_block *block,
                const void *grad, void *m, void *v, void *master, void *weight)
{
    (void)ks;
    if (block->skip != 0)
        return;
    for (int64_t i = 0; i < n; i++) {
        double g = block->grad_scale * ((const double *)grad)[i];
        double *mi = (double *)m + i, *vi = (double *)v + i, *x = (double *)master + i;
        *mi = hyper->beta1 * *mi + (1 - hyper->beta1) * g;
        *vi = hyper->beta2 * *vi + (1 - hyper->beta2) * g * g;
        double step = *mi / block->bias1 / (sqrt(*vi / block->bias2) + hyper->eps);
        *x -= block->lr * (step + hyper->weight_decay * *x);
        ((double *)weight)[i] = *x;
    }
}
