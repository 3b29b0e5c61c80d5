/* Strategy BTP: the chunk boundary sits at the bottleneck. B of one pair, what follows it, and A of the next pair
 * work on this rank's columns; only the r-wide latents are summed over tp, once forward (with the online
 * norm's statistic) and once backward. worker/README.md, "A block under BTP". */
#include "worker/engine_internal.h"

static const char *const sums[SITE_COUNT] = {"latent qkv", "latent o", "latent gate up", "latent down"};
static const char *const gradients[SITE_COUNT] = {"latent gradient qkv", "latent gradient o", "latent gradient gate up",
                                                  "latent gradient down"};

/* The slices of a micro-batch, one after the other: all rows, or two halves of which one's all-reduce runs under
 * the other's products. */
static int slices_of(const struct engine *e, struct rows out[PLAN_SLICES])
{
    int64_t first = plan_first_slice(e->plan), T = e->plan->T;
    out[0] = (struct rows){0, first};
    out[1] = (struct rows){first, T - first};
    return first < T ? 2 : 1;
}

/* The rows of slice s are at work. `beside`: their products run while the other slice is summed, if there is one; by
 * their place and not by what is under way, so that those of a re-forward are the same. */
static void take_slice(struct engine *e, const struct rows slices[PLAN_SLICES], int s, bool beside)
{
    e->rows = slices[s];
    if (e->k->set_spare)
        e->k->set_spare(e->ks, beside && slices[s].count < e->plan->T ? COMM_PROCESSORS : 0);
}

static void all_rows(struct engine *e)
{
    e->rows = (struct rows){0, e->plan->T};
    if (e->k->set_spare)
        e->k->set_spare(e->ks, 0);
}

/* An all-reduce over tp of n columns of the rows at work, with their statistic when S is not NULL: one segment when the
 * two are of one type and neighbours, else one call of two segments. Done at once, or begun. */
static int begin_sum(struct engine *e, int slice, int bundle, void *data, int64_t n, void *S, const char *what,
                     struct error *err)
{
    int64_t rows = e->rows.count;
    struct overlap_call call = {
        .kind = COMM_ALL_REDUCE,
        .comm = &e->comms->tp,
        .ks = e->ks,
        .what = what,
        .segments = {{.data = data, .count = rows * n, .dtype = e->k->act},
                     {.data = S, .count = rows, .dtype = e->k->stat}},
    };
    bool neighbours = S && rows == e->plan->T && e->k->act == e->k->stat;
    if (neighbours)
        call.segments[0].count += rows;
    call.n = S && !neighbours ? 2 : 1;
    if (!e->overlap)
        return comm_all_reduce(call.comm, e->ks, call.segments, call.n, COMM_SUM, what, err);
    e->calls[slice][bundle] = overlap_begin(e->overlap, &call);
    return ERR_OK;
}

static int end_sum(struct engine *e, int slice, int bundle, struct error *err)
{
    return e->overlap ? overlap_wait(e->overlap, e->calls[slice][bundle], err) : ERR_OK;
}

/* Products and their sums; what follows waits for the first slice only when it needs it, in finish(). The statistic
 * lies behind the last branch, so it travels with the last bundle. */
static int latent(struct engine *e, enum plan_site site, int64_t layer, const void *x, bool again, struct error *err)
{
    struct rows slices[PLAN_SLICES];
    int bundles = bundle_count(e, site), n = slices_of(e, slices), rc = ERR_OK;
    bool with_statistic = e->plan->norm_online && (site == SITE_QKV || site == SITE_GU);
    e->begun = !again;
    for (int s = 0; s < n && !again && !rc; s++) {
        take_slice(e, slices, s, s > 0);
        for (int i = 0; i < bundles && !rc; i++) {
            struct bundle b = bundle_at(e, site, i);
            struct param a = bundle_down(e, &b, layer);
            int64_t columns = bundle_columns(e, &b);
            void *h = latent_h(e, &b, layer);
            void *S = with_statistic && i == bundles - 1 ? norm_factor(e, site, layer) : NULL;
            if (S)
                S = (char *)S + e->rows.first * (int64_t)dtype_size(e->k->stat);
            down_forward(e, columns, e->w.in[site], &a, act_at(e, x, e->rows.first * e->w.in[site]), h);
            rc = begin_sum(e, s, i, h, columns, S, sums[site], err);
        }
    }
    all_rows(e);
    return rc;
}

/* The B of a bundle, and where its outputs begin. */
struct bundle_up {
    struct fan fan;
    struct param b;
    int64_t y; /* elements */
};
static struct bundle_up up_of(const struct engine *e, const struct bundle *b, int64_t layer)
{
    const int64_t *out = &e->w.out[plan_branches(b->site).first];
    struct place y = site_output(e, b->site, b->first);
    int64_t before = 0;
    for (int j = 0; j < b->first; j++)
        before += out[j];
    return (struct bundle_up){
        .fan = {.count = b->count,
                .out = out + b->first,
                .in = e->w.latent,
                .ldx = bundle_columns(e, b),
                .stride_x = e->w.latent,
                .ldy = y.ld},
        .b = param_at(e, &e->layers[layer].site[b->site].up, before * e->w.latent),
        .y = y.at,
    };
}

/* From a slice's sums to its z; the rows at work are the slice's. */
static int activate(struct engine *e, enum plan_site site, int64_t layer, int slice, struct error *err)
{
    int rc = ERR_OK;
    for (int i = 0; i < bundle_count(e, site) && e->begun && !rc; i++)
        rc = end_sum(e, slice, i, err);
    for (int i = 0; i < bundle_count(e, site) && !rc; i++) {
        struct bundle b = bundle_at(e, site, i);
        rc = latent_activate(e, &b, layer, !e->begun, err);
    }
    return rc;
}

/* Slice by slice the latents, and with y their B: a kept latent too, so that the bits are those of the forward. */
static int finish(struct engine *e, enum plan_site site, int64_t layer, const void *residual, void *y,
                  struct error *err)
{
    struct rows slices[PLAN_SLICES];
    int n = slices_of(e, slices), rc = ERR_OK;
    for (int s = 0; s < n && !rc; s++) {
        take_slice(e, slices, s, s == 0);
        rc = activate(e, site, layer, s, err);
        for (int i = 0; i < bundle_count(e, site) && y && !rc; i++) {
            struct bundle b = bundle_at(e, site, i);
            struct bundle_up up = up_of(e, &b, layer);
            fan_forward(e, &up.fan, &up.b, latent_z(e, &b, layer), residual, act_at(e, y, up.y));
        }
    }
    all_rows(e);
    return rc;
}

static int output(struct engine *e, enum plan_site site, int64_t layer, const void *x, const void *residual, void *y,
                  struct error *err)
{
    (void)x;
    return finish(e, site, layer, residual, y, err);
}

static int settle(struct engine *e, enum plan_site site, int64_t layer, struct error *err)
{
    return finish(e, site, layer, NULL, NULL, err);
}

static int backward(struct engine *e, const struct bundle *b, int64_t layer, const void *x, const void *dy, void *dx,
                    struct error *err)
{
    struct rows slices[PLAN_SLICES];
    int n = slices_of(e, slices), rc = ERR_OK;
    int64_t columns = bundle_columns(e, b), in = e->w.in[b->site];
    struct bundle_up up = up_of(e, b, layer);
    struct param a = bundle_down(e, b, layer);
    void *dz = engine_buffer(e, BUF_DLATENT, 0);
    for (int s = 0; s < n && !rc; s++) {
        take_slice(e, slices, s, s > 0);
        void *part = act_at(e, dz, e->rows.first * columns);
        fan_backward(e, &up.fan, &up.b, latent_z(e, b, layer), act_at(e, dy, up.y), part);
        rc = begin_sum(e, s, 0, part, columns, NULL, gradients[b->site], err);
    }
    for (int s = 0; s < n && !rc; s++) {
        take_slice(e, slices, s, s == 0);
        void *part = act_at(e, dz, e->rows.first * columns);
        rc = end_sum(e, s, 0, err);
        if (!rc)
            rc = latent_gradient(e, b, layer, part, err);
        if (!rc && x)
            down_weight(e, columns, in, &a, act_at(e, x, e->rows.first * in), part);
        if (!rc)
            down_input(e, columns, in, 1, &a, part, act_at(e, dx, e->rows.first * in));
    }
    all_rows(e);
    return rc;
}

static void weight(struct engine *e, const struct bundle *b, int64_t layer, const void *x, const void *dy)
{
    (void)dy;
    struct param a = bundle_down(e, b, layer);
    down_weight(e, bundle_columns(e, b), e->w.in[b->site], &a, x, engine_buffer(e, BUF_DLATENT, 0));
}

const struct strategy strategy_btp = {
    .name = "BTP",
    .joined = true,
    .embed_forward = sharded_embed_forward,
    .embed_backward = sharded_embed_backward,
    .head_gather = sharded_head_gather,
    .head_input_gradient = sharded_head_input_gradient,
    .head_scatter = sharded_head_scatter,
    .latent = latent,
    .output = output,
    .backward = backward,
    .weight = weight,
    .settle = settle,
};
