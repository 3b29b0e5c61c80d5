/* RMSNorm in its two forms: ONLINE, where the factor R is applied behind the latent, and plain, where it is
 * applied in front. Both stand at the two places of a block; the last norm is plain. Derivations: worker/README.md,
 * "Online RMSNorm" and "The plain norm". */
#include "worker/engine_internal.h"

void *norm_x(const struct engine *e, enum plan_site site, int64_t layer)
{
    return engine_buffer(e, site == SITE_QKV ? BUF_X1 : BUF_X2, layer);
}

void *norm_n(const struct engine *e, enum plan_site site, int64_t layer)
{
    return engine_buffer(e, site == SITE_QKV ? BUF_N1 : BUF_N2, layer);
}

void *norm_factor(const struct engine *e, enum plan_site site, int64_t layer)
{
    if (!e->plan->norm_online)
        return engine_buffer(e, site == SITE_QKV ? BUF_R1 : BUF_R2, layer);
    int64_t columns = plan_branches(site).count * e->w.latent;
    return (char *)engine_buffer(e, BUF_H_QKV + site, layer) + plan_statistic_offset(e->plan, &e->backend, columns);
}

static const struct param *norm_gain(const struct engine *e, enum plan_site site, int64_t layer)
{
    return site == SITE_QKV ? &e->layers[layer].norm1 : &e->layers[layer].norm2;
}

bool norm_joins_rows(const struct engine *e)
{
    return !e->plan->norm_online && e->cut->hidden;
}

/* A sum over the columns of each row is complete when the columns are. */
static int reduce_statistic(struct engine *e, void *S, const char *what, struct error *err)
{
    if (!e->cut->hidden)
        return ERR_OK;
    struct comm_segment statistic = {.data = S, .count = e->rows.count, .dtype = e->k->stat};
    return comm_all_reduce(&e->comms->tp, e->ks, &statistic, 1, COMM_SUM, what, err);
}

int plain_norm_forward(struct engine *e, const void *x, const void *y, const struct param *gain, void *x_out, void *R,
                       void *n, struct error *err)
{
    const struct plan *p = e->plan;
    int64_t rows = e->rows.count;
    if (!e->cut->hidden) {
        e->k->norm_forward(e->ks, rows, p->d, p->norm_eps, x, y, gain->weight, x_out, R, n);
        return ERR_OK;
    }
    e->k->residual_gain(e->ks, rows, e->w.x, x, y, NULL, x_out, NULL, R);
    int rc = reduce_statistic(e, R, "norm", err);
    if (rc)
        return rc;
    e->k->norm_apply(e->ks, rows, e->w.x, p->d, p->norm_eps, x_out, gain->weight, R, R, n);
    return ERR_OK;
}

int norm_forward(struct engine *e, enum plan_site site, int64_t layer, const struct addends *sum, struct error *err)
{
    const struct plan *p = e->plan;
    const struct param *gain = norm_gain(e, site, layer);
    int64_t rows = e->rows.count, w = e->w.x;
    const void *x = act_rows(e, sum->x, w), *y = sum->y ? act_rows(e, sum->y, w) : NULL;
    void *x_out = act_rows(e, norm_x(e, site, layer), w), *n = act_rows(e, norm_n(e, site, layer), w);
    void *R = stat_rows(e, norm_factor(e, site, layer), 1);
    void *S = e->sums_latents ? latent_part_statistic(e, site) : R;
    if (e->again) /* R is known then, and S of no use */
        S = stat_rows(e, engine_buffer(e, BUF_K, 0), 1);
    if (!p->norm_online && (!e->again || !e->cut->hidden)) /* of whole rows R comes again, with the same bits */
        return plain_norm_forward(e, x, y, gain, x_out, R, n, err);
    e->k->residual_gain(e->ks, rows, w, x, y, gain->weight, x_out, n, S);
    if (!p->norm_online)
        e->k->norm_apply(e->ks, rows, w, p->d, p->norm_eps, x_out, gain->weight, NULL, R, n);
    return ERR_OK;
}

/* What a norm's backward works on, from the first row at work. */
struct normed {
    const void *x, *n, *gain;
    void *R, *k, *dn, *dx, *dgain;
};
static struct normed normed_rows(const struct engine *e, enum plan_site site, int64_t layer)
{
    const struct param *gain = norm_gain(e, site, layer);
    int64_t w = e->w.x;
    return (struct normed){.x = act_rows(e, norm_x(e, site, layer), w),
                           .n = act_rows(e, norm_n(e, site, layer), w),
                           .gain = gain->weight,
                           .R = stat_rows(e, norm_factor(e, site, layer), 1),
                           .k = stat_rows(e, engine_buffer(e, BUF_K, 0), 1),
                           .dn = act_rows(e, engine_buffer(e, BUF_DN, 0), w),
                           .dx = act_rows(e, engine_buffer(e, BUF_DX, 0), w),
                           .dgain = gain->grad};
}

static void add_gradient(struct engine *e, const struct normed *v, const void *R)
{
    e->k->gain_backward(e->ks, e->rows.count, e->w.x, v->x, v->gain, R, v->k, v->dn, true, v->dx, v->dgain);
}

int normed_dinput(struct engine *e, enum plan_site site, int64_t layer, const void *dy, struct error *err)
{
    int64_t w = e->w.x;
    bool online = e->plan->norm_online;
    struct normed v = normed_rows(e, site, layer);
    void *n = norm_n(e, site, layer), *dn = engine_buffer(e, BUF_DN, 0);
    for (int i = 0; i < bundle_count(e, site); i++) {
        struct bundle b = bundle_at(e, site, i);
        bool adds = i > 0 && !online;
        void *part = adds ? engine_buffer(e, BUF_DBRANCH, 0) : dn;
        int rc = e->strategy->dinput(e, &b, layer, n, dy, part, err);
        if (rc)
            return rc;
        if (adds)
            e->k->copy_rows(e->ks, e->rows.count, w, act_rows(e, part, w), w, true, v.dn, w);
        if (online) /* BUF_K is of this bundle, and dx a sum of what each bundle gives */
            add_gradient(e, &v, NULL);
    }
    return ERR_OK;
}

int norm_backward(struct engine *e, enum plan_site site, int64_t layer, struct error *err)
{
    const struct plan *p = e->plan;
    struct normed v = normed_rows(e, site, layer);
    int64_t rows = e->rows.count;
    if (p->norm_online)
        return ERR_OK;
    if (!e->cut->hidden) {
        e->k->norm_backward(e->ks, rows, p->d, v.x, v.gain, v.R, v.dn, v.dx, v.k, v.dgain);
        return ERR_OK;
    }
    e->k->row_dot(e->ks, rows, e->w.x, v.dn, v.n, v.k);
    int rc = reduce_statistic(e, v.k, "norm gradient", err);
    if (rc)
        return rc;
    e->k->norm_k(e->ks, rows, p->d, v.R, v.k, v.k);
    add_gradient(e, &v, v.R);
    return ERR_OK;
}
