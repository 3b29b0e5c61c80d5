/* boost-worker with one of its programs for checkpoints, run as a user. */
#ifndef BOOST_DAEMON_AGENT_TOOL_H
#define BOOST_DAEMON_AGENT_TOOL_H

#include <sys/types.h>

#include "proto/base/arena.h"
#include "proto/base/error.h"

/* What it printed: lines "fault: ..." in `faults`, the last other one in `text`; all in the arena. */
struct tool_output {
    char **faults;
    size_t n_faults;
    char *text;
};

/* argv: NULL-terminated, argv[0] the program. Until its end, however long that takes, or until it becomes idle: a
 * program that neither prints nor ends within the hour is killed. ERR_INVALID with what it said on stderr when it ends
 * with another status than 0; ERR_INTERNAL when it could not be run. Any thread but the loop's. */
MUST_USE int agent_tool_run(char *const argv[], uid_t uid, gid_t gid, struct arena *mem, struct tool_output *out,
                            struct error *err);

#endif
