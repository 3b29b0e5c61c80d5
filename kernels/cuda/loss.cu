/* cuda.h: cross-entropy over a sharded vocabulary, a block to a row; worker/README.md, "The edges". */
#include "kernels/cuda/device.cuh"

namespace
{

struct shape {
    int64_t T, ld, valid, first;
};

/* f(value) for this thread's share of the row's valid logits. */
template <int V, class F> __device__ inline void each_logit(const struct shape &c, const bf16 *row, F f)
{
    enum { AHEAD = 2 };
    int64_t j = threadIdx.x * V, whole = c.valid / (AHEAD * BLOCK * V) * (AHEAD * BLOCK * V);
    for (; j < whole; j += AHEAD * BLOCK * V) {
        packed<V> next[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            next[k] = load_packed<V>(row + j + k * BLOCK * V);
        after_loads(next);
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            float x[V];
            widen(next[k], x);
#pragma unroll
            for (int i = 0; i < V; i++)
                f(x[i]);
        }
    }
    for (; j + V <= c.valid; j += BLOCK * V) {
        float x[V];
        load<V>(row + j, x);
#pragma unroll
        for (int i = 0; i < V; i++)
            f(x[i]);
    }
    for (; j < c.valid; j++) /* the rest of the last vector, which is one thread's */
        f(__bfloat162float(row[j]));
}

template <int V>
__global__ void __launch_bounds__(BLOCK) ce_max(struct shape c, const bf16 *__restrict__ logits, float *m)
{
    __shared__ float of_warp[WARPS];
    float top = -INFINITY;
    each_logit<V>(c, logits + blockIdx.x * c.ld, [&](float x) { top = fmaxf(top, x); });
#pragma unroll
    for (int distance = LANES / 2; distance; distance /= 2)
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, distance));
    if (lane() == 0)
        of_warp[threadIdx.x / LANES] = top;
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    for (int i = 0; i < WARPS; i++)
        top = fmaxf(top, of_warp[i]);
    m[blockIdx.x] = top;
}

/* The target's column here; -1: masked, or another rank's. */
__device__ inline int64_t target_of(const struct shape &c, int32_t target)
{
    int64_t column = (int64_t)target - c.first;
    return target >= 0 && column >= 0 && column < c.valid ? column : -1;
}

template <int V>
__global__ void __launch_bounds__(BLOCK)
    ce_sums(struct shape c, const bf16 *__restrict__ logits, const float *m, const int32_t *targets, float *sums)
{
    const bf16 *row = logits + blockIdx.x * c.ld;
    float top = m[blockIdx.x], sum[2] = {0, 0};
    each_logit<V>(c, row, [&](float x) {
        float e = exponential(x - top);
        sum[0] += e;
        sum[1] += e * x;
    });
    block_sum(sum);
    if (threadIdx.x != 0)
        return;
    int64_t target = target_of(c, targets[blockIdx.x]);
    sums[blockIdx.x * (int64_t)3] = sum[0];
    sums[blockIdx.x * (int64_t)3 + 1] = sum[1];
    sums[blockIdx.x * (int64_t)3 + 2] = target >= 0 ? __bfloat162float(row[target]) : 0;
}

template <int V>
__global__ void __launch_bounds__(BLOCK)
    ce_gradient(struct shape c, bf16 *logits, const float *m, const float *sums, const int32_t *targets, float *out)
{
    int64_t i = blockIdx.x, target = target_of(c, targets[i]);
    const float *sum = sums + 3 * i;
    bool masked = targets[i] < 0;
    float top = m[i], factor = 1 / sum[0];
    bf16 *row = logits + i * c.ld;
    int64_t written = masked ? 0 : c.valid;
    for (int64_t j = threadIdx.x * V; j < c.ld; j += BLOCK * V) {
        float p[V] = {};
        if (j < written) {
            load<V>(row + j, p);
#pragma unroll
            for (int k = 0; k < V; k++)
                p[k] = j + k < written ? exponential(p[k] - top) * factor : 0;
            if (target >= j && target < j + V) {
#pragma unroll
                for (int k = 0; k < V; k++)
                    p[k] -= j + k == target ? 1.0f : 0.0f;
            }
        }
        store(row + j, p);
    }
    if (threadIdx.x == 0)
        out[i] = masked ? 0 : sum[1] / sum[0] - sum[2];
}

/* parts [gridDim.x][2]: loss sum and tokens of this block's rows. In fp64: the loss is what users compare between runs.
 */
__global__ void __launch_bounds__(BLOCK)
    ce_losses(int64_t T, const float *m, const float *sums, const int32_t *targets, double *parts)
{
    double sum[2] = {0, 0};
    int64_t step = (int64_t)gridDim.x * BLOCK;
    for (int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x; i < T; i += step) {
        if (targets[i] < 0)
            continue;
        sum[0] += (double)m[i] + log((double)sums[3 * i]) - (double)sums[3 * i + 2];
        sum[1] += 1;
    }
    block_sum(sum);
    if (threadIdx.x != 0)
        return;
    parts[2 * blockIdx.x] = sum[0];
    parts[2 * blockIdx.x + 1] = sum[1];
}

} // namespace

void cuda_ce_max(struct kstream *ks, int64_t T, int64_t ld, int64_t valid, const void *logits, void *m)
{
    if (T <= 0)
        return;
    struct shape c = {T, ld, valid, 0};
    by_width(wide(ld, logits), [&](auto V) {
        launch(ks, "ce_max", grid_of(T), BLOCK, ce_max<decltype(V)::value>, c, (const bf16 *)logits, (float *)m);
    });
}

void cuda_ce_sums(struct kstream *ks, int64_t T, int64_t ld, int64_t valid, int64_t first, const void *logits,
                  const void *m, const int32_t *targets, void *sums)
{
    if (T <= 0)
        return;
    struct shape c = {T, ld, valid, first};
    by_width(wide(ld, logits), [&](auto V) {
        launch(ks, "ce_sums", grid_of(T), BLOCK, ce_sums<decltype(V)::value>, c, (const bf16 *)logits, (const float *)m,
               targets, (float *)sums);
    });
}

void cuda_ce_backward(struct kstream *ks, int64_t T, int64_t ld, int64_t valid, int64_t first, void *logits,
                      const void *m, const void *sums, const int32_t *targets, double *loss, void *c)
{
    if (T <= 0)
        return;
    if (loss) {
        int64_t blocks = at_most(blocks_of(T, BLOCK), MOST_PARTS);
        double *parts = (double *)cuda_scratch(ks, sizeof(double) * 2 * (size_t)blocks, "ce_backward");
        if (!parts)
            return;
        launch(ks, "ce_backward", grid_of(blocks), BLOCK, ce_losses, T, (const float *)m, (const float *)sums, targets,
               parts);
        launch(ks, "ce_backward", 1, BLOCK, add_parts<false>, blocks, parts, loss);
    }
    if (!c)
        return;
    struct shape shape = {T, ld, valid, first};
    by_width(wide(ld, logits), [&](auto V) {
        launch(ks, "ce_backward", grid_of(T), BLOCK, ce_gradient<decltype(V)::value>, shape, (bf16 *)logits,
               (const float *)m, (const float *)sums, targets, (float *)c);
    });
}
