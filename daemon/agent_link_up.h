/* The agent's connection to its controller: hello, Register, heartbeats, reconnect with
 * back-off and jitter. Losing it means nothing to the ranks. By TCP, heartbeats have a connection of their own
 * (agent_heart), and several addresses (a standby) are tried in turn. All on the agent's loop. */
#ifndef BOOST_DAEMON_AGENT_LINK_UP_H
#define BOOST_DAEMON_AGENT_LINK_UP_H

#include <stdbool.h>
#include <stddef.h>
#include <uv.h>

#include "proto/address.h"
#include "proto/agent.pb-c.h"
#include "proto/base/error.h"
#include "proto/tls.h"

struct link_up_ops {
    void *arg;
    /* The Register to send now; valid until the next call. NULL when out of memory. */
    const Boost__Register *(*registration)(void *arg);
    /* The controller has taken us: reports may be sent from here on, until `lost`. */
    void (*registered)(void *arg, const Boost__Registered *answer);
    /* Every other message but HeartbeatAck. */
    void (*message)(void *arg, const Boost__ControllerMessage *message);
    /* What was sent may or may not have arrived. Only after `registered`. */
    void (*lost)(void *arg);
};

struct link_up;

struct link_up_way {
    const char *socket_path; /* of a Unix socket; NULL: by TCP */
    char *const *addresses;  /* host:port */
    size_t n_addresses;
    const char *obeys_path; /* of agent_obeys' file; NULL: none */
    struct tls_files tls; /* read now, and again whenever they have changed */
};

/* Starts connecting. Way and node are copied, except for the texts of addresses and tls, which like ops stay the
 * caller's.
 * ERR_INVALID: an address; ERR_REFUSED: certificates that cannot be used, or that are not of this node. */
MUST_USE int link_up_create(uv_loop_t *loop, const struct link_up_way *way, const char *node,
                            const struct link_up_ops *ops, struct link_up **out, struct error *err);
/* Where it is connected to, or tries to; for messages. */
const char *link_up_where(const struct link_up *link);
/* Closes without `lost`; the memory goes once the loop has run the close callbacks. */
void link_up_close(struct link_up *link);

/* False when not registered or over the frame limit: the caller keeps the report. */
bool link_up_send(struct link_up *link, const Boost__AgentMessage *message);
bool link_up_ready(const struct link_up *link); /* NULL: no */
/* Breaks the connection, so that the next Register says what has changed. */
void link_up_again(struct link_up *link, const char *why);
/* Bytes accepted by link_up_send that the kernel has not taken yet. */
size_t link_up_queued(const struct link_up *link);

#endif
