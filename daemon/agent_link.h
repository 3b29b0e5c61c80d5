/* Sessions whose component is AGENT: AgentMessage in, ControllerMessage out, and which
 * session speaks for which node. An agent is trusted with every job's processes, so
 * only root and the daemon's own user may be one. */
#ifndef BOOST_DAEMON_AGENT_LINK_H
#define BOOST_DAEMON_AGENT_LINK_H

#include <stdbool.h>

#include "daemon/core.h"
#include "daemon/session.h"

struct agent_link {
    struct core *core;
    struct session_set *sessions;
};

/* session_handler's, for an AGENT session. */
MUST_USE int agent_link_opened(struct agent_link *link, struct session *s, struct error *err);
MUST_USE int agent_link_frame(struct agent_link *link, struct session *s, const uint8_t *payload, size_t len,
                              struct error *err);
void agent_link_closed(struct agent_link *link, struct session *s);

/* core_ops.send. */
bool agent_link_send(struct agent_link *link, const char *node, const Boost__ControllerMessage *message);

#endif
