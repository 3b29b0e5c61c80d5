/* ckpt_weights.h: dense layers to pairs of low rank, and pairs to dense layers. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "worker/ckpt_weights.h"

/* Its model in the other form. */
static int other_spec(const struct ckpt_dir *d, int64_t rank, Boost__JobSpec **out, struct error *err)
{
    Boost__Model m = *d->spec->model;
    m.factorization = rank ? BOOST__FACTORIZATION__VALUE__SVD : BOOST__FACTORIZATION__VALUE__FULL_RANK;
    m.has_rank = rank > 0;
    m.rank = (int32_t)rank;
    return weights_spec(&m, d->plan.s, out, err);
}

static int check(const struct plan *p, int64_t rank, struct error *err)
{
    bool full = p->factorization == BOOST__FACTORIZATION__VALUE__FULL_RANK;
    bool svd = p->factorization == BOOST__FACTORIZATION__VALUE__SVD;
    if (rank && !full) {
        error_set(err, ERR_UNSUPPORTED, "only a FULL_RANK model can be cut to rank %" PRId64, rank);
        return error_hint(err, svd ? "without --rank this SVD model becomes FULL_RANK" : "this one is neither");
    }
    if (!rank && !svd) {
        error_set(err, ERR_UNSUPPORTED, "only the pairs of an SVD model can be multiplied to dense layers");
        return error_hint(err, full ? "--rank R cuts this FULL_RANK model to SVD"
                                    : "in COLA and LAX an activation stands between the two");
    }
    int64_t keys = p->hk * p->e, most = keys < p->f ? keys : p->f;
    if (rank > most) {
        error_set(err, ERR_INVALID, "rank %" PRId64 " is more than a layer of this model can have, %" PRId64, rank, most);
        return error_hint(err, "the smallest are %s: at most --rank %" PRId64,
                          most == keys ? "key and value, kv_heads x hidden / heads wide" : "gate and up, intermediate wide",
                          most);
    }
    return ERR_OK;
}

/* What of the old model an item of the new one is made of. */
static int find_source(const struct plan *was, struct tensor_item *item, bool to_svd, struct error *err)
{
    char name[TENSOR_NAME];
    size_t len = strlen(item->name);
    snprintf(name, sizeof name, "%s", item->name);
    char last = name[len - 1];
    bool layer = len > 2 && name[len - 2] == '.' && (last == 'A' || last == 'B' || last == 'W');
    item->how = WEIGHTS_COPY;
    if (layer && to_svd) {
        item->how = last == 'A' ? WEIGHTS_DOWN : WEIGHTS_UP;
        name[len - 1] = 'W';
    } else if (layer) {
        item->how = WEIGHTS_MERGE;
        name[len - 1] = 'A';
        item->source[1] = ckpt_plan_find(was, name);
        name[len - 1] = 'B';
    }
    item->source[0] = ckpt_plan_find(was, name);
    if (item->source[0] < 0 || (item->how == WEIGHTS_MERGE && item->source[1] < 0))
        return error_set(err, ERR_INTERNAL, "the model has no tensor %s", name);
    return ERR_OK;
}

int ckpt_convert(const char *from, const char *to, int64_t rank, char *out, size_t cap, struct error *err)
{
    struct ckpt_dir d;
    struct weights w;
    struct plan plan;
    struct tensor_item *items = NULL;
    size_t n = 0;
    Boost__JobSpec *spec = NULL;
    int rc = ckpt_dir_open(&d, from, err);
    weights_init(&w, &d, rank);
    if (!rc)
        rc = check(&d.plan, rank, err);
    if (!rc)
        rc = ckpt_dir_index(&d, err);
    if (!rc)
        rc = other_spec(&d, rank, &spec, err);
    if (!rc)
        rc = plan_make(spec, &plan, err);
    if (!rc)
        rc = plan_items(&plan, &items, &n, err);
    for (size_t i = 0; i < n && !rc; i++)
        rc = find_source(&d.plan, &items[i], rank > 0, err);
    if (!rc)
        rc = ckpt_write_weights(to, d.step, spec, items, n, weights_rows, &w, out, cap, err);
    if (spec)
        boost__job_spec__free_unpacked(spec, NULL);
    free(items);
    weights_free(&w);
    ckpt_dir_close(&d);
    return rc;
}
