/* The ends of the network where the residual stream is cut along hidden.
 *
 * Embedding: untied, the table is cut along hidden and needs no communication; tied, it is the
 * head's table, cut along the vocabulary, and each rank's hits are summed straight into hidden
 * shards. Head: all-gather of the last norm's output; backward by reduce-scatter into shards. */
#include "worker/engine_internal.h"

/* The [t, T, w] buffer that is exchanged; with one rank the shard itself. */
static void *exchange(const struct engine *e, void *shard)
{
    return e->plan->tp > 1 ? engine_buffer(e, BUF_EXCHANGE, 0) : shard;
}

int sharded_embed_forward(struct engine *e, struct error *err)
{
    const struct plan *p = e->plan;
    void *x = engine_buffer(e, BUF_X1, 0);
    const int32_t *tokens = engine_buffer(e, BUF_INPUTS, 0);
    if (plan_embedding_by_hidden(p)) {
        e->k->embed(e->ks, p->T, 0, p->V, e->w.x, 1, tokens, e->embedding.weight, x);
        return ERR_OK;
    }
    void *parts = exchange(e, x);
    e->k->embed(e->ks, p->T, e->vocab_first, e->vocab_rows, p->d, p->tp, tokens, e->embedding.weight, parts);
    return comm_reduce_scatter(&e->comms->tp, e->ks, parts, x, p->T * e->w.x, e->k->act, "embedding", err);
}

int sharded_embed_backward(struct engine *e, struct error *err)
{
    const struct plan *p = e->plan;
    void *dx = engine_buffer(e, BUF_DX, 0);
    const int32_t *tokens = engine_buffer(e, BUF_INPUTS, 0);
    if (plan_embedding_by_hidden(p)) {
        e->k->embed_backward(e->ks, p->T, 0, p->V, e->w.x, 1, tokens, dx, e->embedding.grad);
        return ERR_OK;
    }
    void *parts = exchange(e, dx);
    int rc = comm_all_gather(&e->comms->tp, e->ks, dx, parts, p->T * e->w.x, e->k->act, "embedding gradient", err);
    if (rc)
        return rc;
    e->k->embed_backward(e->ks, p->T, e->vocab_first, e->vocab_rows, p->d, p->tp, tokens, parts, e->embedding.grad);
    return ERR_OK;
}

int sharded_head_gather(struct engine *e, struct error *err)
{
    const struct plan *p = e->plan;
    void *n = engine_buffer(e, BUF_NF, 0), *parts = exchange(e, n);
    int rc = comm_all_gather(&e->comms->tp, e->ks, n, parts, p->T * e->w.x, e->k->act, "head input", err);
    if (!rc && p->tp > 1)
        e->k->interleave(e->ks, p->tp, p->T, e->w.x, parts, head_input(e));
    return rc;
}

/* Part i holds columns [i w, (i + 1) w) of the input's gradient: what rank i keeps of the sum. */
void sharded_head_input_gradient(struct engine *e, const struct rows *r)
{
    const struct plan *p = e->plan;
    int64_t columns = p->V_pad / p->tp;
    void *parts = exchange(e, engine_buffer(e, BUF_DN, 0));
    struct gemm input = {.m = r->count,
                         .n = e->w.x,
                         .k = columns,
                         .lda = columns,
                         .ldb = p->d,
                         .ldc = e->w.x,
                         .batch = p->tp,
                         .stride_b = e->w.x,
                         .stride_c = p->T * e->w.x};
    e->k->gemm(e->ks, &input, engine_buffer(e, BUF_LOGITS, 0), e->head.weight,
               act_at(e, parts, r->first * e->w.x));
}

int sharded_head_scatter(struct engine *e, struct error *err)
{
    const struct plan *p = e->plan;
    void *dn = engine_buffer(e, BUF_DN, 0), *parts = exchange(e, dn);
    return comm_reduce_scatter(&e->comms->tp, e->ks, parts, dn, p->T * e->w.x, e->k->act, "head input gradient", err);
}
