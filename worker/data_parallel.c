/* data_parallel.h */
#include "worker/data_parallel.h"

#include <stdlib.h>

int data_parallel_prepare(struct engine *e, struct error *err)
{
    const struct plan *p = e->plan;
    int64_t element = (int64_t)dtype_size(e->k->grad);
    int dp_rank = plan_dp_rank(p, e->rank);
    e->buckets = calloc((size_t)e->stage.layers + 2, sizeof *e->buckets);
    e->owned = calloc((size_t)e->tensor_count, sizeof *e->owned);
    if (!e->buckets || !e->owned)
        return error_set(err, ERR_NOMEM, "no memory for the buckets of %lld layers", (long long)e->stage.layers);
    e->bucket_count = plan_buckets(p, &e->stage, element, e->buckets);
    if (p->dp > 1) {
        e->bucket_calls = calloc((size_t)e->bucket_count, sizeof *e->bucket_calls);
        int rc = e->bucket_calls ? overlap_create(e->k, e->ks, e->bucket_count, &e->sums, err)
                                 : error_set(err, ERR_NOMEM, "no memory for %lld buckets", (long long)e->bucket_count);
        if (rc)
            return rc;
    }
    for (int64_t i = 0; i < e->tensor_count; i++) {
        const struct plan_tensor *t = &e->tensors[i];
        struct owned *o = &e->owned[i];
        plan_owned(p, e->buckets, e->bucket_count, dp_rank, t, &o->first, &o->count);
        for (int64_t b = 0; b < e->bucket_count && o->count; b++) {
            int64_t piece, size, at = t->offset + o->first;
            plan_piece(p, &e->buckets[b], dp_rank, &piece, &size);
            if (at >= piece && at < piece + size)
                o->state = e->buckets[b].first / p->dp + at - piece;
        }
    }
    return ERR_OK;
}

void data_parallel_begin(struct engine *e)
{
    e->next_bucket = 0;
}

static char *grad_at(const struct engine *e, int64_t element)
{
    return (char *)engine_buffer(e, BUF_GRADS, 0) + element * (int64_t)dtype_size(e->k->grad);
}

void data_parallel_reduce(struct engine *e, int64_t layer)
{
    const struct plan *p = e->plan;
    if (!e->sums)
        return;
    for (; e->next_bucket < e->bucket_count && e->buckets[e->next_bucket].after >= layer; e->next_bucket++) {
        const struct plan_bucket *b = &e->buckets[e->next_bucket];
        int64_t piece, size;
        plan_piece(p, b, e->comms->dp.rank, &piece, &size);
        struct overlap_call call = {
            .kind = p->zero ? COMM_REDUCE_SCATTER : COMM_ALL_REDUCE,
            .comm = &e->comms->dp,
            .ks = e->ks,
            .what = "gradients",
            .segments = {{.data = grad_at(e, b->first), .count = b->elements, .dtype = e->k->grad}},
            .n = 1,
            .data = grad_at(e, b->first),
            .out = grad_at(e, piece),
            .chunk = size,
            .dtype = e->k->grad,
        };
        e->comms->dp.pass = PASS_STEP;
        e->bucket_calls[e->next_bucket] = overlap_begin(e->sums, &call);
    }
}

int data_parallel_wait(struct engine *e, struct error *err)
{
    int rc = ERR_OK;
    for (int64_t i = 0; e->sums && i < e->next_bucket && !rc; i++)
        rc = overlap_wait(e->sums, e->bucket_calls[i], err);
    return rc;
}

/* Both stages add in the same order and hence go on with equal tables. */
int data_parallel_join_tables(struct engine *e, struct error *err)
{
    if (e->comms->ends.size == 1)
        return ERR_OK;
    const struct plan_bucket *table = &e->buckets[e->bucket_count - 1];
    int64_t first = table->first, count = table->elements;
    if (e->plan->zero)
        plan_piece(e->plan, table, e->comms->dp.rank, &first, &count);
    struct comm_segment s = {.data = grad_at(e, first), .count = count, .dtype = e->k->grad};
    e->comms->ends.pass = PASS_STEP;
    return comm_all_reduce(&e->comms->ends, e->ks, &s, 1, COMM_SUM, "tied table", err);
}

int data_parallel_gather(struct engine *e, struct error *err)
{
    if (!e->plan->zero)
        return ERR_OK;
    struct comm *dp = &e->comms->dp;
    int rc = ERR_OK;
    void *weights = engine_buffer(e, BUF_WEIGHTS, 0);
    for (int64_t i = 0; i < e->bucket_count && !rc; i++) {
        int64_t piece, size;
        plan_piece(e->plan, &e->buckets[i], dp->rank, &piece, &size);
        dp->pass = PASS_STEP;
        rc = comm_all_gather(dp, e->ks, act_at(e, weights, piece), act_at(e, weights, e->buckets[i].first), size,
                             e->k->act, "weights", err);
    }
    return rc;
}
