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

void *bundle_part(const struct engine *e, enum plan_buffer first, const struct bundle *b, int64_t layer, int64_t width)
{
    int64_t branches_before = e->plan->T * b->first, rows_before = e->rows.first * b->count;
    return act_at(e, engine_buffer(e, first + b->site, layer), (branches_before + rows_before) * width);
}

struct param bundle_param(const struct engine *e, const struct bundle *b, const struct param *p, int64_t each)
{
    return p->weight ? param_at(e, p, b->first * each) : *p;
}

struct param bundle_down(const struct engine *e, const struct bundle *b, int64_t layer)
{
    return bundle_param(e, b, &e->layers[layer].site[b->site].down, e->w.latent * e->w.in[b->site]);
}

void *latent_h(const struct engine *e, const struct bundle *b, int64_t layer)
{
    return bundle_part(e, BUF_H_QKV, b, layer, e->w.latent);
}

void *latent_z(const struct engine *e, const struct bundle *b, int64_t layer)
{
    if (!e->places.at[BUF_Z_QKV + b->site].bytes)
        return latent_h(e, b, layer); /* without an activation Y is z, and takes H's place */
    return bundle_part(e, BUF_Z_QKV, b, layer, e->w.latent);
}

enum latent_act latent_activation(const struct engine *e)
{
    return e->plan->latent_silu ? LATENT_SILU : LATENT_IDENTITY;
}

/* The factor that is still to be applied to a site's latents; NULL: none. */
static void *online_factor(const struct engine *e, enum plan_site site, int64_t layer)
{
    bool normed = site == SITE_QKV || site == SITE_GU;
    return normed && e->plan->norm_online ? stat_rows(e, norm_factor(e, site, layer), 1) : NULL;
}

int latent_activate(struct engine *e, const struct bundle *b, int64_t layer, struct error *err)
{
    const struct plan *p = e->plan;
    void *H = latent_h(e, b, layer), *z = latent_z(e, b, layer), *R = online_factor(e, b->site, layer);
    void *S = b->first == 0 && !e->again ? R : NULL; /* R takes its place, for the bundles that follow */
    bool crossing = crosses(e, layer);
    if (crossing)
        z = H;
    if (!e->again || H != z)
        e->k->latent_forward(e->ks, e->rows.count, bundle_columns(e, b), p->d, p->norm_eps,
                             crossing ? LATENT_IDENTITY : latent_activation(e), H, S, R, z);
    return crossing ? crossing_forward(e, b, layer, err) : ERR_OK;
}

int latent_gradient(struct engine *e, const struct bundle *b, int64_t layer, void *dz, struct error *err)
{
    void *R = online_factor(e, b->site, layer), *H = latent_h(e, b, layer), *k = engine_buffer(e, BUF_K, 0);
    bool crossing = crosses(e, layer);
    enum latent_act act = crossing ? LATENT_IDENTITY : latent_activation(e);
    const void *latent = act == LATENT_IDENTITY && !crossing ? latent_z(e, b, layer) : H;
    int rc = crossing_backward(e, b, layer, dz, err);
    if (rc)
        return rc;
    e->k->latent_backward(e->ks, e->rows.count, bundle_columns(e, b), e->plan->d, act, latent, R, dz,
                          R ? stat_rows(e, k, 1) : NULL);
    return ERR_OK;
}

/* ---- two ranks' parts ---- */

void *latent_part(const struct engine *e, enum plan_site site, enum way way)
{
    return engine_buffer(e, (site + (way == WAY_BACKWARD)) % 2 ? BUF_PART_ODD : BUF_PART_EVEN, 0);
}

void *latent_part_statistic(const struct engine *e, enum plan_site site)
{
    return (char *)latent_part(e, site, WAY_FORWARD) + plan_statistic_offset(e->plan, &e->backend, 3 * e->w.latent);
}

static struct comm_own_sum begin(struct engine *e, const struct bundle *b, bool statistic, const char *what)
{
    const struct comm_segment segments[] = {
        {.count = e->rows.count * bundle_columns(e, b), .dtype = e->k->act},
        {.count = e->rows.count, .dtype = e->k->stat},
    };
    return comm_own_sum_begin(&e->comms->tp, e->ks, segments, statistic ? 2 : 1, what);
}

void latent_sum(struct engine *e, const struct bundle *b, int64_t layer, const char *what)
{
    const struct plan *p = e->plan;
    struct comm *tp = &e->comms->tp;
    void *R = online_factor(e, b->site, layer);
    struct comm_own_sum sum = begin(e, b, R, what);
    e->k->latent_sum_forward(e->ks, tp->reach, e->rows.count, bundle_columns(e, b), p->d, p->norm_eps,
                             latent_activation(e), latent_part(e, b->site, WAY_FORWARD),
                             R ? latent_part_statistic(e, b->site) : NULL, latent_h(e, b, layer), R,
                             latent_z(e, b, layer));
    comm_own_sum_end(tp, &sum);
}

void latent_gradient_sum(struct engine *e, const struct bundle *b, int64_t layer, void *dz, const char *what)
{
    struct comm *tp = &e->comms->tp;
    void *R = online_factor(e, b->site, layer), *k = engine_buffer(e, BUF_K, 0);
    enum latent_act act = latent_activation(e);
    const void *latent = act == LATENT_IDENTITY ? latent_z(e, b, layer) : latent_h(e, b, layer);
    struct comm_own_sum sum = begin(e, b, false, what);
    e->k->latent_sum_backward(e->ks, tp->reach, e->rows.count, bundle_columns(e, b), e->plan->d, act, latent, R,
                              latent_part(e, b->site, WAY_BACKWARD), dz, R ? k : NULL);
    comm_own_sum_end(tp, &sum);
}
