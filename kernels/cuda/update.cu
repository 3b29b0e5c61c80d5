/* cuda.h: gradient norm, the decisions of a step, and AdamW (Loshchilov and Hutter, Decoupled Weight Decay
 * Regularization, algorithm 2) on fp32 master weights; the products get a rounded copy. */
#include "kernels/cuda/device.cuh"

namespace
{

/* parts [gridDim.x][2]: sum of squares, and 0. In fp64, where no square of a float overflows: the sum is finite exactly
 * if all elements are. */
template <int V>
__global__ void __launch_bounds__(BLOCK) squares(int64_t n, const float *__restrict__ grad, double *parts)
{
    double sum[1] = {0};
    int64_t step = (int64_t)gridDim.x * BLOCK, first = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
#pragma unroll 4
    for (int64_t i = first; i < n / V; i += step) {
        float x[V];
        load<V>(grad + i * V, x);
#pragma unroll
        for (int k = 0; k < V; k++)
            sum[0] += (double)x[k] * (double)x[k];
    }
    int64_t rest = n / V * V + first;
    if (rest < n)
        sum[0] += (double)grad[rest] * (double)grad[rest];
    block_sum(sum);
    if (threadIdx.x != 0)
        return;
    parts[2 * blockIdx.x] = sum[0];
    parts[2 * blockIdx.x + 1] = 0;
}

/* A loss or a sum that is not finite counts as a gradient that is not, whoever set it. Negated comparisons, so that a
 * NaN count skips too. */
__global__ void step_finish(struct step_block *block, double beta1, double beta2, double clip)
{
    const double *agree = block->agree;
    double tokens = agree[AGREE_TOKENS], squares = agree[AGREE_SQUARES], nonfinite = agree[AGREE_NONFINITE];
    bool usable =
        tokens > 0 && !(nonfinite > 0) && !isnan(nonfinite) && isfinite(agree[AGREE_LOSS]) && isfinite(squares);
    double norm = tokens > 0 ? sqrt(squares) / tokens : 0, t = block->adam_t, scale = 0;
    if (usable) {
        scale = (clip > 0 && norm > clip ? clip / norm : 1) / tokens;
        t += 1;
    }
    block->grad_norm = norm;
    block->grad_scale = scale;
    block->skip = usable ? 0 : 1;
    block->adam_t = t;
    block->bias1 = -expm1(t * log(beta1));
    block->bias2 = -expm1(t * log(beta2));
}

/* What all elements of a tensor share. */
struct factors {
    float grad_scale, beta1, rest1, beta2, rest2, step, root, eps, decay;
};

__device__ inline struct factors factors_of(const struct adamw &h, const struct step_block *block)
{
    return {(float)block->grad_scale,
            (float)h.beta1,
            (float)(1 - h.beta1),
            (float)h.beta2,
            (float)(1 - h.beta2),
            (float)(block->lr / block->bias1),
            (float)(1 / sqrt(block->bias2)),
            (float)h.eps,
            (float)(block->lr * h.weight_decay)};
}

__device__ inline void store_weight(bf16 *to, const float (&x)[4])
{
    *reinterpret_cast<uint2 *>(to) = make_uint2(narrow_two(x[0], x[1]), narrow_two(x[2], x[3]));
}

__device__ inline void store_weight(bf16 *to, const float (&x)[1])
{
    store(to, x);
}

struct tensors {
    const float *grad;
    float *m, *v, *master;
    bf16 *weight;
};

template <int V> __device__ inline void update(const struct factors &f, const struct tensors &t, int64_t i)
{
    float g[V], m[V], v[V], x[V];
    load<V>(t.grad + i, g);
    load<V>(t.m + i, m);
    load<V>(t.v + i, v);
    load<V>(t.master + i, x);
#pragma unroll
    for (int k = 0; k < V; k++) {
        g[k] *= f.grad_scale;
        m[k] = f.beta1 * m[k] + f.rest1 * g[k];
        v[k] = f.beta2 * v[k] + f.rest2 * g[k] * g[k];
        x[k] -= f.step * m[k] / (sqrtf(v[k]) * f.root + f.eps) + f.decay * x[k];
    }
    store(t.m + i, m);
    store(t.v + i, v);
    store(t.master + i, x);
    store_weight(t.weight + i, x);
}

template <int V>
__global__ void __launch_bounds__(BLOCK)
    decay_and_move(int64_t n, struct adamw h, const struct step_block *block, struct tensors t)
{
    __shared__ struct factors shared;
    if (block->skip != 0)
        return;
    if (threadIdx.x == 0)
        shared = factors_of(h, block);
    __syncthreads();
    struct factors f = shared;
    int64_t step = (int64_t)gridDim.x * BLOCK, first = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
    for (int64_t i = first; i < n / V; i += step)
        update<V>(f, t, i * V);
    int64_t rest = n / V * V + first;
    if (rest < n)
        update<1>(f, t, rest);
}

} // namespace

void cuda_grad_squares(struct kstream *ks, int64_t n, const void *grad, double *acc)
{
    if (n <= 0)
        return;
    int64_t blocks = at_most(blocks_of(n, 16 * BLOCK), MOST_PARTS);
    double *parts = (double *)cuda_scratch(ks, sizeof(double) * 2 * (size_t)blocks, "grad_squares");
    if (!parts)
        return;
    launch(ks, "grad_squares", grid_of(blocks), BLOCK, wide(0, grad) ? squares<4> : squares<1>, n, (const float *)grad,
           parts);
    launch(ks, "grad_squares", 1, BLOCK, add_parts<true>, blocks, parts, acc);
}

void cuda_step_finish(struct kstream *ks, struct step_block *block, double beta1, double beta2, double clip)
{
    launch(ks, "step_finish", 1, 1, step_finish, block, beta1, beta2, clip);
}

void cuda_adamw(struct kstream *ks, int64_t n, const struct adamw *hyper, const struct step_block *block,
                const void *grad, void *m, void *v, void *master, void *weight)
{
    if (n <= 0)
        return;
    struct tensors t = {(const float *)grad, (float *)m, (float *)v, (float *)master, (bf16 *)weight};
    bool vectors = wide(0, grad, m, v, master) && (uintptr_t)weight % 8 == 0;
    int64_t blocks = at_most(blocks_of(n, (vectors ? 4 : 1) * BLOCK), (int64_t)16 * ks->sms);
    launch(ks, "adamw", grid_of(at_least(blocks, 1)), BLOCK, vectors ? decay_and_move<4> : decay_and_move<1>, n, *hyper,
           block, t);
}
