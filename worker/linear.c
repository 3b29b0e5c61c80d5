/* The products of linear layers. */
#include "worker/engine_internal.h"

void down_forward(struct engine *e, int64_t n, int64_t k, const struct param *a, const void *x, void *h)
{
    struct gemm g = {.m = e->rows.count, .n = n, .k = k, .trans_b = true, .lda = k, .ldb = k, .ldc = n, .batch = 1};
    e->k->gemm(e->ks, &g, x, a->weight, h);
}

void down_weight(struct engine *e, int64_t n, int64_t k, const struct param *a, const void *x, const void *dh)
{
    struct gemm weight = {.m = n,
                          .n = k,
                          .k = e->rows.count,
                          .trans_a = true,
                          .lda = n,
                          .ldb = k,
                          .ldc = k,
                          .batch = 1,
                          .beta = gradient_beta(e, e->rows.first),
                          .c_grad = true};
    e->k->gemm(e->ks, &weight, dh, x, a->grad);
}

void down_input(struct engine *e, int64_t n, int64_t k, int parts, const struct param *a, const void *dh, void *dx)
{
    int64_t w = k / parts;
    struct gemm input = {.m = e->rows.count,
                         .n = w,
                         .k = n,
                         .lda = n,
                         .ldb = k,
                         .ldc = w,
                         .batch = parts,
                         .stride_b = w,
                         .stride_c = e->plan->T * w};
    e->k->gemm(e->ks, &input, dh, a->weight, dx);
}

struct place site_output(const struct engine *e, enum plan_site site, int j)
{
    struct plan_branches b = plan_branches(site);
    const int64_t *out = &e->w.out[b.first];
    int64_t before = 0, all = 0;
    for (int i = 0; i < (int)b.count; i++) {
        before += i < j ? out[i] : 0;
        all += out[i];
    }
    return e->strategy->joined ? (struct place){before, all} : (struct place){e->plan->T * before, out[j]};
}

void up_forward(struct engine *e, const struct up *u, const struct param *w, const void *x, const void *residual,
                void *y)
{
    struct gemm g = {.m = e->rows.count,
                     .n = u->out,
                     .k = u->in,
                     .trans_b = true,
                     .lda = u->ldx,
                     .ldb = u->in,
                     .ldc = u->ldy,
                     .batch = u->count,
                     .stride_a = u->stride_x,
                     .stride_b = u->out * u->in,
                     .stride_c = u->stride_y,
                     .beta = residual ? 1 : 0,
                     .add = residual};
    e->k->gemm(e->ks, &g, x, w->weight, y);
}

/* Inputs of their own: one batch. A shared one: a sum, one by one. */
void up_input(struct engine *e, const struct up *u, const struct param *w, const void *dy, void *dx)
{
    bool shared = u->stride_x == 0;
    struct gemm g = {.m = e->rows.count,
                     .n = u->in,
                     .k = u->out,
                     .lda = u->ldy,
                     .ldb = u->in,
                     .ldc = u->ldx,
                     .batch = shared ? 1 : u->count,
                     .stride_a = u->stride_y,
                     .stride_b = u->out * u->in,
                     .stride_c = u->stride_x};
    for (int j = 0; j < (shared ? u->count : 1); j++) {
        e->k->gemm(e->ks, &g, act_at(e, dy, j * g.stride_a), act_at(e, w->weight, j * g.stride_b), dx);
        g.beta = 1;
    }
}

void up_weight(struct engine *e, const struct up *u, const struct param *w, const void *x, const void *dy)
{
    struct gemm weight = {.m = u->out,
                          .n = u->in,
                          .k = e->rows.count,
                          .trans_a = true,
                          .lda = u->ldy,
                          .ldb = u->ldx,
                          .ldc = u->in,
                          .batch = u->count,
                          .stride_a = u->stride_y,
                          .stride_b = u->stride_x,
                          .stride_c = u->out * u->in,
                          .beta = gradient_beta(e, e->rows.first),
                          .c_grad = true};
    e->k->gemm(e->ks, &weight, dy, x, w->grad);
}

/* The next layers of one shape: where they lie from the first of all. */
struct run {
    int first;
    struct up up;
    struct param w;
    int64_t x, y; /* elements */
};
static bool next_run(const struct engine *e, const struct fan *f, const struct param *w, struct run *r)
{
    int64_t skipped = 0;
    r->first += r->up.count;
    if (r->first >= f->count)
        return false;
    for (int j = 0; j < r->first; j++)
        skipped += f->out[j];
    int64_t out = f->out[r->first];
    r->up = (struct up){1, out, f->in, f->ldx, f->stride_x, f->ldy, out};
    while (r->first + r->up.count < f->count && f->out[r->first + r->up.count] == out)
        r->up.count++;
    r->w = param_at(e, w, skipped * f->in);
    r->x = r->first * f->stride_x;
    r->y = skipped + e->rows.first * f->ldy;
    return true;
}

void fan_forward(struct engine *e, const struct fan *f, const struct param *w, const void *x, const void *residual,
                 void *y)
{
    for (struct run r = {0}; next_run(e, f, w, &r);)
        up_forward(e, &r.up, &r.w, act_at(e, x, r.x), residual ? act_at(e, residual, r.y) : NULL, act_at(e, y, r.y));
}

void fan_input(struct engine *e, const struct fan *f, const struct param *w, const void *dy, void *dx)
{
    for (struct run r = {0}; next_run(e, f, w, &r);)
        up_input(e, &r.up, &r.w, act_at(e, dy, r.y), act_at(e, dx, r.x));
}

void fan_weight(struct engine *e, const struct fan *f, const struct param *w, const void *x, const void *dy)
{
    for (struct run r = {0}; next_run(e, f, w, &r);)
        up_weight(e, &r.up, &r.w, act_at(e, x, r.x), act_at(e, dy, r.y));
}

int reduce_act(struct engine *e, void *data, int64_t n, const char *what, struct error *err)
{
    struct comm_segment segment = {.data = data, .count = n, .dtype = e->k->act};
    return comm_all_reduce(&e->comms->tp, e->ks, &segment, 1, COMM_SUM, what, err);
}
