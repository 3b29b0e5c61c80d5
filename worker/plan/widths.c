/* What each strategy cuts, and the widths that follow. */
#include <assert.h>

#include "worker/plan/internal.h"
#include "worker/plan/plan.h"

const struct plan_cut *plan_cut_of(Boost__Strategy__Value strategy, bool published)
{
    static const struct plan_cut full = {.heads = true, .mlp = true};
    static const struct plan_cut vanilla = {.heads = true, .latent = true};
    static const struct plan_cut vanilla_published = {.latent = true};
    static const struct plan_cut btp = {.hidden = true, .heads = true, .mlp = true};
    switch (strategy) {
    case BOOST__STRATEGY__VALUE__FULL:
        return &full;
    case BOOST__STRATEGY__VALUE__VANILLA:
        return published ? &vanilla_published : &vanilla;
    default:
        return &btp;
    }
}

const struct plan_cut *plan_cut(const struct plan *p)
{
    return plan_cut_of(p->strategy, p->published);
}

bool plan_adds_residual(const struct plan *p)
{
    return p->tp == 1 || plan_cut(p)->hidden;
}

bool plan_sums_in_kernels(const struct plan *p)
{
    return p->cuda && p->strategy == BOOST__STRATEGY__VALUE__BTP && p->tp == 2 && p->grouped && !p->overlap && !p->lax;
}

struct plan_branches plan_branches(enum plan_site site)
{
    static const struct plan_branches of[SITE_COUNT] = {{PROJ_Q, 3}, {PROJ_O, 1}, {PROJ_GATE, 2}, {PROJ_DOWN, 1}};
    assert((unsigned)site < SITE_COUNT);
    return of[site];
}

enum plan_site plan_site_of(enum plan_projection projection)
{
    static const enum plan_site of[PROJ_COUNT] = {SITE_QKV, SITE_QKV, SITE_QKV, SITE_O, SITE_GU, SITE_GU, SITE_DOWN};
    assert((unsigned)projection < PROJ_COUNT);
    return of[projection];
}

int64_t plan_in_width(const struct plan *p, enum plan_projection projection)
{
    return projection == PROJ_DOWN ? p->f : p->d;
}

int64_t plan_out_width(const struct plan *p, enum plan_projection projection)
{
    switch (projection) {
    case PROJ_K:
    case PROJ_V:
        return p->hk * p->e;
    case PROJ_GATE:
    case PROJ_UP:
        return p->f;
    default:
        return p->d;
    }
}

void plan_widths(const struct plan *p, struct plan_widths *out)
{
    const struct plan_cut *cut = plan_cut(p);
    int64_t t = p->tp, x = cut->hidden ? p->d / t : p->d, of_heads = cut->heads ? t : 1;
    *out = (struct plan_widths){
        .x = x,
        .heads = p->h / of_heads,
        .kv_heads = p->hk / of_heads,
        /* A latent that is cut comes from rows of A, which want o's and down's input whole. */
        .in = {x, cut->latent ? p->d : p->d / of_heads, x, cut->mlp ? p->f / t : p->f},
        .latent = cut->latent ? p->r / t : p->r,
    };
    for (int j = 0; j < PROJ_COUNT; j++) {
        bool of_x = j == PROJ_O || j == PROJ_DOWN, is_mlp = j == PROJ_GATE || j == PROJ_UP;
        bool is_cut = of_x ? cut->hidden : is_mlp ? cut->mlp : cut->heads;
        out->out[j] = plan_out_width(p, j) / (is_cut ? t : 1);
    }
}

int64_t plan_first_slice(const struct plan *p)
{
    if (!p->overlap)
        return p->T;
    return p->micro_batch > 1 ? (p->micro_batch + 1) / 2 * p->s : (p->s + 1) / 2;
}
