/* NULL collectives: one rank of several computes as if the others were there, and nothing travels. For benchmarks of a
 * rank's own work only; no job can have them, since no program but a benchmark is linked with them. */
#ifndef BOOST_TESTS_BENCH_NULL_COMMS_H
#define BOOST_TESTS_BENCH_NULL_COMMS_H

#include "worker/engine.h"

/* copy: as in struct comm_backend, NULL for memcpy. Results are of the right shape and magnitude, and wrong: an
 * all_reduce does nothing, a reduce_scatter leaves this rank's own summand, an all_gather puts this rank's part in its
 * place and leaves in the others' what an earlier operation left there. */
void null_comms(const struct plan *p, int rank,
                void (*copy)(struct kstream *ks, void *to, const void *from, size_t bytes), struct comms *out);

#endif
