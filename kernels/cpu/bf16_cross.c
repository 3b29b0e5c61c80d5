/* bf16.h: crossing latents. Pieces are whole groups of branches. */
#include "kernels/cpu/bf16.h"

#include <string.h>

/* Rows of a piece, and the fp32 ends of an operation: gain and bias [branches, w], three pieces, one row of zeros,
 * totals [2, branches, w]. */
struct ends {
    int64_t step;
    float *gain, *bias, *a, *b, *c, *zeros, *totals;
};

static bool prepare(struct kstream *ks, const struct crossing *c, const void *gain, const void *bias, struct ends *out)
{
    int64_t group = c->branches * c->w, all = c->rows / c->branches;
    out->step = bf16_rows(all, group) * c->branches;
    int64_t piece = out->step * c->w;
    float *scratch = bf16_scratch(ks, 4 * group + 3 * piece + c->w);
    if (!scratch)
        return false;
    out->gain = bf16_carve(&scratch, group);
    out->bias = bf16_carve(&scratch, group);
    out->totals = bf16_carve(&scratch, 2 * group);
    out->a = bf16_carve(&scratch, piece);
    out->b = bf16_carve(&scratch, piece);
    out->c = bf16_carve(&scratch, piece);
    out->zeros = scratch;
    if (gain)
        bf16_widen(ks, 1, group, gain, group, out->gain);
    if (bias)
        bf16_widen(ks, 1, group, bias, group, out->bias);
    return true;
}

static struct crossing piece_of(const struct crossing *c, const struct ends *s, int64_t i)
{
    struct crossing piece = *c;
    piece.rows = fp32_min(s->step, c->rows - i);
    return piece;
}

/* The sums are of the stored u. */
void bf16_cross_sum(struct kstream *ks, const struct crossing *c, const void *Y, const void *G, int64_t ldg,
                    const void *bias, void *u, void *sums)
{
    struct ends s;
    int64_t w = c->w;
    if (!prepare(ks, c, NULL, bias, &s))
        return;
    memset(s.zeros, 0, (size_t)w * sizeof *s.zeros);
    for (int64_t i = 0; i < c->rows; i += s.step) {
        struct crossing piece = piece_of(c, &s, i);
        bf16_widen(ks, piece.rows, w, bf16_at(Y, i * w), w, s.a);
        bf16_widen(ks, piece.rows, w, bf16_at(G, i * ldg), ldg, s.b);
        fp32_cross_sum(ks, &piece, s.a, s.b, w, bias ? s.bias : NULL, s.c, NULL);
        bf16_narrow(ks, piece.rows, w, s.c, bf16_to(u, i * w), w);
        if (!sums)
            continue;
        bf16_widen(ks, piece.rows, w, bf16_at(u, i * w), w, s.a);
        fp32_cross_sum(ks, &piece, s.a, s.zeros, 0, NULL, s.c, (float *)sums + 2 * i);
    }
}

void bf16_cross_forward(struct kstream *ks, const struct crossing *c, const void *u, const void *sums, const void *gain,
                        const void *bias, void *z)
{
    struct ends s;
    int64_t w = c->w;
    if (!prepare(ks, c, gain, bias, &s))
        return;
    for (int64_t i = 0; i < c->rows; i += s.step) {
        struct crossing piece = piece_of(c, &s, i);
        bf16_widen(ks, piece.rows, w, bf16_at(u, i * w), w, s.a);
        fp32_cross_forward(ks, &piece, s.a, (const float *)sums + 2 * i, s.gain, s.bias, s.b);
        bf16_narrow(ks, piece.rows, w, s.b, bf16_to(z, i * w), w);
    }
}

/* The sums are of the stored dv, from which cross_backward subtracts their means: so dv is made and rounded first,
 * its totals unused, then summed. */
void bf16_cross_backward_sums(struct kstream *ks, const struct crossing *c, const void *u, const void *sums,
                              const void *gain, const void *bias, void *dz, void *back, void *dgain, void *dbias)
{
    struct ends s;
    int64_t w = c->w, group = c->branches * w;
    if (!prepare(ks, c, gain, bias, &s))
        return;
    memset(s.totals, 0, (size_t)(2 * group) * sizeof *s.totals);
    for (int64_t i = 0; i < c->rows; i += s.step) {
        struct crossing piece = piece_of(c, &s, i);
        const float *sum = (const float *)sums + 2 * i;
        float *to = (float *)back + 2 * i;
        bf16_widen(ks, piece.rows, w, bf16_at(u, i * w), w, s.a);
        bf16_widen(ks, piece.rows, w, bf16_at(dz, i * w), w, s.b);
        if (c->act != LATENT_IDENTITY) {
            fp32_cross_backward_sums(ks, &piece, s.a, sum, s.gain, s.bias, s.b, to, s.totals, s.totals + group);
            bf16_narrow(ks, piece.rows, w, s.b, bf16_to(dz, i * w), w);
            bf16_widen(ks, piece.rows, w, bf16_at(dz, i * w), w, s.b);
            piece.act = LATENT_IDENTITY;
        }
        fp32_cross_backward_sums(ks, &piece, s.a, sum, s.gain, s.bias, s.b, to, dgain, dbias);
    }
}

void bf16_cross_backward(struct kstream *ks, const struct crossing *c, const void *u, const void *sums,
                         const void *gain, const void *back, void *dv, void *dbias)
{
    struct ends s;
    int64_t w = c->w;
    if (!prepare(ks, c, gain, NULL, &s))
        return;
    for (int64_t i = 0; i < c->rows; i += s.step) {
        struct crossing piece = piece_of(c, &s, i);
        bf16_widen(ks, piece.rows, w, bf16_at(u, i * w), w, s.a);
        bf16_widen(ks, piece.rows, w, bf16_at(dv, i * w), w, s.b);
        fp32_cross_backward(ks, &piece, s.a, (const float *)sums + 2 * i, s.gain, (const float *)back + 2 * i, s.b,
                            dbias);
        bf16_narrow(ks, piece.rows, w, s.b, bf16_to(dv, i * w), w);
    }
}
