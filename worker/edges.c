/* The head, the same for every strategy: last norm, logits over this rank's vocabulary rows, cross-entropy.
 * The norm's backward needs <dn, n> over all of d, which cross-entropy yields from its own three sums
 * without a call. worker/README.md, "The edges". */
#include "worker/engine_internal.h"

void *head_input(const struct engine *e)
{
    return engine_buffer(e, e->places.at[BUF_NFULL].bytes ? BUF_NFULL : BUF_NF, 0);
}

int head_forward(struct engine *e, struct error *err)
{
    const struct plan *p = e->plan;
    int64_t columns = p->V_pad / p->tp;
    int rc =
        plain_norm_forward(e, engine_buffer(e, BUF_X2, p->L - 1), engine_buffer(e, BUF_Y, 0), &e->norm,
                           engine_buffer(e, BUF_XF, 0), engine_buffer(e, BUF_RF, 0), engine_buffer(e, BUF_NF, 0), err);
    if (!rc)
        rc = e->strategy->head_gather(e, err);
    if (rc)
        return rc;
    struct gemm logits = {
        .m = p->T, .n = columns, .k = p->d, .trans_b = true, .lda = p->d, .ldb = p->d, .ldc = columns, .batch = 1};
    e->k->gemm(e->ks, &logits, head_input(e), e->head.weight, engine_buffer(e, BUF_LOGITS, 0));
    return ERR_OK;
}

int head_loss(struct engine *e, double *sum, bool gradient, struct error *err)
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

int head_backward(struct engine *e, struct error *err)
{
    const struct plan *p = e->plan;
    const struct kernels *k = e->k;
    int64_t columns = p->V_pad / p->tp;
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
    k->gemm(e->ks, &weight, engine_buffer(e, BUF_LOGITS, 0), head_input(e), e->head.grad);
    int rc = e->strategy->head_scatter(e, err);
    if (rc)
        return rc;
    k->norm_k(e->ks, p->T, p->d, R, c, c);
    k->gain_backward(e->ks, p->T, e->w.x, engine_buffer(e, BUF_XF, 0), e->norm.weight, R, c,
                     engine_buffer(e, BUF_DN, 0), false, engine_buffer(e, BUF_DX, 0), e->norm.grad);
    return ERR_OK;
}
