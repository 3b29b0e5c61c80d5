/* Batches: the samples of a step, in an order that does not depend on the layout.
 *
 * Training takes windows (proto/tokenfile.h) of its files by weight (data_order.h), of each file in a
 * seeded permutation per epoch, all indexed by the global sample number: what a sample is depends on
 * files, weights, seed and number alone. So no layout changes it, and a resumed run goes on with the
 * next sample, whatever its layout was before. */
#ifndef BOOST_WORKER_DATA_H
#define BOOST_WORKER_DATA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/buffer.h"
#include "proto/base/error.h"
#include "proto/job.pb-c.h"
#include "proto/tokenfile.h"
#include "worker/data_order.h"
#include "worker/engine.h"
#include "worker/plan/plan.h"

struct token_set {
    struct token_file *files;
    int n;
    int64_t windows; /* of all */
};

struct data {
    const struct plan *plan; /* the caller's */
    struct token_set train, eval;
    struct data_mixture mixture; /* of train */
    bool has_eval;
    int64_t eval_windows; /* evaluated each time */
    int64_t dp_index;
    int32_t eod_id, pad_id;
    bool mask_eod;
    int32_t *tokens;           /* one window */
    int32_t *inputs, *targets; /* [accumulation][T] */
    struct micro_batch *micro; /* [accumulation] */
};

/* Opens the files of a resolved spec for one rank. */
MUST_USE int data_open(struct data *d, const Boost__JobSpec *spec, const struct plan *plan, int rank,
                       struct error *err);
void data_close(struct data *d);

/* Micro-batches of update number `step` (1 is the first); valid until the next call of either.
 * Of the step's samples, number (m*dp + k)*micro_batch + j is row j of micro-batch m on replica k. */
MUST_USE int data_train(struct data *d, int64_t step, const struct micro_batch **out, struct error *err);
/* Number of a training window: which file, and which window of it, is global sample `sample`. */
void data_sample(const struct data *d, int64_t sample, int *file, int64_t *window);
/* What training file i is and gives, for a log line. */
void data_describe(const struct data *d, int i, char *out, size_t cap);
/* Appends what the order of samples follows from, apart from seed and batch: a text without line ends, of 20 to 60
 * bytes a file. The files' names are not in it, since a file may move. */
MUST_USE int data_identity(struct data *d, struct buffer *out, struct error *err);
/* How many differences there are between the training data and that of such a text; `out` tells them. 0 too where the
 * text is none of these. */
int data_changes(struct data *d, const char *was, char *out, size_t cap);
/* First and last global sample of an update, for messages. */
void data_range(const struct data *d, int64_t step, int64_t *first, int64_t *last);

/* Evaluation is over eval_tokens (rounded up to windows, capped by the files) spread evenly over
 * the windows of all files in their order, always the same. Micro-batches are numbered from 0; short ones are filled
 * with masked rows. */
int64_t data_eval_count(const struct data *d);
MUST_USE int data_eval(struct data *d, int64_t i, const struct micro_batch **out, struct error *err);

#endif
