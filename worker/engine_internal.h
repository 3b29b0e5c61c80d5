/* Private to the engine's files: engine.c, init.c, linear.c, block_btp.c, edges_btp.c, step.c. */
#ifndef BOOST_WORKER_ENGINE_INTERNAL_H
#define BOOST_WORKER_ENGINE_INTERNAL_H

#include "worker/engine.h"
#include "worker/plan/arena.h"

/* A parameter slice and its gradient, addresses in the arena. */
struct param {
    void *weight; /* act */
    void *grad;   /* grad */
};

/* What a block reads and adds to. Branches that share an input are one [c*r, w] tensor. */
struct layer {
    struct param norm1, a_qkv, b_q, b_k /* v follows */, a_o, b_o;
    struct param norm2, a_gu, b_gate /* up follows */, a_down, b_down;
};

/* What differs between FULL, VANILLA and BTP. Each call runs one micro-batch's part on this
 * rank; all but `loss` may call collectives of the pass set in the comms. */
struct strategy {
    const char *name;
    int (*embed_forward)(struct engine *e, struct error *err);
    int (*block_forward)(struct engine *e, int64_t layer, struct error *err);
    /* Last norm, head: logits in BUF_LOGITS. */
    int (*head_forward)(struct engine *e, struct error *err);
    /* Adds loss sum and token count to sum[0], sum[1] (NULL: this rank does not report them);
     * gradient: turns the logits into their gradients. */
    int (*loss)(struct engine *e, double *sum, bool gradient, struct error *err);
    int (*head_backward)(struct engine *e, struct error *err);
    int (*block_backward)(struct engine *e, int64_t layer, struct error *err);
    int (*embed_backward)(struct engine *e, struct error *err);
};
extern const struct strategy strategy_btp;

struct engine {
    const struct plan *plan;
    const struct kernels *k;
    struct comms *comms;
    const struct strategy *strategy;
    struct kstream *ks;
    int rank, tp_rank;

    struct plan_backend backend;
    struct plan_arena places;
    char *arena;
    int64_t w, wk, fw; /* local widths: d/t, hk*e/t, f/t */
    struct attention attention;

    int64_t tensor_count;
    struct plan_tensor *tensors; /* canonical order */
    struct layer *layers;        /* [L] */
    struct param embedding, norm, head;
    int64_t vocab_first, vocab_rows; /* valid vocabulary rows of the head on this rank */

    struct step_block *block; /* device */
    struct {                  /* host ends of the transfers of a step */
        double votes[AGREE_BUSY - AGREE_STOP + 1];
        double lr, adam_t;
        struct step_block block;
        double eval[2];
    } host;
};

/* A buffer of the arena; `layer` only for saved ones, else 0. */
void *engine_buffer(const struct engine *e, enum plan_buffer buffer, int64_t layer);
/* The address `elements` further on. */
void *act_at(const struct engine *e, const void *base, int64_t elements);

/* ---- the two halves of a low-rank pair (linear.c) ---- */

/* A down-projection, or several that share their input: weight [n, k]. */
void down_forward(struct engine *e, int64_t n, int64_t k, const struct param *a, const void *x, void *h);
/* grad += dh^T x;  dx = dh A. */
void down_backward(struct engine *e, int64_t n, int64_t k, const struct param *a, const void *x, const void *dh,
                   void *dx);
/* `batch` up-projections of equal shape whose weights [out, r] and outputs [T, out] follow one another;
 * the latents are columns of a [T, ldz] tensor. */
struct up {
    int batch;
    int64_t out, r, ldz;
};
void up_forward(struct engine *e, const struct up *u, const struct param *b, const void *z, void *y);
/* grad += dy^T z;  dz = dy B. */
void up_backward(struct engine *e, const struct up *u, const struct param *b, const void *z, const void *dy, void *dz);

/* One all-reduce over tp of a [T, n] latent, with its statistic when S is not NULL: one segment
 * when the two are of one type and neighbours, else one call of two segments. */
int reduce_latent(struct engine *e, void *latent, int64_t n, void *S, const char *what, struct error *err);

#endif
