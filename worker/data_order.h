/* The order of training samples: pure functions. */
#ifndef BOOST_WORKER_DATA_ORDER_H
#define BOOST_WORKER_DATA_ORDER_H

#include <stdint.h>

/* Image of i in permutation number `epoch` of [0, n): a six-round Feistel network on the next
 * power of four, walked until it falls inside (Black and Rogaway, CT-RSA 2002). Pure. */
int64_t data_permute(uint64_t seed, int64_t epoch, int64_t n, int64_t i);

#endif
