/* Strategy FULL, for dense models: q, k, v, gate and up give this rank's heads and columns of the MLP, o and
 * down take them and give a partial sum of the whole residual. The residual stream is whole on every rank.
 * worker/README.md, "FULL". */
#include "worker/engine_internal.h"

static const char *const sums[SITE_COUNT] = {NULL, "o", NULL, "down"};
static const char *const gradients[SITE_COUNT] = {"gradient of q k v's input", NULL, "gradient of gate up's input",
                                                  NULL};

/* A dense layer has no bottleneck. */
static int latent(struct engine *e, enum plan_site site, int64_t layer, const void *x, bool again, struct error *err)
{
    (void)e, (void)site, (void)layer, (void)x, (void)again, (void)err;
    return ERR_OK;
}

static struct fan branches(const struct engine *e, enum plan_site site)
{
    struct plan_branches b = plan_branches(site);
    return (struct fan){.count = b.count, .out = &e->w.out[b.first], .in = e->w.in[site], .ldx = e->w.in[site]};
}

static int output(struct engine *e, enum plan_site site, int64_t layer, const void *x, void *y, struct error *err)
{
    struct fan f = branches(e, site);
    fan_forward(e, &f, &e->layers[layer].site[site].up, x, y);
    return sums[site] ? reduce_act(e, y, e->plan->T * e->w.x, sums[site], err) : ERR_OK;
}

static int backward(struct engine *e, const struct bundle *b, int64_t layer, const void *x, const void *dy, void *dx,
                    struct error *err)
{
    struct fan f = branches(e, b->site);
    fan_backward(e, &f, &e->layers[layer].site[b->site].up, x, dy, dx);
    return gradients[b->site] ? reduce_act(e, dx, e->plan->T * e->w.x, gradients[b->site], err) : ERR_OK;
}

const struct strategy strategy_full = {
    .name = "FULL",
    .embed_forward = replicated_embed_forward,
    .embed_backward = replicated_embed_backward,
    .head_gather = replicated_head_gather,
    .head_input_gradient = replicated_head_input_gradient,
    .head_scatter = replicated_head_scatter,
    .latent = latent,
    .output = output,
    .backward = backward,
};
