/* recording.h */
#include "tests/bench/support/recording.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "worker/plan/intensity.h"

int record_step(const struct options *given, struct device *d, int layers, struct plan *plan, struct error *err)
{
    struct options o = *given;
    struct model m = {.measured = 0};
    double ms;
    o.plain = true;
    int rc = op_times_open(d->kernels, !o.cpu, err);
    if (!rc)
        rc = model_start_layers(&m, &o, d, layers, err);
    if (!rc) {
        op_times_vocabulary(m.plan.V_pad / m.plan.tp);
        op_times_begin();
        rc = model_step(&m, &ms, err);
        op_times_stop();
    }
    *plan = m.plan;
    model_stop(&m);
    return rc;
}

static bool same(const struct gemm *a, const struct gemm *b)
{
    return a->m == b->m && a->n == b->n && a->k == b->k && a->trans_a == b->trans_a && a->trans_b == b->trans_b &&
           a->lda == b->lda && a->ldb == b->ldb && a->ldc == b->ldc && a->batch == b->batch &&
           a->stride_a == b->stride_a && a->stride_b == b->stride_b && a->stride_c == b->stride_c &&
           a->c_grad == b->c_grad && (a->beta != 0) == (b->beta != 0) && !a->add == !b->add;
}

static const char *pass_of(const struct gemm *g)
{
    return g->c_grad ? "wgrad" : g->trans_b ? "fwd" : "dgrad";
}

/* The first product of the plan's list with this shape and pass: several sites may share one. */
static void name(const struct plan_gemm *list, int n, struct product *x)
{
    const struct gemm *g = &x->gemm;
    const char *pass = pass_of(g);
    snprintf(x->name, sizeof x->name, "%" PRId64 "x%" PRId64 "x%" PRId64 "_b%d_%s", g->m, g->n, g->k, g->batch, pass);
    for (int i = 0; i < n; i++) {
        const struct plan_gemm *y = &list[i];
        if (y->m != g->m || y->n != g->n || y->k != g->k || y->batch != g->batch || y->weight != g->c_grad ||
            (y->pass == PLAN_FORWARD) != !strcmp(pass, "fwd"))
            continue;
        snprintf(x->name, sizeof x->name, "%s_%s%s", y->what, pass, g->beta != 0 && !g->c_grad ? "_adds" : "");
        for (char *c = x->name; *c; c++)
            if (!isalnum((unsigned char)*c))
                *c = '_';
        break;
    }
}

/* Two that differ in their strides alone have numbers behind their names. */
static void tell_apart(struct product *all, int n)
{
    for (int i = 0; i < n; i++) {
        int twins = 1;
        for (int j = i + 1; j < n; j++)
            if (!strcmp(all[i].name, all[j].name)) {
                size_t len = strlen(all[j].name);
                snprintf(all[j].name + len, sizeof all[j].name - len, "_%d", ++twins);
            }
    }
}

int recorded_products(const struct plan *p, struct product **products, int *n, struct error *err)
{
    struct plan_gemm list[PLAN_GEMMS_MAX];
    struct plan_backend b;
    plan_backend_estimate(p, &b);
    int listed = plan_gemms(p, &b, list);
    struct product *all = calloc((size_t)op_times_count() + 1, sizeof *all);
    *n = 0;
    if (!(*products = all))
        return error_set(err, ERR_NOMEM, "no memory for the products of a step");
    for (int64_t i = 0; i < op_times_count(); i++) {
        struct op_call c;
        int j = 0;
        op_times_call(i, &c);
        if (c.kind != OP_GEMM)
            continue;
        while (j < *n && !same(&all[j].gemm, &c.gemm))
            j++;
        if (j == *n) {
            all[j].gemm = c.gemm;
            name(list, listed, &all[j]);
            ++*n;
        }
        all[j].calls++;
    }
    tell_apart(all, *n);
    return ERR_OK;
}
