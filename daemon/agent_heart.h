/* Heartbeats on a connection of their own, beside the one that logs and metrics go over: small frames that nothing
 * queues in front of, on a socket that retransmits without exponential back-off. It belongs to one registration of the
 * agent, which the token proves. One that gets no answer for 3 s is made anew; the other connection does not notice.
 * All on the agent's loop. */
#ifndef BOOST_DAEMON_AGENT_HEART_H
#define BOOST_DAEMON_AGENT_HEART_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "daemon/dial.h"

struct heart;
/* `node` is the caller's, and so is `target`, which may change until the next connect. */
MUST_USE int heart_create(uv_loop_t *loop, const char *node, const struct dial_target *target, struct heart **out,
                          struct error *err);
/* The memory goes from the loop. NULL: nothing. */
void heart_close(struct heart *h);

/* From now on, until heart_stop(). For the registration that it beats for already: nothing changes. */
void heart_start(struct heart *h, const char *instance, uint64_t token, int every_ms);
void heart_stop(struct heart *h);
/* The controller has answered on this connection, which is still up. */
bool heart_up(const struct heart *h);
/* Monotonic, of the last answer; 0: none since the start. */
int64_t heart_answered_ns(const struct heart *h);

#endif
