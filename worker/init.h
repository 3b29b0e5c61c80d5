/* Initial weights that do not depend on the layout: element (row, column) of a tensor is a
 * function of (seed, tensor name, row * columns + column) alone. Pure. */
#ifndef BOOST_WORKER_INIT_H
#define BOOST_WORKER_INIT_H

#include <stdint.h>

/* A tensor's key: its name under the run's seed. */
uint64_t init_key(uint64_t seed, const char *name);
/* Numbers `first` to `first + n` of the key's standard normal sequence: Box and Muller's transform
 * in double of Philox 4x32-10 (Salmon and others, Parallel Random Numbers: As Easy as 1, 2, 3). */
void init_normal(uint64_t key, uint64_t first, int64_t n, double *out);
/* Likewise of its sequence of uniform numbers of mean 0 and variance 1: [-sqrt(3), sqrt(3)). */
void init_uniform(uint64_t key, uint64_t first, int64_t n, double *out);

#endif
