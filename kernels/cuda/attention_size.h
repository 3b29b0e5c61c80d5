/* Memory of the CUDA backend's attention as pure numbers, so that it can be computed without CUDA and cuDNN.
 * worker/plan has the same formula; tests/unit/plan/cuda_attention_test.c holds the two together.
 *
 * The workspace begins with one fp32 for each query row, <dO, O>; the own kernel needs nothing else. cuDNN's
 * deterministic backward keeps the gradient of the scores in bf16, h*s*s*2 bytes a sequence, so it works on as many
 * sequences at a time as stay within a limit, or on one. Where query heads share a key-value head, dk and dv exist for
 * every query head before they are summed. The accumulating form keeps dq in fp32 instead of the scores. */
#ifndef BOOST_KERNELS_CUDA_ATTENTION_SIZE_H
#define BOOST_KERNELS_CUDA_ATTENTION_SIZE_H

#include "kernels/kernels.h"

enum {
    ATTENTION_ALIGN = 256,
    ATTENTION_TILE = 128,       /* of the scores in cuDNN: s is rounded up to it */
    ATTENTION_SLACK = 16 << 20, /* what else cuDNN may ask for */
    ATTENTION_SLICE_MIB = 2048  /* limit of the sequences that go through the deterministic backward together */
};

static inline int64_t attention_aligned(int64_t bytes)
{
    return (bytes + ATTENTION_ALIGN - 1) / ATTENTION_ALIGN * ATTENTION_ALIGN;
}

/* <dO, O> of every row of b sequences. */
static inline int64_t attention_rows_bytes(const struct attention *a)
{
    return attention_aligned(a->b * a->h * a->s * (int64_t)sizeof(float));
}

/* dq in fp32, accumulating form only. */
static inline int64_t attention_sums_bytes(const struct attention *a)
{
    return a->accumulate ? attention_aligned(a->b * a->h * a->s * a->e * (int64_t)sizeof(float)) : 0;
}

/* What cuDNN's backward needs for one sequence. */
static inline int64_t attention_sequence_bytes(const struct attention *a)
{
    int64_t padded = (a->s + ATTENTION_TILE - 1) / ATTENTION_TILE * ATTENTION_TILE;
    int64_t scores = a->accumulate ? 0 : 2 * a->h * padded * padded;
    int64_t shared = a->h == a->hk ? 0 : 2 * 2 * a->h * a->s * a->e;
    return attention_aligned(scores + shared);
}

/* The most sequences that cuDNN's backward is given at a time. */
static inline int64_t attention_sequences(const struct attention *a)
{
    int64_t fit = a->accumulate ? a->b : ((int64_t)ATTENTION_SLICE_MIB << 20) / attention_sequence_bytes(a);
    return fit < 1 ? 1 : fit < a->b ? fit : a->b;
}

/* Grows with b, so the workspace of a batch serves any part of it. */
static inline size_t attention_bytes(const struct attention *a, bool backward)
{
    int64_t slack = a->own ? 0 : ATTENTION_SLACK;
    if (!backward)
        return (size_t)slack;
    if (a->own)
        return (size_t)attention_rows_bytes(a);
    return (size_t)(attention_rows_bytes(a) + attention_sums_bytes(a) +
                    attention_sequences(a) * attention_sequence_bytes(a) + slack);
}

#endif
