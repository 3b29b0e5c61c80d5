/* Which ranks of an attempt are slow, by the time that they spend outside of collectives: in a collective every rank
 * waits for the slowest. Compared with the fastest rank that does the same work (of the same pipeline stage) and with the
 * rank's own best. Pure; memory by rank only. It tells, and nothing acts on it. */
#ifndef BOOST_DAEMON_STRAGGLER_H
#define BOOST_DAEMON_STRAGGLER_H

#include <stdbool.h>
#include <stdint.h>

enum {
    STRAGGLER_WINDOW = 16, /* steps whose median counts, so that one long step is nothing */
    STRAGGLER_LEAST = 8,   /* steps before a rank is judged at all                        */
    STRAGGLER_LOOKS = 3,   /* in a row, at least a second apart, to become slow or not    */
};

struct straggler {
    int rank;
    bool slow;          /* else: it keeps up again */
    double outside_ms;  /* a step, median of its window */
    double fastest_ms;  /* of its stage */
    int fastest_rank;   /* itself when it is the only one */
    double best_ms;     /* lowest median that it had */
    double factor;      /* how much slower: than the fastest, or, with `itself`, than its own best */
    bool itself;
};

struct stragglers;

/* Ranks r with the same r / stage_ranks do the same work. NULL: out of memory. */
struct stragglers *stragglers_new(int world, int stage_ranks);
void stragglers_free(struct stragglers *s);
/* One step of a rank. The first ones of an attempt should be left out: they are slow for all. */
void stragglers_add(struct stragglers *s, int rank, double outside_ms);
/* Judges, at most once a second (mono_ns). What has changed, at most `room` of it; the rest comes with later looks. */
int stragglers_look(struct stragglers *s, int64_t mono_ns, struct straggler *out, int room);
/* Ranks that are slow now, ascending, at most `room`; returns how many there are. */
int stragglers_slow(const struct stragglers *s, struct straggler *out, int room);

#endif
