/* The floor of a training step. */
#ifndef BOOST_TESTS_BENCH_FLOOR_LINES_H
#define BOOST_TESTS_BENCH_FLOOR_LINES_H

#include "tests/bench/support/bench_run.h"

/* One line a variant, in microseconds a token: the products of a whole step of one rank, without and with its
 * attention (deterministic or not), and with copies beside them, o->gib of them read and written, or as many bytes as
 * the engine's own passes move (the update's not). One captured sequence, run for o->seconds. */
MUST_USE int bench_floor(const struct options *o, struct device *d, struct error *err);

#endif
