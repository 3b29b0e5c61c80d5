/* The rendezvous socket: ranks' key-value requests go to the controller and the answers
 * back. A request outlives a lost link: it is asked again. */
#ifndef BOOST_DAEMON_AGENT_RENDEZVOUS_H
#define BOOST_DAEMON_AGENT_RENDEZVOUS_H

#include "proto/agent.pb-c.h"
#include "proto/base/error.h"

struct agent;
struct rendezvous_server;

/* Chooses agent->rendezvous_path (state_dir/rendezvous.sock, or a short one below /tmp when that is longer than a
 * socket address holds) and listens there. */
MUST_USE int rendezvous_listen(struct agent *agent, struct rendezvous_server **out, struct error *err);
void rendezvous_close(struct rendezvous_server *server);
void rendezvous_answer(struct rendezvous_server *server, const Boost__KvAnswer *answer);
/* The link is up again, perhaps to a controller that has restarted: what the ranks of live attempts have
 * set is set again, then what is not answered is asked again. */
void rendezvous_resend(struct rendezvous_server *server);

#endif
