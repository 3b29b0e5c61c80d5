/* The matrix products that a rank does for a micro-batch, in the shapes that the strategies run (worker/linear.c,
 * gate.c, edges.c), and what each has to move: FLOP a byte says whether it can be bound by memory. Pure. */
#ifndef BOOST_WORKER_PLAN_INTENSITY_H
#define BOOST_WORKER_PLAN_INTENSITY_H

#include "worker/plan/plan.h"

enum plan_gemm_place {
    GEMM_BLOCK,    /* in every layer */
    GEMM_CROSSING, /* LAX's gates: in every layer but the first */
    GEMM_HEAD,     /* once, on the last stage */
};
/* One product or batch of products C = A B, A [m, k], B [k, n]. */
struct plan_gemm {
    char what[32]; /* weights: "q k v A", "gate up B", "o W", "q gate", "head" */
    enum plan_gemm_place place;
    int pass;    /* PLAN_FORWARD or PLAN_BACKWARD */
    bool weight; /* C is a gradient of weights, in the type of gradients; else activations or their gradient */
    bool adds;   /* to what is in C; of gradients of weights those of a step's first micro-batch do not */
    int64_t m, n, k, batch;
    int64_t calls; /* a layer (or head) and micro-batch; without what recompute repeats */
    /* Of one call. Bytes: every operand that the batch does not share is read once, C is written, and read where the
     * call adds to it. */
    double flop, bytes;
};
enum { PLAN_GEMMS_MAX = 128 };
/* In the order of the forward, then of the backward; the count. */
int plan_gemms(const struct plan *p, const struct plan_backend *b, struct plan_gemm out[PLAN_GEMMS_MAX]);

/* FLOP that the model takes for a step of all ranks, whatever the layout: 6 for each token and element of a matrix
 * (forward 2, backward 4; of the embedding none, it is looked up), and causal attention. Nothing that a layout does
 * twice and no recompute is in: the numerator of model FLOP/s utilisation. */
double plan_model_flop(const struct plan *p);

#endif
