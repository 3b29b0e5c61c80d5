/* fp64.h: cross-entropy over a sharded vocabulary; worker/README.md, "The edges". */
#include <math.h>

#include "kernels/cpu/fp64.h"

void fp64_ce_max(struct kstream *ks, int64_t T, int64_t ld, int64_t valid, const void *logits, void *m)
{
    (void)ks;
    for (int64_t i = 0; i < T; i++) {
        double top = -INFINITY;
        for (int64_t v = 0; v < valid; v++)
            top = fmax(top, ((const double *)logits)[i * ld + v]);
        ((double *)m)[i] = top;
    }
}

void fp64_ce_sums(struct kstream *ks, int64_t T, int64_t ld, int64_t valid, int64_t first, const void *logits,
                  const void *m, const int32_t *targets, void *sums)
{
    (void)ks;
    for (int64_t i = 0; i < T; i++) {
        const double *l = (const double *)logits + i * ld;
        double *out = (double *)sums + i * 3;
        out[0] = out[1] = 0;
        for (int64_t v = 0; v < valid; v++) {
            double e = exp(l[v] - ((const double *)m)[i]);
            out[0] += e;
            out[1] += e * l[v];
        }
        int64_t target = targets[i] - first;
        out[2] = targets[i] >= 0 && target >= 0 && target < valid ? l[target] : 0;
    }
}

/* loss = m + log(sum) - l_target;  d loss / d l_v = p_v - [v is the target]. */
void fp64_ce_backward(struct kstream *ks, int64_t T, int64_t ld, int64_t valid, int64_t first, void *logits,
                      const void *m, const void *sums, const int32_t *targets, double *loss, void *c)
{
    (void)ks;
    for (int64_t i = 0; i < T; i++) {
        double *l = (double *)logits + i * ld;
        const double *sum = (const double *)sums + i * 3;
        double top = ((const double *)m)[i];
        bool masked = targets[i] < 0;
        if (loss && !masked) {
            loss[0] += top + log(sum[0]) - sum[2];
            loss[1] += 1;
        }
        if (!c)
            continue;
        for (int64_t v = 0; v < ld; v++) {
            if (masked || v >= valid)
                l[v] = 0;
            else
                l[v] = exp(l[v] - top) / sum[0] - (first + v == targets[i] ? 1 : 0);
        }
        ((double *)c)[i] = masked ? 0 : sum[1] / sum[0] - sum[2];
    }
}
