/* A decoder block, the same for every strategy: two norms, attention and the gated MLP between the linear
 * layers of four sites. What a strategy does there is behind its table.
 *
 * Both ways it is a table of sections, `forward` and `backward` below, cut where BTP sums latents over ranks: a section
 * begins with the wait for one sum and ends with the begin of the next. Where sums are overlapped the rows of a
 * micro-batch are two slices, and while one is summed the other is in its section; else all rows go through a section
 * at once. worker/README.md, "Overlap". */
#include "worker/engine_internal.h"

/* ---- sections ---- */

typedef int part(struct engine *e, int64_t layer, struct error *err);

/* FROM_SUM waits for the sums of a site and goes on behind them, TO_SUM comes to those of the next site and begins
 * them, MIDDLE is what lies between; NULL: nothing. */
enum { FROM_SUM, MIDDLE, TO_SUM, PARTS };
struct section {
    part *parts[PARTS];
    /* Whether the middle wants all rows at once, so that the slices wait for each other there; NULL: never. */
    bool (*joins)(const struct engine *e);
};

/* All rows, or two slices of them. */
static int slices_of(const struct engine *e, struct rows out[PLAN_SLICES])
{
    int64_t first = plan_first_slice(e->plan), T = e->plan->T;
    out[0] = (struct rows){0, first};
    out[1] = (struct rows){first, T - first};
    return first < T ? 2 : 1;
}

void block_leaves_room(struct engine *e, bool room)
{
    if (e->k->set_spare)
        e->k->set_spare(e->ks, room && e->rows.count < e->plan->T ? COMM_PROCESSORS : 0);
}

/* Whether products of slice s in part i run beside the other slice's sum, where parts [from, to) go slice by slice. */
static bool is_beside(int from, int to, int s, int i)
{
    if (to == MIDDLE) /* in front of a joined middle: the second's sum has these parts of the first alone */
        return s == 0;
    if (from == TO_SUM) /* behind it: the first's sum has this part of the second alone */
        return s > 0;
    return i != TO_SUM; /* the other's turn is next, and its sum should be done by now */
}

/* Parts [from, to) of a section, of the first slice and then of the second. */
static int slice_by_slice(struct engine *e, const struct section *section, int from, int to, int64_t layer,
                          struct error *err)
{
    struct rows slices[PLAN_SLICES];
    int n = slices_of(e, slices), rc = ERR_OK;
    for (int s = 0; s < n && !rc; s++) {
        e->slice = s;
        e->rows = slices[s];
        for (int i = from; i < to && !rc; i++) {
            block_leaves_room(e, is_beside(from, to, s, i));
            rc = section->parts[i] ? section->parts[i](e, layer, err) : ERR_OK;
        }
    }
    e->slice = 0;
    e->rows = (struct rows){0, e->plan->T};
    block_leaves_room(e, false);
    return rc;
}

/* A section of all rows. */
static int run_section(struct engine *e, const struct section *s, int64_t layer, struct error *err)
{
    if (!s->joins || !s->joins(e))
        return slice_by_slice(e, s, FROM_SUM, PARTS, layer, err);
    int rc = slice_by_slice(e, s, FROM_SUM, MIDDLE, layer, err);
    if (!rc)
        rc = s->parts[MIDDLE](e, layer, err);
    return rc ? rc : slice_by_slice(e, s, TO_SUM, PARTS, layer, err);
}

/* ---- what the parts work on ---- */

static void *output_at(const struct engine *e, enum plan_site site, int j, void *base)
{
    return act_at(e, base, site_output(e, site, j).at);
}

/* From the first row at work. */
struct qkv {
    void *q, *k, *v;
};
static struct qkv split_qkv(const struct engine *e, void *base)
{
    const struct attention *a = &e->attention;
    return (struct qkv){act_rows(e, base, a->ldq), act_rows(e, output_at(e, SITE_QKV, 1, base), a->ldk),
                        act_rows(e, output_at(e, SITE_QKV, 2, base), a->ldv)};
}

static void rope_qk(struct engine *e, const struct qkv *x, bool inverse)
{
    const struct plan *p = e->plan;
    const struct attention *a = &e->attention;
    bool joined = e->strategy->joined; /* k's heads follow q's in a row */
    int64_t rows = e->rows.count;
    e->k->rope(e->ks, rows, p->s, joined ? a->h + a->hk : a->h, a->e, a->ldq, p->rope_theta, inverse, x->q);
    if (!joined)
        e->k->rope(e->ks, rows, p->s, a->hk, a->e, a->ldk, p->rope_theta, inverse, x->k);
}

/* A sequence stays whole; and a library's tensors begin on 16 bytes, which the second slice's log-sum-exps may not. */
static bool attention_joins_rows(const struct engine *e)
{
    enum { ALIGN = 16 };
    int64_t statistics = plan_first_slice(e->plan) * e->attention.h * (int64_t)dtype_size(e->k->stat);
    return e->plan->micro_batch == 1 || statistics % ALIGN;
}

static struct attention attention_of(const struct engine *e, const struct rows *rows)
{
    struct attention a = e->attention;
    a.b = rows->count / a.s;
    return a;
}

int block_attentions(const struct engine *e, struct attention out[PLAN_SLICES])
{
    struct rows slices[PLAN_SLICES];
    int n = slices_of(e, slices);
    out[0] = e->attention;
    if (attention_joins_rows(e))
        return 1;
    for (int s = 0; s < n; s++)
        out[s] = attention_of(e, &slices[s]);
    return n > 1 && out[0].b == out[1].b ? 1 : n;
}

/* Gate and up, rows of `width` at a distance of ld, from the first row at work. */
struct gate_up {
    void *gate, *up;
    int64_t rows, width, ld;
};
static struct gate_up split_gate_up(const struct engine *e, void *base)
{
    int64_t width = e->w.out[PROJ_GATE], ld = site_output(e, SITE_GU, 0).ld;
    return (struct gate_up){act_rows(e, base, ld), act_rows(e, output_at(e, SITE_GU, 1, base), ld), e->rows.count,
                            width, ld};
}

static bool ends_stage(const struct engine *e, int64_t i)
{
    return i + 1 == e->stage.layer0 + e->stage.layers;
}

/* The residual behind a block, or what it is the sum of. Whole, it lies where the next norm, the head's or the next
 * stage's want it. */
struct addends block_sum(const struct engine *e, int64_t i)
{
    if (e->adds)
        return (struct addends){ends_stage(e, i) ? engine_buffer(e, BUF_XF, 0) : engine_buffer(e, BUF_X1, i + 1), NULL};
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

/* ---- forward ---- */

/* Whether x2 was kept with the latents: where those are cut a collective makes it, which is not to be repeated. */
static bool kept_middle(const struct engine *e)
{
    return e->again && e->cut->latent;
}

static int norm1(struct engine *e, int64_t i, struct error *err)
{
    bool first = i == e->stage.layer0; /* the embedding or the stage before has put it there */
    struct addends sum = first ? (struct addends){engine_buffer(e, BUF_X1, i), NULL} : block_sum(e, i - 1);
    return norm_forward(e, SITE_QKV, i, &sum, err);
}

/* Its input is there, summed up. */
static int norm1_again(struct engine *e, int64_t i, struct error *err)
{
    return norm_forward(e, SITE_QKV, i, &(struct addends){engine_buffer(e, BUF_X1, i), NULL}, err);
}

static int qkv_latent(struct engine *e, int64_t i, struct error *err)
{
    return e->strategy->latent(e, SITE_QKV, i, norm_n(e, SITE_QKV, i), err);
}

static int qkv_output(struct engine *e, int64_t i, struct error *err)
{
    return e->strategy->output(e, SITE_QKV, i, norm_n(e, SITE_QKV, i), NULL, engine_buffer(e, BUF_QKV, i), err);
}

static int attention(struct engine *e, int64_t i, struct error *err)
{
    struct attention a = attention_of(e, &e->rows);
    struct qkv x = split_qkv(e, engine_buffer(e, BUF_QKV, i));
    (void)err;
    rope_qk(e, &x, false);
    e->k->attention_forward(e->ks, &a, x.q, x.k, x.v, act_rows(e, engine_buffer(e, BUF_CTX, i), a.ldo),
                            stat_rows(e, engine_buffer(e, BUF_LSE, i), a.h), engine_buffer(e, BUF_ATTENTION, 0));
    return ERR_OK;
}

static int o_latent(struct engine *e, int64_t i, struct error *err)
{
    return e->strategy->latent(e, SITE_O, i, engine_buffer(e, BUF_CTX, i), err);
}

static int o_output(struct engine *e, int64_t i, struct error *err)
{
    struct addends sum = middle_sum(e, i);
    if (kept_middle(e))
        return ERR_OK;
    return add_output(e, SITE_O, i, engine_buffer(e, BUF_CTX, i), engine_buffer(e, BUF_X1, i), &sum, err);
}

static int norm2(struct engine *e, int64_t i, struct error *err)
{
    struct addends sum = kept_middle(e) ? (struct addends){engine_buffer(e, BUF_X2, i), NULL} : middle_sum(e, i);
    return norm_forward(e, SITE_GU, i, &sum, err);
}

static int gu_latent(struct engine *e, int64_t i, struct error *err)
{
    return e->strategy->latent(e, SITE_GU, i, norm_n(e, SITE_GU, i), err);
}

static int gu_output(struct engine *e, int64_t i, struct error *err)
{
    return e->strategy->output(e, SITE_GU, i, norm_n(e, SITE_GU, i), NULL, engine_buffer(e, BUF_GU, i), err);
}

/* Not where down's latent was kept, which alone wants it: the backward makes it anew for down's weight. */
static int gated_product(struct engine *e, int64_t i, struct error *err)
{
    struct gate_up x = split_gate_up(e, engine_buffer(e, BUF_GU, i));
    (void)err;
    if (!e->again)
        e->k->glu_forward(e->ks, x.rows, x.width, x.ld, e->plan->mlp_silu, x.gate, x.up,
                          act_rows(e, engine_buffer(e, BUF_PROD, 0), x.width));
    return ERR_OK;
}

static int down_latent(struct engine *e, int64_t i, struct error *err)
{
    return e->strategy->latent(e, SITE_DOWN, i, engine_buffer(e, BUF_PROD, 0), err);
}

static int down_output(struct engine *e, int64_t i, struct error *err)
{
    struct addends sum = block_sum(e, i);
    return add_output(e, SITE_DOWN, i, engine_buffer(e, BUF_PROD, 0), engine_buffer(e, BUF_X2, i), &sum, err);
}

static int next_norm1(struct engine *e, int64_t i, struct error *err)
{
    return ends_stage(e, i) ? ERR_OK : norm1(e, i + 1, err);
}

static int next_qkv_latent(struct engine *e, int64_t i, struct error *err)
{
    return ends_stage(e, i) ? ERR_OK : qkv_latent(e, i + 1, err);
}

static const struct section enter = {{NULL, norm1, qkv_latent}, norm_joins_rows};
static const struct section enter_again = {{NULL, norm1_again, qkv_latent}, norm_joins_rows};
static const struct section forward[] = {
    {{qkv_output, attention, o_latent}, attention_joins_rows},
    {{o_output, norm2, gu_latent}, norm_joins_rows},
    {{gu_output, gated_product, down_latent}, NULL},
    {{down_output, next_norm1, next_qkv_latent}, norm_joins_rows},
};
enum { SECTIONS = sizeof forward / sizeof forward[0], AGAIN = SECTIONS - 1 /* no backward wants down's output */ };

int block_forward(struct engine *e, int64_t i, struct error *err)
{
    int rc = ERR_OK;
    engine_range(e, "forward of block %lld", (long long)i);
    if (i == e->stage.layer0)
        rc = run_section(e, &enter, i, err);
    for (int k = 0; k < SECTIONS && !rc; k++)
        rc = run_section(e, &forward[k], i, err);
    engine_range_end(e);
    return rc;
}

/* ---- backward ---- */

static bool recomputes(const struct engine *e)
{
    return e->plan->recompute != BOOST__RECOMPUTE__VALUE__NONE;
}

/* What the forward did not keep of this block. `again` stays for settle_down(). */
static int reforward(struct engine *e, int64_t i, struct error *err)
{
    engine_set_pass(e, PASS_RECOMPUTE);
    e->again = e->plan->recompute == BOOST__RECOMPUTE__VALUE__LOW_RANK;
    int rc = run_section(e, &enter_again, i, err);
    for (int k = 0; k < AGAIN && !rc; k++)
        rc = run_section(e, &forward[k], i, err);
    engine_set_pass(e, PASS_BACKWARD);
    return rc;
}

/* A re-forward ends with down's latent, and no output() behind it. */
static int settle_down(struct engine *e, int64_t i, struct error *err)
{
    if (!recomputes(e) || !e->strategy->settle)
        return ERR_OK;
    engine_set_pass(e, PASS_RECOMPUTE);
    int rc = e->strategy->settle(e, SITE_DOWN, i, err);
    engine_set_pass(e, PASS_BACKWARD);
    return rc;
}

/* From the gradients of a site's outputs to those of its latents. */
static int dlatents(struct engine *e, enum plan_site site, int64_t i, const void *dy, struct error *err)
{
    int rc = ERR_OK;
    for (int j = 0; j < bundle_count(e, site) && e->strategy->dlatent && !rc; j++) {
        struct bundle b = bundle_at(e, site, j);
        rc = e->strategy->dlatent(e, &b, i, dy, err);
    }
    return rc;
}

static int down_dlatent(struct engine *e, int64_t i, struct error *err)
{
    return dlatents(e, SITE_DOWN, i, engine_buffer(e, BUF_DX, 0), err);
}

/* The weight that multiplies the gated product gets its gradient when that has been made again. */
static int down_dinput(struct engine *e, int64_t i, struct error *err)
{
    struct bundle down = bundle_at(e, SITE_DOWN, 0);
    return e->strategy->dinput(e, &down, i, NULL, engine_buffer(e, BUF_DX, 0), engine_buffer(e, BUF_DINNER, 0), err);
}

static int gated_product_backward(struct engine *e, int64_t i, struct error *err)
{
    struct gate_up x = split_gate_up(e, engine_buffer(e, BUF_GU, i));
    struct gate_up dx = split_gate_up(e, engine_buffer(e, BUF_DOUTER, 0));
    struct bundle down = bundle_at(e, SITE_DOWN, 0);
    const void *dprod = engine_buffer(e, BUF_DINNER, 0);
    void *prod = engine_buffer(e, BUF_PROD, 0);
    (void)err;
    e->k->glu_backward(e->ks, x.rows, x.width, x.ld, e->plan->mlp_silu, x.gate, x.up, act_rows(e, dprod, x.width),
                       dx.gate, dx.up, act_rows(e, prod, x.width));
    e->strategy->dweight(e, &down, i, prod, engine_buffer(e, BUF_DX, 0));
    return ERR_OK;
}

static int gu_dlatent(struct engine *e, int64_t i, struct error *err)
{
    return dlatents(e, SITE_GU, i, engine_buffer(e, BUF_DOUTER, 0), err);
}

static int gu_dinput(struct engine *e, int64_t i, struct error *err)
{
    return normed_dinput(e, SITE_GU, i, engine_buffer(e, BUF_DOUTER, 0), err);
}

static int norm2_backward(struct engine *e, int64_t i, struct error *err)
{
    return norm_backward(e, SITE_GU, i, err);
}

static int o_dlatent(struct engine *e, int64_t i, struct error *err)
{
    return dlatents(e, SITE_O, i, engine_buffer(e, BUF_DX, 0), err);
}

static int o_dinput(struct engine *e, int64_t i, struct error *err)
{
    struct bundle o = bundle_at(e, SITE_O, 0);
    return e->strategy->dinput(e, &o, i, engine_buffer(e, BUF_CTX, i), engine_buffer(e, BUF_DX, 0),
                               engine_buffer(e, BUF_DINNER, 0), err);
}

static int attention_backward(struct engine *e, int64_t i, struct error *err)
{
    struct attention a = attention_of(e, &e->rows);
    struct qkv x = split_qkv(e, engine_buffer(e, BUF_QKV, i)), dx = split_qkv(e, engine_buffer(e, BUF_DOUTER, 0));
    const void *ctx = engine_buffer(e, BUF_CTX, i), *dctx = engine_buffer(e, BUF_DINNER, 0);
    (void)err;
    e->k->attention_backward(e->ks, &a, x.q, x.k, x.v, act_rows(e, ctx, a.ldo),
                             stat_rows(e, engine_buffer(e, BUF_LSE, i), a.h), act_rows(e, dctx, a.ldo), dx.q, dx.k,
                             dx.v, engine_buffer(e, BUF_ATTENTION, 0));
    rope_qk(e, &dx, true);
    return ERR_OK;
}

static int qkv_dlatent(struct engine *e, int64_t i, struct error *err)
{
    return dlatents(e, SITE_QKV, i, engine_buffer(e, BUF_DOUTER, 0), err);
}

static int qkv_dinput(struct engine *e, int64_t i, struct error *err)
{
    return normed_dinput(e, SITE_QKV, i, engine_buffer(e, BUF_DOUTER, 0), err);
}

static int norm1_backward(struct engine *e, int64_t i, struct error *err)
{
    return norm_backward(e, SITE_QKV, i, err);
}

/* Whether a block's backward is begun in the last section of the block behind it: not where there is none, nor where
 * the block's forward has to run again in between. */
static bool begun_behind(const struct engine *e, int64_t i)
{
    return !recomputes(e) && !ends_stage(e, i);
}

static int next_down_dlatent(struct engine *e, int64_t i, struct error *err)
{
    return i > e->stage.layer0 && begun_behind(e, i - 1) ? down_dlatent(e, i - 1, err) : ERR_OK;
}

static const struct section enter_backward = {{settle_down, NULL, down_dlatent}, NULL};
static const struct section backward[SECTIONS] = {
    {{down_dinput, gated_product_backward, gu_dlatent}, NULL},
    {{gu_dinput, norm2_backward, o_dlatent}, norm_joins_rows},
    {{o_dinput, attention_backward, qkv_dlatent}, attention_joins_rows},
    {{qkv_dinput, norm1_backward, next_down_dlatent}, norm_joins_rows},
};

int block_backward(struct engine *e, int64_t i, struct error *err)
{
    int rc = ERR_OK;
    engine_range(e, "backward of block %lld", (long long)i);
    if (recomputes(e))
        rc = reforward(e, i, err);
    if (!rc && !begun_behind(e, i))
        rc = run_section(e, &enter_backward, i, err);
    e->again = false;
    for (int k = 0; k < SECTIONS && !rc; k++)
        rc = run_section(e, &backward[k], i, err);
    engine_range_end(e);
    return rc;
}
