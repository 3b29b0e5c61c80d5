/* The arena of a rank: every buffer that a step touches, with its offset. plan_memory()
 * sums this layout up and the engine takes its addresses from it, so that the two cannot
 * differ. Shapes: [D] of worker/README.md; w = d/t, wk = hk*e/t, fw = f/t. */
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
    /* saved for the backward, one a layer (BUF_LAYER_FIRST to BUF_LAYER_LAST) */
    BUF_X1,    /* [T, w] residual at norm1 */
    BUF_N1,    /* [T, w] x * gain */
    BUF_H_QKV, /* [T, 3r] latent, then [T] stat S: see plan_statistic_offset() */
    BUF_R1,    /* [T] stat */
    BUF_Z_QKV, /* [T, 3r] activated latent; absent for SVD, where z is the latent itself */
    BUF_QKV,   /* [T, w], [T, wk], [T, wk] after rotary positions */
    BUF_CTX,   /* [T, w] */
    BUF_LSE,   /* [b, h/t, s] stat */
    BUF_H_O,   /* [T, r] */
    BUF_Z_O,
    BUF_X2, /* [T, w] residual at norm2 */
    BUF_N2,
    BUF_H_GU, /* [T, 2r], [T] S */
    BUF_R2,
    BUF_Z_GU,
    BUF_GU,   /* [2, T, fw] gate, up */
    BUF_PROD, /* [T, fw] */
    BUF_H_D,  /* [T, r] */
    BUF_Z_D,
    /* scratch of a block */
    BUF_Y,       /* [T, w] what a block adds to the residual */
    BUF_DX,      /* [T, w] gradient of the residual */
    BUF_DN,      /* [T, w] gradient of a norm's output */
    BUF_DINNER,  /* [T, max(w, fw)] gradient of ctx, of the product */
    BUF_DOUTER,  /* [T, max(w + 2wk, 2fw)] gradients of q, k, v; of gate, up */
    BUF_DLATENT, /* [T, 3r] */
    BUF_K,       /* [T] stat */
    BUF_ATTENTION,
    BUF_BLOCK,   /* struct step_block, PLAN_BLOCK_BYTES */
    BUF_EVAL,    /* loss sum and tokens of an evaluation, fp64 */
    BUF_INPUTS,  /* [T] i32 */
    BUF_TARGETS, /* [T] i32 */
    /* edges */
    BUF_XF,     /* [T, w] residual at the last norm */
    BUF_SF,     /* [T] stat */
    BUF_RF,     /* [T] stat */
    BUF_NF,     /* [T, w] its output */
    BUF_GATHER, /* [t, T, w]; absent at t = 1 */
    BUF_NFULL,  /* [T, d]; absent at t = 1, where NF is it */
    BUF_LOGITS, /* [T, V_pad/t] */
    BUF_MAX,    /* [T] stat */
    BUF_SUMS,   /* [T, 3] stat */
    BUF_C,      /* [T] stat */
    BUF_COUNT,
    BUF_LAYER_FIRST = BUF_X1,
    BUF_LAYER_LAST = BUF_Z_D,
};
enum { PLAN_ALIGN = 256, PLAN_BLOCK_BYTES = 256 };

struct plan_place {
    enum plan_memory_category category;
    int64_t bytes;  /* of one; 0 = absent */
    int64_t offset; /* of the first, a multiple of PLAN_ALIGN */
    int64_t stride; /* from layer to layer */
};
struct plan_arena {
    struct plan_place at[BUF_COUNT];
    int64_t total; /* saturates at INT64_MAX: more than any machine has */
};
void plan_arena(const struct plan *p, const struct plan_backend *b, struct plan_arena *out);

/* Bytes from the start of a [T, n] latent to its [T] statistic. Equal types: directly behind, so
 * that both travel as one segment of T(n + 1) elements; else on the next aligned address. */
int64_t plan_statistic_offset(const struct plan *p, const struct plan_backend *b, int64_t n);

#endif
