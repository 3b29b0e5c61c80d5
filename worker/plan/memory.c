/* arena.h and plan_memory(). */
#include <string.h>

#include "worker/plan/arena.h"
#include "worker/plan/internal.h"

static int64_t mul(int64_t a, int64_t b)
{
    int64_t out;
    return __builtin_mul_overflow(a, b, &out) ? INT64_MAX : out;
}

static int64_t add(int64_t a, int64_t b)
{
    int64_t out;
    return __builtin_add_overflow(a, b, &out) ? INT64_MAX : out;
}

static int64_t aligned(int64_t bytes)
{
    return bytes > INT64_MAX - PLAN_ALIGN ? INT64_MAX : round_up(bytes, PLAN_ALIGN);
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

int64_t plan_statistic_offset(const struct plan *p, const struct plan_backend *b, int64_t n)
{
    int64_t latent = mul(mul(p->T, n), (int64_t)dtype_size(b->act));
    return b->act == b->stat ? latent : aligned(latent);
}

struct sizing {
    const struct plan *p;
    const struct plan_backend *b;
    struct plan_arena *arena;
};

static void put(struct sizing *z, enum plan_buffer buffer, enum plan_memory_category category, int64_t bytes)
{
    z->arena->at[buffer] = (struct plan_place){.category = category, .bytes = bytes};
}

/* n columns of T rows. */
static int64_t rows_of(const struct sizing *z, int64_t n, enum dtype t)
{
    return mul(mul(z->p->T, n), (int64_t)dtype_size(t));
}

static void size_parameters(struct sizing *z)
{
    const struct plan_backend *b = z->b;
    int64_t n = plan_parameter_elements(z->p);
    int64_t act = mul(n, (int64_t)dtype_size(b->act)), grad = mul(n, (int64_t)dtype_size(b->grad));
    put(z, BUF_WEIGHTS, MEM_WEIGHTS, act);
    put(z, BUF_MASTER, MEM_MASTER, b->act == b->grad ? 0 : grad);
    put(z, BUF_GRADS, MEM_GRADS, grad);
    put(z, BUF_MOMENT1, MEM_MOMENTS, grad);
    put(z, BUF_MOMENT2, MEM_MOMENTS, grad);
}

static void size_block(struct sizing *z)
{
    const struct plan *p = z->p;
    enum dtype act = z->b->act, stat = z->b->stat;
    int64_t w = p->d / p->tp, wk = p->hk * p->e / p->tp, fw = p->f / p->tp, r = p->r;
    int64_t S = rows_of(z, 1, stat);
    int64_t h_qkv = add(plan_statistic_offset(p, z->b, 3 * r), S);
    int64_t h_gu = add(plan_statistic_offset(p, z->b, 2 * r), S);
    int64_t z_of = p->latent_silu ? 1 : 0; /* a latent without activation is its own z */
    int64_t residual = rows_of(z, w, act);
    int64_t inner = rows_of(z, larger(w, fw), act), outer = rows_of(z, larger(w + 2 * wk, 2 * fw), act);
    const struct {
        enum plan_buffer buffer;
        int64_t bytes;
    } sizes[] = {
        {BUF_X1, residual},
        {BUF_N1, residual},
        {BUF_H_QKV, h_qkv},
        {BUF_R1, S},
        {BUF_Z_QKV, z_of * rows_of(z, 3 * r, act)},
        {BUF_QKV, rows_of(z, w + 2 * wk, act)},
        {BUF_CTX, residual},
        {BUF_LSE, rows_of(z, p->h / p->tp, stat)},
        {BUF_H_O, rows_of(z, r, act)},
        {BUF_Z_O, z_of * rows_of(z, r, act)},
        {BUF_X2, residual},
        {BUF_N2, residual},
        {BUF_H_GU, h_gu},
        {BUF_R2, S},
        {BUF_Z_GU, z_of * rows_of(z, 2 * r, act)},
        {BUF_GU, rows_of(z, 2 * fw, act)},
        {BUF_PROD, rows_of(z, fw, act)},
        {BUF_H_D, rows_of(z, r, act)},
        {BUF_Z_D, z_of * rows_of(z, r, act)},
        {BUF_Y, residual},
        {BUF_DX, residual},
        {BUF_DN, residual},
        {BUF_DINNER, inner},
        {BUF_DOUTER, outer},
        {BUF_DLATENT, rows_of(z, 3 * r, act)},
        {BUF_K, S},
        {BUF_ATTENTION, z->b->attention_workspace},
        {BUF_BLOCK, PLAN_BLOCK_BYTES},
        {BUF_EVAL, PLAN_ALIGN},
        {BUF_INPUTS, rows_of(z, 1, DTYPE_I32)},
        {BUF_TARGETS, rows_of(z, 1, DTYPE_I32)},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        put(z, sizes[i].buffer, sizes[i].buffer <= BUF_LAYER_LAST ? MEM_SAVED : MEM_SCRATCH, sizes[i].bytes);
}

static void size_edges(struct sizing *z)
{
    const struct plan *p = z->p;
    enum dtype act = z->b->act, stat = z->b->stat;
    bool sharded = p->tp > 1;
    put(z, BUF_XF, MEM_HEAD, rows_of(z, p->d / p->tp, act));
    put(z, BUF_SF, MEM_HEAD, rows_of(z, 1, stat));
    put(z, BUF_RF, MEM_HEAD, rows_of(z, 1, stat));
    put(z, BUF_NF, MEM_HEAD, rows_of(z, p->d / p->tp, act));
    put(z, BUF_GATHER, MEM_HEAD, sharded ? rows_of(z, p->d, act) : 0);
    put(z, BUF_NFULL, MEM_HEAD, sharded ? rows_of(z, p->d, act) : 0);
    put(z, BUF_LOGITS, MEM_HEAD, rows_of(z, p->V_pad / p->tp, act));
    put(z, BUF_MAX, MEM_HEAD, rows_of(z, 1, stat));
    put(z, BUF_SUMS, MEM_HEAD, rows_of(z, 3, stat));
    put(z, BUF_C, MEM_HEAD, rows_of(z, 1, stat));
}

void plan_arena(const struct plan *p, const struct plan_backend *b, struct plan_arena *out)
{
    memset(out, 0, sizeof *out);
    struct sizing z = {p, b, out};
    size_parameters(&z);
    size_block(&z);
    size_edges(&z);
    for (int i = 0; i < BUF_COUNT; i++) {
        struct plan_place *at = &out->at[i];
        int64_t copies = i >= BUF_LAYER_FIRST && i <= BUF_LAYER_LAST ? p->L : 1;
        at->stride = aligned(at->bytes);
        at->offset = out->total;
        out->total = add(out->total, mul(at->stride, copies));
    }
}

void plan_backend_estimate(const struct plan *p, struct plan_backend *out)
{
    enum dtype t = p->precision == BOOST__PRECISION__VALUE__FP64 ? DTYPE_F64 : DTYPE_F32;
    *out = (struct plan_backend){.act = t, .stat = t, .grad = t};
    /* The CPU's attention runs at most 64 pairs of sequence and key-value head at once, each with two
     * tiles of 64 rows of scores. */
    enum { PAIRS = 64, TILE_ROWS = 64 };
    int64_t pairs = mul(p->micro_batch, p->hk / p->tp);
    out->attention_workspace =
        mul((pairs < PAIRS ? pairs : PAIRS) * 2 * TILE_ROWS, mul(p->s + 1, (int64_t)dtype_size(t)));
}

void plan_memory(const struct plan *p, const struct plan_backend *b, struct plan_memory *out)
{
    struct plan_arena arena;
    plan_arena(p, b, &arena);
    memset(out, 0, sizeof *out);
    for (int i = 0; i < BUF_COUNT; i++) {
        int64_t copies = i >= BUF_LAYER_FIRST && i <= BUF_LAYER_LAST ? p->L : 1;
        int64_t *sum = &out->bytes[arena.at[i].category];
        *sum = add(*sum, mul(arena.at[i].stride, copies));
    }
    out->total = arena.total;
}
