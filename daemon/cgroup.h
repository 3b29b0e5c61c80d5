/* One cgroup2 group an attempt, where the kernel and our rights allow it: a kill
 * that no process can escape, and out-of-memory events that can be attributed.
 * Everything works without it; the callers then rely on the child subreaper. */
#ifndef BOOST_DAEMON_CGROUP_H
#define BOOST_DAEMON_CGROUP_H

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto/base/error.h"

struct cgroup {
    char path[PATH_MAX]; /* "" = none */
};

/* A new group below the caller's own. ERR_UNSUPPORTED: no cgroup2 mount, no write access or no cgroup.kill. */
MUST_USE int cgroup_create(struct cgroup *cg, const char *name, struct error *err);
/* Takes up a path that an earlier process wrote down; none when it is not a group made by cgroup_create. */
void cgroup_adopt(struct cgroup *cg, const char *path);
/* A descriptor (O_CLOEXEC) to write "0" to from the process that is to join, or -1. */
int cgroup_join_fd(const struct cgroup *cg);
/* SIGKILL to all members, forks included. False when there is no group. */
bool cgroup_kill(const struct cgroup *cg);
/* Whether any process, dead ones not yet reaped apart, is in the group. False when there is no group. */
bool cgroup_populated(const struct cgroup *cg);
/* Processes that the out-of-memory killer took in this group so far; -1 when the kernel does not tell. */
int64_t cgroup_oom_kills(const struct cgroup *cg);
/* Removes the (empty) group; a group that is gone is fine. */
void cgroup_remove(struct cgroup *cg);

#endif
