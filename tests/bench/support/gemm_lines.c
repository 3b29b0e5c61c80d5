/* gemm_lines.h */
#include "tests/bench/support/gemm_lines.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/bench/support/gemm_candidates.h"
#include "tests/bench/support/recording.h"
#include "tests/bench/support/replay.h"

enum { LAYERS = 2 /* of the step that shapes are taken from */, ROUNDS = 3 };

struct candidate {
    const struct gemm *gemm;
    const struct gemm_candidates *all; /* NULL: the engine's own choice */
    int index;
    void *workspace;
    bool failed;
    struct repeated repeated;
    double ms[ROUNDS];
    bool known; /* of the engine's own: what it is */
    struct gemm_candidate what;
};

static void run_one(struct replay *r, const void *arg)
{
    struct candidate *c = (struct candidate *)(uintptr_t)arg;
    const struct gemm *g = c->gemm;
    size_t bytes = replay_gemm_bytes(g, 'c');
    const void *a = replay_in(r, replay_gemm_bytes(g, 'a')), *b = replay_in(r, replay_gemm_bytes(g, 'b'));
    void *out = g->c_grad ? replay_sums(r, bytes) : replay_out(r, bytes);
    struct gemm here = *g;
    if (g->add)
        here.add = replay_in(r, bytes);
    if (!c->all)
        r->k->gemm(r->ks, &here, a, b, out);
    else if (!c->failed && !gemm_candidates_run(c->all, c->index, r->ks, &here, a, b, out, c->workspace))
        c->failed = true;
}

static double median(const double x[ROUNDS])
{
    double low = fmin(x[0], x[1]), high = fmax(x[0], x[1]);
    return fmax(low, fmin(high, x[2]));
}

static double tflops(const struct gemm *g, double ms)
{
    return 2e-9 * (double)g->m * (double)g->n * (double)g->k * g->batch / ms;
}

static void put_algorithm(const struct gemm_candidate *x)
{
    printf("\"split_k\": %d, \"reduction\": \"%s\", \"reproducible\": %s, \"algorithm\": %d, \"tile\": %d, "
           "\"stages\": %d",
           x->split_k, x->reduction, x->reproducible ? "true" : "false", x->id, x->tile, x->stages);
}

static void put_candidates(const struct candidate *c, int n)
{
    if (c->known) {
        printf(", \"chosen\": {\"candidate\": %d, ", c->index);
        put_algorithm(&c->what);
        printf("}");
    }
    printf(", \"candidates\": [");
    for (int i = 1; i < n; i++) {
        struct gemm_candidate x = gemm_candidates_at(c[i].all, c[i].index);
        printf("%s{\"tflops\": ", i > 1 ? ", " : "");
        if (c[i].failed)
            printf("null");
        else
            printf("%.5g, \"ms\": %.5g", tflops(c[i].gemm, median(c[i].ms)), median(c[i].ms));
        printf(", \"workspace_mib\": %.4g, ", (double)x.workspace / (1 << 20));
        put_algorithm(&x);
        printf("}");
    }
    printf("]");
}

/* The fastest candidate, of those that add in a fixed order, and of those that split no sum. */
static void put_best(const struct candidate *c, int n)
{
    double best = NAN, reproducible = NAN, whole = NAN;
    int first = 0;
    for (int i = 1; i < n; i++) {
        struct gemm_candidate x = gemm_candidates_at(c[i].all, c[i].index);
        double speed = c[i].failed ? (double)NAN : tflops(c[i].gemm, median(c[i].ms));
        best = fmax(best, speed);
        first = !first && x.reproducible ? i : first;
        reproducible = x.reproducible ? fmax(reproducible, speed) : reproducible;
        whole = x.split_k <= 1 ? fmax(whole, speed) : whole;
    }
    if (n > 1)
        printf(", \"peer\": \"best of %d candidates\"", n - 1);
    line_put("peer_value", best);
    line_put("best_reproducible", reproducible);
    line_put("best_not_split", whole);
    line_put("first_reproducible", first ? tflops(c[0].gemm, median(c[first].ms)) : (double)NAN);
}

static void print_line(const struct options *o, const struct plan *p, const struct product *x,
                       const struct candidate *c, int n, const struct device_log *log)
{
    const struct gemm *g = &x->gemm;
    char name[160];
    snprintf(name, sizeof name, "%s_%s", o->name, x->name);
    line_begin(name, tflops(g, median(c[0].ms)), "TFLOP/s");
    put_best(c, n);
    line_put("ms", median(c[0].ms));
    line_put("m", (double)g->m);
    line_put("n", (double)g->n);
    line_put("k", (double)g->k);
    line_put("batch", g->batch);
    printf(", \"transposed\": \"%s%s\", \"adds\": %s", g->trans_a ? "t" : "n", g->trans_b ? "t" : "n",
           g->beta != 0 ? "true" : "false");
    line_put("calls", x->calls);
    line_put("layers", LAYERS);
    put_candidates(c, n);
    if (p->tp > 1)
        printf(", \"collectives\": \"NULL\"");
    line_end(o, p, log);
}

/* In turn, so that all see the same clock. */
static int time_all(struct replay *r, const struct options *o, struct candidate *c, int n, struct error *err)
{
    double seconds = o->seconds / ROUNDS;
    int rc = ERR_OK;
    for (int i = 0; i < n && !rc; i++)
        rc = repeated_make(r, &c[i].repeated, 3, err);
    for (int round = 0; round < ROUNDS && !rc; round++)
        for (int i = 0; i < n && !rc; i++)
            if (!c[i].failed)
                rc = repeated_run(r, &c[i].repeated, i ? seconds / 4 : seconds, &c[i].ms[round], err);
    for (int i = 0; i < n; i++)
        repeated_free(r, &c[i].repeated);
    return rc;
}

static int bench_product(struct replay *r, const struct options *o, const struct plan *p, const struct product *x,
                         void *workspace, struct error *err)
{
    struct gemm_candidates *all = NULL;
    struct candidate c[1 + CANDIDATES_MAX];
    struct device_log log;
    int n = 1;
    if (!replay_gemm_fits(r, &x->gemm))
        return ERR_OK;
    int rc = o->cpu ? ERR_OK : gemm_candidates_find(&x->gemm, &all, err);
    if (rc)
        return rc;
    if (all)
        n += gemm_candidates_count(all);
    for (int i = 0; i < n; i++) {
        c[i] = (struct candidate){
            .gemm = &x->gemm, .all = i ? all : NULL, .index = i - 1, .workspace = workspace, .repeated.body = run_one};
        c[i].repeated.arg = &c[i];
    }
    device_log_begin(&log);
    rc = time_all(r, o, c, n, err);
    device_log_end(&log);
    c[0].known = !rc && all && gemm_candidates_chosen(all, r->k, r->ks, &x->gemm, &c[0].what, &c[0].index);
    if (!rc)
        print_line(o, p, x, c, n, &log);
    gemm_candidates_free(all);
    return rc;
}

int bench_gemm(const struct options *o, struct device *d, struct error *err)
{
    struct plan plan;
    struct product *products = NULL;
    struct replay r = {.k = NULL};
    int n = 0;
    int rc = record_step(o, d, LAYERS, &plan, err);
    if (!rc)
        rc = recorded_products(&plan, &products, &n, err);
    if (!rc)
        rc = replay_open(&r, o, d, gemm_candidates_workspace(), err);
    if (!rc)
        rc = replay_warm(&r, o->warm, err);
    for (int i = 0; i < n && !rc; i++)
        rc = bench_product(&r, o, &plan, &products[i], r.workspace, err);
    if (r.k)
        replay_close(&r);
    free(products);
    return rc;
}
