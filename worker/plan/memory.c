/* arena.h and plan_memory(). */
#include <string.h>

#include "worker/plan/arena.h"
#include "worker/plan/internal.h"
#include "worker/plan/saturate.h"

static int64_t aligned(int64_t bytes)
{
    return round_up_size(bytes, PLAN_ALIGN);
}

int64_t plan_statistic_offset(const struct plan *p, const struct plan_backend *b, int64_t n)
{
    int64_t latent = mul(mul(p->T, n), (int64_t)dtype_size(b->act));
    return b->act == b->stat ? latent : aligned(latent);
}

struct sizing {
    const struct plan *p;
    struct plan_stage stage;
    const struct plan_backend *b;
    const struct plan_cut *cut;
    struct plan_widths w;
    struct plan_arena *arena;
};

static void put(struct sizing *z, enum plan_buffer buffer, enum plan_memory_category category, int64_t bytes)
{
    z->arena->at[buffer] = (struct plan_place){.category = category, .bytes = bytes, .layers = 1, .copies = 1};
}

/* Until when a buffer of a block must be kept for its backward. */
enum keep {
    KEEP_BLOCK,  /* always: a block's re-forward begins here */
    KEEP_LATENT, /* unless LAYER: what LOW_RANK does not make again */
    KEEP_REST,   /* recompute NONE only */
};
static void put_saved(struct sizing *z, enum plan_buffer buffer, enum keep keep, int64_t bytes)
{
    static const enum keep last_kept[] = {
        [BOOST__RECOMPUTE__VALUE__NONE] = KEEP_REST,
        [BOOST__RECOMPUTE__VALUE__LOW_RANK] = KEEP_LATENT,
        [BOOST__RECOMPUTE__VALUE__LAYER] = KEEP_BLOCK,
    };
    bool kept = keep <= last_kept[z->p->recompute];
    put(z, buffer, kept ? MEM_SAVED : MEM_SCRATCH, bytes);
    if (!kept)
        return;
    z->arena->at[buffer].layers = z->stage.layers;
    z->arena->at[buffer].copies = mul(z->stage.layers, z->stage.slots);
}

/* n columns of T rows. */
static int64_t rows_of(const struct sizing *z, int64_t n, enum dtype t)
{
    return mul(mul(z->p->T, n), (int64_t)dtype_size(t));
}

static void size_parameters(struct sizing *z)
{
    const struct plan_backend *b = z->b;
    int64_t n = z->stage.elements;
    int64_t act = mul(n, (int64_t)dtype_size(b->act)), grad = mul(n, (int64_t)dtype_size(b->grad));
    int64_t state = z->p->zero ? grad / z->p->dp : grad; /* this replica's pieces only */
    put(z, BUF_WEIGHTS, MEM_WEIGHTS, act);
    put(z, BUF_MASTER, MEM_MASTER, b->act == b->grad ? 0 : state);
    put(z, BUF_GRADS, MEM_GRADS, grad);
    put(z, BUF_MOMENT1, MEM_MOMENTS, state);
    put(z, BUF_MOMENT2, MEM_MOMENTS, state);
}

/* Residuals and norms. Where the latent is cut, the sum behind o is a collective: its result is kept. */
static void size_stream(struct sizing *z)
{
    int64_t residual = rows_of(z, z->w.x, z->b->act);
    int64_t R = z->p->norm_online ? 0 : rows_of(z, 1, z->b->stat);
    put_saved(z, BUF_X1, KEEP_BLOCK, residual);
    put_saved(z, BUF_X2, z->cut->latent ? KEEP_LATENT : KEEP_REST, residual);
    put_saved(z, BUF_N1, KEEP_REST, residual);
    put_saved(z, BUF_N2, KEEP_REST, residual);
    put_saved(z, BUF_R1, KEEP_LATENT, R);
    put_saved(z, BUF_R2, KEEP_LATENT, R);
}

static void size_latents(struct sizing *z)
{
    const struct plan *p = z->p;
    int64_t S = p->norm_online ? rows_of(z, 1, z->b->stat) : 0;
    for (enum plan_site site = 0; site < SITE_COUNT; site++) {
        bool normed = site == SITE_QKV || site == SITE_GU;
        int64_t columns = plan_branches(site).count * z->w.latent;
        int64_t latent = rows_of(z, columns, z->b->act);
        bool has_z = p->latent_silu || p->lax; /* else a latent is its own z */
        put_saved(z, BUF_H_QKV + site, KEEP_LATENT,
                  normed && S ? add(plan_statistic_offset(p, z->b, columns), S) : latent);
        put_saved(z, BUF_Z_QKV + site, p->lax ? KEEP_BLOCK : KEEP_REST, has_z ? latent : 0);
    }
}

/* One copy more, of the layer in front of the stage. */
static void put_front(struct sizing *z, enum plan_buffer buffer)
{
    struct plan_place *at = &z->arena->at[buffer];
    at->front = 1;
    at->layers = z->stage.layers + 1;
    at->copies = mul(at->layers, z->stage.slots);
}

/* A block's latents take in those of the block before, and its backward wants both. */
static void size_crossing(struct sizing *z)
{
    const struct plan *p = z->p;
    int64_t l = z->w.latent, branches = 0;
    bool tensor = p->lax_gate == BOOST__LAX_GATE__VALUE__TENSOR;
    bool gate = tensor || p->lax_gate == BOOST__LAX_GATE__VALUE__LINEAR, gathers = gate && l < p->r;
    for (enum plan_site site = 0; site < SITE_COUNT; site++) {
        int64_t c = plan_branches(site).count;
        branches = larger(branches, c);
        put_saved(z, BUF_U_QKV + site, KEEP_REST, rows_of(z, c * l, z->b->act));
        put_saved(z, BUF_P_QKV + site, KEEP_LATENT, gathers ? rows_of(z, c * p->r, z->b->act) : 0);
        put_saved(z, BUF_SUM_QKV + site, KEEP_LATENT, rows_of(z, 2 * c, z->b->stat));
        put(z, BUF_CROSS_QKV + site, MEM_SCRATCH, rows_of(z, c * l, z->b->act));
        if (!z->stage.first)
            put_front(z, BUF_Z_QKV + site);
    }
    put(z, BUF_CROSS_IN, MEM_SCRATCH, z->stage.last ? 0 : rows_of(z, PROJ_COUNT * l, z->b->act));
    put(z, BUF_BACK, MEM_SCRATCH, rows_of(z, 2 * branches, z->b->stat));
    put(z, BUF_GATE, MEM_SCRATCH, gate ? rows_of(z, branches * p->r, z->b->act) : 0);
    put(z, BUF_PARTS, MEM_SCRATCH, gathers ? rows_of(z, branches * p->r, z->b->act) : 0);
    put(z, BUF_TENSOR, MEM_SCRATCH, tensor ? rows_of(z, 3 * p->r, z->b->act) : 0);
}

static void size_inner(struct sizing *z)
{
    const struct plan *p = z->p;
    const struct plan_widths *w = &z->w;
    enum dtype act = z->b->act;
    int64_t q = w->out[PROJ_Q], qkv = q + 2 * w->out[PROJ_K], mlp = w->out[PROJ_GATE];
    bool gathers_heads = w->in[SITE_O] > q;
    put_saved(z, BUF_QKV, KEEP_REST, rows_of(z, qkv, act));
    put_saved(z, BUF_CTX, KEEP_REST, rows_of(z, q, act));
    put_saved(z, BUF_CTX_FULL, KEEP_REST, gathers_heads ? rows_of(z, p->d, act) : 0);
    put_saved(z, BUF_LSE, KEEP_REST, rows_of(z, w->heads, z->b->stat));
    put_saved(z, BUF_GU, KEEP_REST, rows_of(z, 2 * mlp, act));
    put(z, BUF_PROD, MEM_SCRATCH, rows_of(z, mlp, act)); /* the backward makes it in passing (block.c) */

    put(z, BUF_DINNER, MEM_SCRATCH, rows_of(z, larger(q, mlp), act));
    put(z, BUF_DOUTER, MEM_SCRATCH, rows_of(z, larger(qkv, 2 * mlp), act));
    bool shards_travel = p->tp > 1 && (z->cut->hidden || gathers_heads);
    put(z, BUF_EXCHANGE, MEM_SCRATCH, shards_travel ? rows_of(z, p->d, act) : 0);
}

static void size_scratch(struct sizing *z)
{
    int64_t residual = rows_of(z, z->w.x, z->b->act);
    put(z, BUF_Y, MEM_SCRATCH, plan_adds_residual(z->p) ? 0 : residual);
    put(z, BUF_DX, MEM_SCRATCH, residual);
    put(z, BUF_DX_IN, MEM_SCRATCH, z->stage.last ? 0 : residual);
    put(z, BUF_DN, MEM_SCRATCH, residual);
    put(z, BUF_DBRANCH, MEM_SCRATCH, z->p->grouped || z->p->norm_online ? 0 : residual);
    put(z, BUF_DLATENT, MEM_SCRATCH, rows_of(z, 3 * z->w.latent, z->b->act));
    int64_t part = add(plan_statistic_offset(z->p, z->b, 3 * z->w.latent), rows_of(z, 1, z->b->stat));
    put(z, BUF_PART_EVEN, MEM_SCRATCH, plan_sums_in_kernels(z->p) ? part : 0);
    put(z, BUF_PART_ODD, MEM_SCRATCH, plan_sums_in_kernels(z->p) ? part : 0);
    put(z, BUF_K, MEM_SCRATCH, rows_of(z, 1, z->b->stat));
    put(z, BUF_ATTENTION, MEM_SCRATCH, z->b->attention_workspace);
    put(z, BUF_SCRATCH, MEM_SCRATCH, z->b->scratch);
    put(z, BUF_BLOCK, MEM_SCRATCH, PLAN_BLOCK_BYTES);
    put(z, BUF_EVAL, MEM_SCRATCH, PLAN_ALIGN);
    put(z, BUF_INPUTS, MEM_SCRATCH, rows_of(z, 1, DTYPE_I32));
    put(z, BUF_TARGETS, MEM_SCRATCH, rows_of(z, 1, DTYPE_I32));
}

static void size_edges(struct sizing *z)
{
    const struct plan *p = z->p;
    enum dtype act = z->b->act, stat = z->b->stat;
    int64_t rows = plan_head_rows(p);
    put(z, BUF_XF, MEM_HEAD, rows_of(z, z->w.x, act));
    if (!z->stage.last)
        return;
    put(z, BUF_RF, MEM_HEAD, rows_of(z, 1, stat));
    put(z, BUF_NF, MEM_HEAD, rows_of(z, z->w.x, act));
    put(z, BUF_NFULL, MEM_HEAD, z->w.x < p->d ? rows_of(z, p->d, act) : 0);
    put(z, BUF_LOGITS, MEM_HEAD, mul(mul(rows, p->V_pad / p->tp), (int64_t)dtype_size(act)));
    put(z, BUF_MAX, MEM_HEAD, mul(rows, (int64_t)dtype_size(stat)));
    put(z, BUF_SUMS, MEM_HEAD, mul(3 * rows, (int64_t)dtype_size(stat)));
    put(z, BUF_C, MEM_HEAD, rows_of(z, 1, stat));
}

void plan_arena(const struct plan *p, int stage, const struct plan_backend *b, struct plan_arena *out)
{
    memset(out, 0, sizeof *out);
    struct sizing z = {.p = p, .b = b, .cut = plan_cut(p), .arena = out};
    plan_stage_at(p, stage, &z.stage);
    plan_widths(p, &z.w);
    size_parameters(&z);
    size_stream(&z);
    size_latents(&z);
    if (p->lax)
        size_crossing(&z);
    size_inner(&z);
    size_scratch(&z);
    size_edges(&z);
    for (int i = 0; i < BUF_COUNT; i++) {
        struct plan_place *at = &out->at[i];
        at->offset = out->total;
        at->stride = at->copies > 1 ? aligned(at->bytes) : 0;
        out->total = add(out->total, mul(aligned(at->bytes), at->copies));
    }
}

void plan_stage_memory(const struct plan *p, int stage, const struct plan_backend *b, struct plan_memory *out)
{
    struct plan_arena arena;
    plan_arena(p, stage, b, &arena);
    memset(out, 0, sizeof *out);
    for (int i = 0; i < BUF_COUNT; i++) {
        const struct plan_place *at = &arena.at[i];
        out->bytes[at->category] = add(out->bytes[at->category], mul(aligned(at->bytes), at->copies));
    }
    out->total = arena.total;
}

void plan_memory(const struct plan *p, const struct plan_backend *b, struct plan_memory *out)
{
    /* The embedding is on the first stage, the head on the last; of those between, none has more layers or more
     * micro-batches under way than the second. */
    const int stages[] = {1, p->pp - 1};
    plan_stage_memory(p, 0, b, out);
    for (int i = 0; i < 2 && p->pp > 1; i++) {
        struct plan_memory m;
        plan_stage_memory(p, stages[i], b, &m);
        if (m.total > out->total)
            *out = m;
    }
}
