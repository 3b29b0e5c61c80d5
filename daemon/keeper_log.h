/* What ranks print: taken from their pipes by the keeper's loop, written to
 * rank-<r>.log by one thread, so that a slow or full disk never blocks a rank.
 *
 * Bytes are kept raw. A line over LIMIT_LOG_LINE is split with a mark. At `max_bytes`
 * the file becomes .log.1 (replacing an older one) and a new one begins; the file
 * .log.pos says where in the whole stream each of the two begins, by inode, so that
 * a reader's offset holds across rotations. .log.times says when the stream was where.
 * What cannot be written is dropped, counted, and the log says so once writing works again. */
#ifndef BOOST_DAEMON_KEEPER_LOG_H
#define BOOST_DAEMON_KEEPER_LOG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "proto/base/buffer.h"
#include "proto/base/error.h"

enum {
    KEEPER_LOG_TAIL = 64 << 10, /* bytes of output kept for the exit record   */
    KEEPER_LOG_QUEUE = 1 << 20, /* bytes a rank may be ahead of the disk      */
    KEEPER_LOG_STALL_MS = 1000, /* no write done for so long: drop, not wait  */
};

/* A mark of .log.times: what was printed from wall_ns on, for `interval_ns`, lies at `pos` and behind, before the next
 * mark's. */
struct keeper_log_mark {
    int64_t wall_ns, pos, interval_ns;
};
enum { KEEPER_LOG_MARKS = 4096 }; /* then every other one goes */

struct keeper_logs; /* the writer thread and its logs */
struct keeper_log;  /* of one rank */

/* `write_fn` NULL is write(2); tests give a disk that is slow or full. */
MUST_USE int keeper_logs_create(ssize_t (*write_fn)(int fd, const void *data, size_t len), struct keeper_logs **out,
                                struct error *err);
/* Waits up to timeout_ms for what is queued, then lets go. True when all of it was written or dropped. */
bool keeper_logs_destroy(struct keeper_logs *logs, int timeout_ms);
/* A log that cannot be opened yet is opened again at each write: the rank runs on regardless. */
MUST_USE int keeper_log_add(struct keeper_logs *logs, const char *run_dir, int rank, int64_t max_bytes,
                            struct keeper_log **out, struct error *err);

/* The rest from the keeper's loop only. */

/* Bytes that keeper_log_feed takes without dropping; 0 = leave it in the pipe for now.
 * When the disk has stood still for KEEPER_LOG_STALL_MS this is large and the bytes are dropped. */
size_t keeper_log_room(struct keeper_log *log);
void keeper_log_feed(struct keeper_log *log, const void *data, size_t len);
/* Appends the newest output, at most KEEPER_LOG_TAIL bytes. */
void keeper_log_tail(const struct keeper_log *log, struct buffer *out);
/* Bytes dropped so far. */
int64_t keeper_log_dropped(struct keeper_log *log);

/* ---- reading, by the agent ---- */

/* A piece of a rank's output stream (see above), at most max_bytes from *offset on. When *offset is
 * negative: the last `tail_lines` lines (below 0: all there is). Output older than what rotation kept is passed over:
 * *offset moves to the oldest byte. Appends to `out` and sets *offset to where the piece begins. A missing log reads as
 * empty. */
MUST_USE int keeper_log_read(const char *run_dir, int rank, int64_t *offset, int64_t tail_lines, size_t max_bytes,
                             struct buffer *out, struct error *err);
/* Where in the stream begins what was printed at wall_ns (of this node's clock) or later; exact to a second, or to what
 * .log.times still tells of a long run. -1: nothing was printed since; 0 where no times were kept. */
int64_t keeper_log_since(const char *run_dir, int rank, int64_t wall_ns);
/* Where the stream ends now; 0 for a missing log. */
MUST_USE int keeper_log_end(const char *run_dir, int rank, int64_t *end, struct error *err);

#endif
