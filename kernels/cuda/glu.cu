/* cuda.h: the gated product of the MLP. */
#include "kernels/cuda/device.cuh"

namespace
{

template <bool SILU> struct glu_forward {
    const bf16 *gate, *up;
    bf16 *out;

    template <int V> __device__ void at(int64_t j) const
    {
        float g[V], u[V];
        load<V>(gate + j, g);
        load<V>(up + j, u);
#pragma unroll
        for (int i = 0; i < V; i++)
            u[i] *= SILU ? g[i] * sigmoid(g[i]) : g[i];
        store(out + j, u);
    }
};

template <bool SILU> struct glu_backward {
    const bf16 *gate, *up, *dout;
    bf16 *dgate, *dup;

    template <int V> __device__ void at(int64_t j) const
    {
        float g[V], u[V], dy[V];
        load<V>(gate + j, g);
        load<V>(up + j, u);
        load<V>(dout + j, dy);
#pragma unroll
        for (int i = 0; i < V; i++) {
            float sigma = SILU ? sigmoid(g[i]) : 1;
            u[i] *= SILU ? dy[i] * silu_slope(g[i], sigma) : dy[i];
            dy[i] *= g[i] * sigma;
        }
        store(dgate + j, u);
        store(dup + j, dy);
    }
};

} // namespace

void cuda_glu_forward(struct kstream *ks, int64_t n, bool silu, const void *gate, const void *up, void *out)
{
    const bf16 *g = (const bf16 *)gate, *u = (const bf16 *)up;
    bool aligned = wide(0, gate, up, out);
    if (silu)
        launch_each<8>(ks, "glu_forward", n, aligned, glu_forward<true>{g, u, (bf16 *)out});
    else
        launch_each<8>(ks, "glu_forward", n, aligned, glu_forward<false>{g, u, (bf16 *)out});
}

void cuda_glu_backward(struct kstream *ks, int64_t n, bool silu, const void *gate, const void *up, const void *dout,
                       void *dgate, void *dup)
{
    const bf16 *g = (const bf16 *)gate, *u = (const bf16 *)up, *dy = (const bf16 *)dout;
    bool aligned = wide(0, gate, up, dout, dgate, dup);
    if (silu)
        launch_each<8>(ks, "glu_backward", n, aligned, glu_backward<true>{g, u, dy, (bf16 *)dgate, (bf16 *)dup});
    else
        launch_each<8>(ks, "glu_backward", n, aligned, glu_backward<false>{g, u, dy, (bf16 *)dgate, (bf16 *)dup});
}
