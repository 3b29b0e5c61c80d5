/* The arena of a rank: every buffer that a step touches, with its offset. plan_memory()
 * sums this layout up and the engine takes its addresses from it, so that the two cannot
 * differ. Widths are those of struct plan_widths: x of the residual stream, q, kv and mlp of what q, k and
 * gate give to this rank (out[]), l of a latent, c l of a site with c branches. */
#ifndef BOOST_WORKER_PLAN_ARENA_H
#define BOOST_WORKER_PLAN_ARENA_H

#include "worker/plan/plan.h"

enum plan_buffer {
    /* parameter-shaped */
    BUF_WEIGHTS, /* act */
    BUF_MASTER,  /* grad; absent when act = grad: the weights are their own master */
    BUF_GRADS,
    BUF_MOMENT1,
    BUF_MOMENT2,
    /* of a block, for its backward: one a layer of the stage and micro-batch under way where recompute keeps it
     * (memory.c), else one in all */
    BUF_X1, /* [T, x] residual at norm1 */
    BUF_X2, /* [T, x] residual at norm2 */
    BUF_N1, /* [T, x] norm1's output; ONLINE: x * gain */
    BUF_N2,
    BUF_R1, /* [T] stat S, then R of a plain norm; ONLINE: behind the latent, see plan_statistic_offset() */
    BUF_R2,
    BUF_H_QKV, /* [T, 3l] latent, then [T] stat S and R; next to each other: BUF_H_QKV + enum plan_site */
    BUF_H_O,   /* [T, l] */
    BUF_H_GU,  /* [T, 2l], [T] S and R */
    BUF_H_DOWN,
    BUF_Z_QKV, /* activated latents; absent where z is the latent itself */
    BUF_Z_O,
    BUF_Z_GU,
    BUF_Z_DOWN,
    BUF_U_QKV, /* LAX: the sums of two latents, [T, c l]; P, SUM and CROSS likewise by site */
    BUF_U_O,
    BUF_U_GU,
    BUF_U_DOWN,
    BUF_P_QKV, /* [T, c r] latents of the block before, gathered for a gate; absent where they are whole */
    BUF_P_O,
    BUF_P_GU,
    BUF_P_DOWN,
    BUF_SUM_QKV, /* [T, c, 2] stat: `sums` of struct crossing */
    BUF_SUM_O,
    BUF_SUM_GU,
    BUF_SUM_DOWN,
    BUF_QKV,      /* q, kv and kv columns after rotary positions, side by side or [T, q], [T, kv], [T, kv] */
    BUF_CTX,      /* [T, q] */
    BUF_CTX_FULL, /* [T, d] of all heads; absent where o takes this rank's heads */
    BUF_LSE,      /* [b, heads, s] stat */
    BUF_GU,       /* mlp columns each of gate and up, alike */
    BUF_PROD,     /* [T, mlp] */
    /* scratch of a block */
    BUF_Y,         /* [T, x] what o or down adds to the residual; absent where their products do */
    BUF_DX,        /* [T, x] gradient of the residual */
    BUF_DX_IN,     /* [T, x] the same as it comes from the next stage; absent on the last */
    BUF_CROSS_IN,  /* LAX: [T, 7l] what the next stage adds to dz, of all sites; absent on the last stage */
    BUF_DN,        /* [T, x] gradient of a norm's output */
    BUF_DBRANCH,   /* [T, x] likewise of one branch; absent where branches go together */
    BUF_DINNER,    /* [T, max(q, mlp)] gradient of ctx, of the product */
    BUF_DOUTER,    /* [T, max(q + 2kv, 2mlp)] gradients of q, k, v; of gate, up */
    BUF_DLATENT,   /* [T, 3l]; under BTP a part [rows, 3l] for each slice, in it bundle behind bundle */
    BUF_PART_EVEN, /* [T, 3l] this rank's part of latents or their gradient, then [T] stat: for every other sum; absent
                    */
    BUF_PART_ODD,  /* where sums are calls of their own, plan_sums_in_kernels() */
    BUF_K,         /* [T] stat */
    BUF_CROSS_QKV, /* LAX: [T, c l] what the block behind adds to dz */
    BUF_CROSS_O,
    BUF_CROSS_GU,
    BUF_CROSS_DOWN,
    BUF_BACK,     /* LAX: [T, 3, 2] stat sums of a LayerNorm's backward */
    BUF_GATE,     /* LAX: [T, 3r] a gate's output, or the gradient of its input */
    BUF_PARTS,    /* LAX: [t, T, 3l] latents on their way; absent where they are whole */
    BUF_TENSOR,   /* LAX: [3, T, r] of a TENSOR gate: input, between, output */
    BUF_EXCHANGE, /* [t, T, d/t] hidden shards on their way; absent where none travel */
    BUF_ATTENTION,
    BUF_SCRATCH, /* the backend's own; absent where it wants none */
    BUF_BLOCK,   /* struct step_block, PLAN_BLOCK_BYTES */
    BUF_EVAL,    /* loss sum and tokens of an evaluation, fp64 */
    BUF_INPUTS,  /* [T] i32 */
    BUF_TARGETS, /* [T] i32 */
    /* edges; all but the first on the last stage only */
    BUF_XF,     /* [T, x] residual behind the stage: at the last norm, or for the next stage */
    BUF_RF,     /* [T] stat S, then R */
    BUF_NF,     /* [T, x] its output */
    BUF_NFULL,  /* [T, d]; absent where NF is it */
    BUF_LOGITS, /* [rows, V_pad/t] of plan_head_rows() */
    BUF_MAX,    /* [rows] stat */
    BUF_SUMS,   /* [rows, 3] stat */
    BUF_C,      /* [T] stat */
    BUF_COUNT,
};
enum { PLAN_ALIGN = 256, PLAN_BLOCK_BYTES = 256 };

struct plan_place {
    enum plan_memory_category category;
    int64_t bytes;  /* of one; 0 = absent */
    int64_t layers; /* copies of a micro-batch: layers of the stage and those in front of it that are kept too; or 1 */
    int64_t front;  /* of these in front of the stage: what the stage before hands on */
    int64_t copies; /* layers * micro-batches under way, or 1 */
    int64_t offset; /* of the first, a multiple of PLAN_ALIGN */
    int64_t stride; /* from layer to layer, and from a micro-batch's last to the next one's first; 0: one for all */
};
struct plan_arena {
    struct plan_place at[BUF_COUNT];
    int64_t total; /* saturates at INT64_MAX: more than any machine has */
};
void plan_arena(const struct plan *p, int stage, const struct plan_backend *b, struct plan_arena *out);

/* Bytes from the start of a [T, n] latent to its [T] statistic. Equal types: directly behind, so
 * that both travel as one segment of T(n + 1) elements; else on the next aligned address. */
int64_t plan_statistic_offset(const struct plan *p, const struct plan_backend *b, int64_t n);

#endif
