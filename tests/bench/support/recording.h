/* The operations of one step of the engine, as it calls them: what benchmarks of single operations take their shapes
 * from, so that they follow the engine. */
#ifndef BOOST_TESTS_BENCH_RECORDING_H
#define BOOST_TESTS_BENCH_RECORDING_H

#include "tests/bench/support/bench_run.h"
#include "tests/bench/support/op_times.h"

/* op_times_call() has them, of `layers` layers (0: the model's own) of rank 0 of tp with NULL collectives; the engine
 * is gone again. Once a process, before the table is used for anything else. */
MUST_USE int record_step(const struct options *o, struct device *d, int layers, struct plan *plan, struct error *err);

/* The products of a recording, each once. */
struct product {
    struct gemm gemm;
    char name[64]; /* "q_k_v_A_fwd", or by shape where the plan does not list it */
    int calls;     /* in the recorded step */
};
/* *products is what to free. */
MUST_USE int recorded_products(const struct plan *p, struct product **products, int *n, struct error *err);

#endif
