/* What the device did and when, by CUPTI: kernels of captured sequences too. */
#ifndef BOOST_TESTS_BENCH_TRACE_H
#define BOOST_TESTS_BENCH_TRACE_H

#include <stdint.h>
#include <stdio.h>

#include "proto/base/error.h"

struct trace_record {
    uint64_t start, end; /* ns */
    const char *name;    /* a kernel's, mangled; of a copy "copy", of a memset "memset" */
};
struct trace {
    struct trace_record *records; /* by start */
    int64_t n, lost;              /* lost: CUPTI or memory had no room */
};

/* Before the process's first call of CUDA. ERR_UNSUPPORTED: this build or this machine has no CUPTI. */
MUST_USE int trace_open(struct error *err);
/* While the device has nothing to do. Between the two all is recorded; what was before is dropped. */
MUST_USE int trace_begin(struct error *err);
MUST_USE int trace_end(struct trace *out, struct error *err);
/* No more is recorded. */
void trace_close(void);
void trace_free(struct trace *t);

/* HEAD: the loss with the products beside it, which the table lists under gemm as it knows them by name only. */
enum trace_share { SHARE_GEMM, SHARE_ATTENTION, SHARE_HEAD, SHARE_ELEMENT, SHARE_OPTIMIZER, SHARE_COPY, SHARE_COUNT };
extern const char *const trace_share_names[SHARE_COUNT];
struct trace_summary {
    double share_ms[SHARE_COUNT]; /* a step */
    double busy_ms, idle_ms;      /* a step: with and without anything running, from the first start to the last end */
    double launches;              /* a step */
};
/* Of `steps` steps; `table`: every kernel sorted by its time, NULL for none. */
MUST_USE int trace_summarize(const struct trace *t, int steps, FILE *table, struct trace_summary *out,
                             struct error *err);

#endif
