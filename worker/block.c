/* A decoder block, the same for every strategy: two norms, attention and the gated MLP between the linear
 * layers of four sites. What a strategy does there is behind its table. */
#include "worker/engine_internal.h"

static void *output_at(const struct engine *e, enum plan_site site, int j, void *base)
{
    return act_at(e, base, site_output(e, site, j).at);
}

struct qkv {
    void *q, *k, *v;
};
static struct qkv split_qkv(const struct engine *e, void *base)
{
    return (struct qkv){base, output_at(e, SITE_QKV, 1, base), output_at(e, SITE_QKV, 2, base)};
}

static void rope_qk(struct engine *e, const struct qkv *x, bool inverse)
{
    const struct plan *p = e->plan;
    const struct attention *a = &e->attention;
    bool joined = e->strategy->joined; /* k's heads follow q's in a row */
    e->k->rope(e->ks, p->T, p->s, joined ? a->h + a->hk : a->h, a->e, a->ldq, p->rope_theta, inverse, x->q);
    if (!joined)
        e->k->rope(e->ks, p->T, p->s, a->hk, a->e, a->ldk, p->rope_theta, inverse, x->k);
}

/* gate and up, rows of `width` at a distance of ld. */
struct gate_up {
    void *gate, *up;
    int64_t rows, width, ld;
};
static struct gate_up split_gate_up(const struct engine *e, void *base)
{
    int64_t rows = e->plan->T, width = e->w.out[PROJ_GATE];
    return (struct gate_up){base, output_at(e, SITE_GU, 1, base), rows, width, site_output(e, SITE_GU, 0).ld};
}

/* From norm1's input to ctx and o's latent. */
static int attention_forward(struct engine *e, int64_t i, bool again, struct error *err)
{
    void *n = norm_n(e, SITE_QKV, i), *ctx = engine_buffer(e, BUF_CTX, i);
    struct qkv x = split_qkv(e, engine_buffer(e, BUF_QKV, i));
    int rc = e->strategy->latent(e, SITE_QKV, i, n, again, err);
    if (!rc)
        rc = e->strategy->output(e, SITE_QKV, i, n, NULL, x.q, err);
    if (rc)
        return rc;
    rope_qk(e, &x, false);
    e->k->attention_forward(e->ks, &e->attention, x.q, x.k, x.v, ctx, engine_buffer(e, BUF_LSE, i),
                            engine_buffer(e, BUF_ATTENTION, 0));
    return e->strategy->latent(e, SITE_O, i, ctx, again, err);
}

/* From norm2's output to the product and down's latent; where that was kept, to gate and up: the backward makes the
 * product itself. */
static int mlp_forward(struct engine *e, int64_t i, bool again, struct error *err)
{
    struct gate_up x = split_gate_up(e, engine_buffer(e, BUF_GU, i));
    void *n = norm_n(e, SITE_GU, i), *prod = engine_buffer(e, BUF_PROD, 0);
    int rc = e->strategy->latent(e, SITE_GU, i, n, again, err);
    if (!rc)
        rc = e->strategy->output(e, SITE_GU, i, n, NULL, x.gate, err);
    if (rc)
        return rc;
    if (!again)
        e->k->glu_forward(e->ks, x.rows, x.width, x.ld, e->plan->mlp_silu, x.gate, x.up, prod);
    return e->strategy->latent(e, SITE_DOWN, i, prod, again, err);
}

/* The residual behind a block, or what it is the sum of. Whole, it lies where the next norm, the head's or the next
 * stage's want it. */
struct addends block_sum(const struct engine *e, int64_t i)
{
    bool last = i + 1 == e->stage.layer0 + e->stage.layers;
    if (e->adds)
        return (struct addends){last ? engine_buffer(e, BUF_XF, 0) : engine_buffer(e, BUF_X1, i + 1), NULL};
    return (struct addends){engine_buffer(e, BUF_X2, i), engine_buffer(e, BUF_Y, 0)};
}

/* The residual behind o. */
static struct addends middle_sum(const struct engine *e, int64_t i)
{
    if (e->adds)
        return (struct addends){engine_buffer(e, BUF_X2, i), NULL};
    return (struct addends){engine_buffer(e, BUF_X1, i), engine_buffer(e, BUF_Y, 0)};
}

/* The layer of o or of down, from its input to what it leaves. */
static int add_output(struct engine *e, enum plan_site site, int64_t i, const void *input, const void *residual,
                      const struct addends *sum, struct error *err)
{
    return e->strategy->output(e, site, i, input, e->adds ? residual : NULL, e->adds ? sum->x : sum->y, err);
}

/* All of a block but its last layer, whose output no backward wants. x: what norm1 adds up. again: only what recompute
 * did not keep. */
static int body(struct engine *e, int64_t i, struct addends x, bool again, struct error *err)
{
    const void *ctx = engine_buffer(e, BUF_CTX, i);
    struct addends middle = middle_sum(e, i);
    bool kept = again && e->cut->latent; /* the sum behind o is a collective there, so x2 was kept */
    int rc = norm_forward(e, SITE_QKV, i, x.x, x.y, again, err);
    if (!rc)
        rc = attention_forward(e, i, again, err);
    if (!rc && !kept)
        rc = add_output(e, SITE_O, i, ctx, engine_buffer(e, BUF_X1, i), &middle, err);
    if (kept)
        middle = (struct addends){engine_buffer(e, BUF_X2, i), NULL};
    if (!rc)
        rc = norm_forward(e, SITE_GU, i, middle.x, middle.y, again, err);
    if (!rc)
        rc = mlp_forward(e, i, again, err);
    return rc;
}

int block_forward(struct engine *e, int64_t i, struct error *err)
{
    struct addends in = {engine_buffer(e, BUF_X1, i), NULL}, out = block_sum(e, i);
    bool first = i == e->stage.layer0; /* the embedding or the stage before has put it there */
    engine_range(e, "forward of block %lld", (long long)i);
    int rc = body(e, i, first ? in : block_sum(e, i - 1), false, err);
    if (!rc)
        rc = add_output(e, SITE_DOWN, i, engine_buffer(e, BUF_PROD, 0), engine_buffer(e, BUF_X2, i), &out, err);
    engine_range_end(e);
    return rc;
}

static int mlp_backward(struct engine *e, int64_t i, struct error *err)
{
    struct gate_up x = split_gate_up(e, engine_buffer(e, BUF_GU, i));
    struct gate_up dx = split_gate_up(e, engine_buffer(e, BUF_DOUTER, 0));
    struct bundle down = bundle_at(e, SITE_DOWN, 0);
    void *dy = engine_buffer(e, BUF_DX, 0), *dprod = engine_buffer(e, BUF_DINNER, 0);
    void *prod = engine_buffer(e, BUF_PROD, 0);
    int rc = e->strategy->backward(e, &down, i, NULL, dy, dprod, err);
    if (rc)
        return rc;
    e->k->glu_backward(e->ks, x.rows, x.width, x.ld, e->plan->mlp_silu, x.gate, x.up, dprod, dx.gate, dx.up, prod);
    e->strategy->weight(e, &down, i, prod, dy);
    return normed_backward(e, SITE_GU, i, dx.gate, err);
}

static int attention_backward(struct engine *e, int64_t i, struct error *err)
{
    struct bundle o = bundle_at(e, SITE_O, 0);
    void *dctx = engine_buffer(e, BUF_DINNER, 0), *ctx = engine_buffer(e, BUF_CTX, i);
    struct qkv x = split_qkv(e, engine_buffer(e, BUF_QKV, i)), dx = split_qkv(e, engine_buffer(e, BUF_DOUTER, 0));
    int rc = e->strategy->backward(e, &o, i, ctx, engine_buffer(e, BUF_DX, 0), dctx, err);
    if (rc)
        return rc;
    e->k->attention_backward(e->ks, &e->attention, x.q, x.k, x.v, ctx, engine_buffer(e, BUF_LSE, i), dctx, dx.q, dx.k,
                             dx.v, engine_buffer(e, BUF_ATTENTION, 0));
    rope_qk(e, &dx, true);
    return normed_backward(e, SITE_QKV, i, dx.q, err);
}

/* What the forward did not keep of this block. */
static int reforward(struct engine *e, int64_t i, struct error *err)
{
    Boost__Recompute__Value mode = e->plan->recompute;
    if (mode == BOOST__RECOMPUTE__VALUE__NONE)
        return ERR_OK;
    engine_set_pass(e, PASS_RECOMPUTE);
    struct addends x = {engine_buffer(e, BUF_X1, i), NULL}; /* summed up */
    int rc = body(e, i, x, mode == BOOST__RECOMPUTE__VALUE__LOW_RANK, err);
    if (!rc && e->strategy->settle)
        rc = e->strategy->settle(e, SITE_DOWN, i, err);
    engine_set_pass(e, PASS_BACKWARD);
    return rc;
}

int block_backward(struct engine *e, int64_t i, struct error *err)
{
    engine_range(e, "backward of block %lld", (long long)i);
    int rc = reforward(e, i, err);
    if (!rc)
        rc = mlp_backward(e, i, err);
    if (!rc)
        rc = attention_backward(e, i, err);
    engine_range_end(e);
    return rc;
}
