/* Causal attention as a graph of cuDNN's backend interface: built once for a shape, run on any tensors of it. */
#ifndef BOOST_KERNELS_CUDA_ATTENTION_GRAPH_H
#define BOOST_KERNELS_CUDA_ATTENTION_GRAPH_H

#include "kernels/cuda/attention.h"
#include "kernels/cuda/cudnn.h"

enum { ATTENTION_DESCRIPTORS = 192 };

struct attention_plan {
    const struct cudnn *lib;
    cudnnHandle_t handle;
    bool backward, accumulate;
    int64_t workspace;        /* bytes that cuDNN wants */
    float scale, hidden, one; /* what the graph reads by value, from the host, at every run */
    cudnnBackendDescriptor_t plan;
    cudnnBackendDescriptor_t all[ATTENTION_DESCRIPTORS]; /* in the order they were made; freed with the plan */
    int count;
};

/* For a->b sequences at a time. Takes up to a second; not inside a capture. ERR_UNSUPPORTED: cuDNN has no engine. */
MUST_USE int attention_plan_create(const struct cudnn *lib, cudnnHandle_t handle, const struct attention *a,
                                   bool backward, struct attention_plan **out, struct error *err);
void attention_plan_destroy(struct attention_plan *p);
/* Enqueues on the handle's stream. rows [b, h, s] fp32 and, when accumulating, sums [b, h, s, e] fp32 are scratch of
 * the backward. */
MUST_USE int attention_plan_run(struct attention_plan *p, const struct attention_tensors *t, float *rows, float *sums,
                                void *workspace, struct error *err);

#endif
