/* Strategy FULL, for dense models: q, k, v, gate and up give this rank's heads and columns of the MLP, o and
 * down take them and give a partial sum of the whole residual. The residual stream is whole on every rank.
 * worker/README.md, "FULL". */
#include "worker/engine_internal.h"

static const char *const sums[SITE_COUNT] = {NULL, "o", NULL, "down"};
static const char *const gradients[SITE_COUNT] = {"gradient of q k v's input", NULL, "gradient of gate up's input",
                                                  NULL};

/* A dense layer has no bottleneck. */
static int latent(struct engine *e, enum plan_site site, int64_t layer, const void *x, struct error *err)
{
    (void)e, (void)site, (void)layer, (void)x, (void)err;
    return ERR_OK;
}

/* Of one input and with joined outputs, a site's layers are one. */
static struct up joined(const struct engine *e, enum plan_site site)
{
    int64_t in = e->w.in[site], out = site_output(e, site, 0).ld;
    return (struct up){.count = 1, .out = out, .in = in, .ldx = in, .ldy = out};
}

static int output(struct engine *e, enum plan_site site, int64_t layer, const void *x, const void *residual, void *y,
                  struct error *err)
{
    struct up u = joined(e, site);
    up_forward(e, &u, &e->layers[layer].site[site].up, x, residual, y);
    return sums[site] ? reduce_act(e, y, e->plan->T * e->w.x, sums[site], err) : ERR_OK;
}

static int dinput(struct engine *e, const struct bundle *b, int64_t layer, const void *x, const void *dy, void *dx,
                  struct error *err)
{
    struct up u = joined(e, b->site);
    const struct param *w = &e->layers[layer].site[b->site].up;
    if (x)
        up_weight(e, &u, w, x, dy);
    up_input(e, &u, w, dy, dx);
    return gradients[b->site] ? reduce_act(e, dx, e->plan->T * e->w.x, gradients[b->site], err) : ERR_OK;
}

static void dweight(struct engine *e, const struct bundle *b, int64_t layer, const void *x, const void *dy)
{
    struct up u = joined(e, b->site);
    up_weight(e, &u, &e->layers[layer].site[b->site].up, x, dy);
}

const struct strategy strategy_full = {
    .name = "FULL",
    .joined = true,
    .embed_forward = replicated_embed_forward,
    .embed_backward = replicated_embed_backward,
    .head_gather = replicated_head_gather,
    .head_input_gradient = replicated_head_input_gradient,
    .head_scatter = replicated_head_scatter,
    .latent = latent,
    .output = output,
    .dinput = dinput,
    .dweight = dweight,
};
