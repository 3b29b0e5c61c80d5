/* What a device can do at most: the denominator of model FLOP/s utilisation, whose numerator is plan_model_flop().
 * Pure. */
#ifndef BOOST_WORKER_PLAN_FLOPS_H
#define BOOST_WORKER_PLAN_FLOPS_H

#include "worker/plan/plan.h"

/* Peak of dense bf16 products with fp32 sums, FLOP/s, of a device by the name that its driver gives it ("NVIDIA H200");
 * 0: not known. */
double plan_peak_flops(const char *device_name);
/* Part of `world` devices' peak that a step of `seconds` has used; NaN where peak is not known (0). */
double plan_mfu(const struct plan *p, double seconds, double peak_flops);

#endif
