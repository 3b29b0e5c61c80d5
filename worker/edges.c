/* The head, the same for every strategy: last norm, logits over this rank's vocabulary rows, cross-entropy. Logits are
 * the widest tensor of all, so they are made, used and forgotten chunk by chunk of the rows; in training that takes the
 * products of the head's backward into its forward.
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
    struct addends sum = block_sum(e, p->L - 1);
    int rc = plain_norm_forward(e, sum.x, sum.y, &e->norm, engine_buffer(e, BUF_XF, 0), engine_buffer(e, BUF_RF, 0),
                                engine_buffer(e, BUF_NF, 0), err);
    return rc ? rc : e->strategy->head_gather(e, err);
}

static void *input_rows(const struct engine *e, const struct rows *r)
{
    return act_at(e, head_input(e), r->first * e->plan->d);
}

void head_logits(struct engine *e, const struct rows *r)
{
    int64_t d = e->plan->d, columns = e->plan->V_pad / e->plan->tp;
    struct gemm logits = {
        .m = r->count, .n = columns, .k = d, .trans_b = true, .lda = d, .ldb = d, .ldc = columns, .batch = 1};
    e->k->gemm(e->ks, &logits, input_rows(e, r), e->head.weight, engine_buffer(e, BUF_LOGITS, 0));
}

/* Cross-entropy of these rows' logits, which become their gradients where c is not NULL. */
static int cross_entropy(struct engine *e, const struct rows *r, double *sum, void *c, struct error *err)
{
    const struct kernels *k = e->k;
    int64_t ld = e->plan->V_pad / e->plan->tp, valid = e->vocab_rows, first = e->vocab_first;
    void *logits = engine_buffer(e, BUF_LOGITS, 0), *m = engine_buffer(e, BUF_MAX, 0);
    void *sums = engine_buffer(e, BUF_SUMS, 0);
    const int32_t *targets = (const int32_t *)engine_buffer(e, BUF_TARGETS, 0) + r->first;
    struct comm_segment maxima = {.data = m, .count = r->count, .dtype = k->stat};
    struct comm_segment three = {.data = sums, .count = 3 * r->count, .dtype = k->stat};

    k->ce_max(e->ks, r->count, ld, valid, logits, m);
    int rc = comm_all_reduce(&e->comms->tp, e->ks, &maxima, 1, COMM_MAX, "loss maximum", err);
    if (rc)
        return rc;
    k->ce_sums(e->ks, r->count, ld, valid, first, logits, m, targets, sums);
    rc = comm_all_reduce(&e->comms->tp, e->ks, &three, 1, COMM_SUM, "loss sums", err);
    if (rc)
        return rc;
    k->ce_backward(e->ks, r->count, ld, valid, first, logits, m, sums, targets, sum, c);
    return ERR_OK;
}

/* What the logits' gradients give: the head's gradient, and dn of these rows on this rank. */
static void products_backward(struct engine *e, const struct rows *r)
{
    int64_t d = e->plan->d, columns = e->plan->V_pad / e->plan->tp;
    struct gemm weight = {.m = columns,
                          .n = d,
                          .k = r->count,
                          .trans_a = true,
                          .lda = columns,
                          .ldb = d,
                          .ldc = d,
                          .batch = 1,
                          .beta = gradient_beta(e, r->first),
                          .c_grad = true};
    e->k->gemm(e->ks, &weight, engine_buffer(e, BUF_LOGITS, 0), input_rows(e, r), e->head.grad);
    e->strategy->head_input_gradient(e, r);
}

int head_loss(struct engine *e, double *sum, bool gradient, struct error *err)
{
    int rc = ERR_OK;
    char *c = engine_buffer(e, BUF_C, 0);
    engine_range(e, "head and loss");
    for (struct rows r = {0, e->head_rows}; r.first < e->plan->T && !rc; r.first += r.count) {
        head_logits(e, &r);
        rc = cross_entropy(e, &r, sum, gradient ? c + r.first * (int64_t)dtype_size(e->k->stat) : NULL, err);
        if (!rc && gradient)
            products_backward(e, &r);
    }
    engine_range_end(e);
    return rc;
}

int head_backward(struct engine *e, struct error *err)
{
    const struct plan *p = e->plan;
    const struct kernels *k = e->k;
    void *c = engine_buffer(e, BUF_C, 0), *R = engine_buffer(e, BUF_RF, 0);
    int rc = e->strategy->head_scatter(e, err);
    if (rc)
        return rc;
    k->norm_k(e->ks, p->T, p->d, R, c, c);
    k->gain_backward(e->ks, p->T, e->w.x, engine_buffer(e, BUF_XF, 0), e->norm.weight, R, c,
                     engine_buffer(e, BUF_DN, 0), false, engine_buffer(e, BUF_DX, 0), e->norm.grad);
    return ERR_OK;
}
