/* Processes that ended attempts may have left on the node: those that carry the run directory of an attempt in their
 * environment, and who has a file open. What cannot be seen (another user's, for an agent that is not root) is not
 * found. Any thread. */
#ifndef BOOST_DAEMON_AGENT_LEFTOVER_H
#define BOOST_DAEMON_AGENT_LEFTOVER_H

#include "daemon/procid.h"

enum { LEFTOVERS_MAX = 64 };
struct leftover {
    struct procid id;
    uid_t uid;
    char attempt[96]; /* the run directory's name, "0badcafe-17.2" */
    char name[32];    /* of the process, printable */
};

/* Up to LEFTOVERS_MAX processes whose environment says BOOST_RUN_DIR=<attempts_dir>/<any name>, but for the names in
 * `live`, of attempts that live: each ends with a NUL, an empty one ends the list. -1: /proc cannot be read. */
int leftovers_find(const char *attempts_dir, const char *live, struct leftover out[LEFTOVERS_MAX]);
/* A process, not the caller, that has the file at `path` open, and its name; 0: none that can be seen. */
pid_t file_holder(const char *path, char name[32]);

#endif
