/* Checkpoint directories: manifest, verification, removal. Any thread; blocking.
 * The caller has taken the identity of the job's user. */
#ifndef BOOST_DAEMON_AGENT_CHECKPOINT_H
#define BOOST_DAEMON_AGENT_CHECKPOINT_H

#include "proto/agent.pb-c.h"
#include "proto/base/arena.h"
#include "proto/base/error.h"

/* Writes <dir>/manifest.json durably: the act that makes a checkpoint one. Every shard must be there with its
 * size. Again with the same content is fine. */
MUST_USE int checkpoint_write_manifest(const Boost__WriteManifest *order, int64_t job, struct error *err);
/* The manifest is there and of this step and attempt, and every shard has the size and checksum recorded (in the
 * order when it names shards, else in the manifest). ERR_CORRUPT or ERR_NOT_FOUND names what is damaged; ERR_IO says
 * nothing about it: so where a registered one without a mirror has not even the directory that it shares with others. */
MUST_USE int checkpoint_verify(const Boost__VerifyCheckpoint *order, struct error *err);
/* The same of a registered checkpoint, but all that is wrong with the files, in `mem`; an error only where nothing could
 * be looked at. */
MUST_USE int checkpoint_faults(const Boost__VerifyCheckpoint *order, struct arena *mem, char ***faults, size_t *n,
                               struct error *err);
/* The resolved spec under which a committed checkpoint was written, from the text of its manifest; lives in `a`. One
 * that holds weights alone is ERR_INVALID where more than these is wanted. */
MUST_USE int checkpoint_spec_of(const char *manifest, size_t len, int64_t step, int32_t attempt, bool weights_only,
                                struct arena *a, Boost__JobSpec **out, struct error *err);
/* "step-<n>.a<k>"; false: another name. */
bool checkpoint_parse_name(const char *name, int64_t *step, int *attempt);
/* The same of a directory of this machine. */
MUST_USE int checkpoint_spec(const char *dir, bool weights_only, struct arena *a, Boost__JobSpec **out,
                             struct error *err);
/* The checkpoints below `parent` that have a manifest, newest first, into out->found, in `mem`; as many as fit a
 * frame. A damaged manifest is passed over, a missing `parent` has none. */
MUST_USE int checkpoints_find(const char *parent, struct arena *mem, Boost__TaskReply *out, struct error *err);
/* Whether dir is named as the directory of that checkpoint. */
MUST_USE int checkpoint_check_dir(const char *dir, int64_t step, int32_t attempt, struct error *err);
/* A file of a checkpoint, of exactly that size; the caller closes *fd, which is -1 after most errors. */
MUST_USE int checkpoint_open_shard(const char *dir, const char *file, int64_t bytes, int *fd, struct error *err);
/* Removes a directory whose name is step-<n>.a<k>: renamed to <name>.deleting first, so that a half-removed one
 * is never taken for a checkpoint. One that is gone is fine; ERR_REFUSED for any other name. ERR_BUSY: the directory
 * above it is not there, as where its file system is not mounted, so it may come back. */
MUST_USE int checkpoint_delete(const char *dir, struct error *err);
/* Removes what the attempts from `first` to `last` left half-written below `parent` (<dir>/<store id>-<job>): their
 * directories without a manifest. The controller knows nothing of one of which no shard was reported, so nobody else
 * would. Only once the controller has closed them all. A missing `parent` is fine. */
MUST_USE int checkpoints_clear_torn(const char *parent, int32_t first, int32_t last, struct error *err);

#endif
