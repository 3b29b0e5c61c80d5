/* The thread that puts a rank's shard on disk while training goes on: temporary name,
 * fsync, rename, fsync of the directory, then a durable ShardRecord. No other rank is
 * involved. A write that fails is told in a record of its own and stops nothing. */
#ifndef BOOST_WORKER_SHARD_WRITER_H
#define BOOST_WORKER_SHARD_WRITER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/error.h"

struct shard_writer;

/* records: path of the record log of ShardRecord. mib_s: cap, 0 = none. *bytes is moved forward as
 * bytes reach the disk (may be NULL). */
MUST_USE int shard_writer_create(const char *records, int rank, double mib_s, uint64_t *bytes,
                                 struct shard_writer **out, struct error *err);
/* Stops a write that is under way (its temporary file goes) and ends the thread. */
void shard_writer_destroy(struct shard_writer *w);

/* One file to write; `data` stays untouched by the caller until the writer is idle. */
struct shard_job {
    int64_t step;
    char dir[1024]; /* made if it is not there */
    char file[64];
    const void *data;
    size_t size;
    /* Asked on the writer's thread before anything is written; an error is the outcome. NULL: nothing to ask. */
    int (*check)(const void *arg, struct error *err);
    const void *check_arg;
};
/* Waits until idle, then starts. */
void shard_writer_start(struct shard_writer *w, const struct shard_job *job);
bool shard_writer_busy(struct shard_writer *w);
/* Waits until idle; the outcome of the last write (ERR_OK if there was none). */
int shard_writer_wait(struct shard_writer *w, struct error *err);

#endif
