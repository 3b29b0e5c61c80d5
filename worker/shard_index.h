/* What the shards of a checkpoint hold, whatever layout wrote them: where in which file each element lies that a rank
 * of this job needs. Built from the headers of all shards; of the data only what is asked for is read. */
#ifndef BOOST_WORKER_SHARD_INDEX_H
#define BOOST_WORKER_SHARD_INDEX_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/error.h"
#include "worker/engine.h"
#include "worker/plan/plan.h"
#include "worker/safetensors.h"

struct shard_index;

/* What of the model is wanted: `count` tensors, of which tensor() tells name, slice and dtype (of the rest nothing is
 * asked). */
struct shard_view {
    int64_t count;
    void (*tensor)(const void *of, int64_t i, enum state_kind kind, struct state_tensor *out);
    const void *of;
};

/* Reads all headers of the directory. ERR_CORRUPT: a shard is missing, damaged or of another checkpoint than the rest.
 * ERR_INVALID: the model is another one, or was kept in another type. The engine is asked for the slices of `rank`
 * only; plan and engine stay the caller's and outlive the index. One thread. */
MUST_USE int shard_index_open(const char *dir, const struct plan *plan, const struct engine *engine, int rank,
                              struct shard_index **out, struct error *err);
/* The same for another view than an engine's. */
MUST_USE int shard_index_open_view(const char *dir, const struct plan *plan, const struct shard_view *view, int rank,
                                   struct shard_index **out, struct error *err);
void shard_index_close(struct shard_index *x);
/* Whether it is without moments and position, as checkpoints are that come from elsewhere. */
bool shard_index_weights_only(const struct shard_index *x);
/* ERR_CORRUPT unless each element of the slice lies in the shards exactly once: names tensor, rows and files. */
MUST_USE int shard_index_check(const struct shard_index *x, int64_t i, int kind, struct error *err);

/* The metadata that all shards share, from one of them; the index's. */
const struct safetensors_file *shard_index_shared(const struct shard_index *x);
/* "tp=2 pp=1 dp=4" of the writer, and whether this job has that too. */
const char *shard_index_layout(const struct shard_index *x);
bool shard_index_same_layout(const struct shard_index *x);
/* What the shard of this rank says under "choices", where that is of the same layout; else NULL. */
const char *shard_index_choices(const struct shard_index *x);

/* Elements [first, first + count) of the slice that this rank has of the engine's tensor i, row-major, into out (which
 * has the tensor's type). `kind` is a number in shard_kinds[]. ERR_CORRUPT unless each lies in the shards exactly
 * once. */
MUST_USE int shard_index_read(struct shard_index *x, int64_t i, int kind, int64_t first, int64_t count, void *out,
                              struct error *err);

#endif
