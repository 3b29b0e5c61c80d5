/* Whole training steps, or the layers of one rank of several, on a GPU and through the engine as a job has it:
 * sustained figures with the device's clock and power beside them. For tests/bench/gpu_bench.py, and by hand.
 *
 * Usage: gpu_bench [options] step|layer|profile SIZE,KIND [FIELD=VALUE of the job...]
 *   step     tokens a second of whole steps, and the device memory that they take
 *   layer    forward and backward of one layer of rank 0 of tp: the difference between a deep model and a shallow one,
 * the update left out. The other ranks are not there: NULL collectives, whose results are wrong and take no time
 *   profile  where a step's time goes, by kernel: a table on standard error
 * Options: --name NAME of the result, --warm and --seconds SECONDS (2 and 5), --plain (nothing is captured), --cpu
 * (tries the program out: emulated bf16, figures of no meaning). Standard output: one JSON object a line with name,
 * value, unit and what belongs to it. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/clock.h"
#include "tests/bench/support/bench_job.h"
#include "tests/bench/support/device_log.h"
#include "tests/bench/support/null_comms.h"
#include "tests/bench/support/trace.h"
#include "worker/cuda.h"

/* Steps go round a few batches; the deep model's layers less the shallow one's. */
enum { BATCHES = 2, SHALLOW = 2, DEEP = 6, TRACED = 5, MOST_STEPS = 1 << 16 };

struct options {
    const char *mode, *name;
    double warm, seconds;
    bool cpu, plain;
    struct bench_job job;
};

/* ---- what is computed with ---- */

/* The backend's table with its allocations counted, and for layers without an update. */
static struct kernels table;
static const struct kernels *backend;
static int64_t arena_bytes; /* of the latest engine: its largest allocation */

static void *counted_alloc(size_t bytes, struct error *err)
{
    if ((int64_t)bytes > arena_bytes)
        arena_bytes = (int64_t)bytes;
    return backend->alloc(bytes, err);
}
static void no_squares(struct kstream *ks, int64_t n, const void *grad, double *acc)
{
    (void)ks, (void)n, (void)grad, (void)acc;
}
static void no_adamw(struct kstream *ks, int64_t n, const struct adamw *hyper, const struct step_block *block,
                     const void *grad, void *m, void *v, void *master, void *weight)
{
    (void)ks, (void)n, (void)hyper, (void)block, (void)grad, (void)m, (void)v, (void)master, (void)weight;
}

struct device {
    const struct cuda_library *cuda; /* NULL: the CPU */
    struct local_world *world;
    struct comms alone; /* of a layout of one rank */
};

static int open_device(struct device *d, const struct options *o, struct error *err)
{
    static const struct comm_layout one = {.tp = 1, .dp = 1, .pp = 1};
    int rc;
    if (o->cpu) {
        backend = kernels_cpu_bf16();
        rc = local_world_create(&one, &d->world, err);
        if (!rc)
            rc = local_comms_join(d->world, 0, &d->alone, err);
    } else {
        rc = cuda_library_open(&d->cuda, err);
        if (!rc) {
            backend = d->cuda->kernels();
            rc = d->cuda->comms_create(0, &one, NULL, NULL, 0, NULL, &d->alone, err);
        }
    }
    if (rc)
        return rc;
    table = *backend;
    table.alloc = counted_alloc;
    if (!strcmp(o->mode, "layer")) {
        table.grad_squares = no_squares;
        table.adamw = no_adamw;
    }
    return ERR_OK;
}

static void close_device(struct device *d)
{
    comms_destroy(&d->alone);
    local_world_destroy(d->world);
}

/* A stream that comes and goes: what the context itself takes is not counted as the engine's. */
static int free_before(const struct options *o, int64_t *bytes, struct error *err)
{
    struct kstream *ks;
    *bytes = 0;
    int rc = backend->stream_create(1, &ks, err);
    if (rc)
        return rc;
    rc = o->cpu ? ERR_OK : device_free_bytes(bytes, err);
    backend->stream_destroy(ks);
    return rc;
}

/* ---- a model at work ---- */

struct model {
    struct plan plan;
    struct comms *comms, null; /* null: those of a rank without the others */
    struct engine *engine;
    struct micro_batch *micro;
    int32_t *tokens;
    int64_t step, arena;
    double loss;
    double *ms; /* [MOST_STEPS] of the steps measured */
    int64_t measured;
};

static int train_step(struct model *m, double *ms, struct error *err)
{
    struct step_request request = {.lr = 1e-4};
    struct step_result result;
    int64_t start = clock_mono_ns();
    int rc = engine_step(m->engine, m->micro + m->step++ % BATCHES * m->plan.accumulation, &request, &result, NULL,
                         NULL, err);
    *ms = (double)(clock_mono_ns() - start) / (double)NS_PER_MS;
    if (rc)
        return rc;
    m->loss = result.loss;
    if (!isfinite(result.loss) || result.skipped)
        return error_set(err, ERR_INTERNAL, "step %" PRId64 " has loss %g%s", m->step, result.loss,
                         result.skipped ? " and was skipped" : "");
    return ERR_OK;
}

/* Comms and plan are there. The first step runs plainly and the second is captured, so three are done here. */
static int start_model(struct model *m, const struct options *o, struct error *err)
{
    double unused;
    arena_bytes = 0;
    m->ms = calloc(MOST_STEPS, sizeof *m->ms);
    if (!m->ms)
        return error_set(err, ERR_NOMEM, "no memory for the times");
    int rc = engine_create(&m->plan, &table, m->comms, 0, o->cpu ? 2 : 1, &m->engine, err);
    m->arena = arena_bytes;
    if (!rc)
        rc = bench_fill_weights(m->engine, err);
    if (!rc)
        rc = bench_tokens(&m->plan, BATCHES, &m->micro, &m->tokens, err);
    if (!rc)
        engine_set_capture(m->engine, !o->plain);
    for (int i = 0; i < 3 && !rc; i++)
        rc = train_step(m, &unused, err);
    const char *note = rc ? NULL : engine_note(m->engine);
    if (note)
        fprintf(stderr, "gpu_bench: %s\n", note);
    return rc;
}

static void stop_model(struct model *m)
{
    engine_destroy(m->engine);
    free(m->micro);
    free(m->tokens);
    free(m->ms);
}

/* Steps for so long, at least one; their times are kept when `measure`. */
static int run_for(struct model *m, double seconds, bool measure, struct error *err)
{
    int64_t start = clock_mono_ns();
    int rc = ERR_OK;
    do {
        double ms;
        rc = train_step(m, &ms, err);
        if (!rc && measure && m->measured < MOST_STEPS)
            m->ms[m->measured++] = ms;
    } while (!rc && (double)(clock_mono_ns() - start) < seconds * (double)NS_PER_S);
    return rc;
}

/* ---- figures ---- */

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
/* Of sorted values. */
static double quantile(const double *x, int64_t n, double q)
{
    return n ? x[(int64_t)(q * (double)(n - 1) + 0.5)] : (double)NAN;
}

static void put(const char *key, double value)
{
    if (isfinite(value))
        printf(", \"%s\": %.6g", key, value);
    else
        printf(", \"%s\": null", key);
}

static void begin_line(const char *name, double value, const char *unit)
{
    printf("{\"name\": \"%s\"", name);
    put("value", value);
    printf(", \"unit\": \"%s\"", unit);
}

static void end_line(const struct options *o, const struct plan *p, const struct device_log *log)
{
    static const char *const recompute[] = {
        [BOOST__RECOMPUTE__VALUE__NONE] = "NONE",
        [BOOST__RECOMPUTE__VALUE__LOW_RANK] = "LOW_RANK",
        [BOOST__RECOMPUTE__VALUE__LAYER] = "LAYER",
    };
    put("sm_mhz", log->mhz);
    put("sm_mhz_min", log->mhz_min);
    put("sm_mhz_max", log->mhz_max);
    put("watts", log->watts);
    printf(", \"model\": \"%s\", \"tp\": %d, \"micro_batch\": %" PRId64 ", \"seq_len\": %" PRId64, o->job.model, p->tp,
           p->micro_batch, p->s);
    printf(", \"deterministic\": %s, \"captured\": %s, \"recompute\": \"%s\"", p->deterministic ? "true" : "false",
           !o->plain && table.capture_begin ? "true" : "false", recompute[p->recompute]);
    printf(", \"backend\": \"%s\"}\n", backend->name);
    fflush(stdout);
}

/* ---- whole steps ---- */

static int plan_alone(struct model *m, const struct options *o, struct error *err)
{
    int rc = bench_job_plan(&o->job, &m->plan, err);
    if (!rc && m->plan.world != 1)
        rc = error_set(err, ERR_UNSUPPORTED, "whole steps are those of one rank; see mode layer");
    return rc;
}

static int bench_step(const struct options *o, struct device *d, struct error *err)
{
    struct model m = {.comms = &d->alone};
    struct device_log log;
    int64_t before, after = 0;
    int rc = plan_alone(&m, o, err);
    if (!rc)
        rc = free_before(o, &before, err);
    if (!rc)
        rc = start_model(&m, o, err);
    if (!rc)
        rc = run_for(&m, o->warm, false, err);
    device_log_begin(&log);
    if (!rc)
        rc = run_for(&m, o->seconds, true, err);
    device_log_end(&log);
    if (!rc && !o->cpu)
        rc = device_free_bytes(&after, err);
    if (!rc) {
        double sum = 0, tokens = (double)(m.plan.T * m.plan.accumulation);
        for (int64_t i = 0; i < m.measured; i++)
            sum += m.ms[i];
        qsort(m.ms, (size_t)m.measured, sizeof *m.ms, ascending);
        double median = quantile(m.ms, m.measured, 0.5);
        begin_line(o->name, tokens / median * 1e3, "tokens/s");
        put("step_ms", median);
        put("step_ms_mean", sum / (double)m.measured);
        put("step_ms_p95", quantile(m.ms, m.measured, 0.95));
        put("us_per_token", median * 1e3 / tokens);
        put("steps", (double)m.measured);
        put("arena_gib", (double)m.arena / (1 << 30));
        put("peak_gib", (double)(o->cpu ? m.arena : before - after) / (1 << 30));
        put("parameters", (double)plan_parameters(&m.plan));
        put("loss", m.loss);
        end_line(o, &m.plan, &log);
    }
    stop_model(&m);
    return rc;
}

/* ---- layers ---- */

static int start_layers(struct model *m, const struct options *o, const struct device *d, int layers, struct error *err)
{
    struct bench_job job = o->job;
    job.layers = layers;
    int rc = job.tp ? ERR_OK : bench_job_tp(job.model, &job.tp, err);
    if (!rc)
        rc = bench_job_plan(&job, &m->plan, err);
    if (!rc && m->plan.dp * m->plan.pp != 1)
        rc = error_set(err, ERR_UNSUPPORTED, "layers are cut over tp only");
    if (rc)
        return rc;
    null_comms(&m->plan, 0, d->alone.world.backend->copy, &m->null);
    m->comms = &m->null;
    return start_model(m, o, err);
}

/* Both models in turn, so that they run at the same clock; the median of the differences. */
static int bench_layer(const struct options *o, struct device *d, struct error *err)
{
    struct model shallow = {.measured = 0}, deep = {.measured = 0};
    struct device_log log;
    int64_t before, start = 0;
    int rc = free_before(o, &before, err);
    if (!rc)
        rc = start_layers(&shallow, o, d, SHALLOW, err);
    if (!rc)
        rc = start_layers(&deep, o, d, DEEP, err);
    if (!rc)
        rc = run_for(&deep, o->warm, false, err);
    device_log_begin(&log);
    start = clock_mono_ns();
    while (!rc && (double)(clock_mono_ns() - start) < o->seconds * (double)NS_PER_S) {
        rc = run_for(&deep, 0.4, true, err);
        if (!rc)
            rc = run_for(&shallow, 0.2, true, err);
    }
    device_log_end(&log);
    if (!rc) {
        qsort(deep.ms, (size_t)deep.measured, sizeof *deep.ms, ascending);
        qsort(shallow.ms, (size_t)shallow.measured, sizeof *shallow.ms, ascending);
        double long_ms = quantile(deep.ms, deep.measured, 0.5), short_ms = quantile(shallow.ms, shallow.measured, 0.5);
        begin_line(o->name, (long_ms - short_ms) / (DEEP - SHALLOW), "ms/layer");
        printf(", \"collectives\": \"NULL\"");
        put("ms_deep", long_ms);
        put("ms_shallow", short_ms);
        put("ms_deep_p95", quantile(deep.ms, deep.measured, 0.95));
        put("layers_deep", DEEP);
        put("layers_shallow", SHALLOW);
        put("steps", (double)(deep.measured + shallow.measured));
        put("arena_mib_layer", (double)(deep.arena - shallow.arena) / (DEEP - SHALLOW) / (1 << 20));
        put("loss", deep.loss);
        end_line(o, &deep.plan, &log);
    }
    stop_model(&deep);
    stop_model(&shallow);
    return rc;
}

/* ---- a profile ---- */

static void print_profile(const struct options *o, const struct model *m, const struct trace_summary *s, double traced,
                          double plain, const struct device_log *log)
{
    double span = s->busy_ms + s->idle_ms;
    fprintf(stderr, "%9.3f ms/step from the first start to the last end, %.3f of them idle, %.1f launches\n", span,
            s->idle_ms, s->launches);
    fprintf(stderr, "%9.3f ms/step by the host while traced, %.3f untraced\n", traced, plain);
    begin_line(o->name, 100 * s->idle_ms / span, "%");
    for (int i = 0; i < SHARE_COUNT; i++) {
        char key[32];
        snprintf(key, sizeof key, "%s_pct", trace_share_names[i]);
        put(key, 100 * s->share_ms[i] / span);
        snprintf(key, sizeof key, "%s_ms", trace_share_names[i]);
        put(key, s->share_ms[i]);
        fprintf(stderr, "%9.3f ms/step %6.2f %%  %s\n", s->share_ms[i], 100 * s->share_ms[i] / span,
                trace_share_names[i]);
    }
    put("busy_ms", s->busy_ms);
    put("step_ms_traced", traced);
    put("step_ms", plain);
    put("launches", s->launches);
    end_line(o, &m->plan, log);
}

static int bench_profile(const struct options *o, struct device *d, struct error *err)
{
    struct model m = {.comms = &d->alone};
    struct trace trace = {0};
    struct trace_summary summary;
    struct device_log log;
    double ms, traced = 0;
    int rc = plan_alone(&m, o, err);
    if (!rc)
        rc = start_model(&m, o, err);
    if (!rc)
        rc = run_for(&m, o->warm, false, err);
    if (!rc)
        rc = trace_begin(err);
    device_log_begin(&log);
    for (int i = 0; i < TRACED && !rc; i++, traced += ms / TRACED)
        rc = train_step(&m, &ms, err);
    device_log_end(&log);
    if (!rc)
        rc = trace_end(&trace, err);
    if (!rc && trace.lost)
        fprintf(stderr, "gpu_bench: %" PRId64 " records were lost\n", trace.lost);
    if (!rc)
        rc = trace_summarize(&trace, TRACED, stderr, &summary, err);
    if (!rc) {
        trace_close();
        rc = run_for(&m, o->seconds / 2, true, err);
    }
    if (!rc) {
        qsort(m.ms, (size_t)m.measured, sizeof *m.ms, ascending);
        print_profile(o, &m, &summary, traced, quantile(m.ms, m.measured, 0.5), &log);
    }
    stop_model(&m);
    trace_free(&trace);
    return rc;
}

/* ---- the command line ---- */

static const struct mode {
    const char *name;
    int (*run)(const struct options *o, struct device *d, struct error *err);
} modes[] = {{"step", bench_step}, {"layer", bench_layer}, {"profile", bench_profile}};

static bool read_options(int argc, char **argv, struct options *o)
{
    int i = 1;
    *o = (struct options){.warm = 2, .seconds = 5};
    for (; i < argc && !strncmp(argv[i], "--", 2); i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (!strcmp(argv[i], "--cpu"))
            o->cpu = true;
        else if (!strcmp(argv[i], "--plain"))
            o->plain = true;
        else if (!strcmp(argv[i], "--name") && value)
            o->name = argv[++i];
        else if (!strcmp(argv[i], "--warm") && value)
            o->warm = strtod(argv[++i], NULL);
        else if (!strcmp(argv[i], "--seconds") && value)
            o->seconds = strtod(argv[++i], NULL);
        else
            return false;
    }
    if (argc - i < 2)
        return false;
    o->mode = argv[i];
    o->job = (struct bench_job){.model = argv[i + 1], .cuda = !o->cpu, .n = argc - i - 2, .set = argv + i + 2};
    for (int k = 0; k < o->job.n; k++)
        if (!strncmp(o->job.set[k], "parallel.tp=", 12))
            o->job.tp = (int)strtol(o->job.set[k] + 12, NULL, 10);
    if (!o->name)
        o->name = o->mode;
    return true;
}

int main(int argc, char **argv)
{
    struct options o;
    struct device d = {.cuda = NULL};
    struct error err = {.code = ERR_OK};
    const struct mode *mode = NULL;
    if (read_options(argc, argv, &o))
        for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
            if (!strcmp(modes[i].name, o.mode))
                mode = &modes[i];
    if (!mode) {
        fprintf(stderr, "usage: gpu_bench [--name NAME] [--warm S] [--seconds S] [--plain] [--cpu] step|layer|profile "
                        "SIZE,KIND [FIELD=VALUE...]\n");
        return 2;
    }
    int rc = mode->run == bench_profile ? trace_open(&err) : ERR_OK;
    if (!rc)
        rc = open_device(&d, &o, &err);
    if (!rc) {
        rc = mode->run(&o, &d, &err);
        close_device(&d);
    }
    if (rc)
        fprintf(stderr, "gpu_bench: %s%s%s%s\n", err.message, err.hint[0] ? " (" : "", err.hint,
                err.hint[0] ? ")" : "");
    return rc ? 1 : 0;
}
