/* Work on files that the controller asks for, done in threads: preflight, manifest,
 * verify, delete, logs, stacks. Each as the job's user, except for logs and stacks, which are the agent's. */
#ifndef BOOST_DAEMON_AGENT_TASKS_H
#define BOOST_DAEMON_AGENT_TASKS_H

#include "proto/agent.pb-c.h"
#include "proto/base/error.h"

struct agent;
struct agent_tasks;

MUST_USE int agent_tasks_create(struct agent *agent, struct agent_tasks **out, struct error *err);
/* Replies of tasks still at work are dropped. */
void agent_tasks_close(struct agent_tasks *tasks);
void agent_tasks_take(struct agent *agent, const Boost__Task *task);
/* Something that a follower of a log waits for may have happened. */
void agent_tasks_wake(struct agent *agent);
/* Nobody wants it any more: what it moves it leaves off, nothing else, and does not reply. */
void agent_tasks_cancel(struct agent *agent, uint64_t id);
/* The agent ends: all leave off. */
void agent_tasks_stop(struct agent *agent);
/* The link is lost: the controller asks again for whatever it still wants. */
void agent_tasks_forget(struct agent *agent);

#endif
