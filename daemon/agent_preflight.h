/* What can be checked of a job on a node before anything of it starts: its files, as
 * its user. Any thread; blocks on the file systems involved. */
#ifndef BOOST_DAEMON_AGENT_PREFLIGHT_H
#define BOOST_DAEMON_AGENT_PREFLIGHT_H

#include <stdint.h>

#include "proto/base/arena.h"
#include "proto/base/error.h"
#include "proto/job.pb-c.h"
#include "proto/rpc.pb-c.h"

/* Every data file is readable, a whole number of tokens and at least one window long; the checkpoint directory
 * can be made and written (a probe file is written, synced and removed) and, where the job says what its model is, has
 * room for a checkpoint; so can own_dir, the directory in it that its checkpoints go to (NULL: not known yet); the working
 * directory is there.
 * ERR_INVALID with *reason DataError or SpecError, ERR_NOSPACE with DiskFull, ERR_REFUSED for a user the agent
 * cannot act for. The message names the file, the hint the mend. */
MUST_USE int agent_preflight(const Boost__JobSpec *spec, const char *own_dir, uint32_t uid, uint32_t gid,
                             Boost__Reason__Value *reason, struct error *err);

/* Whether this worker has its CUDA backend (boost-worker --check-cuda, some seconds; once it has said yes it is not
 * asked again until it or its boost-cuda.so is another file). ERR_UNSUPPORTED with what it says. */
MUST_USE int agent_preflight_cuda(const char *worker, struct error *err);

/* The model of a directory of Hugging Face's, which only the worker can read, as that user; lives in `mem`. */
MUST_USE int agent_preflight_model(char *worker, const char *dir, uint32_t uid, uint32_t gid, struct arena *mem,
                                   Boost__JobSpec **out, struct error *err);

/* Whether the checkpoint that the job is to start from is there for its user and fits; ERR_OK without one. */
MUST_USE int agent_preflight_init(const Boost__JobSpec *spec, char *worker, uint32_t uid, uint32_t gid, struct error *err);

#endif
