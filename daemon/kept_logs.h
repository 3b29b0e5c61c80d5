/* What the controller keeps of the output of attempts that failed, for when their nodes cannot be reached: a file each,
 * <state_dir>/kept/<job>.<attempt>, read and written in libuv's threads. The oldest go when all are more than
 * KEPT_LOGS_BYTES. One thread, the loop's. */
#ifndef BOOST_DAEMON_KEPT_LOGS_H
#define BOOST_DAEMON_KEPT_LOGS_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

enum { KEPT_LOGS_BYTES = 64 << 20, KEPT_LOGS_ONE = 4 << 20 };

struct kept_logs {
    uv_loop_t *loop;
    char dir[PATH_MAX];
};

void kept_logs_init(struct kept_logs *k, uv_loop_t *loop, const char *state_dir);
/* Not waited for: what cannot be written is logged, and lost. */
void kept_logs_put(struct kept_logs *k, int64_t job, int attempt, const void *data, size_t len);
/* `done` is called once; data NULL: there is nothing, or it cannot be read. Maybe before this returns. */
void kept_logs_get(struct kept_logs *k, int64_t job, int attempt, void (*done)(void *arg, const void *data, size_t len),
                   void *arg);

#endif
