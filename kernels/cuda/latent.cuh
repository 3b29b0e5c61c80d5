/* Elements of a latent, behind its sum: for latent.cu and latent_sum.cu. */
#ifndef BOOST_KERNELS_CUDA_LATENT_CUH
#define BOOST_KERNELS_CUDA_LATENT_CUH

#include "kernels/cuda/device.cuh"

/* Y = R H as it would be stored. */
template <int V> __device__ inline void apply_factor(float (&y)[V], float r)
{
#pragma unroll
    for (int i = 0; i < V; i++)
        y[i] *= r;
    round_stored(y);
}

template <int V> __device__ inline void apply_silu(float (&y)[V])
{
#pragma unroll
    for (int i = 0; i < V; i++)
        y[i] *= sigmoid(y[i]);
}

/* dz to R dY at V columns of a latent; returns their part of <dY, Y>. */
template <int V>
__device__ inline float latent_gradient(const bf16 *latent, bool factor, float r, bool silu, float (&dy)[V])
{
    float y[V], c = 0;
    load<V>(latent, y);
    if (silu) {
        if (factor)
            apply_factor(y, r);
#pragma unroll
        for (int i = 0; i < V; i++)
            dy[i] *= silu_slope(y[i], sigmoid(y[i]));
    }
#pragma unroll
    for (int i = 0; i < V; i++) {
        c += dy[i] * y[i];
        dy[i] *= r;
    }
    return c;
}

#endif
