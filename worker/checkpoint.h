/* Checkpoints without communication: at a step that all ranks agreed on, each copies its
 * state to host memory and a background thread writes it while training goes on.
 *
 * A shard is <dir>/step-<n>.a<k>/rank-00000-of-00002.safetensors. What several ranks hold is written
 * once: what is equal over tp by the first, a tied table by the first stage, and what is equal over the
 * replicas by each one its part (struct state_tensor's `own`). Of a parameter there is the master weight
 * under the parameter's name and the Adam moments under name.m and name.v: a slice [nrows, ncols] with the
 * metadata "shard:<name>" = "rows,cols,row0,col0" (the global shape and where the slice begins), or a part [n] of
 * one with "rows,cols,row0,col0,nrows,ncols,first" (and the part's first element in the slice, row-major).
 * The metadata holds what else a bit-equal resume needs. */
#ifndef BOOST_WORKER_CHECKPOINT_H
#define BOOST_WORKER_CHECKPOINT_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/error.h"
#include "proto/rankfiles.h"
#include "proto/worker.pb-c.h"
#include "worker/engine.h"
#include "worker/plan/plan.h"
#include "worker/spike.h"

/* Where a run stands, apart from the tensors. */
struct run_position {
    int64_t step;          /* updates tried */
    double adam_t;         /* updates done */
    int64_t samples;       /* consumed: step * global_batch */
    int64_t tokens;        /* unmasked, so far */
    int64_t skipped;       /* updates skipped so far */
    int64_t skipped_run;   /* in a row, up to now */
    struct spike spike;    /* of the losses so far */
    char *data;            /* as checkpoint_open() had it; checkpoint_restore()'s for rank 0, the caller's to free */
};

struct checkpoint;

/* Allocates the host copy (about the size of the shard) and starts the writer thread. engine, plan, start, data
 * and status stay the caller's. checkpoint.dir is not touched yet. `data` goes along in rank 0's shard: what the order
 * of samples follows from (data_identity()); NULL: nothing is told of it. */
MUST_USE int checkpoint_open(const Boost__AttemptStart *start, const struct plan *plan, struct engine *engine,
                             int rank, const char *data, struct rank_status *status, struct checkpoint **out,
                             struct error *err);
/* A write under way is given up; checkpoint_wait() first for one that is wanted. */
void checkpoint_close(struct checkpoint *c);

bool checkpoint_busy(struct checkpoint *c);
/* Copies the state as it is now and hands it to the writer (after the writer's last one is done).
 * Training may go on when it returns; where the backend has streams for it the copy is made meanwhile, and the next
 * update waits for it. engine_note() says once what could not go along. A state that is not finite is not written:
 * ERR_REFUSED of checkpoint_wait(). */
MUST_USE int checkpoint_snapshot(struct checkpoint *c, const struct run_position *at, struct error *err);
/* Waits for the writer; the outcome of the last write. */
int checkpoint_wait(struct checkpoint *c, struct error *err);
int64_t checkpoint_bytes(const struct checkpoint *c); /* of a shard */

/* Reads the state of this rank from a checkpoint directory, whatever layout and strategy wrote it, weights into the
 * engine too; collective under zero 1. ERR_INVALID: another model (its constants too, where the checkpoint has them),
 * precision class, batch size or sample order.
 * ERR_CORRUPT: damaged, incomplete, an element there twice, or shards that are of different checkpoints. All headers
 * are read, of the data what this rank needs. `status` may be NULL. at->spike starts anew from a checkpoint that does
 * not have it, at->data is NULL. */
MUST_USE int checkpoint_restore(const char *dir, const struct plan *plan, struct engine *engine, int rank,
                                struct rank_status *status, struct run_position *at, struct error *err);
/* Attempt number that wrote the directory "…/step-<n>.a<k>", from its name; 0 when it has another form. */
int checkpoint_attempt_of(const char *dir);
/* The same of the weights alone, into an engine whose state is that of a fresh start; where the run stands is not
 * read. */
MUST_USE int checkpoint_restore_weights(const char *dir, const struct plan *plan, struct engine *engine, int rank,
                                        struct rank_status *status, struct error *err);
/* The same from a directory of Hugging Face's layout (hf.h), whose model has to be that of `spec`, the resolved job. */
MUST_USE int checkpoint_restore_hf(const char *dir, const Boost__JobSpec *spec, struct engine *engine,
                                   struct rank_status *status, struct error *err);

#endif
