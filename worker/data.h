/* Tokens: files, windows, order, batches.
 *
 * A file is n windows of s+1 tokens at stride s (neighbours share one token; the ragged
 * end is dropped). Training takes windows in a seeded permutation per epoch, indexed by
 * the global sample number, so that the order is a function of (seed, number) alone: it
 * does not depend on the layout and a resumed run goes on where it was. Files are read
 * with pread, never mapped: a file that shrinks under us is an error with a text. */
#ifndef BOOST_WORKER_DATA_H
#define BOOST_WORKER_DATA_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/error.h"
#include "proto/job.pb-c.h"
#include "worker/engine.h"
#include "worker/plan/plan.h"

/* ---- one token file -------------------------------------------------------- */

struct token_file {
    char *path;
    int fd;
    int token_bytes; /* 1: TEXT, 2: U16, 4: U32; little-endian */
    int64_t tokens;
    int64_t windows;
    int64_t s;     /* tokens of a window without the last target */
    int64_t vocab; /* ids at or above are an error */
};

/* ERR_INVALID: not a regular file, not a whole number of tokens, shorter than one window.
 * ERR_UNSUPPORTED: a format that is not built. */
MUST_USE int token_file_open(struct token_file *f, const char *path, Boost__Format__Value format, int64_t s,
                             int64_t vocab, struct error *err);
void token_file_close(struct token_file *f);
/* The s+1 tokens of a window. ERR_INVALID names file, token offset and id when an id is
 * outside the vocabulary, and says so when the file has shrunk. */
MUST_USE int token_file_window(const struct token_file *f, int64_t window, int32_t *out, struct error *err);

/* ---- order ------------------------------------------------------------------ */

/* Image of i in permutation number `epoch` of [0, n): a six-round Feistel network on the next
 * power of four, walked until it falls inside (Black and Rogaway, CT-RSA 2002). Pure. */
int64_t data_permute(uint64_t seed, int64_t epoch, int64_t n, int64_t i);

/* ---- batches ---------------------------------------------------------------- */

struct data {
    const struct plan *plan; /* the caller's */
    struct token_file train, eval;
    bool has_eval;
    int64_t eval_windows; /* evaluated each time */
    int64_t dp_index;
    int32_t eod_id, pad_id;
    bool mask_eod;
    int32_t *tokens;            /* one window */
    int32_t *inputs, *targets;  /* [accumulation][T] */
    struct micro_batch *micro;  /* [accumulation] */
};

/* Opens the files of a resolved spec for one rank. */
MUST_USE int data_open(struct data *d, const Boost__JobSpec *spec, const struct plan *plan, int rank,
                       struct error *err);
void data_close(struct data *d);

/* Micro-batches of update number `step` (1 is the first); valid until the next call of either.
 * Of the step's samples, number (m*dp + k)*micro_batch + j is row j of micro-batch m on replica k. */
MUST_USE int data_train(struct data *d, int64_t step, const struct micro_batch **out, struct error *err);
/* First and last global sample of an update, for messages. */
void data_range(const struct data *d, int64_t step, int64_t *first, int64_t *last);

/* Evaluation is over eval_tokens (rounded up to windows, capped by the file) spread evenly over
 * the file, always the same. Micro-batches are numbered from 0; short ones are filled with masked rows. */
int64_t data_eval_count(const struct data *d);
MUST_USE int data_eval(struct data *d, int64_t i, const struct micro_batch **out, struct error *err);

#endif
