/* The programs of boost-worker for checkpoints: `boost-worker ckpt VERB ...`, as an agent runs them as a user. */
#ifndef BOOST_WORKER_CKPT_TOOL_H
#define BOOST_WORKER_CKPT_TOOL_H

#include "proto/base/error.h"

/* argv[0] is the verb. What was found or done goes to stdout in lines ("fault: ..." for each fault), a failure into
 * *err; the exit status. */
int ckpt_tool(int argc, char **argv, struct error *err);

#endif
