/* Operations of the kernels' table repeated on random data: in captured sequences, at operands that go round memory
 * larger than any cache, for as long as it takes the card to settle. One thread. */
#ifndef BOOST_TESTS_BENCH_REPLAY_H
#define BOOST_TESTS_BENCH_REPLAY_H

#include "kernels/kernels.h"
#include "tests/bench/support/bench_run.h"

/* What operations read is never what others write, so the data keep their spread (and the card its power) however
 * often they run. */
struct replay {
    const struct kernels *k;
    struct kstream *ks;
    void (*copy)(struct kstream *ks, void *to, const void *from, size_t bytes); /* on the device; NULL: memcpy */
    struct {
        char *base;
        size_t bytes, at;
    } in, out, sums;           /* random in bf16; written by operations; fp32 that operations add to */
    void *scratch, *workspace; /* of all operations; of attention */
    size_t workspace_bytes;
    bool captures;
};
/* `workspace`: bytes that attention wants at most. */
MUST_USE int replay_open(struct replay *r, const struct options *o, const struct device *d, size_t workspace,
                         struct error *err);
void replay_close(struct replay *r);

/* The next piece of random data, of output, of sums: 256-byte aligned, valid until the memory has been gone round.
 * NULL: there is not so much at once. */
const void *replay_in(struct replay *r, size_t bytes);
void *replay_out(struct replay *r, size_t bytes);
void *replay_sums(struct replay *r, size_t bytes);
/* Bytes of gemm()'s operands from the first element to the last. */
size_t replay_gemm_bytes(const struct gemm *g, char operand);
bool replay_gemm_fits(const struct replay *r, const struct gemm *g);
/* Enqueues one, at fresh operands (what it adds, if that lies apart, too). Attention's statistics are random too: fit for time, not for results. */
void replay_gemm(struct replay *r, const struct gemm *g);
void replay_attention(struct replay *r, const struct attention *a, bool backward);

/* Something that is done over and over; the operands are taken anew each time. */
struct repeated {
    void (*body)(struct replay *r, const void *arg);
    const void *arg;
    /* by repeated_make() */
    struct kgraph *graph; /* NULL: not captured */
    int calls;            /* of the body in a graph */
};
/* Plans are made by a first call; then so many calls are captured that a launch takes about `ms`. */
MUST_USE int repeated_make(struct replay *r, struct repeated *x, double ms, struct error *err);
/* Milliseconds of one call, over at least `seconds`. */
MUST_USE int repeated_run(struct replay *r, const struct repeated *x, double seconds, double *ms, struct error *err);
void repeated_free(struct replay *r, struct repeated *x);

/* Products of 8192 for so long: what comes next runs at the clock that the card's power allows. */
MUST_USE int replay_warm(struct replay *r, double seconds, struct error *err);

#endif
