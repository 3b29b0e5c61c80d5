/* Copies of checkpoints in an object store: <mirror>/<store id>-<job>/step-<n>.a<k>/, the files of the directory under
 * their names, the manifest last, so that a copy without one is no checkpoint. Any thread; blocking. The caller has taken
 * the identity of the job's user. Whatever was cut (agent killed, connection lost) goes on where it was. */
#ifndef BOOST_DAEMON_AGENT_MIRROR_H
#define BOOST_DAEMON_AGENT_MIRROR_H

#include "daemon/remote/s3.h"
#include "proto/agent.pb-c.h"
#include "proto/base/error.h"

/* Unfinished uploads of other checkpoints of the job are given up. *moved: bytes that travelled. ERR_BUSY: it is being
 * copied already. ERR_CORRUPT, ERR_NOT_FOUND of a shard: it is not what was written. */
MUST_USE int mirror_copy(struct s3 *s, const Boost__MirrorCheckpoint *order, struct http_progress *progress,
                         int64_t *moved, struct error *err);
/* Puts the copy in the place of a directory that is missing or damaged, each shard checked against the order's record.
 * ERR_BUSY: that is being done already. */
MUST_USE int mirror_fetch(struct s3 *s, const Boost__VerifyCheckpoint *order, struct http_progress *progress,
                          int64_t *moved, struct error *err);
/* Removes the copy, the manifest first, and what of it was not finished. One that is gone is fine. */
MUST_USE int mirror_delete(struct s3 *s, const char *dir, const char *mirror, struct error *err);
/* What a fetch of this directory left unfinished on this node. */
MUST_USE int mirror_forget(const char *dir, struct error *err);

#endif
