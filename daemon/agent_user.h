/* File access as the job's user, for the calling thread only: the thread's file system
 * identity (setfsuid(2)) and groups change, the process stays what it is. No effect
 * unless the agent runs as root. */
#ifndef BOOST_DAEMON_AGENT_USER_H
#define BOOST_DAEMON_AGENT_USER_H

#include <stdbool.h>
#include <sys/types.h>

#include "proto/base/error.h"

enum { AS_USER_GROUPS = 256 };
struct as_user {
    bool changed;
    int group_count;
    gid_t groups[AS_USER_GROUPS]; /* the thread's own */
};
/* All groups of the user, `gid` among them; how many. */
int as_user_groups(uid_t uid, gid_t gid, gid_t groups[AS_USER_GROUPS]);

/* ERR_REFUSED: the agent is neither root nor that user. */
MUST_USE int as_user_begin(struct as_user *u, uid_t uid, gid_t gid, struct error *err);
void as_user_end(struct as_user *u);

#endif
