/* Strategy BTP: the chunk boundary sits at the bottleneck. B of one pair, what follows it, and A of the next pair
 * work on this rank's columns; only the r-wide latents are summed over tp, once forward (with the online
 * norm's statistic) and once backward. worker/README.md, "A block under BTP". */
#include "worker/engine_internal.h"

static const char *const sums[SITE_COUNT] = {"latent qkv", "latent o", "latent gate up", "latent down"};
static const char *const gradients[SITE_COUNT] = {"latent gradient qkv", "latent gradient o", "latent gradient gate up",
                                                  "latent gradient down"};

/* An all-reduce over tp of n columns of the rows at work, with their statistic when S is not NULL: one segment when the
 * two are of one type and neighbours, else one call of two segments. Without overlap it is done at once; else it is
 * begun, and products that follow in the same part of the block run beside it. Nothing where the sum is left to the
 * kernel that uses it. */
static int begin_sum(struct engine *e, const struct bundle *b, void *data, int64_t n, void *S, const char *what,
                     struct error *err)
{
    int64_t rows = e->rows.count;
    if (e->sums_latents)
        return ERR_OK;
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
    e->calls[e->slice][b->first] = overlap_begin(e->overlap, &call);
    block_leaves_room(e, true);
    return ERR_OK;
}

static int end_sum(struct engine *e, const struct bundle *b, struct error *err)
{
    return e->overlap ? overlap_wait(e->overlap, e->calls[e->slice][b->first], err) : ERR_OK;
}

/* Products, and their sums begun. The statistic lies behind the last branch, so it travels with the last bundle. */
static int latent(struct engine *e, enum plan_site site, int64_t layer, const void *x, struct error *err)
{
    int bundles = bundle_count(e, site), rc = ERR_OK;
    int64_t in = e->w.in[site];
    bool with_statistic = e->plan->norm_online && (site == SITE_QKV || site == SITE_GU);
    if (e->again)
        return ERR_OK; /* they were kept */
    for (int i = 0; i < bundles && !rc; i++) {
        struct bundle b = bundle_at(e, site, i);
        struct param a = bundle_down(e, &b, layer);
        int64_t columns = bundle_columns(e, &b);
        void *h = e->sums_latents ? latent_part(e, site, WAY_FORWARD) : latent_h(e, &b, layer);
        bool last = with_statistic && i == bundles - 1;
        down_forward(e, columns, in, &a, act_rows(e, x, in), h);
        rc = begin_sum(e, &b, h, columns, last ? stat_rows(e, norm_factor(e, site, layer), 1) : NULL, sums[site], err);
    }
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

/* From the sums, of which all are awaited first since the statistic comes with the last, to z: of kept latents too. */
static int settle(struct engine *e, enum plan_site site, int64_t layer, struct error *err)
{
    bool summed = e->again; /* they were kept so */
    int rc = ERR_OK;
    if (e->sums_latents && !summed) {
        struct bundle all = bundle_at(e, site, 0);
        latent_sum(e, &all, layer, sums[site]);
        return ERR_OK;
    }
    for (int i = 0; i < bundle_count(e, site) && !summed && !rc; i++) {
        struct bundle b = bundle_at(e, site, i);
        rc = end_sum(e, &b, err);
    }
    for (int i = 0; i < bundle_count(e, site) && !rc; i++) {
        struct bundle b = bundle_at(e, site, i);
        rc = latent_activate(e, &b, layer, err);
    }
    return rc;
}

static int output(struct engine *e, enum plan_site site, int64_t layer, const void *x, const void *residual, void *y,
                  struct error *err)
{
    (void)x;
    int rc = settle(e, site, layer, err);
    for (int i = 0; i < bundle_count(e, site) && !rc; i++) {
        struct bundle b = bundle_at(e, site, i);
        struct bundle_up up = up_of(e, &b, layer);
        fan_forward(e, &up.fan, &up.b, latent_z(e, &b, layer), residual, act_at(e, y, up.y));
    }
    return rc;
}

/* Of the rows at work, a bundle's [rows, c l]. Each slice has its own part of the buffer, whatever the site, since the
 * other may be at another one. */
static void *latent_dz(const struct engine *e, const struct bundle *b)
{
    enum { BRANCHES = 3 }; /* of a site, at most */
    int64_t before = e->rows.first * BRANCHES + e->rows.count * b->first;
    return act_at(e, engine_buffer(e, BUF_DLATENT, 0), before * e->w.latent);
}

/* The gradient of B neither needs the sum of dz nor is needed for it: it is made beside that. */
static int dlatent(struct engine *e, const struct bundle *b, int64_t layer, const void *dy, struct error *err)
{
    struct bundle_up up = up_of(e, b, layer);
    void *dz = e->sums_latents ? latent_part(e, b->site, WAY_BACKWARD) : latent_dz(e, b);
    const void *of_bundle = act_at(e, dy, up.y);
    fan_input(e, &up.fan, &up.b, of_bundle, dz);
    int rc = begin_sum(e, b, dz, bundle_columns(e, b), NULL, gradients[b->site], err);
    if (!rc)
        fan_weight(e, &up.fan, &up.b, latent_z(e, b, layer), of_bundle);
    return rc;
}

static void dweight(struct engine *e, const struct bundle *b, int64_t layer, const void *x, const void *dy)
{
    (void)dy;
    struct param a = bundle_down(e, b, layer);
    int64_t in = e->w.in[b->site];
    down_weight(e, bundle_columns(e, b), in, &a, act_rows(e, x, in), latent_dz(e, b));
}

/* From the sum to the gradient of the products. */
static int settle_gradient(struct engine *e, const struct bundle *b, int64_t layer, void *dz, struct error *err)
{
    if (e->sums_latents) {
        latent_gradient_sum(e, b, layer, dz, gradients[b->site]);
        return ERR_OK;
    }
    int rc = end_sum(e, b, err);
    return rc ? rc : latent_gradient(e, b, layer, dz, err);
}

static int dinput(struct engine *e, const struct bundle *b, int64_t layer, const void *x, const void *dy, void *dx,
                  struct error *err)
{
    int64_t in = e->w.in[b->site];
    struct param a = bundle_down(e, b, layer);
    void *dz = latent_dz(e, b);
    int rc = settle_gradient(e, b, layer, dz, err);
    if (rc)
        return rc;
    if (x)
        dweight(e, b, layer, x, dy);
    down_input(e, bundle_columns(e, b), in, 1, &a, dz, act_rows(e, dx, in));
    return ERR_OK;
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
    .settle = settle,
    .dlatent = dlatent,
    .dinput = dinput,
    .dweight = dweight,
};
