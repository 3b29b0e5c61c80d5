/* cuda.h: conversion between the element types of tensors. */
#include "kernels/cuda/device.cuh"

namespace
{

template <class From> __device__ inline double widened(From x)
{
    return (double)x;
}

template <> __device__ inline double widened(bf16 x)
{
    return (double)__bfloat162float(x);
}

template <class To> struct narrowed {
    static __device__ To of(double x)
    {
        return (To)x;
    }
};

/* From double the value must be rounded once, not first to float: x that lies within half an ulp of float of a bf16 tie
 * would be rounded twice. Rounding to odd in the first step makes the second one exact. */
template <> struct narrowed<bf16> {
    static __device__ bf16 of(double x)
    {
        float f = (float)x;
        if ((double)f != x && isfinite(f)) {
            unsigned bits = __float_as_uint(f);
            if (fabs((double)f) > fabs(x))
                bits--;
            f = __uint_as_float(bits | 1);
        }
        return __float2bfloat16_rn(f);
    }
};

template <class To, class From> struct conversion {
    const From *from;
    To *to;

    template <int V> __device__ void at(int64_t i) const
    {
        to[i] = narrowed<To>::of(widened(from[i]));
    }
};

template <class To, class From> void convert(struct kstream *ks, void *dst, const void *src, int64_t n)
{
    launch_each<1>(ks, "cast", n, false, conversion<To, From>{(const From *)src, (To *)dst});
}

template <class To> void convert_to(struct kstream *ks, void *dst, enum dtype from, const void *src, int64_t n)
{
    if (from == DTYPE_F32)
        convert<To, float>(ks, dst, src, n);
    else if (from == DTYPE_F64)
        convert<To, double>(ks, dst, src, n);
    else
        convert<To, bf16>(ks, dst, src, n);
}

bool is_float(enum dtype t)
{
    return t == DTYPE_F32 || t == DTYPE_F64 || t == DTYPE_BF16;
}

} // namespace

void cuda_cast(struct kstream *ks, enum dtype to, void *dst, enum dtype from, const void *src, int64_t n)
{
    if (!is_float(to) || !is_float(from)) {
        cuda_fault(ks, ERR_INTERNAL, "no cast from %s to %s", dtype_name(from), dtype_name(to));
        return;
    }
    if (n <= 0)
        return;
    if (to == from)
        cuda_ok(ks, cudaMemcpyAsync(dst, src, (size_t)n * dtype_size(to), cudaMemcpyDeviceToDevice, ks->stream),
                "cast");
    else if (to == DTYPE_F32)
        convert_to<float>(ks, dst, from, src, n);
    else if (to == DTYPE_F64)
        convert_to<double>(ks, dst, from, src, n);
    else
        convert_to<bf16>(ks, dst, from, src, n);
}
