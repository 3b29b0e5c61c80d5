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

struct shard_pace {
    double mib_s; /* at most so many MiB a second, whatever had to be waited for; 0 = no cap */
    double cpu;   /* of one processor's time, while nobody waits for the writer: 0.25; 0 = no limit */
};
/* records: path of the record log of ShardRecord. *bytes is moved forward as bytes reach the disk (may be NULL). */
MUST_USE int shard_writer_create(const char *records, int rank, const struct shard_pace *pace, uint64_t *bytes,
                                 struct shard_writer **out, struct error *err);
/* Stops a write that is under way (its temporary file goes) and ends the thread. */
void shard_writer_destroy(struct shard_writer *w);

/* One file to write; `data` stays untouched by the caller until the writer is idle. Where it begins on a page the
 * file is written past the page cache, if its file system can. */
struct shard_job {
    int64_t step;
    char dir[1024]; /* made if it is not there, none above it */
    char file[64];
    const void *data;
    size_t size;
    /* Called on the writer's thread, NULL: nothing to ask; an error is the outcome, and no file comes to be. `ready`
     * once, before data is read; `check` of each part [from, to) of data, in order, right before it is written. */
    int (*ready)(const void *arg, struct error *err);
    int (*check)(const void *arg, size_t from, size_t to, struct error *err);
    const void *arg;
};
/* Waits until idle, then starts. */
void shard_writer_start(struct shard_writer *w, const struct shard_job *job);
bool shard_writer_busy(struct shard_writer *w);
/* Waits until idle; the outcome of the last write (ERR_OK if there was none). */
int shard_writer_wait(struct shard_writer *w, struct error *err);

#endif
