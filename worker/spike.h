/* How unusual a step's loss is: its distance from a running mean of the losses before it, in their running
 * standard deviations. Pure.
 *
 * Loss k of n weighs (1-a)^(n-k), a = SPIKE_FADE: W = sum of weights, Q = sum of their squares, mean = sum of
 * w x / W, variance = sum of w (x - mean)^2 / (W - Q/W), which for a = 0 is the usual one with n-1. A loss that
 * is not finite adds nothing, and one farther off than SPIKE_BOUND adds no more than that bound would, so that
 * neither hides the next. */
#ifndef BOOST_WORKER_SPIKE_H
#define BOOST_WORKER_SPIKE_H

#include <stdint.h>

#define SPIKE_FADE  0.05   /* half of the weight lies in the last 14 losses: a falling one is left behind soon */
#define SPIKE_BOUND 6.0    /* told above this */
#define SPIKE_FLOOR 1e-4   /* least standard deviation, of the mean: a flat loss has no spikes in its last digits */
enum { SPIKE_AFTER = 20 }; /* losses before the first answer */

struct spike {
    double fade;                              /* a */
    int64_t count;                            /* of losses that were added */
    double weight, squares, mean, deviations; /* W, Q, mean, sum of w (x - mean)^2 */
};

void spike_init(struct spike *s, double fade);
/* NaN for a loss that is not finite, and before SPIKE_AFTER losses. */
double spike_z(const struct spike *s, double loss);
void spike_add(struct spike *s, double loss);
double spike_variance(const struct spike *s); /* 0 below two losses */

#endif
