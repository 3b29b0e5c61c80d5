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

/* What lies between the tensors that products make, in the order of the buffer. */
static int64_t gaps(const struct engine *e, struct spans *out)
{
    int64_t n = 0, end = 0;
    for (int64_t i = 0; i <= e->tensor_count; i++) {
        const struct plan_tensor *t = i < e->tensor_count ? &e->tensors[i] : NULL;
        if (t && !made_by_product(e, t))
            continue;
        int64_t next = t ? t->offset : e->stage.elements;
        assert(next >= end); /* tensors lie in their order */
        if (next > end)
            out[n++] = (struct spans){.at = end, .count = next - end, .stride = next - end, .times = 1};
        end = t ? next + t->nrows * t->ncols : next;
    }
    return n;
}

/* How many of n spans in order follow one another at `stride` from the first, of its size; it counts too. taken: the
 * others are to be none of their own any more (times 0). */
static int64_t follow(struct spans *all, int64_t n, int64_t stride, bool taken)
{
    int64_t times = 1;
    for (int64_t i = 1; i < n; i++)
        if (all[i].times > 0 && all[i].count == all[0].count && all[i].at == all[0].at + times * stride) {
            times++;
            if (taken)
                all[i].times = 0;
        }
    return times;
}

/* One launch for all gains of a kind: layers are alike, so theirs lie at equal distances. Of several distances the one
 * with most spans. Returns how many are left. */
static int64_t join(struct spans *all, int64_t n)
{
    int64_t joined = 0;
    for (int64_t i = 0; i < n; i++) {
        struct spans *first = &all[i];
        for (int64_t j = i + 1; j < n && first->times > 0; j++) {
            int64_t stride = all[j].at - first->at, times = follow(first, n - i, stride, false);
            if (times > first->times) {
                first->stride = stride;
                first->times = times;
            }
        }
        if (first->times > 1)
            follow(first, n - i, first->stride, true);
        if (first->times > 0)
            all[joined++] = *first;
    }
    return joined;
}

int gradients_prepare(struct engine *e, struct error *err)
{
    e->zeroed = calloc((size_t)e->tensor_count + 1, sizeof *e->zeroed);
    if (!e->zeroed)
        return error_set(err, ERR_NOMEM, "no memory for what is zeroed of %lld tensors", (long long)e->tensor_count);
    e->zeroed_count = join(e->zeroed, gaps(e, e->zeroed));
    return ERR_OK;
}

void gradients_begin(struct engine *e)
{
    size_t element = dtype_size(e->k->grad);
    char *grads = engine_buffer(e, BUF_GRADS, 0);
    for (int64_t i = 0; i < e->zeroed_count; i++) {
        const struct spans *s = &e->zeroed[i];
        e->k->zero_each(e->ks, grads + (size_t)s->at * element, (size_t)s->count * element, (size_t)s->stride * element,
                        s->times);
    }
}

double gradient_beta(const struct engine *e, int64_t first_row)
{
    return e->first_micro && first_row == 0 ? 0 : 1;
}
