/* cuda.h: the plain norm over whole rows, a block to a row: what the row's sum is made of stays in registers until the
 * sum is known, so each way reads and writes everything once. */
#include "kernels/cuda/columns.cuh"
#include "kernels/cuda/scratch_size.h"

namespace
{

/* ---- a row's columns by threads ------------------------------------------------------ */

/* The first column of vector i of this thread. */
template <int V, int THREADS> __device__ inline int column_of(int i)
{
    return ((int)threadIdx.x + i * THREADS) * V;
}

/* This thread's N vectors; zeros behind the row's end. */
template <int V, int THREADS, int N> __device__ inline void load_part(const bf16 *row, int64_t w, packed<V> (&out)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        int column = column_of<V, THREADS>(i);
        out[i] = column < w ? load_packed<V>(row + column) : packed<V>{};
    }
}

/* Over the block, in all threads. `turn` alternates between the calls of a kernel, so that one barrier is enough:
 * who writes a turn's parts has passed the barrier of the other, behind which all have read them. */
template <int THREADS> __device__ inline float row_total(float x, int turn)
{
    __shared__ float part[2][THREADS / LANES];
    x = warp_sum(x);
    if (lane() == 0)
        part[turn][threadIdx.x / LANES] = x;
    __syncthreads();
    x = 0;
#pragma unroll
    for (int i = 0; i < THREADS / LANES; i++)
        x += part[turn][i];
    return x;
}

/* ---- forward --------------------------------------------------------------------------- */

template <int V, int N>
__global__ void __launch_bounds__(BLOCK) norm_forward(int64_t w, float inv_d, float eps, const bf16 *x, const bf16 *y,
                                                      const bf16 *gain, bf16 *x_out, float *R, bf16 *n)
{
    int64_t first = (int64_t)blockIdx.x * w;
    packed<V> xs[N], ys[N] = {};
    float a[N][V], sum = 0;
    load_part<V, BLOCK>(x + first, w, xs);
    if (y)
        load_part<V, BLOCK>(y + first, w, ys);
#pragma unroll
    for (int k = 0; k < N; k++) {
        int column = column_of<V, BLOCK>(k);
        widen(xs[k], a[k]);
        if (y) {
            float b[V];
            widen(ys[k], b);
#pragma unroll
            for (int i = 0; i < V; i++)
                a[k][i] += b[i];
            round_stored(a[k]);
        }
        if ((y || x_out != x) && column < w)
            store(x_out + first + column, a[k]);
#pragma unroll
        for (int i = 0; i < V; i++)
            sum += a[k][i] * a[k][i];
    }
    float r = 1 / sqrtf(fmaf(row_total<BLOCK>(sum, 0), inv_d, eps));
    if (threadIdx.x == 0)
        R[blockIdx.x] = r;
#pragma unroll
    for (int k = 0; k < N; k++) {
        int column = column_of<V, BLOCK>(k);
        if (column >= w)
            continue;
        float g[V];
        load<V>(gain + column, g);
#pragma unroll
        for (int i = 0; i < V; i++)
            a[k][i] = r * a[k][i] * g[i];
        store(n + first + column, a[k]);
    }
}

/* ---- backward ----------------------------------------------------------------------------- */

/* Blocks that a processor holds at a time, by their registers. As many for each of an H200's processors, whatever the
 * device: how rows are shared out is a function of the shape alone. */
template <int N, int THREADS> constexpr int blocks_each()
{
    return N == 1 ? 3 : 2 * BLOCK / THREADS;
}
enum { PROCESSORS = 132 };

/* Block b takes rows b, b + blocks, ...; the next row's loads are under way while this one's sum is made. parts
 * [blocks][w]: each block's share of dgain. */
template <int V, int N, int THREADS>
__global__ void __launch_bounds__(THREADS, blocks_each<N, THREADS>())
    norm_backward(int64_t T, int64_t w, float inv_d, const bf16 *x, const bf16 *gain, const float *R, const bf16 *dn,
                  bf16 *dx, float *k, float *parts)
{
    packed<V> gains[N], xs[N], dns[N];
    float sums[N][V] = {};
    int64_t row = blockIdx.x;
    load_part<V, THREADS>(gain, w, gains);
    load_part<V, THREADS>(x + row * w, w, xs);
    load_part<V, THREADS>(dn + row * w, w, dns);
    float r = R[row];
    for (int turn = 0; row < T; turn ^= 1) {
        int64_t next = row + gridDim.x, ahead = next < T ? next : row;
        packed<V> outs[N], next_xs[N], next_dns[N];
        load_part<V, THREADS>(dx + row * w, w, outs);
        load_part<V, THREADS>(x + ahead * w, w, next_xs);
        load_part<V, THREADS>(dn + ahead * w, w, next_dns);
        float next_r = R[ahead], dot = 0;
#pragma unroll
        for (int v = 0; v < N; v++) {
            float a[V], u[V], g[V];
            widen(xs[v], a);
            widen(dns[v], u);
            widen(gains[v], g);
#pragma unroll
            for (int i = 0; i < V; i++)
                dot += u[i] * (a[i] * g[i]);
        }
        float factor = r * r * inv_d * (r * row_total<THREADS>(dot, turn));
        if (threadIdx.x == 0)
            k[row] = factor;
#pragma unroll
        for (int v = 0; v < N; v++) {
            int column = column_of<V, THREADS>(v);
            float a[V], u[V], g[V], out[V];
            widen(xs[v], a);
            widen(dns[v], u);
            widen(gains[v], g);
            widen(outs[v], out);
#pragma unroll
            for (int i = 0; i < V; i++) {
                u[i] *= r;
                out[i] += u[i] * g[i] - factor * a[i];
                sums[v][i] += a[i] * u[i];
            }
            if (column < w)
                store(dx + row * w + column, out);
            xs[v] = next_xs[v];
            dns[v] = next_dns[v];
        }
        r = next_r;
        row = next;
    }
#pragma unroll
    for (int v = 0; v < N; v++) {
        int column = column_of<V, THREADS>(v);
        if (column < w)
            store(parts + blockIdx.x * w + column, sums[v]);
    }
}

/* k of rows that are too wide for a block's registers, a warp to a row. */
template <int V>
__global__ void __launch_bounds__(BLOCK) norm_row_k(int64_t T, int64_t w, float inv_d, const bf16 *x, const bf16 *gain,
                                                    const float *R, const bf16 *dn, float *k)
{
    int64_t row = warp_row();
    if (row >= T)
        return;
    float dot = 0;
    for (int64_t j = first_column<V>(); j < w; j += LANES * V) {
        float a[V], u[V], g[V];
        load<V>(x + row * w + j, a);
        load<V>(dn + row * w + j, u);
        load<V>(gain + j, g);
#pragma unroll
        for (int i = 0; i < V; i++)
            dot += u[i] * (a[i] * g[i]);
    }
    dot = warp_sum(dot);
    if (lane() == 0) {
        float r = R[row];
        k[row] = r * r * inv_d * (r * dot);
    }
}

/* ---- which of them by width ------------------------------------------------------------------ */

template <int N> using vectors_of = std::integral_constant<int, N>;

/* f(N) with the fewest of 1, 2 and 4 vectors of `each` columns that hold a row; false: none does. */
template <class F> static bool by_vectors(int64_t w, int64_t each, F f)
{
    if (w <= each)
        f(vectors_of<1>());
    else if (w <= 2 * each)
        f(vectors_of<2>());
    else if (w <= 4 * each)
        f(vectors_of<4>());
    else
        return false;
    return true;
}

struct backward_args {
    int64_t T, d;
    const bf16 *x, *gain;
    const float *R;
    const bf16 *dn;
    bf16 *dx;
    float *k;
    void *dgain;
};

template <int V, int N, int THREADS> static void launch_backward(struct kstream *ks, const struct backward_args *a)
{
    constexpr int64_t most = PROCESSORS * blocks_each<N, THREADS>();
    static_assert(most * V * N * THREADS * sizeof(float) <= CUDA_GEMM_WORKSPACE, "as scratch_size.h has it");
    int64_t blocks = at_most(most, blocks_of(a->T, 4));
    struct column_shape shape = {a->T, a->d, 1};
    void *const out[1] = {a->dgain};
    float *parts = (float *)cuda_scratch(ks, sizeof(float) * blocks * a->d, "norm_backward");
    if (!parts)
        return;
    launch(ks, "norm_backward", grid_of(blocks), THREADS, norm_backward<V, N, THREADS>, a->T, a->d,
           (float)(1 / (double)a->d), a->x, a->gain, a->R, a->dn, a->dx, a->k, parts);
    launch_totals<1>(ks, "norm_backward", &shape, blocks, parts, out);
}

/* Whether a row's columns fit a block's registers. */
template <int V> static bool backward_in_registers(struct kstream *ks, const struct backward_args *a)
{
    constexpr int64_t each = V * BLOCK;
    if (a->d <= each)
        launch_backward<V, 1, BLOCK>(ks, a);
    else if (a->d <= 2 * each)
        launch_backward<V, 2, BLOCK>(ks, a);
    else if (a->d <= 4 * each)
        launch_backward<V, 2, 2 * BLOCK>(ks, a);
    else
        return false;
    return true;
}

} // namespace

void cuda_norm_forward(struct kstream *ks, int64_t T, int64_t d, double eps, const void *x, const void *y,
                       const void *gain, void *x_out, void *R, void *n)
{
    if (T <= 0)
        return;
    bool done = false;
    by_width(wide(d, x, y, gain, x_out, n), [&](auto V) {
        done = by_vectors(d, decltype(V)::value * BLOCK, [&](auto N) {
            launch(ks, "norm_forward", grid_of(T), BLOCK, norm_forward<decltype(V)::value, decltype(N)::value>, d,
                   (float)(1 / (double)d), (float)eps, (const bf16 *)x, (const bf16 *)y, (const bf16 *)gain,
                   (bf16 *)x_out, (float *)R, (bf16 *)n);
        });
    });
    if (done)
        return;
    cuda_residual_gain(ks, T, d, x, y, NULL, x_out, NULL, R);
    cuda_norm_apply(ks, T, d, d, eps, x_out, gain, R, R, n);
}

void cuda_norm_backward(struct kstream *ks, int64_t T, int64_t d, const void *x, const void *gain, const void *R,
                        const void *dn, void *dx, void *k, void *dgain)
{
    if (T <= 0)
        return;
    const struct backward_args a = {
        T, d, (const bf16 *)x, (const bf16 *)gain, (const float *)R, (const bf16 *)dn, (bf16 *)dx, (float *)k, dgain};
    by_width(wide(d, x, gain, dn, dx), [&](auto V) {
        if (backward_in_registers<decltype(V)::value>(ks, &a))
            return;
        launch(ks, "norm_backward", grid_of(blocks_of(T, WARPS)), BLOCK, norm_row_k<decltype(V)::value>, T, d,
               (float)(1 / (double)d), a.x, a.gain, a.R, a.dn, a.k);
        cuda_gain_backward(ks, T, d, x, gain, R, k, dn, true, dx, dgain);
    });
}
