/* A decoder block under BTP: the chunk boundary sits at the bottleneck. B of one
 * pair, what follows it, and A of the next pair work on this rank's columns; only the r-wide
 * latents are summed over tp, once forward (with the norm's statistic) and once backward.
 * Shapes and derivations: worker/README.md. */
#include "worker/edges_btp.h"
#include "worker/engine_internal.h"

/* The latent behind a down-projection: summed over tp, normed if S is given, activated. */
struct latent {
    int64_t n;          /* width: 3r, r, 2r, r */
    enum plan_buffer h; /* keeps Y for the backward */
    enum plan_buffer z;
    enum plan_buffer R;             /* of the norm in front; BUF_COUNT: none */
    const char *forward, *backward; /* for messages and the status page */
};
static struct latent latent_qkv(const struct engine *e)
{
    return (struct latent){3 * e->plan->r, BUF_H_QKV, BUF_Z_QKV, BUF_R1, "latent qkv", "latent gradient qkv"};
}
static struct latent latent_o(const struct engine *e)
{
    return (struct latent){e->plan->r, BUF_H_O, BUF_Z_O, BUF_COUNT, "latent o", "latent gradient o"};
}
static struct latent latent_gu(const struct engine *e)
{
    return (struct latent){2 * e->plan->r, BUF_H_GU, BUF_Z_GU, BUF_R2, "latent gate up", "latent gradient gate up"};
}
static struct latent latent_down(const struct engine *e)
{
    return (struct latent){e->plan->r, BUF_H_D, BUF_Z_D, BUF_COUNT, "latent down", "latent gradient down"};
}

static void *statistic(const struct engine *e, const struct latent *l, int64_t layer)
{
    return (char *)engine_buffer(e, l->h, layer) + plan_statistic_offset(e->plan, &e->backend, l->n);
}

/* The activated latent z; without an activation Y is its own z. */
static void *activated(const struct engine *e, const struct latent *l, int64_t layer)
{
    return engine_buffer(e, e->plan->latent_silu ? l->z : l->h, layer);
}

static enum latent_act activation(const struct engine *e)
{
    return e->plan->latent_silu ? LATENT_SILU : LATENT_IDENTITY;
}

/* h = x A, summed over tp; Y = R h; z = activation(Y). */
static int bottleneck_forward(struct engine *e, const struct latent *l, int64_t layer, int64_t in,
                              const struct param *a, const void *x, struct error *err)
{
    void *h = engine_buffer(e, l->h, layer);
    bool normed = l->R != BUF_COUNT;
    void *S = normed ? statistic(e, l, layer) : NULL;
    void *R = normed ? engine_buffer(e, l->R, layer) : NULL;
    down_forward(e, l->n, in, a, x, h);
    int rc = reduce_latent(e, h, l->n, S, l->forward, err);
    if (rc)
        return rc;
    e->k->latent_forward(e->ks, e->plan->T, l->n, e->plan->d, e->plan->norm_eps, activation(e), h, S, R,
                         activated(e, l, layer));
    return ERR_OK;
}

/* From this rank's part of dz (BUF_DLATENT): its sum over tp, through activation and norm (which
 * leaves k in BUF_K), to A's gradient and dx. The norm needs no collective: <dY, Y> is over the latent. */
static int bottleneck_backward(struct engine *e, const struct latent *l, int64_t layer, int64_t in,
                               const struct param *a, const void *x, void *dx, struct error *err)
{
    void *dz = engine_buffer(e, BUF_DLATENT, 0);
    bool normed = l->R != BUF_COUNT;
    int rc = reduce_latent(e, dz, l->n, NULL, l->backward, err);
    if (rc)
        return rc;
    e->k->latent_backward(e->ks, e->plan->T, l->n, e->plan->d, activation(e), engine_buffer(e, l->h, layer),
                          normed ? engine_buffer(e, l->R, layer) : NULL, dz,
                          normed ? engine_buffer(e, BUF_K, 0) : NULL);
    down_backward(e, l->n, in, a, x, dz, dx);
    return ERR_OK;
}

/* q, k and v side by side: [T, w], [T, wk], [T, wk]. */
struct qkv {
    void *q, *k, *v;
};
static struct qkv split_qkv(const struct engine *e, void *base)
{
    int64_t T = e->plan->T;
    return (struct qkv){base, act_at(e, base, T * e->w), act_at(e, base, T * (e->w + e->wk))};
}

/* With as many key-value heads as query heads all three have one shape and go in one batch;
 * else k and v do, and q goes by itself. */
static bool one_shape(const struct engine *e)
{
    return e->w == e->wk;
}

static void qkv_up_forward(struct engine *e, const struct layer *p, const void *z, const struct qkv *out)
{
    int64_t r = e->plan->r;
    struct up q = {one_shape(e) ? 3 : 1, e->w, r, 3 * r}, kv = {2, e->wk, r, 3 * r};
    up_forward(e, &q, &p->b_q, z, out->q);
    if (!one_shape(e))
        up_forward(e, &kv, &p->b_k, act_at(e, z, r), out->k);
}

static void qkv_up_backward(struct engine *e, const struct layer *p, const void *z, const struct qkv *dout, void *dz)
{
    int64_t r = e->plan->r;
    struct up q = {one_shape(e) ? 3 : 1, e->w, r, 3 * r}, kv = {2, e->wk, r, 3 * r};
    up_backward(e, &q, &p->b_q, z, dout->q, dz);
    if (!one_shape(e))
        up_backward(e, &kv, &p->b_k, act_at(e, z, r), dout->k, act_at(e, dz, r));
}

static void rope_qk(struct engine *e, const struct qkv *x, bool inverse)
{
    const struct plan *p = e->plan;
    e->k->rope(e->ks, p->T, p->s, p->h / p->tp, p->e, e->w, p->rope_theta, inverse, x->q);
    e->k->rope(e->ks, p->T, p->s, p->hk / p->tp, p->e, e->wk, p->rope_theta, inverse, x->k);
}

/* Norm1, q k v, attention, o: BUF_Y = what the residual gains. */
static int attention_forward(struct engine *e, int64_t i, struct error *err)
{
    const struct layer *p = &e->layers[i];
    struct latent qkv = latent_qkv(e), o = latent_o(e);
    void *ctx = engine_buffer(e, BUF_CTX, i);
    int rc = bottleneck_forward(e, &qkv, i, e->w, &p->a_qkv, engine_buffer(e, BUF_N1, i), err);
    if (rc)
        return rc;
    struct qkv x = split_qkv(e, engine_buffer(e, BUF_QKV, i));
    qkv_up_forward(e, p, activated(e, &qkv, i), &x);
    rope_qk(e, &x, false);
    e->k->attention_forward(e->ks, &e->attention, x.q, x.k, x.v, ctx, engine_buffer(e, BUF_LSE, i),
                            engine_buffer(e, BUF_ATTENTION, 0));
    rc = bottleneck_forward(e, &o, i, e->w, &p->a_o, ctx, err);
    if (rc)
        return rc;
    struct up up_o = {1, e->w, e->plan->r, e->plan->r};
    up_forward(e, &up_o, &p->b_o, activated(e, &o, i), engine_buffer(e, BUF_Y, 0));
    return ERR_OK;
}

/* Norm2, gate and up, product, down: BUF_Y likewise. */
static int mlp_forward(struct engine *e, int64_t i, struct error *err)
{
    const struct plan *plan = e->plan;
    const struct layer *p = &e->layers[i];
    struct latent gu = latent_gu(e), down = latent_down(e);
    void *gate = engine_buffer(e, BUF_GU, i), *prod = engine_buffer(e, BUF_PROD, i);
    int rc = bottleneck_forward(e, &gu, i, e->w, &p->a_gu, engine_buffer(e, BUF_N2, i), err);
    if (rc)
        return rc;
    struct up up_gu = {2, e->fw, plan->r, 2 * plan->r}, up_down = {1, e->w, plan->r, plan->r};
    up_forward(e, &up_gu, &p->b_gate, activated(e, &gu, i), gate);
    e->k->glu_forward(e->ks, plan->T * e->fw, plan->mlp_silu, gate, act_at(e, gate, plan->T * e->fw), prod);
    rc = bottleneck_forward(e, &down, i, e->fw, &p->a_down, prod, err);
    if (rc)
        return rc;
    up_forward(e, &up_down, &p->b_down, activated(e, &down, i), engine_buffer(e, BUF_Y, 0));
    return ERR_OK;
}

/* The residual addition of one half-block and the norm of the next are one operation, so a block
 * begins with its predecessor's addition; the last one is done at the head. */
static int block_forward(struct engine *e, int64_t i, struct error *err)
{
    const struct plan *plan = e->plan;
    const struct layer *p = &e->layers[i];
    struct latent qkv = latent_qkv(e), gu = latent_gu(e);
    void *y = engine_buffer(e, BUF_Y, 0), *x1 = engine_buffer(e, BUF_X1, i), *x2 = engine_buffer(e, BUF_X2, i);
    bool first = i == 0;

    e->k->residual_gain(e->ks, plan->T, e->w, first ? x1 : engine_buffer(e, BUF_X2, i - 1), first ? NULL : y,
                        p->norm1.weight, x1, engine_buffer(e, BUF_N1, i), statistic(e, &qkv, i));
    int rc = attention_forward(e, i, err);
    if (rc)
        return rc;
    e->k->residual_gain(e->ks, plan->T, e->w, x1, y, p->norm2.weight, x2, engine_buffer(e, BUF_N2, i),
                        statistic(e, &gu, i));
    return mlp_forward(e, i, err);
}

/* Adds to BUF_DX the gradient through the MLP half; BUF_DX comes in as that of the block's output. */
static int mlp_backward(struct engine *e, int64_t i, struct error *err)
{
    const struct plan *plan = e->plan;
    const struct layer *p = &e->layers[i];
    struct latent gu = latent_gu(e), down = latent_down(e);
    int64_t product = plan->T * e->fw;
    void *dx = engine_buffer(e, BUF_DX, 0), *dz = engine_buffer(e, BUF_DLATENT, 0);
    void *dprod = engine_buffer(e, BUF_DINNER, 0), *dgate = engine_buffer(e, BUF_DOUTER, 0);
    void *gate = engine_buffer(e, BUF_GU, i), *dn = engine_buffer(e, BUF_DN, 0);
    struct up up_gu = {2, e->fw, plan->r, 2 * plan->r}, up_down = {1, e->w, plan->r, plan->r};

    up_backward(e, &up_down, &p->b_down, activated(e, &down, i), dx, dz);
    int rc = bottleneck_backward(e, &down, i, e->fw, &p->a_down, engine_buffer(e, BUF_PROD, i), dprod, err);
    if (rc)
        return rc;
    e->k->glu_backward(e->ks, product, plan->mlp_silu, gate, act_at(e, gate, product), dprod, dgate,
                       act_at(e, dgate, product));
    up_backward(e, &up_gu, &p->b_gate, activated(e, &gu, i), dgate, dz);
    rc = bottleneck_backward(e, &gu, i, e->w, &p->a_gu, engine_buffer(e, BUF_N2, i), dn, err);
    if (rc)
        return rc;
    e->k->gain_backward(e->ks, plan->T, e->w, engine_buffer(e, BUF_X2, i), p->norm2.weight, NULL,
                        engine_buffer(e, BUF_K, 0), dn, true, dx, p->norm2.grad);
    return ERR_OK;
}

static int attention_backward(struct engine *e, int64_t i, struct error *err)
{
    const struct plan *plan = e->plan;
    const struct layer *p = &e->layers[i];
    struct latent qkv = latent_qkv(e), o = latent_o(e);
    void *dx = engine_buffer(e, BUF_DX, 0), *dz = engine_buffer(e, BUF_DLATENT, 0);
    void *dctx = engine_buffer(e, BUF_DINNER, 0), *ctx = engine_buffer(e, BUF_CTX, i);
    void *dn = engine_buffer(e, BUF_DN, 0);
    struct qkv x = split_qkv(e, engine_buffer(e, BUF_QKV, i)), d_x = split_qkv(e, engine_buffer(e, BUF_DOUTER, 0));
    struct up up_o = {1, e->w, plan->r, plan->r};

    up_backward(e, &up_o, &p->b_o, activated(e, &o, i), dx, dz);
    int rc = bottleneck_backward(e, &o, i, e->w, &p->a_o, ctx, dctx, err);
    if (rc)
        return rc;
    e->k->attention_backward(e->ks, &e->attention, x.q, x.k, x.v, ctx, engine_buffer(e, BUF_LSE, i), dctx, d_x.q, d_x.k,
                             d_x.v, engine_buffer(e, BUF_ATTENTION, 0));
    rope_qk(e, &d_x, true);
    qkv_up_backward(e, p, activated(e, &qkv, i), &d_x, dz);
    rc = bottleneck_backward(e, &qkv, i, e->w, &p->a_qkv, engine_buffer(e, BUF_N1, i), dn, err);
    if (rc)
        return rc;
    e->k->gain_backward(e->ks, plan->T, e->w, engine_buffer(e, BUF_X1, i), p->norm1.weight, NULL,
                        engine_buffer(e, BUF_K, 0), dn, true, dx, p->norm1.grad);
    return ERR_OK;
}

static int block_backward(struct engine *e, int64_t i, struct error *err)
{
    int rc = mlp_backward(e, i, err);
    if (!rc)
        rc = attention_backward(e, i, err);
    return rc;
}

const struct strategy strategy_btp = {
    .name = "BTP",
    .embed_forward = btp_embed_forward,
    .block_forward = block_forward,
    .head_forward = btp_head_forward,
    .loss = btp_loss,
    .head_backward = btp_head_backward,
    .block_backward = block_backward,
    .embed_backward = btp_embed_backward,
};
