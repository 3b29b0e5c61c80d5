/* Private to the .cu files: operations that go over rows once and sum over them by columns, in two stages so that the
 * order is fixed: blocks of rows through the stream's scratch, then the blocks in turn. */
#ifndef BOOST_KERNELS_CUDA_COLUMNS_CUH
#define BOOST_KERNELS_CUDA_COLUMNS_CUH

#include "kernels/cuda/device.cuh"

/* A block's tile is TILE_ROWS rows of LANES vectors, moved down the rows; about COLUMN_BLOCKS blocks in all. */
enum { TILE_ROWS = BLOCK / LANES, COLUMN_BLOCKS = SCRATCH_CHUNKS, TOTAL_LANES = 16 };
static_assert(SCRATCH_TILE == LANES * 8, "scratch_size.h has the widest tile");

/* rows, of which number i is of branch i % branches; w columns. */
struct column_shape {
    int64_t rows, w;
    int branches;
};

/* Blocks of rows: enough for the device, few enough to be added quickly; a function of the shape alone. */
static inline int64_t column_chunks(const struct column_shape *s, int V)
{
    int64_t across = blocks_of(s->w, LANES * V) * s->branches;
    return at_least(1, at_most(COLUMN_BLOCKS / across, blocks_of(s->rows, 4 * TILE_ROWS * (int64_t)s->branches)));
}

/* op.row(row, w, column, gain, sums): does the row's work in V columns, of which gain is op.gain [branches, w], and
 * adds to sums. parts [SUMS][branches][chunks][w]; NULL: no sums are wanted. Grid (tiles, chunks, branches), block
 * (LANES, TILE_ROWS). */
template <int V, int SUMS, class Op>
static __global__ void __launch_bounds__(BLOCK) column_parts(Op op, int64_t rows, int64_t w, float *parts)
{
    __shared__ float lanes[SUMS][TILE_ROWS][LANES * V];
    int64_t first = (int64_t)blockIdx.x * LANES * V, column = first + threadIdx.x * V;
    int64_t branches = gridDim.z, branch = blockIdx.z;
    float sums[SUMS][V] = {};
    if (column < w) {
        float gain[V];
        load<V>(op.gain + branch * w + column, gain);
        int64_t step = (int64_t)gridDim.y * TILE_ROWS * branches;
        for (int64_t i = ((int64_t)blockIdx.y * TILE_ROWS + threadIdx.y) * branches + branch; i < rows; i += step)
            op.row(i, w, column, gain, sums);
    }
    if (!parts)
        return;
#pragma unroll
    for (int s = 0; s < SUMS; s++)
#pragma unroll
        for (int i = 0; i < V; i++)
            lanes[s][threadIdx.y][threadIdx.x * V + i] = sums[s][i];
    __syncthreads();
    int mine = threadIdx.y * LANES + threadIdx.x;
    if (mine >= LANES * V || first + mine >= w)
        return;
    for (int s = 0; s < SUMS; s++) {
        float total = 0;
        for (int i = 0; i < TILE_ROWS; i++)
            total += lanes[s][i][mine];
        parts[((s * branches + branch) * gridDim.y + blockIdx.y) * w + first + mine] = total;
    }
}

/* out [branches, w] += the sums over the chunks of parts [branches][chunks][w]. Grid (columns / LANES, branches), block
 * (LANES, TOTAL_LANES). A template, so that a file that has no use for it has none. */
template <int LANES_Y> static __global__ void column_totals(int64_t chunks, int64_t w, const float *parts, float *out)
{
    __shared__ float lanes[LANES_Y][LANES];
    int64_t column = (int64_t)blockIdx.x * LANES + threadIdx.x, branch = blockIdx.y;
    float total = 0;
    for (int64_t i = threadIdx.y; i < chunks && column < w; i += LANES_Y)
        total += parts[(branch * chunks + i) * w + column];
    lanes[threadIdx.y][threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.y != 0 || column >= w)
        return;
    total = 0;
    for (int i = 0; i < LANES_Y; i++)
        total += lanes[i][threadIdx.x];
    out[branch * w + column] += total;
}

template <int SUMS>
static inline void launch_totals(struct kstream *ks, const char *what, const struct column_shape *s, int64_t chunks,
                                 const float *parts, void *const (&out)[SUMS])
{
    for (int i = 0; i < SUMS; i++)
        launch(ks, what, grid_of(blocks_of(s->w, LANES), s->branches), dim3(LANES, TOTAL_LANES),
               column_totals<TOTAL_LANES>, chunks, s->w, parts + i * s->branches * chunks * s->w, (float *)out[i]);
}

/* The operation, and its sums added to out[] unless out[0] is NULL. */
template <int V, int SUMS, class Op>
static inline void launch_columns(struct kstream *ks, const char *what, const struct column_shape *s, Op op,
                                  void *const (&out)[SUMS])
{
    int64_t chunks = column_chunks(s, V);
    float *parts = NULL;
    if (out[0]) {
        parts = (float *)cuda_scratch(ks, sizeof(float) * SUMS * s->branches * chunks * s->w, what);
        if (!parts)
            return;
    }
    launch(ks, what, grid_of(blocks_of(s->w, LANES * V), chunks, s->branches), dim3(LANES, TILE_ROWS),
           column_parts<V, SUMS, Op>, op, s->rows, s->w, parts);
    if (out[0])
        launch_totals<SUMS>(ks, what, s, chunks, parts, out);
}

#endif
