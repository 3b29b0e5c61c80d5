/* The products of linear layers. */
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

/* Branches of one shape from number j on. */
static int run_length(const struct fan *f, int j)
{
    int n = 1;
    while (j + n < f->count && f->out[j + n] == f->out[j])
        n++;
    return n;
}

/* Where a run of branches lies: parameters, input and output of its first. */
struct run {
    int first, count;
    int64_t out, in, ldx, stride_x;
    struct param w;
    int64_t x, y; /* elements from the first branch's */
};
static bool next_run(const struct engine *e, const struct fan *f, const struct param *w, struct run *r)
{
    int64_t skipped = 0;
    r->first += r->count;
    if (r->first >= f->count)
        return false;
    for (int j = 0; j < r->first; j++)
        skipped += f->out[j];
    r->count = run_length(f, r->first);
    r->out = f->out[r->first];
    r->in = f->in;
    r->ldx = f->shared ? f->in : f->count * f->in;
    r->stride_x = f->shared ? 0 : f->in;
    r->w = param_at(e, w, skipped * f->in);
    r->x = r->first * r->stride_x;
    r->y = e->plan->T * skipped;
    return true;
}

void fan_forward(struct engine *e, const struct fan *f, const struct param *w, const void *x, void *y)
{
    int64_t T = e->plan->T;
    for (struct run r = {0}; next_run(e, f, w, &r);) {
        struct gemm g = {.m = T,
                         .n = r.out,
                         .k = r.in,
                         .trans_b = true,
                         .lda = r.ldx,
                         .ldb = r.in,
                         .ldc = r.out,
                         .batch = r.count,
                         .stride_a = r.stride_x,
                         .stride_b = r.out * r.in,
                         .stride_c = T * r.out};
        e->k->gemm(e->ks, &g, act_at(e, x, r.x), r.w.weight, act_at(e, y, r.y));
    }
}

/* dx of a run whose branches have inputs of their own: one batch. Of a shared one: a sum, one by one. */
static void input_gradient(struct engine *e, const struct run *r, bool shared, const void *dy, void *dx)
{
    int64_t T = e->plan->T;
    struct gemm g = {.m = T,
                     .n = r->in,
                     .k = r->out,
                     .lda = r->out,
                     .ldb = r->in,
                     .ldc = r->ldx,
                     .batch = shared ? 1 : r->count,
                     .stride_a = T * r->out,
                     .stride_b = r->out * r->in,
                     .stride_c = r->stride_x};
    if (!shared) {
        e->k->gemm(e->ks, &g, act_at(e, dy, r->y), r->w.weight, act_at(e, dx, r->x));
        return;
    }
    for (int j = 0; j < r->count; j++) {
        g.beta = r->first + j > 0;
        e->k->gemm(e->ks, &g, act_at(e, dy, r->y + j * g.stride_a), act_at(e, r->w.weight, j * g.stride_b), dx);
    }
}

void fan_backward(struct engine *e, const struct fan *f, const struct param *w, const void *x, const void *dy, void *dx)
{
    int64_t T = e->plan->T;
    for (struct run r = {0}; next_run(e, f, w, &r);) {
        struct gemm weight = {.m = r.out,
                              .n = r.in,
                              .k = T,
                              .trans_a = true,
                              .lda = r.out,
                              .ldb = r.ldx,
                              .ldc = r.in,
                              .batch = r.count,
                              .stride_a = T * r.out,
                              .stride_b = r.stride_x,
                              .stride_c = r.out * r.in,
                              .beta = 1,
                              .c_grad = true};
        e->k->gemm(e->ks, &weight, act_at(e, dy, r.y), act_at(e, x, r.x), r.w.grad);
        input_gradient(e, &r, f->shared, dy, dx);
    }
}

int reduce_act(struct engine *e, void *data, int64_t n, const char *what, struct error *err)
{
    struct comm_segment segment = {.data = data, .count = n, .dtype = e->k->act};
    return comm_all_reduce(&e->comms->tp, e->ks, &segment, 1, COMM_SUM, what, err);
}
