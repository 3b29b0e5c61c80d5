/* Collectives of a step in closed form; the derivations are in worker/plan/README.md. */
#include <string.h>

#include "worker/plan/plan.h"
#include "worker/plan/saturate.h"

static void count(struct plan_comm *c, int64_t times, int64_t calls, int64_t elements, int64_t statistics)
{
    c->calls += times * calls;
    c->elements = add(c->elements, mul(times, elements + statistics));
    c->statistics = add(c->statistics, mul(times, statistics));
}

/* What one micro-batch adds in one stage: `times` of it, counted for pass `pass`. */
struct tally {
    const struct plan *p;
    const struct plan_stage *stage;
    struct plan_comm_counts *out;
    int pass;
    int64_t times;
};

static void call(const struct tally *y, int kind, int64_t times, int64_t calls, int64_t elements)
{
    count(&y->out->tp[kind][y->pass], y->times * times, calls, elements, 0);
}

/* All-reduces of sums of rows, which have their own type; with no calls of their own they go along with others. */
static void statistics(const struct tally *y, int64_t times, int64_t calls, int64_t elements)
{
    count(&y->out->tp[PLAN_ALL_REDUCE][y->pass], y->times * times, calls, 0, elements);
}

/* Cross-entropy: maximum of the logits, then three sums; chunk by chunk of the rows. */
static void loss(const struct tally *y)
{
    int64_t chunks = y->p->T / plan_head_rows(y->p);
    if (y->stage->last)
        statistics(y, 1, 2 * chunks, y->p->T + 3 * y->p->T);
}

/* ---- BTP ---- */

/* All-reduces of latents in a layer, one way. */
static int64_t btp_calls(const struct plan *p)
{
    int64_t slices = plan_first_slice(p) < p->T ? 2 : 1;
    return slices * (p->grouped ? SITE_COUNT : PROJ_COUNT);
}

/* Latents 3r, r, 2r, r. The statistic of two norms goes along, or on its own. A block's layers up to the last A, which
 * is as far as a re-forward goes. */
static void btp_layers(const struct tally *y)
{
    const struct plan *p = y->p;
    int64_t T = p->T, L = y->stage->layers;
    call(y, PLAN_ALL_REDUCE, L, btp_calls(p), 7 * T * p->r);
    statistics(y, L, p->norm_online ? 0 : 2, 2 * T);
}

static void btp_forward(const struct tally *y)
{
    const struct plan *p = y->p;
    btp_layers(y);
    if (y->stage->last) { /* the last norm's statistic and output */
        statistics(y, 1, 1, p->T);
        call(y, PLAN_ALL_GATHER, 1, 1, p->T * p->d);
    }
    if (y->stage->first && p->tied)
        call(y, PLAN_REDUCE_SCATTER, 1, 1, p->T * p->d);
    loss(y);
}

/* LOW_RANK keeps all that a collective gave. */
static void btp_again(const struct tally *y, bool low_rank)
{
    if (!low_rank)
        btp_layers(y);
}

static void btp_backward(const struct tally *y)
{
    const struct plan *p = y->p;
    int64_t T = p->T, d = p->d, r = p->r, L = y->stage->layers;
    call(y, PLAN_ALL_REDUCE, L, btp_calls(p), 7 * T * r);
    if (!p->norm_online)
        statistics(y, L, 2, 2 * T);
    if (y->stage->last)
        call(y, PLAN_REDUCE_SCATTER, 1, 1, T * d);
    if (y->stage->first && p->tied)
        call(y, PLAN_ALL_GATHER, 1, 1, T * d);
}

/* ---- FULL ---- */

/* The embedding's output; the gradient of the head's input. */
static void replicated_edge(const struct tally *y, bool here)
{
    if (here)
        call(y, PLAN_ALL_REDUCE, 1, 1, y->p->T * y->p->d);
}

static void full_forward(const struct tally *y)
{
    call(y, PLAN_ALL_REDUCE, y->stage->layers, 2, 2 * y->p->T * y->p->d); /* behind o and down */
    replicated_edge(y, y->stage->first);
    loss(y);
}

static void full_again(const struct tally *y, bool low_rank)
{
    (void)low_rank;                                                   /* there is no such thing in a dense model */
    call(y, PLAN_ALL_REDUCE, y->stage->layers, 1, y->p->T * y->p->d); /* behind o */
}

static void full_backward(const struct tally *y)
{
    /* In front of q, k, v and of gate, up. */
    call(y, PLAN_ALL_REDUCE, y->stage->layers, 2, 2 * y->p->T * y->p->d);
    replicated_edge(y, y->stage->last);
}

/* ---- VANILLA ---- */

static int64_t qkv_width(const struct plan *p)
{
    return p->d + 2 * p->hk * p->e;
}

/* LAX, from the second layer on: the latents are cut, so their LayerNorms' sums are reduced, and the gates' inputs
 * gathered. */
static void vanilla_crossing(const struct tally *y, int gate_kind)
{
    const struct plan *p = y->p;
    int64_t calls = p->grouped ? SITE_COUNT : PROJ_COUNT;
    int64_t layers = y->stage->layers - y->stage->first;
    if (!p->lax)
        return;
    statistics(y, layers, calls, PROJ_COUNT * 2 * p->T);
    if (p->lax_gate != BOOST__LAX_GATE__VALUE__IDENTITY)
        call(y, gate_kind, layers, calls, PROJ_COUNT * p->T * p->r);
}

/* q, k, v, and attention's output; gate and up. */
static void vanilla_inner(const struct tally *y)
{
    const struct plan *p = y->p;
    int64_t T = p->T, L = y->stage->layers;
    if (p->published) {
        call(y, PLAN_ALL_REDUCE, L, 3, T * qkv_width(p));
    } else { /* onto heads, and back */
        call(y, PLAN_REDUCE_SCATTER, L, 3, T * qkv_width(p));
        call(y, PLAN_ALL_GATHER, L, 1, T * p->d);
    }
    call(y, PLAN_ALL_REDUCE, L, 2, 2 * T * p->f);
}

static void vanilla_forward(const struct tally *y)
{
    const struct plan *p = y->p;
    vanilla_inner(y);
    call(y, PLAN_ALL_REDUCE, y->stage->layers, 2, 2 * p->T * p->d); /* o, down */
    vanilla_crossing(y, PLAN_ALL_GATHER);
    replicated_edge(y, y->stage->first);
    loss(y);
}

/* LOW_RANK keeps the latents and both residuals, not what B gives inside a block. */
static void vanilla_again(const struct tally *y, bool low_rank)
{
    vanilla_inner(y);
    if (low_rank)
        return;
    call(y, PLAN_ALL_REDUCE, y->stage->layers, 1, y->p->T * y->p->d); /* o */
    vanilla_crossing(y, PLAN_ALL_GATHER);
}

static void vanilla_backward(const struct tally *y)
{
    const struct plan *p = y->p;
    int64_t T = p->T, d = p->d, f = p->f, L = y->stage->layers;
    if (p->published) {
        call(y, PLAN_ALL_REDUCE, L, 1, T * d);
    } else {
        call(y, PLAN_ALL_GATHER, L, 3, T * qkv_width(p));
        call(y, PLAN_REDUCE_SCATTER, L, 1, T * d);
    }
    /* In front of q k v, of gate up, of down: once for branches that share an A. */
    int64_t qkv = p->grouped ? 1 : 3, gu = p->grouped ? 1 : 2;
    call(y, PLAN_ALL_REDUCE, L, qkv + gu + 1, T * (qkv * d + gu * d + f));
    /* A LINEAR gate's input gradient is a sum over ranks; TENSOR's two matrices are whole on every rank, and
     * so that their gradients are too, what is gathered is the gradient of its output. */
    bool tensor = p->lax_gate == BOOST__LAX_GATE__VALUE__TENSOR;
    vanilla_crossing(y, tensor ? PLAN_ALL_GATHER : PLAN_REDUCE_SCATTER);
    replicated_edge(y, y->stage->last);
}

/* ---- all ---- */

struct counted {
    void (*forward)(const struct tally *y);
    void (*again)(const struct tally *y, bool low_rank); /* a re-forward of the stage's blocks */
    void (*backward)(const struct tally *y);
};
static const struct counted strategies[] = {
    [BOOST__STRATEGY__VALUE__FULL] = {full_forward, full_again, full_backward},
    [BOOST__STRATEGY__VALUE__VANILLA] = {vanilla_forward, vanilla_again, vanilla_backward},
    [BOOST__STRATEGY__VALUE__BTP] = {btp_forward, btp_again, btp_backward},
};

void plan_stage_comm_counts(const struct plan *p, int index, struct plan_comm_counts *out)
{
    enum { AGREEMENT = 8 };
    struct plan_stage stage;
    plan_stage_at(p, index, &stage);
    memset(out, 0, sizeof *out);
    plan_parallel_counts(p, &stage, out);
    if (p->tp > 1) {
        const struct counted *s = &strategies[p->strategy];
        s->forward(&(struct tally){p, &stage, out, PLAN_FORWARD, p->accumulation});
        s->backward(&(struct tally){p, &stage, out, PLAN_BACKWARD, p->accumulation});
        s->forward(&(struct tally){p, &stage, out, PLAN_EVAL, 1});
        if (p->recompute != BOOST__RECOMPUTE__VALUE__NONE)
            s->again(&(struct tally){p, &stage, out, PLAN_RECOMPUTE, p->accumulation},
                     p->recompute == BOOST__RECOMPUTE__VALUE__LOW_RANK);
    }
    if (p->world > 1)
        count(&out->world[PLAN_ALL_REDUCE][PLAN_STEP], 1, 1, AGREEMENT, 0);
}

void plan_comm_counts(const struct plan *p, struct plan_comm_counts *out)
{
    plan_stage_comm_counts(p, 0, out);
}

int64_t plan_comm_bytes(const struct plan_comm *c, int64_t element_bytes, int64_t statistic_bytes)
{
    return add(mul(c->elements - c->statistics, element_bytes), mul(c->statistics, statistic_bytes));
}
