/* attention_lines.h */
#include "tests/bench/support/attention_lines.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/bench/support/replay.h"

static const struct variant {
    const char *suffix;
    bool backward, accumulate, own;
} variants[] = {
    {"fwd", false, false, false},    {"bwd", true, false, false},    {"bwd_nondet", true, true, false},
    {"own_fwd", false, false, true}, {"own_bwd", true, false, true}, {"own_bwd_nondet", true, true, true},
};

static int read_shape(const char *text, struct attention *a, struct error *err)
{
    int64_t *const numbers[] = {&a->b, &a->h, &a->hk, &a->s, &a->e};
    const char *at = text;
    *a = (struct attention){.b = 0};
    for (int i = 0; i < 5; i++) {
        char *end;
        *numbers[i] = strtoll(at, &end, 10);
        if (end == at || *numbers[i] < 1 || *end != (i < 4 ? ',' : 0))
            return error_set(err, ERR_INVALID, "\"%s\" is no shape B,H,HK,S,E", text);
        at = end + 1;
    }
    a->ldq = a->ldo = a->h * a->e;
    a->ldk = a->ldv = a->hk * a->e;
    return ERR_OK;
}

struct attending {
    struct attention a;
    bool backward;
};

static void run_one(struct replay *r, const void *arg)
{
    const struct attending *x = arg;
    replay_attention(r, &x->a, x->backward);
}

static void print_line(const struct options *o, const struct attending *x, const struct variant *v, double ms,
                       const struct device_log *log)
{
    const struct attention *a = &x->a;
    double flop = 2.0 * (double)(a->b * a->h * a->e) * (double)a->s * (double)a->s * (x->backward ? 2.5 : 1);
    char name[128];
    char group[32] = "";
    if (a->hk != a->h)
        snprintf(group, sizeof group, "_hk%" PRId64, a->hk);
    snprintf(name, sizeof name, "%s_b%" PRId64 "_h%" PRId64 "_s%" PRId64 "_e%" PRId64 "%s_%s", o->name, a->b, a->h,
             a->s, a->e, group, v->suffix);
    line_begin(name, flop / ms * 1e-9, "TFLOP/s");
    line_put("ms", ms);
    line_put("key_heads", (double)a->hk);
    printf(", \"kernel\": \"%s\"", v->own ? "own" : "cuDNN");
    line_end_plain(o, log);
}

static int bench_variant(struct replay *r, const struct options *o, const struct attention *a, const struct variant *v,
                         struct error *err)
{
    struct attending x = {.a = *a, .backward = v->backward};
    struct repeated y = {.body = run_one, .arg = &x};
    struct device_log log;
    double ms = NAN;
    x.a.own = v->own;
    x.a.accumulate = v->accumulate;
    int rc = repeated_make(r, &y, 5, err);
    if (!rc)
        rc = repeated_run(r, &y, o->seconds / 4, &ms, err);
    device_log_begin(&log);
    if (!rc)
        rc = repeated_run(r, &y, o->seconds, &ms, err);
    device_log_end(&log);
    repeated_free(r, &y);
    if (!rc)
        print_line(o, &x, v, ms, &log);
    return rc;
}

static size_t workspace_of(const struct kernels *k, const struct attention *a)
{
    size_t most = 0;
    for (int i = 0; i < 8; i++) {
        struct attention x = *a;
        x.own = i & 1;
        x.accumulate = i & 2;
        size_t bytes = k->attention_workspace(&x, i & 4);
        most = bytes > most ? bytes : most;
    }
    return most;
}

static int bench_shape(const struct options *o, struct device *d, const char *text, double warm, struct error *err)
{
    struct replay r = {.k = NULL};
    struct attention a;
    int rc = read_shape(text, &a, err);
    if (!rc)
        rc = replay_open(&r, o, d, workspace_of(d->kernels, &a), err);
    bool library = !rc && r.k->attention_check;
    if (library && r.k->attention_check(r.ks, &a, r.workspace, err)) {
        fprintf(stderr, "gpu_ops: no library's attention for %s: %s\n", text, err->message);
        library = false;
    }
    if (!rc)
        rc = replay_warm(&r, warm, err);
    for (size_t i = 0; i < sizeof variants / sizeof *variants && !rc; i++)
        if (variants[i].own || library)
            rc = bench_variant(&r, o, &a, &variants[i], err);
    if (r.k)
        replay_close(&r);
    return rc;
}

int bench_attention(const struct options *o, struct device *d, struct error *err)
{
    int rc = bench_shape(o, d, o->job.model, o->warm, err);
    for (int i = 0; i < o->job.n && !rc; i++)
        rc = bench_shape(o, d, o->job.set[i], o->warm / 4, err);
    return rc;
}
