/* Logs of ended attempts, in state_dir/logs, the oldest removed beyond log_keep_bytes. */
#ifndef BOOST_DAEMON_AGENT_LOGS_H
#define BOOST_DAEMON_AGENT_LOGS_H

#include <stdint.h>

#include "proto/base/error.h"

struct agent;

/* Moves the logs out of a run directory that is about to go, then makes room. */
MUST_USE int agent_logs_keep(struct agent *agent, const char *run_dir, struct error *err);
/* Removes directories below `logs_dir`, oldest first, until what is left is at most `limit` bytes. */
MUST_USE int agent_logs_trim(const char *logs_dir, int64_t limit, struct error *err);

#endif
