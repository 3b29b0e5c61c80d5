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

/* A sum over the columns of each row is complete when the columns are. */
static int reduce_statistic(struct engine *e, void *S, const char *what, struct error *err)
{
    if (!e->cut->hidden)
        return ERR_OK;
    struct comm_segment statistic = {.data = S, .count = e->plan->T, .dtype = e->k->stat};
    return comm_all_reduce(&e->comms->tp, e->ks, &statistic, 1, COMM_SUM, what, err);
}

int plain_norm_forward(struct engine *e, const void *x, const void *y, const struct param *gain, void *x_out, void *R,
                       void *n, struct error *err)
{
    const struct plan *p = e->plan;
    if (!e->cut->hidden) {
        e->k->norm_forward(e->ks, p->T, p->d, p->norm_eps, x, y, gain->weight, x_out, R, n);
        return ERR_OK;
    }
    e->k->residual_gain(e->ks, p->T, e->w.x, x, y, NULL, x_out, NULL, R);
    int rc = reduce_statistic(e, R, "norm", err);
    if (rc)
        return rc;
    e->k->norm_apply(e->ks, p->T, e->w.x, p->d, p->norm_eps, x_out, gain->weight, R, R, n);
    return ERR_OK;
}

int norm_forward(struct engine *e, enum plan_site site, int64_t layer, const void *x, const void *y, bool again,
                 struct error *err)
{
    const struct plan *p = e->plan;
    const struct param *gain = norm_gain(e, site, layer);
    void *x_out = norm_x(e, site, layer), *n = norm_n(e, site, layer), *R = norm_factor(e, site, layer);
    void *S = again ? engine_buffer(e, BUF_K, 0) : R;   /* R is known then, and S of no use */
    if (!p->norm_online && (!again || !e->cut->hidden)) /* of whole rows R comes again, with the same bits */
        return plain_norm_forward(e, x, y, gain, x_out, R, n, err);
    e->k->residual_gain(e->ks, p->T, e->w.x, x, y, gain->weight, x_out, n, S);
    if (!p->norm_online)
        e->k->norm_apply(e->ks, p->T, e->w.x, p->d, p->norm_eps, x_out, gain->weight, NULL, R, n);
    return ERR_OK;
}

static void add_gradient(struct engine *e, enum plan_site site, int64_t layer, const void *R, const void *dn)
{
    const struct param *gain = norm_gain(e, site, layer);
    e->k->gain_backward(e->ks, e->plan->T, e->w.x, norm_x(e, site, layer), gain->weight, R, engine_buffer(e, BUF_K, 0),
                        dn, true, engine_buffer(e, BUF_DX, 0), gain->grad);
}

int normed_backward(struct engine *e, enum plan_site site, int64_t layer, const void *dy, struct error *err)
{
    const struct plan *p = e->plan;
    void *n = norm_n(e, site, layer), *dn = engine_buffer(e, BUF_DN, 0), *k = engine_buffer(e, BUF_K, 0);
    for (int i = 0; i < bundle_count(e, site); i++) {
        struct bundle b = bundle_at(e, site, i);
        bool adds = i > 0 && !p->norm_online;
        void *part = adds ? engine_buffer(e, BUF_DBRANCH, 0) : dn;
        int rc = e->strategy->backward(e, &b, layer, n, dy, part, err);
        if (rc)
            return rc;
        if (adds)
            e->k->copy_rows(e->ks, p->T, e->w.x, part, e->w.x, true, dn, e->w.x);
        if (p->norm_online) /* BUF_K is of this bundle, and dx a sum of what each bundle gives */
            add_gradient(e, site, layer, NULL, dn);
    }
    if (p->norm_online)
        return ERR_OK;
    void *R = norm_factor(e, site, layer);
    if (!e->cut->hidden) {
        const struct param *gain = norm_gain(e, site, layer);
        e->k->norm_backward(e->ks, p->T, p->d, norm_x(e, site, layer), gain->weight, R, dn, engine_buffer(e, BUF_DX, 0),
                            k, gain->grad);
        return ERR_OK;
    }
    e->k->row_dot(e->ks, p->T, e->w.x, dn, n, k);
    int rc = reduce_statistic(e, k, "norm gradient", err);
    if (rc)
        return rc;
    e->k->norm_k(e->ks, p->T, p->d, R, k, k);
    add_gradient(e, site, layer, R, dn);
    return ERR_OK;
}
