/* Strategy BTP: the chunk boundary sits at the bottleneck. B of one pair, what follows it, and A of the next pair
 * work on this rank's columns; only the r-wide latents are summed over tp, once forward (with the online
 * norm's statistic) and once backward. worker/README.md, "A block under BTP". */
#include "worker/engine_internal.h"

static const char *const sums[SITE_COUNT] = {"latent qkv", "latent o", "latent gate up", "latent down"};
static const char *const gradients[SITE_COUNT] = {"latent gradient qkv", "latent gradient o", "latent gradient gate up",
                                                  "latent gradient down"};

/* One all-reduce over tp of a [T, n] latent, with its statistic when S is not NULL: one segment
 * when the two are of one type and neighbours, else one call of two segments. */
static int reduce_latent(struct engine *e, void *latent, int64_t n, void *S, const char *what, struct error *err)
{
    int64_t T = e->plan->T;
    if (!S)
        return reduce_act(e, latent, T * n, what, err);
    struct comm_segment segments[2] = {
        {.data = latent, .count = T * n, .dtype = e->k->act},
        {.data = S, .count = T, .dtype = e->k->stat},
    };
    bool one = e->k->act == e->k->stat;
    if (one)
        segments[0].count += T;
    return comm_all_reduce(&e->comms->tp, e->ks, segments, one ? 1 : 2, COMM_SUM, what, err);
}

/* The statistic lies behind the last branch, so it travels with the last bundle. */
static int latent(struct engine *e, enum plan_site site, int64_t layer, const void *x, bool again, struct error *err)
{
    int bundles = bundle_count(e, site);
    bool with_statistic = e->plan->norm_online && (site == SITE_QKV || site == SITE_GU);
    for (int i = 0; i < bundles && !again; i++) {
        struct bundle b = bundle_at(e, site, i);
        struct param a = bundle_down(e, &b, layer);
        void *h = latent_y(e, &b, layer);
        down_forward(e, bundle_columns(e, &b), e->w.in[site], &a, x, h);
        void *S = with_statistic && i == bundles - 1 ? norm_factor(e, site, layer) : NULL;
        int rc = reduce_latent(e, h, bundle_columns(e, &b), S, sums[site], err);
        if (rc)
            return rc;
    }
    for (int i = 0; i < bundles; i++) {
        struct bundle b = bundle_at(e, site, i);
        int rc = latent_activate(e, &b, layer, again, err);
        if (rc)
            return rc;
    }
    return ERR_OK;
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
    int64_t before = 0;
    for (int j = 0; j < b->first; j++)
        before += out[j];
    return (struct bundle_up){
        .fan = {.count = b->count,
                .out = out + b->first,
                .in = e->w.latent,
                .ldx = bundle_columns(e, b),
                .stride_x = e->w.latent},
        .b = param_at(e, &e->layers[layer].site[b->site].up, before * e->w.latent),
        .y = e->plan->T * before,
    };
}

static int output(struct engine *e, enum plan_site site, int64_t layer, const void *x, void *y, struct error *err)
{
    (void)x, (void)err;
    for (int i = 0; i < bundle_count(e, site); i++) {
        struct bundle b = bundle_at(e, site, i);
        struct bundle_up up = up_of(e, &b, layer);
        fan_forward(e, &up.fan, &up.b, latent_z(e, &b, layer), act_at(e, y, up.y));
    }
    return ERR_OK;
}

static int backward(struct engine *e, const struct bundle *b, int64_t layer, const void *x, const void *dy, void *dx,
                    struct error *err)
{
    void *dz = engine_buffer(e, BUF_DLATENT, 0);
    int64_t columns = bundle_columns(e, b);
    struct bundle_up up = up_of(e, b, layer);
    struct param a = bundle_down(e, b, layer);
    fan_backward(e, &up.fan, &up.b, latent_z(e, b, layer), act_at(e, dy, up.y), dz);
    int rc = reduce_act(e, dz, e->plan->T * columns, gradients[b->site], err);
    if (!rc)
        rc = latent_gradient(e, b, layer, dz, err);
    if (rc)
        return rc;
    down_backward(e, columns, e->w.in[b->site], 1, &a, x, dz, dx);
    return ERR_OK;
}

const struct strategy strategy_btp = {
    .name = "BTP",
    .embed_forward = sharded_embed_forward,
    .embed_backward = sharded_embed_backward,
    .head_gather = sharded_head_gather,
    .head_scatter = sharded_head_scatter,
    .latent = latent,
    .output = output,
    .backward = backward,
};
