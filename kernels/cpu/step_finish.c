/* cpu.h: what one step decides from its reduced agreement; the contract is in kernels.h. */
#include <math.h>

#include "kernels/cpu/cpu.h"

void cpu_step_finish(struct kstream *ks, struct step_block *block, double beta1, double beta2, double clip)
{
    (void)ks;
    const double *agree = block->agree;
    double tokens = agree[AGREE_TOKENS];
    /* The flag is set by grad_squares(); a loss or a sum that is not finite counts the same, whoever set it.
     * Negated comparisons, so that a NaN count skips too. */
    bool usable = tokens > 0 && !(agree[AGREE_NONFINITE] > 0) && !isnan(agree[AGREE_NONFINITE]) &&
                  isfinite(agree[AGREE_LOSS]) && isfinite(agree[AGREE_SQUARES]);

    block->grad_norm = tokens > 0 ? sqrt(agree[AGREE_SQUARES]) / tokens : 0;
    block->skip = usable ? 0 : 1;
    block->grad_scale = 0;
    if (usable) {
        double factor = clip > 0 && block->grad_norm > clip ? clip / block->grad_norm : 1;
        block->grad_scale = factor / tokens;
        block->adam_t += 1;
    }
    block->bias1 = -expm1(block->adam_t * log(beta1));
    block->bias2 = -expm1(block->adam_t * log(beta2));
}
