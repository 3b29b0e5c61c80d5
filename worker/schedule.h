/* The learning rate as a function of the step. Pure. */
#ifndef BOOST_WORKER_SCHEDULE_H
#define BOOST_WORKER_SCHEDULE_H

#include <stdint.h>

#include "proto/job.pb-c.h"

/* Rate of update number `step`, 1 to `steps`, so that with warm-up w
 *   lr(n) = peak n / w for n <= w,   lr(w) = peak,   lr(steps) = peak * min_lr_ratio
 * (CONSTANT stays at the peak). Between w and steps: COSINE half a cosine wave, LINEAR a line;
 * WSD the peak, then a line over the last wsd_decay_steps. A run shorter than its warm-up
 * stays on the warm-up line. */
double schedule_lr(const Boost__Optimizer *o, int64_t steps, int64_t step);

#endif
