/* intensity.h: one line for each call of gemm() in the engine. */
#include "worker/plan/intensity.h"

#include <stdio.h>
#include <string.h>

static const char *const names[PROJ_COUNT] = {"q", "k", "v", "o", "gate", "up", "down"};

struct listing {
    const struct plan *p;
    const struct plan_backend *b;
    const struct plan_cut *cut;
    struct plan_widths w;
    struct plan_gemm *out;
    int n, pass;
};

/* What a batch has in common. */
enum shared { OWN, SHARED_A, SHARED_B };

static void put(struct listing *l, struct plan_gemm g, enum shared shared)
{
    double act = (double)dtype_size(l->b->act), c = g.weight ? (double)dtype_size(l->b->grad) : act;
    double m = (double)g.m, n = (double)g.n, k = (double)g.k, batch = (double)g.batch;
    if (g.calls == 0)
        return;
    g.pass = l->pass;
    g.flop = 2 * m * n * k * batch;
    g.bytes = act * (m * k * (shared == SHARED_A ? 1 : batch) + k * n * (shared == SHARED_B ? 1 : batch)) +
              c * m * n * batch * (g.adds ? 2 : 1);
    l->out[l->n++] = g;
}

/* Branches [first, first + count) of a site. */
struct branches {
    enum plan_site site;
    int first, count;
};

/* "q k v" and what kind of weight. */
static struct plan_gemm gemm_of(const struct branches *b, const char *weight)
{
    struct plan_gemm g = {.batch = 1, .calls = 1};
    size_t used = 0;
    for (int j = b->first; j < b->first + b->count; j++)
        used += (size_t)snprintf(g.what + used, sizeof g.what - used, "%s ", names[plan_branches(b->site).first + j]);
    snprintf(g.what + used, sizeof g.what - used, "%s", weight);
    return g;
}

static struct plan_gemm shape(struct plan_gemm g, int64_t m, int64_t n, int64_t k, int64_t batch)
{
    g.m = m;
    g.n = n;
    g.k = k;
    g.batch = batch;
    return g;
}

static int bundle_count(const struct listing *l, enum plan_site site)
{
    return l->p->grouped ? 1 : plan_branches(site).count;
}

static struct branches bundle_at(const struct listing *l, enum plan_site site, int i)
{
    return l->p->grouped ? (struct branches){site, 0, plan_branches(site).count} : (struct branches){site, i, 1};
}

/* ---- A ---- */

static void down_forward(struct listing *l, const struct branches *b)
{
    put(l, shape(gemm_of(b, "A"), l->p->T, b->count * l->w.latent, l->w.in[b->site], 1), OWN);
}

static void down_backward(struct listing *l, const struct branches *b)
{
    int64_t in = l->w.in[b->site], columns = b->count * l->w.latent;
    /* o's input is a sum over ranks by heads: parts for the reduce-scatter. */
    int64_t parts = l->cut->latent && l->cut->heads && b->site == SITE_O ? l->p->tp : 1;
    struct plan_gemm weight = shape(gemm_of(b, "A"), columns, in, l->p->T, 1);
    weight.weight = weight.adds = true;
    put(l, weight, OWN);
    put(l, shape(gemm_of(b, "A"), l->p->T, in / parts, columns, parts), SHARED_A);
}

/* ---- B, and W of a dense layer ---- */

/* `count` layers [out, in]; they have inputs of their own, or share one. */
struct up {
    struct branches b;
    const char *weight;
    int64_t out, in, count;
    bool shared;
    bool first; /* the first to give a gradient of a shared input */
};

static void up_forward(struct listing *l, const struct up *u)
{
    put(l, shape(gemm_of(&u->b, u->weight), l->p->T, u->out, u->in, u->count), u->shared ? SHARED_A : OWN);
}

static void up_backward(struct listing *l, const struct up *u)
{
    struct plan_gemm weight = shape(gemm_of(&u->b, u->weight), u->out, u->in, l->p->T, u->count);
    weight.weight = weight.adds = true;
    put(l, weight, u->shared ? SHARED_B : OWN);
    struct plan_gemm input = shape(gemm_of(&u->b, u->weight), l->p->T, u->in, u->out, u->shared ? 1 : u->count);
    input.calls = u->shared ? u->first : 1; /* a shared input's gradient is a sum, one by one */
    put(l, input, OWN);
    input.calls = u->shared ? u->count - u->first : 0;
    input.adds = true;
    put(l, input, OWN);
}

/* Neighbours of one shape go as one batch. */
static void fan(struct listing *l, const struct branches *b, void (*each)(struct listing *, const struct up *))
{
    const int64_t *out = &l->w.out[plan_branches(b->site).first];
    bool dense = l->p->factorization == BOOST__FACTORIZATION__VALUE__FULL_RANK;
    for (int first = b->first, end = b->first + b->count, n; first < end; first += n) {
        for (n = 1; first + n < end && out[first + n] == out[first]; n++)
            ;
        each(l, &(struct up){.b = {b->site, first, n},
                             .weight = dense ? "W" : "B",
                             .out = out[first],
                             .in = dense ? l->w.in[b->site] : l->w.latent,
                             .count = n,
                             .shared = dense,
                             .first = first == b->first});
    }
}

/* VANILLA: branch by branch, for collectives stand between; what goes onto heads in one part a rank. */
static void apart(struct listing *l, const struct branches *b, void (*each)(struct listing *, const struct up *))
{
    int64_t parts = l->cut->heads && b->site == SITE_QKV ? l->p->tp : 1;
    for (int j = b->first; j < b->first + b->count; j++)
        each(l, &(struct up){.b = {b->site, j, 1},
                             .weight = "B",
                             .out = plan_out_width(l->p, plan_branches(b->site).first + j) / parts,
                             .in = l->w.latent,
                             .count = parts,
                             .shared = true,
                             .first = true});
}

static void ups(struct listing *l, const struct branches *b, void (*each)(struct listing *, const struct up *))
{
    if (l->cut->latent)
        apart(l, b, each);
    else
        fan(l, b, each);
}

/* ---- LAX's gates ---- */

static struct plan_gemm gate_of(const struct branches *b, const char *weight)
{
    struct plan_gemm g = gemm_of(b, weight);
    g.place = GEMM_CROSSING;
    return g;
}

static void linear_gate(struct listing *l, const struct branches *b)
{
    int64_t T = l->p->T, r = l->p->r, w = l->w.latent;
    if (l->pass == PLAN_FORWARD) {
        put(l, shape(gate_of(b, "gate"), T, w, r, b->count), OWN);
        return;
    }
    struct plan_gemm weight = shape(gate_of(b, "gate"), w, r, T, b->count);
    weight.weight = weight.adds = true;
    put(l, weight, OWN);
    struct plan_gemm input = shape(gate_of(b, "gate"), T, w, w, l->cut->latent ? l->p->tp : 1);
    input.calls = b->count;
    put(l, input, SHARED_A);
}

static void tensor_gate(struct listing *l, const struct branches *b)
{
    int64_t T = l->p->T, m, n;
    plan_gate_shape(l->p->r, &m, &n);
    struct plan_gemm right = gate_of(b, "right"), left = gate_of(b, "left");
    right.calls = left.calls = b->count;
    put(l, shape(right, m * T, n, n, 1), OWN); /* in the backward once more: what lies between is not kept */
    if (l->pass == PLAN_FORWARD) {
        put(l, shape(left, m, T * n, m, 1), OWN);
        return;
    }
    struct plan_gemm dleft = shape(left, m, m, T * n, 1), dright = shape(right, n, n, m * T, 1);
    dleft.weight = dleft.adds = dright.weight = dright.adds = true;
    put(l, dleft, OWN);
    put(l, shape(left, m, T * n, m, 1), OWN);
    put(l, dright, OWN);
    put(l, shape(right, m * T, n, n, 1), OWN);
}

static void gate(struct listing *l, const struct branches *b)
{
    if (l->p->lax && l->p->lax_gate == BOOST__LAX_GATE__VALUE__LINEAR)
        linear_gate(l, b);
    if (l->p->lax && l->p->lax_gate == BOOST__LAX_GATE__VALUE__TENSOR)
        tensor_gate(l, b);
}

/* ---- all ---- */

static void head(struct listing *l)
{
    const struct plan *p = l->p;
    int64_t columns = p->V_pad / p->tp, parts = l->cut->hidden ? p->tp : 1;
    int64_t rows = plan_head_rows(p);
    struct plan_gemm g = {.what = "head", .place = GEMM_HEAD, .calls = p->T / rows};
    if (l->pass == PLAN_FORWARD) {
        put(l, shape(g, rows, columns, p->d, 1), OWN);
        return;
    }
    struct plan_gemm weight = shape(g, columns, p->d, rows, 1);
    weight.weight = weight.adds = true;
    put(l, weight, OWN);
    put(l, shape(g, rows, p->d / parts, columns, parts), SHARED_A);
}

int plan_gemms(const struct plan *p, const struct plan_backend *b, struct plan_gemm out[PLAN_GEMMS_MAX])
{
    struct listing l = {.p = p, .b = b, .cut = plan_cut(p), .out = out, .pass = PLAN_FORWARD};
    bool low_rank = p->factorization != BOOST__FACTORIZATION__VALUE__FULL_RANK;
    plan_widths(p, &l.w);
    for (enum plan_site site = 0; site < SITE_COUNT; site++) {
        for (int i = 0; i < bundle_count(&l, site) && low_rank; i++) {
            struct branches bundle = bundle_at(&l, site, i);
            down_forward(&l, &bundle);
            gate(&l, &bundle);
        }
        for (int i = 0; i < bundle_count(&l, site); i++) {
            struct branches bundle = bundle_at(&l, site, i);
            ups(&l, &bundle, up_forward);
        }
    }
    head(&l);
    l.pass = PLAN_BACKWARD;
    head(&l);
    for (enum plan_site site = SITE_COUNT; site-- > 0;)
        for (int i = 0; i < bundle_count(&l, site); i++) {
            struct branches bundle = bundle_at(&l, site, i);
            ups(&l, &bundle, up_backward);
            gate(&l, &bundle);
            if (low_rank)
                down_backward(&l, &bundle);
        }
    return l.n;
}

/* Multiplications of one token with the matrices of its layers and the head. */
static double products(const struct plan *p)
{
    double r = (double)p->r, one = 0, gates = 0, d = (double)p->d;
    for (enum plan_projection j = 0; j < PROJ_COUNT; j++) {
        double in = (double)plan_in_width(p, j), out = (double)plan_out_width(p, j);
        one += p->factorization == BOOST__FACTORIZATION__VALUE__FULL_RANK ? in * out : r * (in + out);
    }
    if (p->lax && p->lax_gate == BOOST__LAX_GATE__VALUE__LINEAR)
        gates = PROJ_COUNT * r * r;
    if (p->lax && p->lax_gate == BOOST__LAX_GATE__VALUE__TENSOR) {
        int64_t m, n;
        plan_gate_shape(p->r, &m, &n);
        gates = PROJ_COUNT * r * (double)(m + n);
    }
    return (double)p->L * one + (double)(p->L - 1) * gates + (double)p->V * d;
}

double plan_model_flop(const struct plan *p)
{
    double s = (double)p->s, sequences = (double)p->global_batch;
    /* A query has the keys up to its own place: s (s + 1) / 2 pairs, each with two products of width d. */
    double attention = (double)p->L * s * (s + 1) / 2 * 2 * (double)p->d;
    return 6 * sequences * (s * products(p) + attention);
}
