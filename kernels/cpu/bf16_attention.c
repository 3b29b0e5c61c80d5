/* bf16.h: rotary positions and causal attention. Positions are those of whole sequences, so rope is cut by heads;
 * attention works on one sequence at a time, whose fp32 copies are in the workspace behind that of fp32. */
#include "kernels/cpu/bf16.h"

void bf16_rope(struct kstream *ks, int64_t T, int64_t s, int64_t heads, int64_t e, int64_t ld, double theta,
               bool inverse, void *x)
{
    int64_t step = bf16_rows(heads, s * e);
    float *a = bf16_scratch(ks, step * s * e);
    if (!a)
        return;
    for (int64_t i = 0; i < T; i += s) {
        int64_t rows = fp32_min(s, T - i);
        for (int64_t head = 0; head < heads; head += step) {
            int64_t count = fp32_min(step, heads - head), w = count * e;
            void *at = bf16_to(x, i * ld + head * e);
            bf16_widen(ks, rows, w, at, ld, a);
            fp32_rope(ks, rows, s, count, e, w, theta, inverse, a);
            bf16_narrow(ks, rows, w, a, at, ld);
        }
    }
}

/* One sequence, dense. */
static struct attention one_sequence(const struct attention *a)
{
    struct attention one = *a;
    one.b = 1;
    one.ldq = one.ldo = a->h * a->e;
    one.ldk = one.ldv = a->hk * a->e;
    return one;
}

struct copies {
    float *q, *k, *v, *o, *d_o, *dq, *dk, *dv;
    void *workspace;
};

/* Hands out the workspace and returns its floats; with base NULL only their number. */
static int64_t place(const struct attention *a, bool backward, float *base, struct copies *out)
{
    struct attention one = one_sequence(a);
    int64_t q = a->s * one.ldq, k = a->s * one.ldk, used = 0;
    const struct {
        float **where;
        int64_t floats;
    } parts[] = {{&out->q, q},
                 {&out->k, k},
                 {&out->v, k},
                 {&out->o, q},
                 {&out->d_o, backward ? q : 0},
                 {&out->dq, backward ? q : 0},
                 {&out->dk, backward ? k : 0},
                 {&out->dv, backward ? k : 0}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        *parts[i].where = base ? base + used : NULL;
        used += parts[i].floats;
    }
    out->workspace = base ? base + used : NULL;
    return used + (int64_t)(fp32_attention_workspace(&one, backward) / sizeof(float));
}

size_t bf16_attention_workspace(const struct attention *a, bool backward)
{
    struct copies unused;
    return (size_t)place(a, backward, NULL, &unused) * sizeof(float);
}

void bf16_attention_forward(struct kstream *ks, const struct attention *a, const void *q, const void *k, const void *v,
                            void *o, void *lse, void *workspace)
{
    struct attention one = one_sequence(a);
    struct copies c;
    place(a, false, workspace, &c);
    for (int64_t i = 0; i < a->b; i++) {
        int64_t row = i * a->s;
        bf16_widen(ks, a->s, one.ldq, bf16_at(q, row * a->ldq), a->ldq, c.q);
        bf16_widen(ks, a->s, one.ldk, bf16_at(k, row * a->ldk), a->ldk, c.k);
        bf16_widen(ks, a->s, one.ldv, bf16_at(v, row * a->ldv), a->ldv, c.v);
        fp32_attention_forward(ks, &one, c.q, c.k, c.v, c.o, (float *)lse + row * a->h, c.workspace);
        bf16_narrow(ks, a->s, one.ldo, c.o, bf16_to(o, row * a->ldo), a->ldo);
    }
}

void bf16_attention_backward(struct kstream *ks, const struct attention *a, const void *q, const void *k, const void *v,
                             const void *o, const void *lse, const void *d_o, void *dq, void *dk, void *dv,
                             void *workspace)
{
    struct attention one = one_sequence(a);
    struct copies c;
    place(a, true, workspace, &c);
    for (int64_t i = 0; i < a->b; i++) {
        int64_t row = i * a->s;
        bf16_widen(ks, a->s, one.ldq, bf16_at(q, row * a->ldq), a->ldq, c.q);
        bf16_widen(ks, a->s, one.ldk, bf16_at(k, row * a->ldk), a->ldk, c.k);
        bf16_widen(ks, a->s, one.ldv, bf16_at(v, row * a->ldv), a->ldv, c.v);
        bf16_widen(ks, a->s, one.ldo, bf16_at(o, row * a->ldo), a->ldo, c.o);
        bf16_widen(ks, a->s, one.ldo, bf16_at(d_o, row * a->ldo), a->ldo, c.d_o);
        fp32_attention_backward(ks, &one, c.q, c.k, c.v, c.o, (const float *)lse + row * a->h, c.d_o, c.dq, c.dk, c.dv,
                                c.workspace);
        bf16_narrow(ks, a->s, one.ldq, c.dq, bf16_to(dq, row * a->ldq), a->ldq);
        bf16_narrow(ks, a->s, one.ldk, c.dk, bf16_to(dk, row * a->ldk), a->ldk);
        bf16_narrow(ks, a->s, one.ldv, c.dv, bf16_to(dv, row * a->ldv), a->ldv);
    }
}
