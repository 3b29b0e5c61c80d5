/* Sessions whose component is AGENT: AgentMessage in, ControllerMessage out, and which
 * session speaks for which node. An agent is trusted with every job's processes, so
 * on the Unix socket only root and the daemon's own user may be one, and by TLS only who has the node's own
 * certificate.
 *
 * By TLS an agent has a second session, for heartbeats alone (Heart): it is bound to the registered instance by a
 * token, and outlives the first one, so that a node is not lost while that is made anew. */
#ifndef BOOST_DAEMON_AGENT_LINK_H
#define BOOST_DAEMON_AGENT_LINK_H

#include <stdbool.h>

#include "daemon/core.h"
#include "daemon/session.h"

enum { AGENT_LINK_BUCKETS = 1024 };

/* A node whose agent has registered since boostd runs; both sessions NULL when it is away. */
struct agent_node;
struct agent_link {
    struct core *core;
    struct agent_node *buckets[AGENT_LINK_BUCKETS];
};
/* Once no session is left. */
void agent_link_free(struct agent_link *link);

/* session_handler's, for an AGENT session. */
MUST_USE int agent_link_opened(struct agent_link *link, struct session *s, struct error *err);
MUST_USE int agent_link_frame(struct agent_link *link, struct session *s, const uint8_t *payload, size_t len,
                              struct error *err);
void agent_link_closed(struct agent_link *link, struct session *s);

/* core_ops.send. */
bool agent_link_send(struct agent_link *link, const char *node, const Boost__ControllerMessage *message);

#endif
