/* Memory that the ranks of a group reach of one another's, for kernels: NCCL's device interface to a window. */
#ifndef BOOST_KERNELS_CUDA_REACH_H
#define BOOST_KERNELS_CUDA_REACH_H

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

struct ncclComm;
struct ncclWindow_vidmem;

/* Of two ranks, by both at once; blocks. `window` was registered over `base` with the flag NCCL_WIN_COLL_SYMMETRIC. *out
 * is NULL without an error where the communicator has no such memory, or this NCCL is another version than the one that
 * was compiled for: its kernels' interface is of one version. */
MUST_USE int cuda_reach_create(struct ncclComm *comm, struct ncclWindow_vidmem *window, const void *base,
                               struct kreach **out, struct error *err);
/* Before the communicator's end, when no kernel uses it any more. */
void cuda_reach_destroy(struct ncclComm *comm, struct kreach *reach);

#ifdef __cplusplus
}
#endif

#endif
