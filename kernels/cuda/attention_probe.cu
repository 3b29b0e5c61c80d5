/* What attention_check() computes on: inputs from a seed, and the distance of two results. */
#include <cuda_bf16.h>

#include "kernels/cuda/attention.h"

namespace
{

using bf16 = __nv_bfloat16;

/* splitmix64's finish (Steele, Lea and Flood, 2014). */
__device__ uint64_t mixed(uint64_t z)
{
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Mean 0 and variance 1: the sum of four uniform numbers, of variance 1/12 each. */
__device__ float about_normal(uint64_t seed, int64_t i)
{
    uint64_t bits = mixed(seed + (uint64_t)(i + 1) * 0x9e3779b97f4a7c15u);
    float sum = 0;
    for (int part = 0; part < 4; part++)
        sum += (float)(bits >> 16 * part & 0xffff) * 0x1p-16f - 0.5f;
    return sum * 1.7320508f;
}

constexpr int THREADS = 256, BLOCKS = 1024;
__global__ void fill(int64_t rows, int64_t ld, int64_t e, uint64_t seed, float offset, bf16 *x)
{
    int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < rows * ld; i += step)
        x[i] = __float2bfloat16(offset != 0 && i % ld % e == 0 ? offset : about_normal(seed, i));
}

__device__ double value(const bf16 *x, int64_t i)
{
    return __bfloat162float(x[i]);
}

__device__ double value(const float *x, int64_t i)
{
    return x[i];
}

/* One block: a start-up's worth of numbers, in a fixed order. */
template <class T>
__global__ void __launch_bounds__(THREADS) compare(int64_t rows, int64_t columns, int64_t ld, int64_t e, int skip,
                                                   const T *got, const T *want, struct attention_distance *out)
{
    __shared__ struct attention_distance part[THREADS];
    struct attention_distance mine = {0, 0, 0};
    for (int64_t i = threadIdx.x; i < rows * columns; i += THREADS) {
        int64_t column = i % columns, at = i / columns * ld + column;
        double x = value(got, at), y = value(want, at);
        if (!isfinite(x)) {
            mine.not_finite += 1;
        } else if (column % e >= skip) {
            mine.error += (x - y) * (x - y);
            mine.size += y * y;
        }
    }
    part[threadIdx.x] = mine;
    for (int n = THREADS / 2; n; n /= 2) {
        __syncthreads();
        if (threadIdx.x < n) {
            part[threadIdx.x].error += part[threadIdx.x + n].error;
            part[threadIdx.x].size += part[threadIdx.x + n].size;
            part[threadIdx.x].not_finite += part[threadIdx.x + n].not_finite;
        }
    }
    if (threadIdx.x == 0)
        *out = part[0];
}

} // namespace

void attention_probe_fill(struct kstream *ks, int64_t rows, int64_t ld, int64_t e, uint64_t seed, float offset, void *x)
{
    fill<<<BLOCKS, THREADS, 0, ks->stream>>>(rows, ld, e, seed, offset, static_cast<bf16 *>(x));
    cuda_launched(ks, "attention's check, inputs");
}

void attention_probe_compare(struct kstream *ks, enum dtype type, int64_t rows, int64_t columns, int64_t ld, int64_t e,
                             int skip, const void *got, const void *want, struct attention_distance *out)
{
    if (type == DTYPE_F32)
        compare<<<1, THREADS, 0, ks->stream>>>(rows, columns, ld, e, skip, static_cast<const float *>(got),
                                               static_cast<const float *>(want), out);
    else
        compare<<<1, THREADS, 0, ks->stream>>>(rows, columns, ld, e, skip, static_cast<const bf16 *>(got),
                                               static_cast<const bf16 *>(want), out);
    cuda_launched(ks, "attention's check, comparison");
}
