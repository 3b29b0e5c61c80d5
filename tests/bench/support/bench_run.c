/* bench_run.h */
#include "tests/bench/support/bench_run.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/clock.h"
#include "tests/bench/support/null_comms.h"
#include "worker/cuda.h"

enum { BATCHES = 2 /* that steps go round */, MOST_STEPS = 1 << 16 };

/* ---- the command line ---- */

bool options_read(int argc, char **argv, double seconds, struct options *o)
{
    int i = 1;
    *o = (struct options){.warm = 2, .seconds = seconds};
    for (; i < argc && !strncmp(argv[i], "--", 2); i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (!strcmp(argv[i], "--cpu"))
            o->cpu = true;
        else if (!strcmp(argv[i], "--plain"))
            o->plain = true;
        else if (!strcmp(argv[i], "--layers"))
            o->layers = true;
        else if (!strcmp(argv[i], "--name") && value)
            o->name = argv[++i];
        else if (!strcmp(argv[i], "--warm") && value)
            o->warm = strtod(argv[++i], NULL);
        else if (!strcmp(argv[i], "--gib") && value)
            o->gib = strtod(argv[++i], NULL);
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

int device_open(struct device *d, const struct options *o, bool no_update, struct error *err)
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
    d->kernels = &table;
    if (no_update) {
        table.grad_squares = no_squares;
        table.adamw = no_adamw;
    }
    return ERR_OK;
}

void device_close(struct device *d)
{
    comms_destroy(&d->alone);
    local_world_destroy(d->world);
}

int device_free_before(const struct options *o, int64_t *bytes, struct error *err)
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

int model_step(struct model *m, double *ms, struct error *err)
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

int model_start(struct model *m, const struct options *o, struct error *err)
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
        rc = model_step(m, &unused, err);
    const char *note = rc ? NULL : engine_note(m->engine);
    if (note)
        fprintf(stderr, "gpu_bench: %s\n", note);
    return rc;
}

int model_start_layers(struct model *m, const struct options *o, const struct device *d, int layers, struct error *err)
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
    return model_start(m, o, err);
}

void model_stop(struct model *m)
{
    engine_destroy(m->engine);
    free(m->micro);
    free(m->tokens);
    free(m->ms);
}

int model_run_for(struct model *m, double seconds, bool measure, struct error *err)
{
    int64_t start = clock_mono_ns();
    int rc = ERR_OK;
    do {
        double ms;
        rc = model_step(m, &ms, err);
        if (!rc && measure && m->measured < MOST_STEPS)
            m->ms[m->measured++] = ms;
    } while (!rc && (double)(clock_mono_ns() - start) < seconds * (double)NS_PER_S);
    return rc;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double model_quantile(struct model *m, double q)
{
    qsort(m->ms, (size_t)m->measured, sizeof *m->ms, ascending);
    return m->measured ? m->ms[(int64_t)(q * (double)(m->measured - 1) + 0.5)] : (double)NAN;
}

double model_mean(const struct model *m)
{
    double sum = 0;
    for (int64_t i = 0; i < m->measured; i++)
        sum += m->ms[i];
    return sum / (double)m->measured;
}

/* ---- a line of standard output ---- */

void line_put(const char *key, double value)
{
    if (isfinite(value))
        printf(", \"%s\": %.6g", key, value);
    else
        printf(", \"%s\": null", key);
}

void line_begin(const char *name, double value, const char *unit)
{
    printf("{\"name\": \"%s\"", name);
    line_put("value", value);
    printf(", \"unit\": \"%s\"", unit);
}

static void put_log(const struct device_log *log)
{
    line_put("sm_mhz", log->mhz);
    line_put("sm_mhz_min", log->mhz_min);
    line_put("sm_mhz_max", log->mhz_max);
    line_put("watts", log->watts);
}

void line_end_plain(const struct options *o, const struct device_log *log)
{
    put_log(log);
    printf(", \"captured\": %s, \"backend\": \"%s\"}\n", !o->plain && table.capture_begin ? "true" : "false",
           backend->name);
    fflush(stdout);
}

void line_end(const struct options *o, const struct plan *p, const struct device_log *log)
{
    static const char *const recompute[] = {
        [BOOST__RECOMPUTE__VALUE__NONE] = "NONE",
        [BOOST__RECOMPUTE__VALUE__LOW_RANK] = "LOW_RANK",
        [BOOST__RECOMPUTE__VALUE__LAYER] = "LAYER",
    };
    put_log(log);
    printf(", \"model\": \"%s\", \"tp\": %d, \"micro_batch\": %" PRId64 ", \"seq_len\": %" PRId64, o->job.model, p->tp,
           p->micro_batch, p->s);
    printf(", \"deterministic\": %s, \"captured\": %s, \"recompute\": \"%s\"", p->deterministic ? "true" : "false",
           !o->plain && table.capture_begin ? "true" : "false", recompute[p->recompute]);
    printf(", \"backend\": \"%s\"}\n", backend->name);
    fflush(stdout);
}
