/* The keeper: parent of the ranks of one attempt on one node. It outlives the agent
 * and the controller's absence, takes the ranks' output, records every end durably
 * (rank-<r>.exit), kills on request and goes only when no process of the attempt is
 * left (keeper.end). It decides nothing: one rank's failure leaves the others alone. */
#ifndef BOOST_DAEMON_KEEPER_H
#define BOOST_DAEMON_KEEPER_H

#include <stdbool.h>

#include "proto/base/error.h"

struct keeper_options {
    const char *run_dir; /* absolute, holding start.pb */
    bool use_cgroup;     /* where the kernel lets us */
    int ready_fd;        /* a byte goes there once keeper.id is written, then it is closed; -1 = none */
};

/* Runs the attempt to its end; blocks SIGCHLD, SIGTERM and SIGINT of the process and makes it a child
 * subreaper, so it wants a process of its own. SIGTERM and SIGINT kill everything, as the file `stop` does.
 * ERR_BUSY: another keeper has this run directory. */
MUST_USE int keeper_run(const struct keeper_options *options, struct error *err);

/* For the agent that finds a run directory without keeper.id: takes the keeper's lock of it, so that no
 * keeper can start any more while the descriptor is open. ERR_BUSY: one is there. */
MUST_USE int keeper_lock(const char *run_dir, int *fd, struct error *err);

#endif
