/* cuda.h: norm and residual, a warp to a row; and what scratch all sums want. */
#include "kernels/cuda/columns.cuh"

namespace
{

template <int V>
__global__ void __launch_bounds__(BLOCK)
    residual_gain(int64_t T, int64_t w, const bf16 *x, const bf16 *y, const bf16 *gain, bf16 *x_out, bf16 *n, float *S)
{
    int64_t row = warp_row();
    if (row >= T)
        return;
    float sum = 0;
    for (int64_t j = first_column<V>(); j < w; j += LANES * V) {
        float a[V], b[V];
        load<V>(x + row * w + j, a);
        if (y) {
            load<V>(y + row * w + j, b);
#pragma unroll
            for (int i = 0; i < V; i++)
                a[i] += b[i];
            round_stored(a);
        }
        if (y || x_out != x)
            store(x_out + row * w + j, a);
#pragma unroll
        for (int i = 0; i < V; i++)
            sum += a[i] * a[i];
        if (n) {
            load<V>(gain + j, b);
#pragma unroll
            for (int i = 0; i < V; i++)
                a[i] *= b[i];
            store(n + row * w + j, a);
        }
    }
    sum = warp_sum(sum);
    if (lane() == 0)
        S[row] = sum;
}

template <int V>
__global__ void __launch_bounds__(BLOCK) norm_apply(int64_t T, int64_t w, float inv_d, float eps, const bf16 *x,
                                                    const bf16 *gain, const float *S, float *R, bf16 *n)
{
    int64_t row = warp_row();
    if (row >= T)
        return;
    float r = row_factor(row, inv_d, eps, S, R);
    for (int64_t j = first_column<V>(); j < w; j += LANES * V) {
        float a[V], g[V];
        load<V>(x + row * w + j, a);
        load<V>(gain + j, g);
#pragma unroll
        for (int i = 0; i < V; i++)
            a[i] = r * a[i] * g[i];
        store(n + row * w + j, a);
    }
}

template <int V> struct gain_backward {
    const bf16 *x, *gain, *dn;
    const float *R, *k;
    bf16 *dx;
    bool accumulate;

    __device__ void row(int64_t row, int64_t w, int64_t column, const float (&g)[V], float (&sums)[1][V]) const
    {
        int64_t at = row * w + column;
        float r = R ? R[row] : 1, factor = k[row], xs[V], us[V], out[V];
        load<V>(x + at, xs);
        load<V>(dn + at, us);
        if (accumulate)
            load<V>(dx + at, out);
#pragma unroll
        for (int i = 0; i < V; i++) {
            float u = r * us[i], value = u * g[i] - factor * xs[i];
            out[i] = accumulate ? out[i] + value : value;
            sums[0][i] += xs[i] * u;
        }
        store(dx + at, out);
    }
};

template <int V>
__global__ void __launch_bounds__(BLOCK) row_dot(int64_t T, int64_t w, const bf16 *a, const bf16 *b, float *out)
{
    int64_t row = warp_row();
    if (row >= T)
        return;
    float sum = 0;
    for (int64_t j = first_column<V>(); j < w; j += LANES * V) {
        float x[V], y[V];
        load<V>(a + row * w + j, x);
        load<V>(b + row * w + j, y);
#pragma unroll
        for (int i = 0; i < V; i++)
            sum += x[i] * y[i];
    }
    sum = warp_sum(sum);
    if (lane() == 0)
        out[row] = sum;
}

struct norm_k {
    float inv_d;
    const float *R, *c;
    float *k;

    template <int V> __device__ void at(int64_t i) const
    {
        k[i] = R[i] * R[i] * inv_d * c[i];
    }
};

} // namespace

void cuda_residual_gain(struct kstream *ks, int64_t T, int64_t w, const void *x, const void *y, const void *gain,
                        void *x_out, void *n, void *S)
{
    if (T <= 0)
        return;
    by_width(wide(w, x, y, n ? gain : NULL, x_out, n), [&](auto V) {
        launch(ks, "residual_gain", grid_of(blocks_of(T, WARPS)), BLOCK, residual_gain<decltype(V)::value>, T, w,
               (const bf16 *)x, (const bf16 *)y, (const bf16 *)gain, (bf16 *)x_out, (bf16 *)n, (float *)S);
    });
}

void cuda_norm_apply(struct kstream *ks, int64_t T, int64_t w, int64_t d, double eps, const void *x, const void *gain,
                     const void *S, void *R, void *n)
{
    if (T <= 0)
        return;
    by_width(wide(w, x, gain, n), [&](auto V) {
        launch(ks, "norm_apply", grid_of(blocks_of(T, WARPS)), BLOCK, norm_apply<decltype(V)::value>, T, w,
               (float)(1 / (double)d), (float)eps, (const bf16 *)x, (const bf16 *)gain, (const float *)S, (float *)R,
               (bf16 *)n);
    });
}

void cuda_gain_backward(struct kstream *ks, int64_t T, int64_t w, const void *x, const void *gain, const void *R,
                        const void *k, const void *dn, bool accumulate, void *dx, void *dgain)
{
    if (T <= 0 || w <= 0)
        return;
    struct column_shape shape = {T, w, 1};
    void *const out[1] = {dgain};
    by_width(wide(w, x, gain, dn, dx), [&](auto V) {
        struct gain_backward<decltype(V)::value> op = {
            (const bf16 *)x, (const bf16 *)gain, (const bf16 *)dn, (const float *)R, (const float *)k,
                (bf16 *)dx, accumulate
        };
        launch_columns<decltype(V)::value, 1>(ks, "gain_backward", &shape, op, out);
    });
}

void cuda_row_dot(struct kstream *ks, int64_t T, int64_t w, const void *a, const void *b, void *out)
{
    if (T <= 0)
        return;
    by_width(wide(w, a, b), [&](auto V) {
        launch(ks, "row_dot", grid_of(blocks_of(T, WARPS)), BLOCK, row_dot<decltype(V)::value>, T, w, (const bf16 *)a,
               (const bf16 *)b, (float *)out);
    });
}

void cuda_norm_k(struct kstream *ks, int64_t T, int64_t d, const void *R, const void *c, void *k)
{
    struct norm_k op = {(float)(1 / (double)d), (const float *)R, (const float *)c, (float *)k};
    launch_each<1>(ks, "norm_k", T, false, op);
}

/* The operations follow one another on the stream, so the largest is enough. */
size_t cuda_sums_scratch(const struct scratch_shape *shape)
{
    return scratch_sums_bytes(shape);
}
