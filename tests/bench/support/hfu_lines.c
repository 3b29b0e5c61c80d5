/* hfu_lines.h */
#include "tests/bench/support/hfu_lines.h"

#include <math.h>
#include <stdio.h>

#include "tests/bench/support/replay.h"

static const double PEAK_TFLOPS = 989.4;

struct pair {
    struct gemm gemm[2];
    int n;
};

static struct gemm linear(int64_t T, int64_t in, int64_t out)
{
    return (struct gemm){.m = T, .n = out, .k = in, .trans_b = true, .lda = in, .ldb = in, .ldc = out, .batch = 1};
}

static struct pair full(const struct plan *p, int64_t out)
{
    return (struct pair){.n = 1, .gemm = {linear(p->T, p->d, out / p->tp)}};
}
static struct pair vanilla(const struct plan *p, int64_t out)
{
    return (struct pair){.n = 2, .gemm = {linear(p->T, p->d, p->r / p->tp), linear(p->T, p->r / p->tp, out)}};
}
static struct pair btp(const struct plan *p, int64_t out)
{
    return (struct pair){.n = 2, .gemm = {linear(p->T, p->d / p->tp, p->r), linear(p->T, p->r, out / p->tp)}};
}

static const struct way {
    const char *name;
    struct pair (*pair)(const struct plan *p, int64_t out);
} ways[] = {{"full", full}, {"vanilla", vanilla}, {"btp", btp}};

static void run_pair(struct replay *r, const void *arg)
{
    const struct pair *x = arg;
    for (int i = 0; i < x->n; i++)
        replay_gemm(r, &x->gemm[i]);
}

static int bench_pair(struct replay *r, const struct options *o, const struct plan *p, const struct pair *pair,
                      const char *name, struct error *err)
{
    struct repeated x = {.body = run_pair, .arg = pair};
    struct device_log log;
    double ms = NAN, tflop = 0;
    for (int i = 0; i < pair->n; i++)
        tflop += 2e-12 * (double)pair->gemm[i].m * (double)pair->gemm[i].n * (double)pair->gemm[i].k;
    int rc = repeated_make(r, &x, 5, err);
    if (!rc)
        rc = repeated_run(r, &x, o->seconds / 2, &ms, err);
    device_log_begin(&log);
    if (!rc)
        rc = repeated_run(r, &x, o->seconds, &ms, err);
    device_log_end(&log);
    repeated_free(r, &x);
    if (rc)
        return rc;
    line_begin(name, 100 * tflop / (ms / 1e3) / PEAK_TFLOPS, "%");
    line_put("peak_tflops", PEAK_TFLOPS);
    line_put("ms", ms);
    line_put("tflop", tflop);
    if (p->tp > 1)
        printf(", \"collectives\": \"NULL\"");
    line_end(o, p, &log);
    return ERR_OK;
}

int bench_hfu(const struct options *o, struct device *d, struct error *err)
{
    struct bench_job job = o->job;
    struct replay r = {.k = NULL};
    struct plan p;
    int rc = job.tp ? ERR_OK : bench_job_tp(job.model, &job.tp, err);
    if (!rc)
        rc = bench_job_plan(&job, &p, err);
    if (!rc && p.r < 1)
        rc = error_set(err, ERR_INVALID, "%s has no rank to make pairs of", job.model);
    if (!rc)
        rc = replay_open(&r, o, d, 0, err);
    if (!rc)
        rc = replay_warm(&r, o->warm, err);
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++)
        for (int mlp = 0; mlp < 2 && !rc; mlp++) {
            struct pair pair = ways[i].pair(&p, mlp ? p.f : p.d);
            char name[128];
            snprintf(name, sizeof name, "%s_%s_%s", o->name, ways[i].name, mlp ? "mlp" : "attn");
            rc = bench_pair(&r, o, &p, &pair, name, err);
        }
    if (r.k)
        replay_close(&r);
    return rc;
}
