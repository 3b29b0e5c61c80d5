/* Collectives that run while the rank computes, one after the other: on a stream beside the rank's where the backend
 * has such, behind what the rank's had been given at overlap_begin(); else on a thread that works off a queue. Between
 * overlap_begin() and its overlap_wait() the rank makes no other call on that call's group, nor on one that has the
 * same ranks; on other groups it may. */
#ifndef BOOST_WORKER_OVERLAP_H
#define BOOST_WORKER_OVERLAP_H

#include "worker/comm/comm.h"

struct overlap;

enum { OVERLAP_SEGMENTS = 2 };
enum { OVERLAP_MARK = 0 }; /* the slot of the rank's stream that is used */
/* An all-reduce (the sum of at most OVERLAP_SEGMENTS segments) or a reduce-scatter, as in comm.h. */
struct overlap_call {
    enum comm_kind kind;
    struct comm *comm;  /* its pass counts as it is at overlap_begin() */
    struct kstream *ks; /* the rank's */
    const char *what;
    struct comm_segment segments[OVERLAP_SEGMENTS]; /* all_reduce */
    int n;
    void *data, *out; /* reduce_scatter */
    int64_t chunk;
    enum dtype dtype;
};

/* ks: the rank's stream, of k. capacity: calls that are begun and not waited for, at most. */
MUST_USE int overlap_create(const struct kernels *k, struct kstream *ks, int64_t capacity, struct overlap **out,
                            struct error *err);
/* Waits for the call under way; those behind it are not made. */
void overlap_destroy(struct overlap *o);

/* Enqueues a call. Its number, for overlap_wait(). */
int64_t overlap_begin(struct overlap *o, const struct overlap_call *call);
/* Until the call is done (of a stream: what the rank's is given from now on waits); its error. Each call is waited for
 * once, and noted on the status page then. */
MUST_USE int overlap_wait(struct overlap *o, int64_t number, struct error *err);

#endif
