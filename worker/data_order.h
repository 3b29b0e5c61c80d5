/* The order of training samples: from a sample's number to a file and a window, by pure functions.
 * Derivations: worker/README.md, "The order of samples". One thread may make a mixture, any may use it. */
#ifndef BOOST_WORKER_DATA_ORDER_H
#define BOOST_WORKER_DATA_ORDER_H

#include <stdint.h>

#include "proto/base/error.h"

/* Image of i in permutation number `epoch` of [0, n): a six-round Feistel network on the next
 * power of four, walked until it falls inside (Black and Rogaway, CT-RSA 2002). Pure. */
int64_t data_permute(uint64_t seed, int64_t epoch, int64_t n, int64_t i);

/* The seed of file number `file`: the job's for the first. */
uint64_t data_file_seed(uint64_t seed, int file);

/* Which file a sample comes from. Of every `period` samples, share[f] are of file f, so spread that after any
 * number n of samples each file has given more than n share/period - 1 and less than n share/period + 1. */
enum { MIXTURE_PERIOD_MAX = 1 << 20, MIXTURE_FILES_MAX = 1 << 16 };
struct data_mixture {
    int files;
    int32_t period;
    int32_t *share; /* [files], at least 1; their sum is the period */
    uint16_t *file; /* [period] */
    int32_t *turn;  /* [period], samples of the same file before this one within the period */
};
/* Weights are above 0. The period is the smallest in which every share is a whole number (to 1e-9); where none
 * up to MIXTURE_PERIOD_MAX is, that one, with shares rounded to its parts: to less than one in a million.
 * ERR_INVALID: a weight that is no part at all. */
MUST_USE int data_mixture_make(struct data_mixture *m, const double *weights, int files, struct error *err);
void data_mixture_free(struct data_mixture *m);
/* Sample number `sample` of the run is sample number *number of file *file. */
void data_mixture_at(const struct data_mixture *m, int64_t sample, int *file, int64_t *number);

#endif
