/* cuda.h: the library's end; linked into boost-cuda.so only. */
#include "worker/cuda.h"

const struct cuda_library boost_cuda_library = {
    .kernels = kernels_cuda,
    .comms_create = nccl_comms_create,
};
