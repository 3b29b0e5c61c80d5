/* A script of the site: health check, prolog, epilog. Waits for the end of the process itself and never for that of
 * what it started in the background, nor for its pipe to close; what it prints is read all the while, and the last
 * line is kept. Any thread; blocks for the time limit and 5 s at most. */
#ifndef BOOST_DAEMON_AGENT_SCRIPT_H
#define BOOST_DAEMON_AGENT_SCRIPT_H

#include <stdbool.h>
#include <stddef.h>

#include "proto/base/error.h"

struct script_variable {
    const char *name, *value; /* value NULL: left out */
};
struct script {
    const char *path;
    /* Its environment over the agent's own, of which BOOST_* is left out: what runs by itself in the background
     * must not look like a process of an attempt. */
    const struct script_variable *variables;
    size_t n_variables;
    int timeout_ms;
    const char *limit;  /* the field of the configuration with the time limit, for the hint */
    int cancel_fd;      /* it is killed when this becomes readable; 0 or less: never */
    bool kill_children; /* those in its process group when it ends; after a time limit or a failure in any case */
};

/* Where it is noted which scripts run, so that an agent that was killed leaves none behind: those that are noted there
 * still are killed, with all that descends from them. Once, before any script; without it nothing is noted. */
MUST_USE int scripts_open(const char *dir, struct error *err);
/* ERR_OK: it ended with status 0. Else the message says all: "/etc/boost/prolog.sh: status 3 after 0.2 s: no scratch
 * disk"; ERR_TIMEOUT when it was killed for its time, ERR_REFUSED when it was cancelled, ERR_IO otherwise. */
MUST_USE int script_run(const struct script *script, struct error *err);

#endif
