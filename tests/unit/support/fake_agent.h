/* The agent's end of the rendezvous for tests: a thread that keeps keys and values and
 * answers RankRequest frames on a Unix socket. */
#ifndef BOOST_TESTS_FAKE_AGENT_H
#define BOOST_TESTS_FAKE_AGENT_H

struct fake_agent;

/* NULL on failure. */
struct fake_agent *fake_agent_start(const char *socket_path);
/* The connection of the n-th next request (1: the next) is closed instead of answered, as by an
 * agent that restarts; what it asked for is not done. */
void fake_agent_drop(struct fake_agent *a, int nth);
void fake_agent_stop(struct fake_agent *a);

#endif
