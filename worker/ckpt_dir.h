/* A checkpoint directory as a whole, without an engine: for the programs that verify, export and convert. One thread. */
#ifndef BOOST_WORKER_CKPT_DIR_H
#define BOOST_WORKER_CKPT_DIR_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/arena.h"
#include "proto/base/error.h"
#include "proto/job.pb-c.h"
#include "worker/plan/plan.h"
#include "worker/shard_index.h"

struct json_t;

/* "…/step-<n>.a<k>" */
bool ckpt_dir_parse(const char *dir, int64_t *step, int64_t *attempt);
/* What its manifest.json says, of whatever step and attempt; *out is the caller's to free, NULL after an error.
 * ERR_NOT_FOUND: there is none; ERR_CORRUPT: it is no JSON. */
MUST_USE int ckpt_dir_manifest(const char *dir, struct json_t **out, struct error *err);

/* Its manifest, and the plan of its model in one piece (tp = pp = dp = 1). */
struct ckpt_dir {
    const char *path; /* the caller's */
    int64_t step, attempt;
    struct json_t *manifest;
    Boost__JobSpec *spec; /* in the arena; a layout of one rank */
    struct arena arena;
    struct plan plan;
    enum dtype dtype;          /* of the state: F32, or F64 */
    struct shard_index *index; /* after ckpt_dir_index() */
};
/* ERR_CORRUPT: the manifest is missing, damaged or of another checkpoint. ckpt_dir_close() after failure too. */
MUST_USE int ckpt_dir_open(struct ckpt_dir *d, const char *path, struct error *err);
/* Reads the headers of all shards. */
MUST_USE int ckpt_dir_index(struct ckpt_dir *d, struct error *err);
void ckpt_dir_close(struct ckpt_dir *d);

/* Rows [row0, row0 + nrows) of the whole weight number i of the plan as fp32, row-major. */
MUST_USE int ckpt_dir_rows(struct ckpt_dir *d, int64_t i, int64_t row0, int64_t nrows, float *out, struct error *err);
/* Columns [col0, col0 + ncols), transposed: out is [ncols, rows]. */
MUST_USE int ckpt_dir_columns(struct ckpt_dir *d, int64_t i, int64_t col0, int64_t ncols, float *out,
                              struct error *err);
/* Number of the tensor of that name in the plan, -1: none. */
int64_t ckpt_plan_find(const struct plan *plan, const char *name);

/* Called with each fault found; the text names the file. */
typedef void (*ckpt_fault_fn)(void *arg, const char *text);
/* All that is wrong with the directory: manifest, shards that are missing, cut, damaged, of another checkpoint or not
 * readable, files that do not belong, elements that are missing or there twice. headers_only: sizes and checksums are
 * not looked at, and of shards that have another size or are not there nothing is said. Returns the number of shards;
 * an error only where nothing could be looked at. */
MUST_USE int ckpt_verify(const char *dir, bool headers_only, ckpt_fault_fn fault, void *arg, struct error *err);

#endif
