/* A file in a job's checkpoint directory by which agents see whether it is one directory for all of them. As the job's
 * user, in a thread. */
#ifndef BOOST_DAEMON_AGENT_SHARED_H
#define BOOST_DAEMON_AGENT_SHARED_H

#include "proto/agent.pb-c.h"
#include "proto/base/error.h"

/* PUT makes the directory and the file, and takes away what earlier proofs of the job have left; LOOK is ERR_NOT_FOUND
 * when the file does not appear within some seconds (a network file system remembers what was not there), ERR_CORRUPT
 * when it is another one; REMOVE. */
MUST_USE int agent_prove_shared(const Boost__ProveShared *order, struct error *err);

#endif
