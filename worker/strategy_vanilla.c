/* Strategy VANILLA, the baseline: each pair is cut as one Megatron chunk. A is cut by rows, so each rank has r/t
 * columns of a latent; B is cut by columns and gives a partial sum of its whole output. SLICED sends q, k and v
 * by heads and gathers the attention's output; PUBLISHED sums them whole, and every rank works on all heads.
 * worker/README.md, "VANILLA". */
#include "worker/engine_internal.h"

static const char *const outputs[PROJ_COUNT] = {"q", "k", "v", "o", "gate", "up", "down"};
static const char *const gradients[PROJ_COUNT] = {"gradient of q", "gradient of k", "gradient of v"};
static const char *const inputs[SITE_COUNT] = {"gradient of q k v's input", "gradient of o's input",
                                               "gradient of gate up's input", "gradient of down's input"};

/* SLICED: the outputs of QKV and the input of O travel as parts, one for each rank's heads. */
static int parts_out(const struct engine *e, enum plan_site site)
{
    return e->cut->heads && site == SITE_QKV ? e->plan->tp : 1;
}

static int parts_in(const struct engine *e, enum plan_site site)
{
    return e->cut->heads && site == SITE_O ? e->plan->tp : 1;
}

/* What A is applied to: o's is gathered. */
static const void *whole_input(const struct engine *e, enum plan_site site, int64_t layer, const void *x)
{
    return parts_in(e, site) > 1 ? engine_buffer(e, BUF_CTX_FULL, layer) : x;
}

static int gather_ctx(struct engine *e, int64_t layer, const void *ctx, struct error *err)
{
    int64_t T = e->plan->T, w = e->w.out[PROJ_Q];
    void *parts = engine_buffer(e, BUF_EXCHANGE, 0);
    int rc = comm_all_gather(&e->comms->tp, e->ks, ctx, parts, T * w, e->k->act, "attention", err);
    if (!rc)
        e->k->interleave(e->ks, e->plan->tp, T, w, parts, engine_buffer(e, BUF_CTX_FULL, layer));
    return rc;
}

static int latent(struct engine *e, enum plan_site site, int64_t layer, const void *x, struct error *err)
{
    if (parts_in(e, site) > 1) {
        int rc = gather_ctx(e, layer, x, err);
        if (rc)
            return rc;
    }
    for (int i = 0; i < bundle_count(e, site); i++) {
        struct bundle b = bundle_at(e, site, i);
        struct param a = bundle_down(e, &b, layer);
        if (!e->again)
            down_forward(e, bundle_columns(e, &b), e->w.in[site], &a, whole_input(e, site, layer, x),
                         latent_h(e, &b, layer));
        int rc = latent_activate(e, &b, layer, err);
        if (rc)
            return rc;
    }
    return ERR_OK;
}

/* The B of one branch: its latent's place in the bundle, and its outputs, whole or as t parts by heads. */
struct branch {
    enum plan_projection projection;
    struct up up;
    struct param b;
    int64_t z, y; /* elements from the bundle's latent, from the site's outputs */
};
static struct branch branch_of(const struct engine *e, const struct bundle *b, int j, int64_t layer)
{
    struct plan_branches branches = plan_branches(b->site);
    int64_t before = 0, l = e->w.latent;
    for (int i = branches.first; i < (int)branches.first + j; i++)
        before += plan_out_width(e->plan, i);
    enum plan_projection projection = branches.first + j;
    int parts = parts_out(e, b->site);
    int64_t width = plan_out_width(e->plan, projection) / parts;
    return (struct branch){
        .projection = projection,
        .up = {parts, width, l, bundle_columns(e, b), 0, width, e->plan->T * width},
        .b = param_at(e, &e->layers[layer].site[b->site].up, before * l),
        .z = (j - b->first) * l,
        .y = site_output(e, b->site, j).at,
    };
}

static int branch_forward(struct engine *e, const struct branch *j, const void *z, const void *residual, void *y,
                          struct error *err)
{
    int64_t n = e->plan->T * j->up.out;
    bool scattered = j->up.count > 1;
    void *out = scattered ? engine_buffer(e, BUF_EXCHANGE, 0) : y;
    up_forward(e, &j->up, &j->b, z, residual, out);
    if (!scattered)
        return reduce_act(e, y, n, outputs[j->projection], err);
    return comm_reduce_scatter(&e->comms->tp, e->ks, out, y, n, e->k->act, outputs[j->projection], err);
}

static int branch_backward(struct engine *e, const struct branch *j, const void *z, const void *dy, void *dz,
                           struct error *err)
{
    if (j->up.count > 1) {
        void *parts = engine_buffer(e, BUF_EXCHANGE, 0);
        int rc = comm_all_gather(&e->comms->tp, e->ks, dy, parts, e->plan->T * j->up.out, e->k->act,
                                 gradients[j->projection], err);
        if (rc)
            return rc;
        dy = parts;
    }
    up_weight(e, &j->up, &j->b, z, dy);
    up_input(e, &j->up, &j->b, dy, dz);
    return ERR_OK;
}

static int output(struct engine *e, enum plan_site site, int64_t layer, const void *x, const void *residual, void *y,
                  struct error *err)
{
    (void)x;
    for (int i = 0; i < bundle_count(e, site); i++) {
        struct bundle b = bundle_at(e, site, i);
        for (int j = b.first; j < b.first + b.count; j++) {
            struct branch branch = branch_of(e, &b, j, layer);
            int rc = branch_forward(e, &branch, act_at(e, latent_z(e, &b, layer), branch.z), residual,
                                    act_at(e, y, branch.y), err);
            if (rc)
                return rc;
        }
    }
    return ERR_OK;
}

static int dinput(struct engine *e, const struct bundle *b, int64_t layer, const void *x, const void *dy, void *dx,
                  struct error *err)
{
    int64_t columns = bundle_columns(e, b), in = e->w.in[b->site];
    void *dz = engine_buffer(e, BUF_DLATENT, 0), *z = latent_z(e, b, layer);
    struct param a = bundle_down(e, b, layer);
    for (int j = b->first; j < b->first + b->count; j++) {
        struct branch branch = branch_of(e, b, j, layer);
        int rc =
            branch_backward(e, &branch, act_at(e, z, branch.z), act_at(e, dy, branch.y), act_at(e, dz, branch.z), err);
        if (rc)
            return rc;
    }
    int rc = latent_gradient(e, b, layer, dz, err);
    if (rc)
        return rc;
    int parts = parts_in(e, b->site);
    void *out = parts > 1 ? engine_buffer(e, BUF_EXCHANGE, 0) : dx;
    if (x)
        down_weight(e, columns, in, &a, whole_input(e, b->site, layer, x), dz);
    down_input(e, columns, in, parts, &a, dz, out);
    if (parts == 1)
        return reduce_act(e, dx, e->plan->T * in, inputs[b->site], err);
    return comm_reduce_scatter(&e->comms->tp, e->ks, out, dx, e->plan->T * in / parts, e->k->act, inputs[b->site], err);
}

static void dweight(struct engine *e, const struct bundle *b, int64_t layer, const void *x, const void *dy)
{
    (void)dy;
    struct param a = bundle_down(e, b, layer);
    down_weight(e, bundle_columns(e, b), e->w.in[b->site], &a, whole_input(e, b->site, layer, x),
                engine_buffer(e, BUF_DLATENT, 0));
}

const struct strategy strategy_vanilla = {
    .name = "VANILLA",
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
