/* How long each operation of the kernels' table takes, by events in the stream around every call: needs no profiler,
 * and knows shapes, so it can say what an operation makes of its bytes and FLOP. Steps must not be captured; an
 * operation of a few microseconds looks longer than it is, by the launch that the event waits for. */
#ifndef BOOST_TESTS_BENCH_OP_TIMES_H
#define BOOST_TESTS_BENCH_OP_TIMES_H

#include <stdio.h>

#include "kernels/kernels.h"
#include "tests/bench/support/trace.h"

/* Puts itself before the operations of *table, which an engine is then to be made with. One table a process; the calls
 * of one thread at a time. `cuda`: events of the driver; else the host's clock. */
MUST_USE int op_times_open(struct kernels *table, bool cuda, struct error *err);
/* Products with this many rows or columns, or a sum of so many, are the head's. */
void op_times_vocabulary(int64_t columns);
void op_times_begin(void);
void op_times_stop(void); /* without a sum: what was recorded stays */
/* When the device has nothing left to do. A line for each operation and shape, the longest first; time by kind a step,
 * and bytes (of operands, each once) that operations which are no products moved. */
struct op_times {
    double share_ms[SHARE_COUNT];
    double element_gb;
    double calls;
};
MUST_USE int op_times_end(int steps, FILE *out, struct op_times *sums, struct error *err);

/* The calls since op_times_begin() one by one, in order; their times are there after op_times_end(). */
enum op_kind { OP_OTHER, OP_GEMM, OP_ATTENTION_FORWARD, OP_ATTENTION_BACKWARD };
struct op_call {
    enum op_kind kind;
    enum trace_share share;
    const char *label; /* operation and shape */
    double bytes;      /* each operand once */
    double flop, ms;
    union {
        struct gemm gemm;
        struct attention attention;
    };
};
int64_t op_times_count(void);
void op_times_call(int64_t i, struct op_call *out);

#endif
