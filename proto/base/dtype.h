/* Element types of tensors, shared by plan, kernels, collectives and checkpoints. */
#ifndef BOOST_PROTO_BASE_DTYPE_H
#define BOOST_PROTO_BASE_DTYPE_H

#include <stddef.h>

/* Nothing computes in those from DTYPE_COUNT on: they are in files that come from elsewhere. */
enum dtype {
    DTYPE_F32,
    DTYPE_F64,
    DTYPE_BF16,
    DTYPE_I32,
    DTYPE_COUNT,
    DTYPE_F16 = DTYPE_COUNT,
    DTYPE_IN_FILES,
};
size_t dtype_size(enum dtype t);
const char *dtype_name(enum dtype t); /* safetensors' names: "F32", "F64", "BF16", "I32", "F16" */

#endif
