/* bf16.h: AdamW on the fp32 master weights; the products get a rounded copy. */
#include "kernels/cpu/bf16.h"

void bf16_adamw(struct kstream *ks, int64_t n, const struct adamw *hyper, const struct step_block *block,
                const void *grad, void *m, void *v, void *master, void *weight)
{
    if (block->skip != 0)
        return;
    fp32_adamw(ks, n, hyper, block, grad, m, v, master, master);
    bf16_narrow(ks, n, 1, master, weight, 1);
}
