/* How long an attempt still needs, from its own progress: steps of another attempt say nothing of its pace. */
#ifndef BOOST_CTL_PACE_H
#define BOOST_CTL_PACE_H

#include <stdint.h>

struct pace {
    int attempt;                /* measured; 0 = none */
    int64_t from_step, from_ns; /* where it was first seen */
};

/* Notes that `attempt` was at `step` at now_ns (monotonic) and gives the seconds left to `steps`;
 * negative: not known yet. */
double pace_left_s(struct pace *pace, int attempt, int64_t step, int64_t steps, int64_t now_ns);

#endif
