/* What the worker uses of boost-cuda.so, which it opens only for a job that runs on CUDA. */
#ifndef BOOST_WORKER_CUDA_H
#define BOOST_WORKER_CUDA_H

#include "kernels/kernels.h"
#include "proto/base/error.h"
#include "worker/comm/comm.h"

struct cuda_library {
    const struct kernels *(*kernels)(void);
    /* nccl_comms_create() of worker/comm/comm.h, which is in the library only. */
    int (*comms_create)(int rank, const struct comm_layout *layout, const char *bind_address,
                        const struct rendezvous *rv, int connect_timeout_ms, const struct comms_watch *watch,
                        struct comms *out, struct error *err);
};

/* Opens the library at the first call (kernels/library.h: places and errors); it stays open while the process lives.
 * Any thread. */
MUST_USE int cuda_library_open(const struct cuda_library **out, struct error *err);

/* The library's own: cuda_library.c, the one symbol that the worker looks up. */
extern const struct cuda_library boost_cuda_library;

#endif
