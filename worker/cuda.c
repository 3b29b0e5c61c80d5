/* cuda.h: the worker's end. */
#include "worker/cuda.h"

#include "kernels/library.h"
#include "proto/version.h"

int cuda_library_open(const struct cuda_library **out, struct error *err)
{
    void *symbol;
    int rc = kernels_library(boost_build_id(), "boost_cuda_library", &symbol, err);
    *out = rc ? NULL : symbol;
    return rc;
}
