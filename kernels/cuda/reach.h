/* Memory that two ranks reach of one another's, for kernels: NCCL's device interface to a window. */
#ifndef BOOST_KERNELS_CUDA_REACH_H
#define BOOST_KERNELS_CUDA_REACH_H

#include "kernels/kernels.h"

#ifdef __cplusplus
#include <nccl.h>
#else
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wstrict-prototypes"
#include <nccl.h>
#pragma GCC diagnostic pop
#endif

/* Whether the NCCL that is compiled for has windows and an interface for kernels. */
#define CUDA_HAS_REACH (NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0))

#if CUDA_HAS_REACH
#ifdef __cplusplus
extern "C" {
#endif

/* By both ranks of `comm` at once, on the thread that makes its calls; blocks. `window` was registered over `base` with
 * the flag NCCL_WIN_COLL_SYMMETRIC. *out is the caller's; NULL with ncclSuccess where the communicator has no such
 * memory, or the NCCL that runs is not the version that was compiled for: its interface for kernels is of one version.
 */
ncclResult_t cuda_reach_create(ncclComm_t comm, ncclWindow_t window, const void *base, struct kreach **out);
/* Before the communicator's end, when no kernel uses it any more. NULL: nothing. */
void cuda_reach_destroy(ncclComm_t comm, struct kreach *reach);

#ifdef __cplusplus
}
#endif
#endif

#endif
