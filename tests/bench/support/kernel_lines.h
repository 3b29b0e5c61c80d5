/* Lines of a benchmark of the operations that are no products. */
#ifndef BOOST_TESTS_BENCH_KERNEL_LINES_H
#define BOOST_TESTS_BENCH_KERNEL_LINES_H

#include "tests/bench/support/bench_run.h"

/* A line for each operation and shape inside whole steps, in GB/s of the fewest bytes possible (each input read once,
 * each output written once); peer_value is a large device copy's GB/s, read and written. Times are between events in
 * the stream, and event_us of them the events' own. The last line is all of them but the update. */
MUST_USE int bench_kernels(const struct options *o, struct device *d, struct error *err);

#endif
