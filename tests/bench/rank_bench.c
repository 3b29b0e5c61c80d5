/* Steps of rank 0 of tp while the other ranks are not there: NULL collectives, whose results are wrong and take no time.
 * What the same job's step takes longer is what its ranks wait for one another. Nothing is learned (the rate is 0), so
 * that wrong sums do no harm. For tests/bench/paper_table.py, and by hand.
 *
 * Usage: rank_bench [--name NAME] [--warm S] [--seconds S] [--plain] [--cpu] step|gradients SIZE,KIND
 *        [FIELD=VALUE of the job...]
 *   step       whole ones, clip and update included
 *   gradients  forward and backward, no update
 * Standard output: one JSON object, milliseconds of a step. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "proto/base/clock.h"
#include "tests/bench/support/bench_run.h"

static int one_step(struct model *m, double *ms, struct error *err)
{
    struct step_request request = {.lr = 0};
    struct step_result result;
    int64_t start = clock_mono_ns();
    int rc = engine_step(m->engine, m->micro, &request, &result, NULL, NULL, err);
    *ms = (double)(clock_mono_ns() - start) / (double)NS_PER_MS;
    m->loss = result.loss;
    return rc;
}

static int run_for(struct model *m, double seconds, bool measure, struct error *err)
{
    enum { MOST = 4096 };
    int64_t start = clock_mono_ns();
    int rc = ERR_OK;
    do {
        double ms;
        rc = one_step(m, &ms, err);
        if (!rc && measure && m->measured < MOST)
            m->ms[m->measured++] = ms;
    } while (!rc && (double)(clock_mono_ns() - start) < seconds * (double)NS_PER_S);
    return rc;
}

static int bench_rank(const struct options *o, struct device *d, struct error *err)
{
    struct model m = {.measured = 0};
    struct device_log log;
    int64_t before, after = 0;
    int rc = device_free_before(o, &before, err);
    if (!rc)
        rc = model_start_layers(&m, o, d, 0, err);
    if (!rc)
        rc = run_for(&m, o->warm, false, err);
    device_log_begin(&log);
    if (!rc)
        rc = run_for(&m, o->seconds, true, err);
    device_log_end(&log);
    if (!rc && !o->cpu)
        rc = device_free_bytes(&after, err);
    if (!rc) {
        line_begin(o->name, model_quantile(&m, 0.5), "ms");
        printf(", \"collectives\": \"NULL\"");
        line_put("step_ms_p95", model_quantile(&m, 0.95));
        line_put("steps", (double)m.measured);
        line_put("arena_gib", (double)m.arena / (1 << 30));
        line_put("peak_gib", (double)(o->cpu ? m.arena : before - after) / (1 << 30));
        line_end(o, &m.plan, &log);
    }
    model_stop(&m);
    return rc;
}

int main(int argc, char **argv)
{
    struct options o;
    struct device d = {.cuda = NULL};
    struct error err = {.code = ERR_OK};
    bool read = options_read(argc, argv, 3, &o), no_update = read && !strcmp(o.mode, "gradients");
    if (!read || o.layers || (!no_update && strcmp(o.mode, "step") != 0)) {
        fprintf(stderr, "usage: rank_bench [--name NAME] [--warm S] [--seconds S] [--plain] [--cpu] step|gradients "
                        "SIZE,KIND [FIELD=VALUE...]\n");
        return 2;
    }
    int rc = device_open(&d, &o, no_update, &err);
    if (!rc) {
        rc = bench_rank(&o, &d, &err);
        device_close(&d);
    }
    if (rc)
        fprintf(stderr, "rank_bench: %s%s%s%s\n", err.message, err.hint[0] ? " (" : "", err.hint,
                err.hint[0] ? ")" : "");
    return rc ? 1 : 0;
}
