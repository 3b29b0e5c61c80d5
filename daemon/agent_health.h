/* Whether the node is fit for work: checks at the agent's start, every health_interval_ms, before each attempt and when
 * the controller asks, and what prolog and epilog have shown. The controller is told what fails, and cordons the node
 * while anything does (proto/agent.proto, HealthReport). What is wrong with one GPU alone takes that GPU out
 * (agent_devices.h) and not the node. All on the agent's loop. */
#ifndef BOOST_DAEMON_AGENT_HEALTH_H
#define BOOST_DAEMON_AGENT_HEALTH_H

#include "daemon/agent_checks.h"
#include "proto/agent.pb-c.h"
#include "proto/base/arena.h"

struct agent;
struct agent_health;

/* Checks for the first time, with what takes no time; a site's script goes on in a thread. After attempts_load(). */
MUST_USE int health_open(struct agent *agent, struct agent_health **out, struct error *err);
/* Whether a thread still checks: then health_close() has to wait, or not be called. */
bool health_busy(const struct agent_health *h);
void health_close(struct agent_health *h);
/* For the clock: checks when it is time, and tells the controller what is new. */
void health_run(struct agent *agent, int64_t now);
/* What the controller is to be told, in `arena`; NULL: out of memory. health_told(): it has been. */
Boost__HealthReport *health_report(struct agent *agent, struct arena *arena);
void health_told(struct agent_health *h);
/* The controller wants a check now, and an answer. mended: what prolog and epilog had shown counts no more. */
void health_ask(struct agent *agent, bool mended);
/* What the checks before an attempt have found: told at once, and it counts until the next check. */
void health_found(struct agent *agent, const struct findings *found);
/* A prolog or an epilog has failed: that counts until the controller asks for a check, for later agents too. */
void health_failed(struct agent *agent, const char *check, const char *text);

#endif
