/* The ends of the network where the residual stream is whole on every rank: the embedding is cut along the
 * vocabulary and its rows are summed; the gradient of the head's input is a sum over vocabulary rows. */
#include "worker/engine_internal.h"

int replicated_embed_forward(struct engine *e, struct error *err)
{
    const struct plan *p = e->plan;
    void *x = engine_buffer(e, BUF_X1, 0);
    e->k->embed(e->ks, p->T, e->vocab_first, e->vocab_rows, p->d, 1, engine_buffer(e, BUF_INPUTS, 0),
                e->embedding.weight, x);
    return reduce_act(e, x, p->T * p->d, "embedding", err);
}

int replicated_embed_backward(struct engine *e, struct error *err)
{
    const struct plan *p = e->plan;
    (void)err;
    e->k->embed_backward(e->ks, p->T, e->vocab_first, e->vocab_rows, p->d, 1, engine_buffer(e, BUF_INPUTS, 0),
                         engine_buffer(e, BUF_DX, 0), e->embedding.grad);
    return ERR_OK;
}

int replicated_head_gather(struct engine *e, struct error *err)
{
    (void)e, (void)err;
    return ERR_OK;
}

void replicated_head_input_gradient(struct engine *e, const struct rows *r)
{
    int64_t d = e->plan->d, columns = e->plan->V_pad / e->plan->tp;
    struct gemm input = {.m = r->count, .n = d, .k = columns, .lda = columns, .ldb = d, .ldc = d, .batch = 1};
    e->k->gemm(e->ks, &input, engine_buffer(e, BUF_LOGITS, 0), e->head.weight,
               act_at(e, engine_buffer(e, BUF_DN, 0), r->first * d));
}

int replicated_head_scatter(struct engine *e, struct error *err)
{
    return reduce_act(e, engine_buffer(e, BUF_DN, 0), e->plan->T * e->plan->d, "head input gradient", err);
}
