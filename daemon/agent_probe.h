/* Looks whether a later controller of the same store answers at another address (a standby that was adopted): connects,
 * exchanges hellos, hangs up. What the agent says there tells a controller that was replaced so. On the agent's
 * loop. */
#ifndef BOOST_DAEMON_AGENT_PROBE_H
#define BOOST_DAEMON_AGENT_PROBE_H

#include <stdint.h>
#include <uv.h>

#include "daemon/dial.h"
#include "proto/rpc.pb-c.h"

struct probe {
    uv_loop_t *loop;
    uv_timer_t deadline;
    struct dial *dial;
    Boost__Hello hello; /* what is said; its texts are the caller's */
    void (*found)(void *arg, const Boost__Hello *answer);
    void *arg;
};
void probe_init(struct probe *p, uv_loop_t *loop, void (*found)(void *arg, const Boost__Hello *answer), void *arg);
/* Begins, unless one is under way. `found` comes when somebody has answered; nothing when nobody does. */
void probe_start(struct probe *p, const struct dial_target *target, const Boost__Hello *hello);
/* With the close callback of its timer the memory may go. */
void probe_close(struct probe *p, uv_close_cb closed);

#endif
