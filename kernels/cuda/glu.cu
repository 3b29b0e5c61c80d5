/* cuda.h: the gated product of the MLP. */
#include "kernels/cuda/device.cuh"

namespace
{

/* Where the elements of a row lie: those of gate and up, and of their gradients, at a stride of ld. An element's number
 * fits in 32 bits in FEW, where the division is a fifth of that in 64. */
template <bool FEW> struct rows_of {
    int64_t n, ld;

    __device__ int64_t place(int64_t j) const
    {
        if (n == ld)
            return j;
        int64_t row = FEW ? (int64_t)((uint32_t)j / (uint32_t)n) : j / n;
        return j + row * (ld - n);
    }
};

template <bool SILU, bool FEW> struct glu_forward {
    struct rows_of<FEW> rows;
    const bf16 *gate, *up;
    bf16 *out;

    template <int V> __device__ void at(int64_t j) const
    {
        float g[V], u[V];
        int64_t from = rows.place(j);
        load<V>(gate + from, g);
        load<V>(up + from, u);
#pragma unroll
        for (int i = 0; i < V; i++)
            u[i] *= SILU ? g[i] * sigmoid(g[i]) : g[i];
        store(out + j, u);
    }
};

template <bool SILU, bool FEW> struct glu_backward {
    struct rows_of<FEW> rows;
    const bf16 *gate, *up, *dout;
    bf16 *dgate, *dup, *out; /* out may be NULL */

    template <int V> __device__ void at(int64_t j) const
    {
        float g[V], u[V], dy[V], product[V];
        int64_t from = rows.place(j);
        load<V>(gate + from, g);
        load<V>(up + from, u);
        load<V>(dout + j, dy);
#pragma unroll
        for (int i = 0; i < V; i++) {
            float sigma = SILU ? sigmoid(g[i]) : 1, f = SILU ? g[i] * sigma : g[i];
            product[i] = u[i] * f; /* as the forward has it */
            u[i] *= SILU ? dy[i] * silu_slope(g[i], sigma) : dy[i];
            dy[i] *= f;
        }
        if (out)
            store(out + j, product);
        store(dgate + from, u);
        store(dup + from, dy);
    }
};

/* f(SILU, FEW), constants. */
template <class F> void by_kind(bool silu, int64_t elements, F f)
{
    bool few = elements <= UINT32_MAX;
    if (silu && few)
        f(std::true_type(), std::true_type());
    else if (silu)
        f(std::true_type(), std::false_type());
    else if (few)
        f(std::false_type(), std::true_type());
    else
        f(std::false_type(), std::false_type());
}

/* A vector must not reach over the end of a row. */
int64_t widths(int64_t n, int64_t ld)
{
    return n == ld ? 0 : n | ld;
}

} // namespace

void cuda_glu_forward(struct kstream *ks, int64_t rows, int64_t n, int64_t ld, bool silu, const void *gate,
                      const void *up, void *out)
{
    const bf16 *g = (const bf16 *)gate, *u = (const bf16 *)up;
    bool aligned = wide(widths(n, ld), gate, up, out);
    by_kind(silu, rows * n, [&](auto SILU, auto FEW) {
        struct glu_forward<decltype(SILU)::value, decltype(FEW)::value> op = {
            {n, ld}, g, u, (bf16 *)out
        };
        launch_each<8>(ks, "glu_forward", rows * n, aligned, op);
    });
}

void cuda_glu_backward(struct kstream *ks, int64_t rows, int64_t n, int64_t ld, bool silu, const void *gate,
                       const void *up, const void *dout, void *dgate, void *dup, void *out)
{
    const bf16 *g = (const bf16 *)gate, *u = (const bf16 *)up, *dy = (const bf16 *)dout;
    bool aligned = wide(widths(n, ld), gate, up, dout, dgate, dup, out);
    by_kind(silu, rows * n, [&](auto SILU, auto FEW) {
        struct glu_backward<decltype(SILU)::value, decltype(FEW)::value> op = {
            {n, ld}, g, u, dy, (bf16 *)dgate, (bf16 *)dup, (bf16 *)out
        };
        launch_each<8>(ks, "glu_backward", rows * n, aligned, op);
    });
}
