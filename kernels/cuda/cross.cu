/* cuda.h: crossing latents. A warp to a row, the branch along y; sums over rows by columns.cuh. */
#include "kernels/cuda/columns.cuh"

namespace
{

struct rows {
    int64_t rows, w;
    int branches;
    double inv_r;
    float eps;
    bool silu, whole; /* whole: w == r, and sums are mean and variance */
};

struct rows rows_of(const struct crossing *c)
{
    return {c->rows, c->w, c->branches, 1 / (double)c->r, (float)c->eps, c->act == LATENT_SILU, c->w == c->r};
}

/* This warp's row; beyond c.rows: none. */
__device__ inline int64_t row_of(const struct rows &c)
{
    return warp_row() * c.branches + blockIdx.y;
}

dim3 grid_of_rows(const struct crossing *c)
{
    return grid_of(blocks_of(c->rows, (int64_t)WARPS * c->branches), c->branches);
}

struct row_norm {
    float mean, scale; /* scale = (variance + eps)^-1/2 */
};

/* From sums that ranks have added in double: the difference of two large numbers. */
__device__ inline struct row_norm norm_of(const struct rows &c, const float *sums, int64_t row)
{
    float mean = sums[2 * row], variance = sums[2 * row + 1];
    if (!c.whole) {
        double m = mean * c.inv_r;
        mean = (float)m;
        variance = (float)(variance * c.inv_r - m * m);
    }
    return {mean, 1 / sqrtf(fmaxf(variance, 0) + c.eps)};
}

template <int V>
__global__ void __launch_bounds__(BLOCK)
    cross_sum(struct rows c, const bf16 *Y, const bf16 *G, int64_t ldg, const bf16 *bias, bf16 *u, float *sums)
{
    int64_t row = row_of(c);
    if (row >= c.rows)
        return;
    float sum = 0, squares = 0;
    for (int64_t j = first_column<V>(); j < c.w; j += LANES * V) {
        float a[V], b[V];
        load<V>(Y + row * c.w + j, a);
        load<V>(G + row * ldg + j, b);
#pragma unroll
        for (int i = 0; i < V; i++)
            a[i] += b[i];
        if (bias) {
            load<V>(bias + blockIdx.y * c.w + j, b);
#pragma unroll
            for (int i = 0; i < V; i++)
                a[i] += b[i];
        }
        round_stored(a);
        store(u + row * c.w + j, a);
#pragma unroll
        for (int i = 0; i < V; i++) {
            sum += a[i];
            squares += a[i] * a[i];
        }
    }
    if (!sums)
        return;
    sum = warp_sum(sum);
    if (c.whole) { /* again, from what this lane has just stored */
        sum *= (float)c.inv_r;
        squares = 0;
        for (int64_t j = first_column<V>(); j < c.w; j += LANES * V) {
            float a[V];
            load<V>(u + row * c.w + j, a);
#pragma unroll
            for (int i = 0; i < V; i++)
                squares += (a[i] - sum) * (a[i] - sum);
        }
    }
    squares = warp_sum(squares);
    if (lane() == 0) {
        sums[2 * row] = sum;
        sums[2 * row + 1] = c.whole ? squares * (float)c.inv_r : squares;
    }
}

template <int V>
__global__ void __launch_bounds__(BLOCK)
    cross_forward(struct rows c, const bf16 *u, const float *sums, const bf16 *gain, const bf16 *bias, bf16 *z)
{
    int64_t row = row_of(c);
    if (row >= c.rows)
        return;
    struct row_norm n = norm_of(c, sums, row);
    for (int64_t j = first_column<V>(); j < c.w; j += LANES * V) {
        float x[V], g[V], b[V];
        load<V>(u + row * c.w + j, x);
        load<V>(gain + blockIdx.y * c.w + j, g);
        load<V>(bias + blockIdx.y * c.w + j, b);
#pragma unroll
        for (int i = 0; i < V; i++) {
            float v = g[i] * ((x[i] - n.mean) * n.scale) + b[i];
            x[i] = c.silu ? v * sigmoid(v) : v;
        }
        store(z + row * c.w + j, x);
    }
}

/* One vector of a row: dv in place of dz, rounded, and what it adds to back[]; x becomes xhat. */
template <int V>
__device__ inline void derive(const struct rows &c, struct row_norm n, const float (&g)[V], const float (&b)[V],
                              float (&x)[V], float (&dv)[V], float &total, float &along)
{
#pragma unroll
    for (int i = 0; i < V; i++) {
        x[i] = (x[i] - n.mean) * n.scale;
        if (c.silu) {
            float v = g[i] * x[i] + b[i];
            dv[i] *= silu_slope(v, sigmoid(v));
        }
    }
    if (c.silu)
        round_stored(dv);
#pragma unroll
    for (int i = 0; i < V; i++) {
        total += dv[i] * g[i];
        along += dv[i] * g[i] * x[i];
    }
}

__device__ inline void store_back(float total, float along, int64_t row, float *back)
{
    total = warp_sum(total);
    along = warp_sum(along);
    if (lane() == 0) {
        back[2 * row] = total;
        back[2 * row + 1] = along;
    }
}

template <int V>
__global__ void __launch_bounds__(BLOCK) backward_rows(struct rows c, const bf16 *u, const float *sums,
                                                       const bf16 *gain, const bf16 *bias, bf16 *dz, float *back)
{
    int64_t row = row_of(c);
    if (row >= c.rows)
        return;
    struct row_norm n = norm_of(c, sums, row);
    float total = 0, along = 0;
    for (int64_t j = first_column<V>(); j < c.w; j += LANES * V) {
        float x[V], dv[V], g[V], b[V];
        load<V>(u + row * c.w + j, x);
        load<V>(dz + row * c.w + j, dv);
        load<V>(gain + blockIdx.y * c.w + j, g);
        load<V>(bias + blockIdx.y * c.w + j, b);
        derive<V>(c, n, g, b, x, dv, total, along);
        if (c.silu)
            store(dz + row * c.w + j, dv);
    }
    store_back(total, along, row, back);
}

/* The sums over rows that backward_rows leaves. */
template <int V> struct backward_columns {
    struct rows c;
    const bf16 *u, *dv, *gain;
    const float *sums;

    __device__ void row(int64_t row, int64_t w, int64_t column, const float (&)[V], float (&out)[2][V]) const
    {
        struct row_norm n = norm_of(c, sums, row);
        float x[V], d[V];
        load<V>(u + row * w + column, x);
        load<V>(dv + row * w + column, d);
#pragma unroll
        for (int i = 0; i < V; i++) {
            out[0][i] += d[i] * ((x[i] - n.mean) * n.scale);
            out[1][i] += d[i];
        }
    }
};

/* Both at once, where a warp's columns fit its registers: N vectors of 8 a lane. A warp's rows are all of one branch,
 * and the warps of a block are added in turn. parts as column_parts leaves them, with gridDim.x chunks. */
template <int N>
__global__ void __launch_bounds__(BLOCK, N < 4 ? 2 : 1)
    backward_fused(struct rows c, const bf16 *u, const float *sums, const bf16 *gain, const bf16 *bias, bf16 *dz,
                   float *back, float *parts)
{
    enum { V = 8, COLUMNS = N * LANES * V };
    __shared__ float of_block[2][COLUMNS];
    float dgain[N][V] = {}, dbias[N][V] = {};
    int64_t branch = blockIdx.y, step = (int64_t)gridDim.x * WARPS * c.branches;
    for (int64_t row = row_of(c); row < c.rows; row += step) {
        struct row_norm n = norm_of(c, sums, row);
        float total = 0, along = 0;
#pragma unroll
        for (int k = 0; k < N; k++) {
            int64_t j = (k * LANES + lane()) * V;
            if (j >= c.w)
                continue;
            float x[V], dv[V], g[V], b[V];
            load<V>(u + row * c.w + j, x);
            load<V>(dz + row * c.w + j, dv);
            load<V>(gain + branch * c.w + j, g);
            load<V>(bias + branch * c.w + j, b);
            derive<V>(c, n, g, b, x, dv, total, along);
            if (c.silu)
                store(dz + row * c.w + j, dv);
#pragma unroll
            for (int i = 0; i < V; i++) {
                dgain[k][i] += dv[i] * x[i];
                dbias[k][i] += dv[i];
            }
        }
        store_back(total, along, row, back);
    }
    for (int warp = 0; warp < WARPS; warp++) {
        if ((int)threadIdx.x / LANES == warp) {
#pragma unroll
            for (int k = 0; k < N; k++)
#pragma unroll
                for (int i = 0; i < V; i++) {
                    int at = (k * LANES + lane()) * V + i;
                    of_block[0][at] = (warp ? of_block[0][at] : 0) + dgain[k][i];
                    of_block[1][at] = (warp ? of_block[1][at] : 0) + dbias[k][i];
                }
        }
        __syncthreads();
    }
    for (int64_t j = threadIdx.x; j < c.w; j += BLOCK)
        for (int s = 0; s < 2; s++)
            parts[((s * c.branches + branch) * gridDim.x + blockIdx.x) * c.w + j] = of_block[s][j];
}

template <int V> struct backward {
    struct rows c;
    const bf16 *u, *gain;
    const float *sums, *back;
    bf16 *dv;

    __device__ void row(int64_t row, int64_t w, int64_t column, const float (&g)[V], float (&out)[1][V]) const
    {
        struct row_norm n = norm_of(c, sums, row);
        float total = back[2 * row] * (float)c.inv_r, along = back[2 * row + 1] * (float)c.inv_r;
        float x[V], d[V];
        load<V>(u + row * w + column, x);
        load<V>(dv + row * w + column, d);
#pragma unroll
        for (int i = 0; i < V; i++) {
            d[i] = n.scale * (d[i] * g[i] - total - (x[i] - n.mean) * n.scale * along);
            out[0][i] += d[i];
        }
        store(dv + row * w + column, d);
    }
};

struct column_shape columns_of(const struct crossing *c)
{
    return {c->rows, c->w, c->branches};
}

bool empty(const struct crossing *c)
{
    return c->rows <= 0 || c->w <= 0;
}

template <int N>
void launch_fused(struct kstream *ks, const struct crossing *c, const void *u, const void *sums, const void *gain,
                  const void *bias, void *dz, void *back, void *const (&out)[2])
{
    struct column_shape shape = columns_of(c);
    int64_t chunks = column_chunks(&shape, 8);
    float *parts = (float *)cuda_scratch(ks, sizeof(float) * 2 * c->branches * chunks * c->w, "cross_backward_sums");
    if (!parts)
        return;
    launch(ks, "cross_backward_sums", grid_of(chunks, c->branches), BLOCK, backward_fused<N>, rows_of(c),
           (const bf16 *)u, (const float *)sums, (const bf16 *)gain, (const bf16 *)bias, (bf16 *)dz, (float *)back,
           parts);
    launch_totals<2>(ks, "cross_backward_sums", &shape, chunks, parts, out);
}

} // namespace

void cuda_cross_sum(struct kstream *ks, const struct crossing *c, const void *Y, const void *G, int64_t ldg,
                    const void *bias, void *u, void *sums)
{
    if (c->rows <= 0)
        return;
    by_width(wide(c->w, Y, G, bias, u) && ldg % 8 == 0, [&](auto V) {
        launch(ks, "cross_sum", grid_of_rows(c), BLOCK, cross_sum<decltype(V)::value>, rows_of(c), (const bf16 *)Y,
               (const bf16 *)G, ldg, (const bf16 *)bias, (bf16 *)u, (float *)sums);
    });
}

void cuda_cross_forward(struct kstream *ks, const struct crossing *c, const void *u, const void *sums, const void *gain,
                        const void *bias, void *z)
{
    if (empty(c))
        return;
    by_width(wide(c->w, u, gain, bias, z), [&](auto V) {
        launch(ks, "cross_forward", grid_of_rows(c), BLOCK, cross_forward<decltype(V)::value>, rows_of(c),
               (const bf16 *)u, (const float *)sums, (const bf16 *)gain, (const bf16 *)bias, (bf16 *)z);
    });
}

void cuda_cross_backward_sums(struct kstream *ks, const struct crossing *c, const void *u, const void *sums,
                              const void *gain, const void *bias, void *dz, void *back, void *dgain, void *dbias)
{
    void *const out[2] = {dgain, dbias};
    if (empty(c))
        return;
    bool vectors = wide(c->w, u, gain, bias, dz);
    if (vectors && c->w <= 256) {
        launch_fused<1>(ks, c, u, sums, gain, bias, dz, back, out);
        return;
    }
    if (vectors && c->w <= 512) {
        launch_fused<2>(ks, c, u, sums, gain, bias, dz, back, out);
        return;
    }
    if (vectors && c->w <= 1024) {
        launch_fused<4>(ks, c, u, sums, gain, bias, dz, back, out);
        return;
    }
    struct column_shape shape = columns_of(c);
    by_width(vectors, [&](auto V) {
        constexpr int N = decltype(V)::value;
        launch(ks, "cross_backward_sums", grid_of_rows(c), BLOCK, backward_rows<N>, rows_of(c), (const bf16 *)u,
               (const float *)sums, (const bf16 *)gain, (const bf16 *)bias, (bf16 *)dz, (float *)back);
        struct backward_columns<N> op = {
            rows_of(c), (const bf16 *)u, (const bf16 *)dz, (const bf16 *)gain, (const float *)sums
        };
        launch_columns<N, 2>(ks, "cross_backward_sums", &shape, op, out);
    });
}

void cuda_cross_backward(struct kstream *ks, const struct crossing *c, const void *u, const void *sums,
                         const void *gain, const void *back, void *dv, void *dbias)
{
    if (empty(c))
        return;
    struct column_shape shape = columns_of(c);
    void *const out[1] = {dbias};
    by_width(wide(c->w, u, gain, dv), [&](auto V) {
        constexpr int N = decltype(V)::value;
        struct backward<N> op = {
            rows_of(c), (const bf16 *)u, (const bf16 *)gain, (const float *)sums, (const float *)back, (bf16 *)dv
        };
        launch_columns<N, 1>(ks, "cross_backward", &shape, op, out);
    });
}
