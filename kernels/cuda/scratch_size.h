/* The scratch of the CUDA backend as pure numbers, so that it can be computed without CUDA. worker/plan has the same
 * formulas; tests/unit/plan/backend_test.c holds the two together.
 *
 * Operations of a stream run in order and share the scratch: cuBLASLt's workspace, and in it the parts of norm_rows.cu;
 * of sums over rows two parts for each column and chunk of rows; for an embedding's gradient the tokens of each row of the table, in lists. */
#ifndef BOOST_KERNELS_CUDA_SCRATCH_SIZE_H
#define BOOST_KERNELS_CUDA_SCRATCH_SIZE_H

#include "kernels/kernels.h"

/* cuBLASLt's share: the largest workspace that its Hopper kernels ask for. */
enum { CUDA_GEMM_WORKSPACE = 32 << 20 };

enum {
    SCRATCH_TILE = 32 * 8, /* columns of a block: lanes and their vectors */
    SCRATCH_CHUNKS = 1024, /* blocks of the first stage of a sum, about */
    SCRATCH_SPARE = 8,     /* that no column is without one */
    SCRATCH_BRANCHES = 4,  /* side by side, in a crossing's sums; more than there are */
    SCRATCH_SQUARES = 1024 /* parts of the gradient norm, two numbers each */
};

/* For sums of two kinds over up to this many columns of all branches. */
static inline int64_t scratch_columns_bytes(int64_t columns)
{
    int64_t tiles = (columns + SCRATCH_TILE - 1) / SCRATCH_TILE + SCRATCH_SPARE;
    return 2 * (int64_t)sizeof(float) * SCRATCH_TILE * (tiles > SCRATCH_CHUNKS ? tiles : (int64_t)SCRATCH_CHUNKS);
}

/* Begin, end and place of each list, and three numbers a token. */
static inline int64_t scratch_lists_bytes(int64_t T, int64_t rows)
{
    return (int64_t)sizeof(int32_t) * (2 * rows + 1 + 3 * T);
}

static inline size_t scratch_sums_bytes(const struct scratch_shape *shape)
{
    int64_t columns = scratch_columns_bytes(SCRATCH_BRANCHES * shape->width);
    int64_t lists = scratch_lists_bytes(shape->T, shape->vocab);
    int64_t squares = 2 * (int64_t)sizeof(double) * SCRATCH_SQUARES;
    int64_t most = columns > lists ? columns : lists;
    return (size_t)(most > squares ? most : squares);
}

#endif
