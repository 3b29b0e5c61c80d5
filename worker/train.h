/* Training of one rank: restore, then loop { data, step, report, checkpoint, evaluate },
 * then done. Everything that decides the path is the same on all ranks of an attempt. */
#ifndef BOOST_WORKER_TRAIN_H
#define BOOST_WORKER_TRAIN_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/error.h"
#include "proto/worker.pb-c.h"
#include "worker/comm/comm.h"
#include "worker/plan/plan.h"
#include "worker/report.h"

/* What a rank trains with; all of it is the caller's and outlives the call. */
struct train {
    const Boost__AttemptStart *start; /* with a resolved spec */
    const struct plan *plan;
    const struct kernels *kernels;
    struct comms *comms; /* connected */
    int rank;
    struct report *report;
};

struct train_end {
    int64_t step;     /* steps done, also after an error */
    bool stopped;     /* ended by a stop vote before the last step */
    double eval_loss; /* of the last evaluation, NaN without one */
};

/* Blocks until the run is over; *end is filled in either way. */
MUST_USE int train(const struct train *t, struct train_end *end, struct error *err);

#endif
