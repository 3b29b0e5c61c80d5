/* floor_lines.h */
#include "tests/bench/support/floor_lines.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tests/bench/support/recording.h"
#include "tests/bench/support/replay.h"

enum copies { NO_COPIES, GIVEN_COPIES, ENGINE_COPIES };

static const struct variant {
    const char *suffix;
    bool products, attention, accumulate;
    enum copies copies;
} variants[] = {
    {"_gemm", true, false, false, NO_COPIES},
    {"_attention", false, true, false, NO_COPIES},
    {"_attention_nondet", false, true, true, NO_COPIES},
    {"_gemm_attention", true, true, false, NO_COPIES},
    {"_gemm_attention_nondet", true, true, true, NO_COPIES},
    {"", true, true, false, GIVEN_COPIES},
    {"_nondet", true, true, true, GIVEN_COPIES},
    {"_passes", true, true, false, ENGINE_COPIES},
};

struct step {
    const struct variant *v;
    double given;  /* bytes that each product of a layer has copied behind it */
    double copied; /* in one pass over the step */
};

static bool product_of_layer(const struct op_call *c)
{
    return c->kind == OP_GEMM && c->share == SHARE_GEMM;
}
static bool pass_of_engine(const struct op_call *c)
{
    return c->kind == OP_OTHER && c->share != SHARE_OPTIMIZER;
}

static bool attention(const struct op_call *c)
{
    return c->kind == OP_ATTENTION_FORWARD || c->kind == OP_ATTENTION_BACKWARD;
}

/* Read and written together, in pieces that the memory holds. */
static void copy(struct replay *r, double bytes)
{
    size_t left = (size_t)(bytes / 2), most = r->out.bytes / 2;
    while (left > 0) {
        size_t n = left < most ? left : most;
        const void *from = replay_in(r, n);
        void *to = replay_out(r, n);
        if (r->copy)
            r->copy(r->ks, to, from, n);
        else
            memcpy(to, from, n);
        left -= n;
    }
}

static void run_step(struct replay *r, const void *arg)
{
    struct step *s = (struct step *)(uintptr_t)arg;
    s->copied = 0;
    for (int64_t i = 0; i < op_times_count(); i++) {
        struct op_call c;
        double bytes = 0;
        op_times_call(i, &c);
        if (c.kind == OP_GEMM && s->v->products)
            replay_gemm(r, &c.gemm);
        if (attention(&c) && s->v->attention) {
            c.attention.accumulate = s->v->accumulate;
            replay_attention(r, &c.attention, c.kind == OP_ATTENTION_BACKWARD);
        }
        if (s->v->copies == GIVEN_COPIES && product_of_layer(&c))
            bytes = s->given;
        if (s->v->copies == ENGINE_COPIES && pass_of_engine(&c))
            bytes = c.bytes;
        copy(r, bytes);
        s->copied += bytes;
    }
}

static int bench_variant(struct replay *r, const struct options *o, const struct plan *p, struct step *s,
                         struct error *err)
{
    struct repeated x = {.body = run_step, .arg = s};
    struct device_log log;
    double ms = NAN;
    int rc = repeated_make(r, &x, 1, err);
    if (!rc)
        rc = repeated_run(r, &x, o->seconds / 4, &ms, err);
    device_log_begin(&log);
    if (!rc)
        rc = repeated_run(r, &x, o->seconds, &ms, err);
    device_log_end(&log);
    repeated_free(r, &x);
    if (rc)
        return rc;
    char name[128];
    double tokens = (double)(p->T * p->accumulation);
    struct plan told = *p;
    told.deterministic = !s->v->accumulate;
    snprintf(name, sizeof name, "%s%s", o->name, s->v->suffix);
    line_begin(name, ms * 1e3 / tokens, "us/token");
    line_put("step_ms", ms);
    line_put("tokens_s", tokens / ms * 1e3);
    line_put("copied_gb", s->copied / 1e9);
    printf(", \"products\": %s, \"attention\": \"%s\"", s->v->products ? "true" : "false",
           !s->v->attention   ? "none"
           : s->v->accumulate ? "accumulating"
                              : "deterministic");
    if (p->tp > 1)
        printf(", \"collectives\": \"NULL\"");
    line_end(o, &told, &log);
    return ERR_OK;
}

static size_t workspace_of(const struct kernels *k)
{
    size_t most = 0;
    for (int64_t i = 0; i < op_times_count(); i++)
        for (int accumulate = 0; accumulate < 2; accumulate++) {
            struct op_call c;
            op_times_call(i, &c);
            if (!attention(&c))
                continue;
            c.attention.accumulate = accumulate;
            size_t bytes = k->attention_workspace(&c.attention, c.kind == OP_ATTENTION_BACKWARD);
            most = bytes > most ? bytes : most;
        }
    return most;
}

int bench_floor(const struct options *o, struct device *d, struct error *err)
{
    struct plan plan;
    struct replay r = {.k = NULL};
    int64_t products = 0;
    int rc = record_step(o, d, 0, &plan, err);
    if (!rc)
        rc = replay_open(&r, o, d, workspace_of(d->kernels), err);
    if (!rc)
        rc = replay_warm(&r, o->warm, err);
    for (int64_t i = 0; i < op_times_count(); i++) {
        struct op_call c;
        op_times_call(i, &c);
        products += product_of_layer(&c);
    }
    for (size_t i = 0; i < sizeof variants / sizeof *variants && !rc; i++) {
        struct step s = {.v = &variants[i], .given = o->gib * (1 << 30) / (double)products};
        if (s.v->copies != GIVEN_COPIES || o->gib > 0)
            rc = bench_variant(&r, o, &plan, &s, err);
    }
    if (r.k)
        replay_close(&r);
    return rc;
}
