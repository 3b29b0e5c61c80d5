/* The latents of low-rank pairs, once their sums are complete. */
#include "worker/engine_internal.h"

int bundle_count(const struct engine *e, enum plan_site site)
{
    return e->plan->grouped ? 1 : plan_branches(site).count;
}

struct bundle bundle_at(const struct engine *e, enum plan_site site, int i)
{
    int count = plan_branches(site).count;
    return e->plan->grouped ? (struct bundle){site, 0, count} : (struct bundle){site, i, 1};
}

int64_t bundle_columns(const struct engine *e, const struct bundle *b)
{
    return b->count * e->w.latent;
}

int64_t bundle_offset(const struct engine *e, const struct bundle *b)
{
    return e->plan->T * b->first * e->w.latent;
}

struct param bundle_down(const struct engine *e, const struct bundle *b, int64_t layer)
{
    return param_at(e, &e->layers[layer].site[b->site].down, b->first * e->w.latent * e->w.in[b->site]);
}

void *latent_y(const struct engine *e, const struct bundle *b, int64_t layer)
{
    return act_at(e, engine_buffer(e, BUF_H_QKV + b->site, layer), bundle_offset(e, b));
}

void *latent_z(const struct engine *e, const struct bundle *b, int64_t layer)
{
    if (!e->places.at[BUF_Z_QKV + b->site].bytes)
        return latent_y(e, b, layer); /* without an activation Y is its own z */
    return act_at(e, engine_buffer(e, BUF_Z_QKV + b->site, layer), bundle_offset(e, b));
}

static enum latent_act activation(const struct engine *e)
{
    return e->plan->latent_silu ? LATENT_SILU : LATENT_IDENTITY;
}

/* The factor that is still to be applied to a site's latents; NULL: none. */
static void *online_factor(const struct engine *e, enum plan_site site, int64_t layer)
{
    bool normed = site == SITE_QKV || site == SITE_GU;
    return normed && e->plan->norm_online ? norm_factor(e, site, layer) : NULL;
}

void latent_activate(struct engine *e, const struct bundle *b, int64_t layer, bool again)
{
    const struct plan *p = e->plan;
    void *Y = latent_y(e, b, layer), *z = latent_z(e, b, layer);
    if (again && Y == z)
        return;
    void *R = again ? NULL : online_factor(e, b->site, layer);
    void *S = b->first == 0 ? R : NULL; /* R takes its place, for the bundles that follow */
    e->k->latent_forward(e->ks, p->T, bundle_columns(e, b), p->d, p->norm_eps, activation(e), Y, S, R, z);
}

void latent_gradient(struct engine *e, const struct bundle *b, int64_t layer, void *dz)
{
    void *R = online_factor(e, b->site, layer);
    e->k->latent_backward(e->ks, e->plan->T, bundle_columns(e, b), e->plan->d, activation(e), latent_y(e, b, layer), R,
                          dz, R ? engine_buffer(e, BUF_K, 0) : NULL);
}
