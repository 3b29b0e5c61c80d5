/* Private to the .cu files: bf16 in 16-byte accesses, sums in a fixed order, launches.
 *
 * Kernels are templates on V, the neighbouring elements of a thread: 8 bf16 (16 bytes) where widths and addresses
 * allow, else 1. All arithmetic between a load and a store is fp32. */
#ifndef BOOST_KERNELS_CUDA_DEVICE_CUH
#define BOOST_KERNELS_CUDA_DEVICE_CUH

#include <cmath>
#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>

#include "kernels/cuda/cuda.h"

using bf16 = __nv_bfloat16;

enum { LANES = 32, BLOCK = 256, WARPS = BLOCK / LANES };

/* ---- bf16 ---------------------------------------------------------------------------- */

/* V bf16 as they lie in memory. */
template <int V> struct packed;
template <> struct packed<8> {
    uint4 bits;
};
template <> struct packed<1> {
    unsigned short bits;
};

template <int V> __device__ inline packed<V> load_packed(const bf16 *p)
{
    return *reinterpret_cast<const packed<V> *>(p);
}

template <int V> __device__ inline void store_packed(bf16 *p, packed<V> x)
{
    *reinterpret_cast<packed<V> *>(p) = x;
}

/* A point that loads stay in front of, and what is done with them behind, so that all are under way at once: left
 * alone, the compiler puts each load next to its use to save registers. The whole warp comes here. */
template <int N> __device__ inline void after_loads(packed<8> (&x)[N])
{
    __syncwarp();
#ifdef __CUDA_ARCH__
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+r"(x[i].bits.x), "+r"(x[i].bits.y), "+r"(x[i].bits.z), "+r"(x[i].bits.w));
#endif
}

template <int N> __device__ inline void after_loads(packed<1> (&x)[N])
{
    __syncwarp();
#ifdef __CUDA_ARCH__
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+h"(x[i].bits));
#endif
}

/* A bf16 is the upper half of a float. */
__device__ inline void widen_two(unsigned two, float &low, float &high)
{
    low = __uint_as_float(two << 16);
    high = __uint_as_float(two & 0xffff0000u);
}

__device__ inline void widen(packed<8> p, float (&x)[8])
{
    widen_two(p.bits.x, x[0], x[1]);
    widen_two(p.bits.y, x[2], x[3]);
    widen_two(p.bits.z, x[4], x[5]);
    widen_two(p.bits.w, x[6], x[7]);
}

__device__ inline void widen(packed<1> p, float (&x)[1])
{
    x[0] = __uint_as_float((unsigned)p.bits << 16);
}

__device__ inline unsigned narrow_two(float low, float high)
{
    __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<unsigned *>(&two);
}

template <int V> __device__ inline void load(const bf16 *p, float (&x)[V])
{
    widen(load_packed<V>(p), x);
}

__device__ inline void store(bf16 *p, const float (&x)[8])
{
    packed<8> out;
    out.bits =
        make_uint4(narrow_two(x[0], x[1]), narrow_two(x[2], x[3]), narrow_two(x[4], x[5]), narrow_two(x[6], x[7]));
    store_packed<8>(p, out);
}

__device__ inline void store(bf16 *p, const float (&x)[1])
{
    *p = __float2bfloat16_rn(x[0]);
}

/* To what will be stored, for what follows from it. */
template <int V> __device__ inline void round_stored(float (&x)[V])
{
#pragma unroll
    for (int i = 0; i < V; i++)
        x[i] = __bfloat162float(__float2bfloat16_rn(x[i]));
}

/* V floats: whole 16-byte accesses, or one. */
template <int V> __device__ inline void load(const float *p, float (&x)[V])
{
    if constexpr (V % 4 == 0) {
#pragma unroll
        for (int i = 0; i < V; i += 4) {
            float4 four = *reinterpret_cast<const float4 *>(p + i);
            x[i] = four.x;
            x[i + 1] = four.y;
            x[i + 2] = four.z;
            x[i + 3] = four.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < V; i++)
            x[i] = p[i];
    }
}

template <int V> __device__ inline void store(float *p, const float (&x)[V])
{
    if constexpr (V % 4 == 0) {
#pragma unroll
        for (int i = 0; i < V; i += 4)
            *reinterpret_cast<float4 *>(p + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    } else {
#pragma unroll
        for (int i = 0; i < V; i++)
            p[i] = x[i];
    }
}

/* ---- functions ------------------------------------------------------------------------- */

/* e^x by the hardware's 2^x: (3 + |x|) units of 2^-24, 0 below the smallest normal number; infinity and NaN as usual.
 */
__device__ inline float exponential(float x)
{
    float scaled = x * 1.44269504f, y;
#ifdef __CUDA_ARCH__
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(scaled));
#else
    y = exp2f(scaled);
#endif
    return y;
}

/* The quotient is within 2 units in the last place; 0 where e^-y is beyond 2^126. */
__device__ inline float sigmoid(float y)
{
    return __fdividef(1.0f, 1.0f + exponential(-y));
}

/* Of SiLU: sigma + y sigma (1 - sigma). */
__device__ inline float silu_slope(float y, float sigma)
{
    return sigma * (1 + y * (1 - sigma));
}

/* ---- sums in a fixed order --------------------------------------------------------------- */

/* Over the lanes of a warp, the same bits in all of them. */
template <class F> __device__ inline F warp_sum(F x)
{
#pragma unroll
    for (int distance = LANES / 2; distance; distance /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

/* Over a block of BLOCK threads, in all of them; once a kernel for each N and F. */
template <int N, class F> __device__ inline void block_sum(F (&x)[N])
{
    __shared__ F part[N][WARPS];
#pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] = warp_sum(x[i]);
        if (threadIdx.x % LANES == 0)
            part[i][threadIdx.x / LANES] = x[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] = 0;
        for (int k = 0; k < WARPS; k++)
            x[i] += part[i][k];
    }
}

/* The second stage of a sum in fp64: parts [count][2] as the blocks of the first left them. acc[0] += the first;
 * acc[1] += the second, or 1 if the first is not finite. One block. */
template <bool COUNTS_NONFINITE> static __global__ void add_parts(int count, const double *parts, double *acc)
{
    double sum[2] = {0, 0};
    for (int i = threadIdx.x; i < count; i += BLOCK) {
        sum[0] += parts[2 * i];
        sum[1] += parts[2 * i + 1];
    }
    block_sum(sum);
    if (threadIdx.x == 0) {
        acc[0] += sum[0];
        acc[1] += COUNTS_NONFINITE ? (isfinite(sum[0]) ? 0.0 : 1.0) : sum[1];
    }
}

enum { MOST_PARTS = SCRATCH_SQUARES }; /* blocks of the first stage */

/* ---- rows by warps -------------------------------------------------------------------------- */

__device__ inline int64_t warp_row()
{
    return (int64_t)blockIdx.x * WARPS + threadIdx.x / LANES;
}

__device__ inline int lane()
{
    return (int)threadIdx.x % LANES;
}

/* This lane's columns are those of V from here, LANES * V apart. */
template <int V> __device__ inline int64_t first_column()
{
    return lane() * V;
}

/* R = (S/d + eps)^-1/2 of a row, or R as given when S is NULL, or 1. One lane reads and writes: R may be S. */
__device__ inline float row_factor(int64_t row, float inv_d, float eps, const float *S, float *R)
{
    float r = 1;
    if (!R)
        return r;
    if (lane() == 0) {
        if (S)
            R[row] = r = 1 / sqrtf(fmaf(S[row], inv_d, eps));
        else
            r = R[row];
    }
    return __shfl_sync(0xffffffffu, r, 0);
}

/* ---- launches ---------------------------------------------------------------------------------- */

static inline int64_t blocks_of(int64_t n, int64_t each)
{
    return (n + each - 1) / each;
}

static inline int64_t at_most(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t at_least(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static inline dim3 grid_of(int64_t x, int64_t y = 1, int64_t z = 1)
{
    return dim3((unsigned)x, (unsigned)y, (unsigned)z);
}

/* Whether rows of these widths at these addresses (NULL: none) can be read 16 bytes at a time. */
template <class... P> static inline bool wide(int64_t widths, const P *...at)
{
    return widths % 8 == 0 && (((uintptr_t)at | ... | 0) % 16) == 0;
}

/* f(V) with V a constant. */
template <class F> static inline void by_width(bool wide, F f)
{
    if (wide)
        f(std::integral_constant<int, 8>());
    else
        f(std::integral_constant<int, 1>());
}

template <class... P, class... A>
static inline void launch(struct kstream *ks, const char *what, dim3 grid, dim3 block, void (*kernel)(P...), A... args)
{
    kernel<<<grid, block, 0, ks->stream>>>(static_cast<P>(args)...);
    cuda_launched(ks, what);
}

/* op.at<V>(i) for every i of n elements, in vectors of V where `vectors` of them can be. */
template <int V, class Op> static __global__ void each(Op op, int64_t n, int64_t vectors)
{
    int64_t step = (int64_t)gridDim.x * BLOCK, first = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
    for (int64_t i = first; i < vectors; i += step)
        op.template at<V>(i * V);
    for (int64_t i = vectors * V + first; i < n; i += step)
        op.template at<1>(i);
}

template <int V, class Op>
static inline void launch_each(struct kstream *ks, const char *what, int64_t n, bool wide, Op op)
{
    if (n <= 0)
        return;
    int64_t vectors = wide ? n / V : 0;
    int64_t blocks = blocks_of(vectors ? vectors : n, BLOCK);
    launch(ks, what, grid_of(at_most(blocks, 1 << 20)), BLOCK, each<V, Op>, op, n, vectors);
}

#endif
