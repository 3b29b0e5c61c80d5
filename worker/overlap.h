/* All-reduces that run while the rank computes: a queue worked off in order by a thread of its own. Between
 * overlap_begin() and its overlap_wait() the rank makes no other call on its groups. */
#ifndef BOOST_WORKER_OVERLAP_H
#define BOOST_WORKER_OVERLAP_H

#include "worker/comm/comm.h"

struct overlap;

MUST_USE int overlap_create(struct overlap **out, struct error *err);
/* Waits for what is under way. */
void overlap_destroy(struct overlap *o);

enum { OVERLAP_SEGMENTS = 2, OVERLAP_CALLS = 8 };
/* Enqueues the sum over the group of at most OVERLAP_SEGMENTS segments; at most OVERLAP_CALLS may be waited for at a
 * time. The number of the call, for overlap_wait(). */
int64_t overlap_begin(struct overlap *o, struct comm *c, struct kstream *ks, const struct comm_segment *segments, int n,
                      const char *what);
/* Until the call is done; its error. */
MUST_USE int overlap_wait(struct overlap *o, int64_t call, struct error *err);

#endif
