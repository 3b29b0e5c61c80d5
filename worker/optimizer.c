/* optimizer.h: AdamW (decoupled decay). */
#include "worker/optimizer.h"

#include <stdlib.h>

#include "worker/engine_internal.h"

/* Behind the last run, which becomes longer where they touch. */
static void append(struct span *spans, int64_t *n, const struct span *next)
{
    struct span *last = *n ? &spans[*n - 1] : NULL;
    if (!next->count)
        return;
    if (last && last->at + last->count == next->at && last->state + last->count == next->state &&
        last->decay == next->decay)
        last->count += next->count;
    else
        spans[(*n)++] = *next;
}

int optimizer_prepare(struct engine *e, struct error *err)
{
    e->updates = calloc((size_t)e->tensor_count, sizeof *e->updates);
    e->squares = calloc((size_t)e->tensor_count, sizeof *e->squares);
    if (!e->updates || !e->squares)
        return error_set(err, ERR_NOMEM, "no memory for what is updated of %lld tensors", (long long)e->tensor_count);
    for (int64_t i = 0; i < e->tensor_count; i++) {
        const struct plan_tensor *t = &e->tensors[i];
        const struct owned *o = &e->owned[i];
        struct span own = {.at = t->offset + o->first, .state = o->state, .count = o->count, .decay = t->decay};
        struct span all = {.at = t->offset, .state = t->offset, .count = t->nrows * t->ncols, .decay = t->decay};
        append(e->updates, &e->update_count, e->plan->zero ? &own : &all);
        own.state = own.at;
        own.decay = false; /* which the norm does not ask */
        if (t->counted)
            append(e->squares, &e->square_count, &own);
    }
    return ERR_OK;
}

static void update(struct engine *e)
{
    const struct plan *p = e->plan;
    int64_t element = (int64_t)dtype_size(e->k->grad);
    bool separate = e->places.at[BUF_MASTER].bytes != 0;
    char *grads = engine_buffer(e, BUF_GRADS, 0), *weights = engine_buffer(e, BUF_WEIGHTS, 0);
    char *m = engine_buffer(e, BUF_MOMENT1, 0), *v = engine_buffer(e, BUF_MOMENT2, 0);
    char *masters = engine_buffer(e, BUF_MASTER, 0);
    for (int64_t i = 0; i < e->update_count; i++) {
        const struct span *r = &e->updates[i];
        struct adamw hyper = {p->beta1, p->beta2, p->eps, r->decay ? p->weight_decay : 0};
        void *weight = act_at(e, weights, r->at);
        e->k->adamw(e->ks, r->count, &hyper, e->block, grads + r->at * element, m + r->state * element,
                    v + r->state * element, separate ? masters + r->state * element : weight, weight);
    }
}

static const struct optimizer adamw = {.name = "ADAMW", .update = update};

const struct optimizer *find_optimizer(const struct plan *p)
{
    (void)p; /* OptimizerKind has one value */
    return &adamw;
}
