/* cuda.h: how far the device has come, for a host that does not wait for it. */
#include "kernels/cuda/device.cuh"

namespace
{

/* Kept on the device: the host's memory is only written to. */
__device__ uint32_t counts[CUDA_STAMPS];

__global__ void stamp(volatile struct cuda_stamps *host, int slot, uint32_t value)
{
    host->value[slot] = value;
    host->count[slot] = ++counts[slot];
    host->last = (uint32_t)slot;
    __threadfence_system();
}

} // namespace

void cuda_stamp(struct kstream *ks, volatile struct cuda_stamps *host, int slot, uint32_t value)
{
    launch(ks, "stamp", 1, 1, stamp, host, slot, value);
}
