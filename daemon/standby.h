/* Copies of the store for a cold standby, made while boostd runs: every backup_every_s to backup_dir, in libuv's
 * threads. A copy that fails is told once and tried again; nothing waits for it. */
#ifndef BOOST_DAEMON_STANDBY_H
#define BOOST_DAEMON_STANDBY_H

#include <stdbool.h>
#include <uv.h>

#include "proto/base/error.h"
#include "store/store.h"

struct standby {
    struct store *store;
    const char *dir; /* the configuration's; "": none */
    uint64_t every_ms;
    uv_timer_t timer;
    uv_work_t work;
    bool open, working, failing, stopped;
    unsigned made;
    struct error err; /* of the copy under way */
};
/* ERR_INTERNAL and such when the loop has no handle for it. */
MUST_USE int standby_start(struct standby *s, uv_loop_t *loop, struct store *store, const char *dir, int every_s,
                           struct error *err);
/* Cuts short the copy that is under way; the loop has to run until its handles are gone. */
void standby_stop(struct standby *s);

#endif
