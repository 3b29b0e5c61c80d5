/* Models of the benchmarks by name: plans, weights and tokens, none of which needs a file. */
#ifndef BOOST_TESTS_BENCH_JOB_H
#define BOOST_TESTS_BENCH_JOB_H

#include <stdbool.h>

#include "worker/engine.h"

/* "1b,cola" and fields of a job that differ ("parallel.micro_batch=4"). */
struct bench_job {
    const char *model; /* SIZE,KIND; KIND: full, svd, cola, lax */
    bool cuda;
    int layers; /* 0: the model's own */
    int tp;     /* 0: what the field says */
    int n;
    char **set;
};
/* Ranks of a node that the literature cuts this size for; 1 where it is trained on one device. */
MUST_USE int bench_job_tp(const char *model, int *tp, struct error *err);
MUST_USE int bench_job_plan(const struct bench_job *job, struct plan *out, struct error *err);

/* Weights of the right spread, random and quickly made: not those of a job, whose generator is slower than the whole
 * benchmark. Speed depends on them only as far as the card's power does. */
MUST_USE int bench_fill_weights(struct engine *e, struct error *err);

/* Micro-batches of a step, random tokens among those that rank 0 has logits of, so that with collectives which do not
 * happen it still has a loss. *tokens is what to free. */
MUST_USE int bench_tokens(const struct plan *p, int steps, struct micro_batch **micro, int32_t **tokens,
                          struct error *err);

#endif
