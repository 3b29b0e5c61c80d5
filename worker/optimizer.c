/* optimizer.h: AdamW (decoupled decay). */
#include "worker/optimizer.h"

#include "worker/engine_internal.h"

/* Elements to update: one's own when the state is cut over the replicas, else all of the slice. */
static void *part(const struct engine *e, int64_t i, enum state_kind kind, int64_t *count)
{
    struct state_tensor t;
    engine_tensor(e, i, kind, &t);
    *count = e->plan->zero ? t.count : t.tensor.nrows * t.tensor.ncols;
    return e->plan->zero ? t.own : t.device;
}

static void update(struct engine *e)
{
    const struct plan *p = e->plan;
    for (int64_t i = 0; i < e->tensor_count; i++) {
        const struct plan_tensor *t = &e->tensors[i];
        struct adamw hyper = {p->beta1, p->beta2, p->eps, t->decay ? p->weight_decay : 0};
        int64_t n, first = p->zero ? e->owned[i].first : 0;
        void *grad = part(e, i, STATE_GRAD, &n), *m = part(e, i, STATE_MOMENT1, &n);
        void *v = part(e, i, STATE_MOMENT2, &n), *master = part(e, i, STATE_WEIGHT, &n);
        if (n)
            e->k->adamw(e->ks, n, &hyper, e->block, grad, m, v, master,
                        act_at(e, engine_buffer(e, BUF_WEIGHTS, 0), t->offset + first));
    }
}

static const struct optimizer adamw = {.name = "ADAMW", .update = update};

const struct optimizer *find_optimizer(const struct plan *p)
{
    (void)p; /* OptimizerKind has one value */
    return &adamw;
}
