/* Time as boostd lives through it: the monotonic clock, less what passed while the process did not run (stopped, swapped
 * out, a virtual machine that was moved). Whatever it waits for has not been heard of in that time for its own fault:
 * nodes would all be DOWN, kills overdue and deadlines over before the first byte that came meanwhile is read. */
#ifndef BOOST_DAEMON_OWN_CLOCK_H
#define BOOST_DAEMON_OWN_CLOCK_H

#include <stdint.h>

struct own_clock { /* all zero to begin with */
    int64_t behind_ns; /* of the monotonic clock */
    int64_t looked_ns; /* at the monotonic clock, last */
    int64_t wake_ns;   /* when it was to run again at the latest, by the monotonic clock; 0: not planned */
};

enum { OWN_CLOCK_SLACK_MS = 500 }; /* what a busy machine may be late by */

/* `now`: of the monotonic clock. Never less than it was before. */
int64_t own_clock_ns(struct own_clock *c, int64_t now);
/* It sleeps, at most up to wake_ns by the monotonic clock; INT64_MAX: until something comes. */
void own_clock_sleep(struct own_clock *c, int64_t wake_ns);

#endif
