/* Collectives of a step in closed form; derivations in worker/plan/README.md. */
#include <string.h>

#include "worker/plan/plan.h"

static void add(struct plan_comm *c, int64_t times, int64_t calls, int64_t elements)
{
    c->calls += times * calls;
    c->elements += times * elements;
}

/* The forward of one micro-batch, `times` times, counted for pass `pass`. */
static void forward(const struct plan *p, int pass, int64_t times, struct plan_comm_counts *out)
{
    int64_t T = p->T, d = p->d, r = p->r;
    /* Latents 3r, r, 2r, r; online norm sends its statistic along twice. */
    add(&out->tp[PLAN_ALL_REDUCE][pass], times * p->L, 4, 7 * T * r + 2 * T);
    /* Last norm's statistic, maximum of the logits, three sums of cross-entropy. */
    add(&out->tp[PLAN_ALL_REDUCE][pass], times, 3, T + T + 3 * T);
    add(&out->tp[PLAN_ALL_GATHER][pass], times, 1, T * d);
    if (p->tied)
        add(&out->tp[PLAN_REDUCE_SCATTER][pass], times, 1, T * d);
}

static void backward(const struct plan *p, int64_t times, struct plan_comm_counts *out)
{
    int64_t T = p->T, d = p->d, r = p->r;
    add(&out->tp[PLAN_ALL_REDUCE][PLAN_BACKWARD], times * p->L, 4, 7 * T * r);
    add(&out->tp[PLAN_REDUCE_SCATTER][PLAN_BACKWARD], times, 1, T * d);
    if (p->tied)
        add(&out->tp[PLAN_ALL_GATHER][PLAN_BACKWARD], times, 1, T * d);
}

void plan_comm_counts(const struct plan *p, struct plan_comm_counts *out)
{
    enum { AGREEMENT = 8 };
    memset(out, 0, sizeof *out);
    if (p->tp > 1) {
        forward(p, PLAN_FORWARD, p->accumulation, out);
        forward(p, PLAN_EVAL, 1, out);
        backward(p, p->accumulation, out);
    }
    if (p->world > 1)
        add(&out->world[PLAN_ALL_REDUCE][PLAN_STEP], 1, 1, AGREEMENT);
}
