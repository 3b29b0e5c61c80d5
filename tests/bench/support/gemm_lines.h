/* Lines of a benchmark of matrix products. */
#ifndef BOOST_TESTS_BENCH_GEMM_LINES_H
#define BOOST_TESTS_BENCH_GEMM_LINES_H

#include "tests/bench/support/bench_run.h"

/* A line for each product of a layer and of the head, in TFLOP/s: value is the engine's choice, peer_value the fastest
 * candidate of cuBLASLt's heuristic, and each candidate is listed. All run in turn, a third of o->seconds three times.
 */
MUST_USE int bench_gemm(const struct options *o, struct device *d, struct error *err);

#endif
