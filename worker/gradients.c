/* How the gradient buffers begin a step. A product makes most gradients: in the stage's first micro-batch it writes
 * them, whatever was there, and adds from then on. All else is zeroed. */
#include <assert.h>
#include <stdlib.h>

#include "worker/engine_internal.h"

/* A tied table is made by the head's product where the head is; where it is the embedding alone, rows are added up. */
static bool made_by_product(const struct engine *e, const struct plan_tensor *t)
{
    switch (t->role) {
    case ROLE_HEAD:
    case ROLE_DENSE:
    case ROLE_DOWN:
    case ROLE_UP:
    case ROLE_GATE:
    case ROLE_GATE_LEFT:
        return true;
    case ROLE_EMBEDDING:
        return e->plan->tied && e->stage.last;
    default:
        return false;
    }
}

int gradients_prepare(struct engine *e, struct error *err)
{
    int64_t end = 0;
    e->zeroed = calloc((size_t)e->tensor_count + 1, sizeof *e->zeroed);
    if (!e->zeroed)
        return error_set(err, ERR_NOMEM, "no memory for what is zeroed of %lld tensors", (long long)e->tensor_count);
    for (int64_t i = 0; i <= e->tensor_count; i++) {
        const struct plan_tensor *t = i < e->tensor_count ? &e->tensors[i] : NULL;
        if (t && !made_by_product(e, t))
            continue;
        int64_t next = t ? t->offset : e->stage.elements;
        assert(next >= end); /* tensors lie in their order */
        if (next > end)
            e->zeroed[e->zeroed_count++] = (struct span){.at = end, .count = next - end};
        end = t ? next + t->nrows * t->ncols : next;
    }
    return ERR_OK;
}

void gradients_begin(struct engine *e)
{
    size_t element = dtype_size(e->k->grad);
    char *grads = engine_buffer(e, BUF_GRADS, 0);
    for (int64_t i = 0; i < e->zeroed_count; i++)
        e->k->zero(e->ks, grads + (size_t)e->zeroed[i].at * element, (size_t)e->zeroed[i].count * element);
}

double gradient_beta(const struct engine *e, int64_t first_row)
{
    return e->first_micro && first_row == 0 ? 0 : 1;
}
