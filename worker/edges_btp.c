/* Both ends of the network on hidden shards (worker/README.md, "The edges").
 *
 * Embedding: untied, the table is cut along hidden and needs no communication; tied, it is the
 * head's table, cut along the vocabulary, and each rank's hits are summed straight into hidden
 * shards. Head: the last norm on shards with one [T] statistic, all-gather of its output, V/t
 * columns of logits; backward by reduce-scatter into shards. The norm's backward needs <dn, n>
 * over all of d, which cross-entropy yields from its own three sums without a call. */
#include "worker/edges_btp.h"

/* The [t, T, w] buffer that is exchanged; with one rank the shard itself. */
static void *exchange(const struct engine *e, void *shard)
{
    return e->plan->tp > 1 ? engine_buffer(e, BUF_GATHER, 0) : shard;
}

/* The last norm's output over all of d, [T, d]. */
static void *full_norm(const struct engine *e)
{
    return engine_buffer(e, e->plan->tp > 1 ? BUF_NFULL : BUF_NF, 0);
}

int btp_embed_forward(struct engine *e, struct error *err)
{
    const struct plan *p = e->plan;
    void *x = engine_buffer(e, BUF_X1, 0);
    const int32_t *tokens = engine_buffer(e, BUF_INPUTS, 0);
    if (!p->tied) {
        e->k->embed(e->ks, p->T, 0, p->V, e->w, 1, tokens, e->embedding.weight, x);
        return ERR_OK;
    }
    void *parts = exchange(e, x);
    e->k->embed(e->ks, p->T, e->vocab_first, e->vocab_rows, p->d, p->tp, tokens, e->embedding.weight, parts);
    return comm_reduce_scatter(&e->comms->tp, e->ks, parts, x, p->T * e->w, e->k->act, "embedding", err);
}

int btp_embed_backward(struct engine *e, struct error *err)
{
    const struct plan *p = e->plan;
    void *dx = engine_buffer(e, BUF_DX, 0);
    const int32_t *tokens = engine_buffer(e, BUF_INPUTS, 0);
    if (!p->tied) {
        e->k->embed_backward(e->ks, p->T, 0, p->V, e->w, 1, tokens, dx, e->embedding.grad);
        return ERR_OK;
    }
    void *parts = exchange(e, dx);
    int rc = comm_all_gather(&e->comms->tp, e->ks, dx, parts, p->T * e->w, e->k->act, "embedding gradient", err);
    if (rc)
        return rc;
    e->k->embed_backward(e->ks, p->T, e->vocab_first, e->vocab_rows, p->d, p->tp, tokens, parts, e->embedding.grad);
    return ERR_OK;
}

int btp_head_forward(struct engine *e, struct error *err)
{
    const struct plan *p = e->plan;
    const struct kernels *k = e->k;
    void *x = engine_buffer(e, BUF_XF, 0), *n = engine_buffer(e, BUF_NF, 0), *S = engine_buffer(e, BUF_SF, 0);
    k->residual_gain(e->ks, p->T, e->w, engine_buffer(e, BUF_X2, p->L - 1), engine_buffer(e, BUF_Y, 0), NULL, x, NULL,
                     S);
    struct comm_segment statistic = {.data = S, .count = p->T, .dtype = k->stat};
    int rc = comm_all_reduce(&e->comms->tp, e->ks, &statistic, 1, COMM_SUM, "last norm", err);
    if (rc)
        return rc;
    k->norm_apply(e->ks, p->T, e->w, p->d, p->norm_eps, x, e->norm.weight, S, engine_buffer(e, BUF_RF, 0), n);
    void *parts = exchange(e, n);
    rc = comm_all_gather(&e->comms->tp, e->ks, n, parts, p->T * e->w, k->act, "head input", err);
    if (rc)
        return rc;
    if (p->tp > 1)
        k->interleave(e->ks, p->tp, p->T, e->w, parts, full_norm(e));
    struct gemm logits = {.m = p->T,
                          .n = p->V_pad / p->tp,
                          .k = p->d,
                          .trans_b = true,
                          .lda = p->d,
                          .ldb = p->d,
                          .ldc = p->V_pad / p->tp,
                          .batch = 1};
    k->gemm(e->ks, &logits, full_norm(e), e->head.weight, engine_buffer(e, BUF_LOGITS, 0));
    return ERR_OK;
}

int btp_loss(struct engine *e, double *sum, bool gradient, struct error *err)
{
    const struct plan *p = e->plan;
    const struct kernels *k = e->k;
    int64_t ld = p->V_pad / p->tp, valid = e->vocab_rows, first = e->vocab_first;
    void *logits = engine_buffer(e, BUF_LOGITS, 0), *m = engine_buffer(e, BUF_MAX, 0);
    void *sums = engine_buffer(e, BUF_SUMS, 0);
    const int32_t *targets = engine_buffer(e, BUF_TARGETS, 0);
    struct comm_segment maxima = {.data = m, .count = p->T, .dtype = k->stat};
    struct comm_segment three = {.data = sums, .count = 3 * p->T, .dtype = k->stat};

    k->ce_max(e->ks, p->T, ld, valid, logits, m);
    int rc = comm_all_reduce(&e->comms->tp, e->ks, &maxima, 1, COMM_MAX, "loss maximum", err);
    if (rc)
        return rc;
    k->ce_sums(e->ks, p->T, ld, valid, first, logits, m, targets, sums);
    rc = comm_all_reduce(&e->comms->tp, e->ks, &three, 1, COMM_SUM, "loss sums", err);
    if (rc)
        return rc;
    k->ce_backward(e->ks, p->T, ld, valid, first, logits, m, sums, targets, sum,
                   gradient ? engine_buffer(e, BUF_C, 0) : NULL);
    return ERR_OK;
}

int btp_head_backward(struct engine *e, struct error *err)
{
    const struct plan *p = e->plan;
    const struct kernels *k = e->k;
    int64_t columns = p->V_pad / p->tp;
    void *dlogits = engine_buffer(e, BUF_LOGITS, 0), *dn = engine_buffer(e, BUF_DN, 0);
    void *c = engine_buffer(e, BUF_C, 0), *R = engine_buffer(e, BUF_RF, 0);

    struct gemm weight = {.m = columns,
                          .n = p->d,
                          .k = p->T,
                          .trans_a = true,
                          .lda = columns,
                          .ldb = p->d,
                          .ldc = p->d,
                          .batch = 1,
                          .beta = 1,
                          .c_grad = true};
    k->gemm(e->ks, &weight, dlogits, full_norm(e), e->head.grad);
    /* Part i holds columns [i w, (i + 1) w) of the input's gradient: what rank i keeps of the sum. */
    void *parts = exchange(e, dn);
    struct gemm input = {.m = p->T,
                         .n = e->w,
                         .k = columns,
                         .lda = columns,
                         .ldb = p->d,
                         .ldc = e->w,
                         .batch = p->tp,
                         .stride_b = e->w,
                         .stride_c = p->T * e->w};
    k->gemm(e->ks, &input, dlogits, e->head.weight, parts);
    int rc = comm_reduce_scatter(&e->comms->tp, e->ks, parts, dn, p->T * e->w, k->act, "head input gradient", err);
    if (rc)
        return rc;
    k->norm_k(e->ks, p->T, p->d, R, c, c);
    k->gain_backward(e->ks, p->T, e->w, engine_buffer(e, BUF_XF, 0), e->norm.weight, R, c, dn, false,
                     engine_buffer(e, BUF_DX, 0), e->norm.grad);
    return ERR_OK;
}
