/* Which rank hangs: pure, so that it can be tested with made-up times.
 *
 * While TRAINING or EVALUATING a rank hangs when nothing of its status page has moved for
 * clamp(5 x smoothed time of the page's progress, hang_min, hang_max) (hang_max until the first was
 * timed). Progress is a micro-batch, or on a GPU, where one tells nothing before the device is done, a step of
 * training: so the two phases have a time each, and while evaluation has none yet training's counts. While LOADING or
 * SAVING when no byte has for 60 s, kept within the same bounds. Other phases have limits of their own in the
 * controller. */
#ifndef BOOST_DAEMON_AGENT_HANG_H
#define BOOST_DAEMON_AGENT_HANG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/agent_attempts.h"

/* A look at the page at now_ns (monotonic). True once for each hang. */
bool hang_look(struct hang_watch *h, const struct rank_status *page, int64_t now_ns, int64_t min_ms, int64_t max_ms);
/* The machine or the agent stood still for gap_ns: that was not the rank's doing. */
void hang_excuse(struct hang_watch *h, int64_t gap_ns);
/* The limit in force, ns; 0 = none in this phase. */
int64_t hang_limit_ns(const struct hang_watch *h, int64_t min_ms, int64_t max_ms);
/* For people: what the rank was doing. */
void hang_describe(const struct hang_watch *h, int rank, int64_t now_ns, int64_t limit_ns, char *out, size_t cap);
const char *phase_name(uint32_t phase); /* "training" */

#endif
