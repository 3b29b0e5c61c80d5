/* Where a checkpoint tool may write: not among what jobs write, go on from and delete. */
#ifndef BOOST_WORKER_CKPT_PLACE_H
#define BOOST_WORKER_CKPT_PLACE_H

#include "proto/base/error.h"

/* Whether something may appear at `to`, by what is on the disk. ERR_REFUSED: it lies in a checkpoint's directory, or
 * among the checkpoints of a job; a checkpoint (step-<n>.a<k>) also where its directory holds one of any job, or one
 * that is not whole. The places of jobs that have written nothing yet only the controller knows. */
MUST_USE int ckpt_place_check(const char *to, struct error *err);

#endif
