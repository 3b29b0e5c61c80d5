/* Matrix products of the low-rank pairs, and the all-reduce between their halves. */
#include "worker/engine_internal.h"

void down_forward(struct engine *e, int64_t n, int64_t k, const struct param *a, const void *x, void *h)
{
    struct gemm g = {.m = e->plan->T, .n = n, .k = k, .trans_b = true, .lda = k, .ldb = k, .ldc = n, .batch = 1};
    e->k->gemm(e->ks, &g, x, a->weight, h);
}

void down_backward(struct engine *e, int64_t n, int64_t k, const struct param *a, const void *x, const void *dh,
                   void *dx)
{
    int64_t T = e->plan->T;
    struct gemm weight = {
        .m = n, .n = k, .k = T, .trans_a = true, .lda = n, .ldb = k, .ldc = k, .batch = 1, .beta = 1, .c_grad = true};
    e->k->gemm(e->ks, &weight, dh, x, a->grad);
    struct gemm input = {.m = T, .n = k, .k = n, .lda = n, .ldb = k, .ldc = k, .batch = 1};
    e->k->gemm(e->ks, &input, dh, a->weight, dx);
}

void up_forward(struct engine *e, const struct up *u, const struct param *b, const void *z, void *y)
{
    int64_t T = e->plan->T;
    struct gemm g = {.m = T,
                     .n = u->out,
                     .k = u->r,
                     .trans_b = true,
                     .lda = u->ldz,
                     .ldb = u->r,
                     .ldc = u->out,
                     .batch = u->batch,
                     .stride_a = u->r,
                     .stride_b = u->out * u->r,
                     .stride_c = T * u->out};
    e->k->gemm(e->ks, &g, z, b->weight, y);
}

void up_backward(struct engine *e, const struct up *u, const struct param *b, const void *z, const void *dy, void *dz)
{
    int64_t T = e->plan->T;
    struct gemm weight = {.m = u->out,
                          .n = u->r,
                          .k = T,
                          .trans_a = true,
                          .lda = u->out,
                          .ldb = u->ldz,
                          .ldc = u->r,
                          .batch = u->batch,
                          .stride_a = T * u->out,
                          .stride_b = u->r,
                          .stride_c = u->out * u->r,
                          .beta = 1,
                          .c_grad = true};
    e->k->gemm(e->ks, &weight, dy, z, b->grad);
    struct gemm latent = {.m = T,
                          .n = u->r,
                          .k = u->out,
                          .lda = u->out,
                          .ldb = u->r,
                          .ldc = u->ldz,
                          .batch = u->batch,
                          .stride_a = T * u->out,
                          .stride_b = u->out * u->r,
                          .stride_c = u->r};
    e->k->gemm(e->ks, &latent, dy, b->weight, dz);
}

int reduce_latent(struct engine *e, void *latent, int64_t n, void *S, const char *what, struct error *err)
{
    int64_t T = e->plan->T;
    struct comm_segment segments[2] = {
        {.data = latent, .count = T * n, .dtype = e->k->act},
        {.data = S, .count = T, .dtype = e->k->stat},
    };
    int count = S ? 2 : 1;
    if (S && e->k->act == e->k->stat) {
        segments[0].count += T;
        count = 1;
    }
    return comm_all_reduce(&e->comms->tp, e->ks, segments, count, COMM_SUM, what, err);
}
