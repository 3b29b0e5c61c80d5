/* How often to checkpoint, when that is left to us. Pure. */
#ifndef BOOST_WORKER_PACE_H
#define BOOST_WORKER_PACE_H

/* Seconds of training between two checkpoints that lose least time together, with cost_s that training stands still for one
 * and failures mean_failure_s apart: Daly, A higher order estimate of the optimum checkpoint interval (2006), eq. 37,
 * whose first term is Young's sqrt(2 cost M). At least PACE_MIN_S. */
#define PACE_MIN_S     1.0
#define PACE_FIRST_S   30.0    /* before a cost is known */
#define PACE_FAILURE_S 86400.0 /* where nobody says */
double pace_seconds(double cost_s, double mean_failure_s);

#endif
