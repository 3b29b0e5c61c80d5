/* own_clock.h */
#include "daemon/own_clock.h"

#include <inttypes.h>

#include "daemon/log.h"
#include "proto/base/clock.h"

int64_t own_clock_ns(struct own_clock *c, int64_t now)
{
    int64_t slack = OWN_CLOCK_SLACK_MS * NS_PER_MS, gap = now - c->looked_ns;
    if (c->wake_ns && now > c->wake_ns + slack && gap > slack) {
        log_line(LOG_WARN, "boostd did not run for %.1f s: what it waits for may take that much longer",
                 (double)gap / (double)NS_PER_S);
        c->behind_ns += gap;
    }
    c->looked_ns = now;
    return now - c->behind_ns;
}

void own_clock_sleep(struct own_clock *c, int64_t wake_ns)
{
    c->wake_ns = wake_ns == INT64_MAX ? 0 : wake_ns;
}
