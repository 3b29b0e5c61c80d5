/* What a plan's figures depend on of the backend that will run it, from the plan alone: the formulas of
 * kernels/cpu and kernels/cuda once more, since this library includes neither. Tests beside those hold them equal. */
#include "worker/plan/internal.h"
#include "worker/plan/plan.h"
#include "worker/plan/saturate.h"

static int64_t aligned(int64_t bytes)
{
    enum { ALIGN = 256 };
    return round_up_size(bytes, ALIGN);
}

/* ---- CPU ---- */

/* The attention runs at most 64 pairs of sequence and key-value head at once, each with two tiles of 64 rows of
 * scores. BF16 works on one sequence at a time, on fp32 copies of q, k, v, o and their gradients. */
static int64_t cpu_attention(const struct plan *p, const struct plan_backend *b)
{
    enum { PAIRS = 64, TILE_ROWS = 64 };
    bool bf16 = b->act == DTYPE_BF16;
    struct plan_widths w;
    plan_widths(p, &w);
    int64_t pairs = mul(bf16 ? 1 : p->micro_batch, w.kv_heads);
    int64_t tiles = mul((pairs < PAIRS ? pairs : PAIRS) * 2 * TILE_ROWS, p->s + 1);
    int64_t copies = bf16 ? mul(p->s, 4 * mul(w.heads + w.kv_heads, p->e)) : 0;
    return mul(add(tiles, copies), (int64_t)dtype_size(b->stat));
}

/* ---- CUDA ---- */

int64_t plan_cuda_attention(const struct plan_attention *a)
{
    enum { TILE = 128 };
    const int64_t slack = 16 << 20, limit = (int64_t)2 << 30;
    int64_t all = mul(a->b, mul(a->h, a->s)), rows = aligned(mul(all, 4));
    if (a->own)
        return rows;
    int64_t padded = round_up(a->s, TILE);
    int64_t scores = a->accumulate ? 0 : mul(2, mul(a->h, mul(padded, padded)));
    int64_t shared = a->h == a->hk ? 0 : mul(4, mul(a->h, mul(a->s, a->e)));
    int64_t sums = a->accumulate ? aligned(mul(mul(all, a->e), 4)) : 0;
    int64_t sequence = aligned(add(scores, shared)), together = a->accumulate ? a->b : limit / sequence;
    together = larger(1, together < a->b ? together : a->b);
    return add(add(rows, sums), add(mul(together, sequence), slack));
}

static int64_t cuda_attention(const struct plan *p)
{
    struct plan_widths w;
    plan_widths(p, &w);
    const struct plan_attention a = {.b = p->micro_batch,
                                     .s = p->s,
                                     .h = w.heads,
                                     .hk = w.kv_heads,
                                     .e = p->e,
                                     .own = p->attention_own,
                                     .accumulate = !p->deterministic};
    return plan_cuda_attention(&a);
}

int64_t plan_cuda_scratch(const struct plan_largest *l)
{
    enum { WORKSPACE = 32 << 20, TILE = 256, CHUNKS = 1024, SPARE = 8, BRANCHES = 4 };
    int64_t wide = mul(BRANCHES, l->width), tiles = wide / TILE + (wide % TILE != 0) + SPARE;
    int64_t columns = mul(2 * 4 * TILE, larger(tiles, CHUNKS));
    int64_t lists = mul(4, add(add(mul(2, l->vocab), 1), mul(3, l->T)));
    return larger(WORKSPACE, larger(columns, lists)); /* the squares' parts are less than either */
}

/* ---- all ---- */

void plan_largest(const struct plan *p, struct plan_largest *out)
{
    enum { BRANCHES = 3 };
    struct plan_widths w;
    plan_widths(p, &w);
    *out = (struct plan_largest){
        .T = p->T,
        .width = larger(w.x, BRANCHES * w.latent),
        .vocab = plan_embedding_by_hidden(p) ? p->V : p->V_pad / p->tp,
    };
}

void plan_backend_estimate(const struct plan *p, struct plan_backend *out)
{
    if (p->cuda) {
        *out = (struct plan_backend){.act = DTYPE_BF16, .stat = DTYPE_F32, .grad = DTYPE_F32};
        out->attention_workspace = cuda_attention(p);
        struct plan_largest largest;
        plan_largest(p, &largest);
        out->scratch = plan_cuda_scratch(&largest);
        return;
    }
    bool bf16 = p->precision == BOOST__PRECISION__VALUE__BF16;
    enum dtype t = p->precision == BOOST__PRECISION__VALUE__FP64 ? DTYPE_F64 : DTYPE_F32;
    *out = (struct plan_backend){.act = bf16 ? DTYPE_BF16 : t, .stat = t, .grad = t};
    out->attention_workspace = cpu_attention(p, out);
}

/* The largest divisor of T within the bound, in whole tiles of a GPU's products where there is one; rather one above
 * the bound than chunks of less than a quarter of it, whose products would be narrow. */
int64_t plan_head_rows(const struct plan *p)
{
    enum { TILE = 128, LEAST = 4 /* of the bound: one part in */ };
    struct plan_backend b;
    plan_backend_estimate(p, &b);
    int64_t row = mul(p->V_pad / p->tp, (int64_t)dtype_size(b.act));
    int64_t bound = p->head_bytes ? larger(p->head_bytes / row, 1) : p->T;
    if (bound >= p->T)
        return p->T;
    for (int64_t n = bound / TILE * TILE; n > 0 && n >= bound / LEAST; n -= TILE)
        if (p->T % n == 0)
            return n;
    for (int64_t n = bound; n > 0 && n >= bound / LEAST; n--)
        if (p->T % n == 0)
            return n;
    while (p->T % bound)
        bound++;
    return bound;
}
