/* Lines of a benchmark of attention. */
#ifndef BOOST_TESTS_BENCH_ATTENTION_LINES_H
#define BOOST_TESTS_BENCH_ATTENTION_LINES_H

#include "tests/bench/support/bench_run.h"

/* In place of a model and its fields: shapes "B,H,HK,S,E". For each, forward, deterministic and accumulating backward
 * in TFLOP/s (of the scores below the diagonal: 2 B H S S E forward, 2.5 times that backward), by cuDNN where it is
 * there and right, and by the own kernel. */
MUST_USE int bench_attention(const struct options *o, struct device *d, struct error *err);

#endif
