/* Names of users by number, looked up off the loop (a name service may be slow) and
 * remembered for the life of the daemon. One thread, the loop's. */
#ifndef BOOST_DAEMON_USERS_H
#define BOOST_DAEMON_USERS_H

#include <sys/types.h>
#include <uv.h>

struct user_entry;
struct users {
    uv_loop_t *loop;
    struct user_entry *first;
};
void users_init(struct users *u, uv_loop_t *loop);
/* After the loop has run dry. */
void users_free(struct users *u);
/* NULL: not known yet. Lives as long as `u`. */
const char *users_name(const struct users *u, uid_t uid);
/* `done` comes from the loop, once users_name() knows the uid (an unknown one is named by its number). ERR_NOMEM and
 * such are passed as rc. */
void users_lookup(struct users *u, uid_t uid, void (*done)(void *arg, int rc), void *arg);
/* The account of this name on this machine, asked for anew each time; uid and gid are its when rc is 0, ERR_NOT_FOUND
 * when there is none. `name` is copied. */
void users_find(struct users *u, const char *name, void (*done)(void *arg, int rc, uid_t uid, gid_t gid), void *arg);

#endif
