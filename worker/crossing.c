/* LAX: a latent takes in that of the same projection in the block before. With p its z there,
 *
 *     u = Y + G(p),  z = activation(LayerNorm(u)),
 *
 * and p's gradient gets G's transpose of du. Where latents are whole on every rank (BTP) there is no call in it;
 * where they are cut (VANILLA) the LayerNorm's sums are reduced and the gates' inputs gathered.
 * worker/README.md, "Latent crossing". */
#include "worker/engine_internal.h"

bool crosses(const struct engine *e, int64_t layer)
{
    return e->plan->lax && layer > 0;
}

static void *sums_of(const struct engine *e, const struct bundle *b, int64_t layer)
{
    size_t skipped = (size_t)(2 * (e->plan->T * b->first + e->rows.first * b->count)) * dtype_size(e->k->stat);
    return (char *)engine_buffer(e, BUF_SUM_QKV + b->site, layer) + skipped;
}

static struct crossing shape_of(const struct engine *e, const struct bundle *b)
{
    return (struct crossing){.rows = e->rows.count * b->count,
                             .w = e->w.latent,
                             .r = e->plan->r,
                             .branches = b->count,
                             .eps = 1e-6,
                             .act = latent_activation(e)};
}

/* Sums over a row's columns are complete when the columns are. */
static int reduce_sums(struct engine *e, const struct bundle *b, void *sums, const char *what, struct error *err)
{
    if (!e->cut->latent)
        return ERR_OK;
    struct comm_segment segment = {.data = sums, .count = 2 * e->rows.count * b->count, .dtype = e->k->stat};
    return comm_all_reduce(&e->comms->tp, e->ks, &segment, 1, COMM_SUM, what, err);
}

int crossing_forward(struct engine *e, const struct bundle *b, int64_t layer, struct error *err)
{
    const struct site_params *site = &e->layers[layer].site[b->site];
    int64_t l = e->w.latent;
    struct crossing c = shape_of(e, b);
    struct param gain = bundle_param(e, b, &site->cross_gain, l), bias = bundle_param(e, b, &site->cross_bias, l);
    struct param gate_bias = bundle_param(e, b, &site->gate_bias, l);
    void *u = bundle_part(e, BUF_U_QKV, b, layer, l), *sums = sums_of(e, b, layer);
    struct gated gated;
    int rc = gate_forward(e, b, layer, &gated, err);
    if (rc)
        return rc;
    e->k->cross_sum(e->ks, &c, latent_h(e, b, layer), gated.G, gated.ld, gate_bias.weight, u, e->again ? NULL : sums);
    rc = e->again ? ERR_OK : reduce_sums(e, b, sums, "latent norm", err);
    if (rc)
        return rc;
    e->k->cross_forward(e->ks, &c, u, sums, gain.weight, bias.weight, latent_z(e, b, layer));
    return ERR_OK;
}

int crossing_backward(struct engine *e, const struct bundle *b, int64_t layer, void *dz, struct error *err)
{
    const struct site_params *site = &e->layers[layer].site[b->site];
    int64_t l = e->w.latent;
    struct crossing c = shape_of(e, b);
    struct param gain = bundle_param(e, b, &site->cross_gain, l), bias = bundle_param(e, b, &site->cross_bias, l);
    struct param gate_bias = bundle_param(e, b, &site->gate_bias, l);
    if (!e->plan->lax)
        return ERR_OK;
    void *u = bundle_part(e, BUF_U_QKV, b, layer, l), *sums = sums_of(e, b, layer);
    void *taken = bundle_part(e, BUF_CROSS_QKV, b, 0, l), *back = engine_buffer(e, BUF_BACK, 0);
    if (layer < e->plan->L - 1)
        e->k->copy_rows(e->ks, c.rows, l, taken, l, true, dz, l);
    if (!crosses(e, layer))
        return ERR_OK;
    e->k->cross_backward_sums(e->ks, &c, u, sums, gain.weight, bias.weight, dz, back, gain.grad, bias.grad);
    int rc = reduce_sums(e, b, back, "latent norm gradient", err);
    if (rc)
        return rc;
    e->k->cross_backward(e->ks, &c, u, sums, gain.weight, back, dz, gate_bias.grad);
    return gate_backward(e, b, layer, dz, taken, err);
}
