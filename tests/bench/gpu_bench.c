/* Whole training steps, or the layers of one rank of several, on a GPU and through the engine as a job has it:
 * sustained figures with the device's clock and power beside them. For tests/bench/gpu_bench.py, and by hand.
 *
 * Usage: gpu_bench [options] step|layer|profile SIZE,KIND [FIELD=VALUE of the job...]
 *   step     tokens a second of whole steps, and the device memory that they take
 *   layer    forward and backward of one layer of rank 0 of tp: the difference between a deep model and a shallow one,
 * the update left out. The other ranks are not there: NULL collectives, whose results are wrong and take no time
 *   profile  where a step's time goes, by kernel: a table on standard error. With --layers of the deep model that mode
 * layer has, edges included
 * Options: --name NAME of the result, --warm and --seconds SECONDS (2 and 5), --plain (nothing is captured), --layers,
 * --cpu (tries the program out: emulated bf16, figures of no meaning). Standard output: one JSON object a line with
 * name, value, unit and what belongs to it. */
#include <ftw.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/clock.h"
#include "tests/bench/support/bench_run.h"
#include "tests/bench/support/null_comms.h"
#include "tests/bench/support/op_times.h"
#include "tests/bench/support/trace.h"
#include "worker/checkpoint.h"

/* The deep model's layers less the shallow one's; steps of a profile. */
enum { SHALLOW = 2, DEEP = 6, TRACED = 5 };

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
        rc = device_free_before(o, &before, err);
    if (!rc)
        rc = model_start(&m, o, err);
    if (!rc)
        rc = model_run_for(&m, o->warm, false, err);
    device_log_begin(&log);
    if (!rc)
        rc = model_run_for(&m, o->seconds, true, err);
    device_log_end(&log);
    if (!rc && !o->cpu)
        rc = device_free_bytes(&after, err);
    if (!rc) {
        double tokens = (double)(m.plan.T * m.plan.accumulation);
        double median = model_quantile(&m, 0.5);
        line_begin(o->name, tokens / median * 1e3, "tokens/s");
        line_put("step_ms", median);
        line_put("step_ms_mean", model_mean(&m));
        line_put("step_ms_p95", model_quantile(&m, 0.95));
        line_put("us_per_token", median * 1e3 / tokens);
        line_put("steps", (double)m.measured);
        line_put("arena_gib", (double)m.arena / (1 << 30));
        line_put("peak_gib", (double)(o->cpu ? m.arena : before - after) / (1 << 30));
        line_put("parameters", (double)plan_parameters(&m.plan));
        line_put("loss", m.loss);
        line_end(o, &m.plan, &log);
    }
    model_stop(&m);
    return rc;
}

/* ---- layers ---- */

/* Collectives that a recompute mode repeats: what NULL ones leave out of its time. */
static void put_repeated(const struct plan *p)
{
    static const struct {
        int kind;
        const char *name;
    } kinds[] = {
        {PLAN_ALL_REDUCE, "all_reduce"}, {PLAN_REDUCE_SCATTER, "reduce_scatter"}, {PLAN_ALL_GATHER, "all_gather"}};
    struct plan_comm_counts counts;
    plan_comm_counts(p, &counts);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        const struct plan_comm *c = &counts.tp[kinds[i].kind][PLAN_RECOMPUTE];
        char key[64];
        if (!c->calls)
            continue;
        snprintf(key, sizeof key, "repeated_%s_calls", kinds[i].name);
        line_put(key, (double)c->calls / (double)(p->L * p->accumulation));
        snprintf(key, sizeof key, "repeated_%s_mib", kinds[i].name);
        line_put(key, (double)plan_comm_bytes(c, 2, 4) / (1 << 20) / (double)(p->L * p->accumulation));
    }
}

/* Both models in turn, so that they run at the same clock; the difference of the medians. */
static int bench_layer(const struct options *o, struct device *d, struct error *err)
{
    struct model shallow = {.measured = 0}, deep = {.measured = 0};
    struct device_log log;
    int64_t before, start = 0;
    int rc = device_free_before(o, &before, err);
    if (!rc)
        rc = model_start_layers(&shallow, o, d, SHALLOW, err);
    if (!rc)
        rc = model_start_layers(&deep, o, d, DEEP, err);
    if (!rc)
        rc = model_run_for(&deep, o->warm, false, err);
    device_log_begin(&log);
    start = clock_mono_ns();
    while (!rc && (double)(clock_mono_ns() - start) < o->seconds * (double)NS_PER_S) {
        rc = model_run_for(&deep, 0.4, true, err);
        if (!rc)
            rc = model_run_for(&shallow, 0.2, true, err);
    }
    device_log_end(&log);
    if (!rc) {
        double long_ms = model_quantile(&deep, 0.5), short_ms = model_quantile(&shallow, 0.5);
        line_begin(o->name, (long_ms - short_ms) / (DEEP - SHALLOW), "ms/layer");
        printf(", \"collectives\": \"NULL\"");
        line_put("ms_deep", long_ms);
        line_put("ms_shallow", short_ms);
        line_put("ms_deep_p95", model_quantile(&deep, 0.95));
        line_put("layers_deep", DEEP);
        line_put("layers_shallow", SHALLOW);
        line_put("steps", (double)(deep.measured + shallow.measured));
        line_put("arena_mib_layer", (double)(deep.arena - shallow.arena) / (DEEP - SHALLOW) / (1 << 20));
        put_repeated(&deep.plan);
        line_put("loss", deep.loss);
        line_end(o, &deep.plan, &log);
    }
    model_stop(&deep);
    model_stop(&shallow);
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
    line_begin(o->name, 100 * s->idle_ms / span, "%");
    for (int i = 0; i < SHARE_COUNT; i++) {
        char key[32];
        snprintf(key, sizeof key, "%s_pct", trace_share_names[i]);
        line_put(key, 100 * s->share_ms[i] / span);
        snprintf(key, sizeof key, "%s_ms", trace_share_names[i]);
        line_put(key, s->share_ms[i]);
        fprintf(stderr, "%9.3f ms/step %6.2f %%  %s\n", s->share_ms[i], 100 * s->share_ms[i] / span,
                trace_share_names[i]);
    }
    line_put("busy_ms", s->busy_ms);
    line_put("step_ms_traced", traced);
    line_put("step_ms", plain);
    line_put("launches", s->launches);
    line_end(o, &m->plan, log);
}

static int start_profiled(struct model *m, const struct options *o, const struct device *d, struct error *err)
{
    if (o->layers)
        return model_start_layers(m, o, d, DEEP, err);
    int rc = plan_alone(m, o, err);
    return rc ? rc : model_start(m, o, err);
}

static int bench_profile(const struct options *o, struct device *d, struct error *err)
{
    struct model m = {.comms = &d->alone};
    struct trace trace = {0};
    struct trace_summary summary;
    struct device_log log;
    double ms, traced = 0;
    int rc = start_profiled(&m, o, d, err);
    if (!rc)
        rc = model_run_for(&m, o->warm, false, err);
    if (!rc)
        rc = trace_begin(err);
    device_log_begin(&log);
    for (int i = 0; i < TRACED && !rc; i++, traced += ms / TRACED)
        rc = model_step(&m, &ms, err);
    device_log_end(&log);
    if (!rc)
        rc = trace_end(&trace, err);
    if (!rc && trace.lost)
        fprintf(stderr, "gpu_bench: %" PRId64 " records were lost\n", trace.lost);
    if (!rc)
        rc = trace_summarize(&trace, TRACED, stderr, &summary, err);
    if (!rc) {
        trace_close();
        rc = model_run_for(&m, o->seconds / 2, true, err);
    }
    if (!rc)
        print_profile(o, &m, &summary, traced, model_quantile(&m, 0.5), &log);
    model_stop(&m);
    trace_free(&trace);
    return rc;
}

/* Without a profiler: by operation and shape, nothing captured. */
static int bench_ops(const struct options *given, struct device *d, struct error *err)
{
    struct options o = *given;
    struct model m = {.comms = &d->alone};
    struct op_times sums;
    struct device_log log;
    double ms, all = 0;
    o.plain = true;
    int rc = plan_alone(&m, &o, err);
    if (!rc)
        rc = op_times_open(d->kernels, !o.cpu, err);
    op_times_vocabulary(m.plan.V_pad);
    if (!rc)
        rc = model_start(&m, &o, err);
    if (!rc)
        rc = model_run_for(&m, o.warm, false, err);
    for (int timed = 0; timed < 2 && !rc; timed++) { /* the first makes the events */
        op_times_begin();
        device_log_begin(&log);
        for (int i = 0; i < TRACED && !rc; i++, all += timed ? ms / TRACED : 0)
            rc = model_step(&m, &ms, err);
        device_log_end(&log);
    }
    if (!rc)
        rc = op_times_end(TRACED, stderr, &sums, err);
    if (!rc) {
        double sum = 0;
        for (int i = 0; i < SHARE_COUNT; i++)
            sum += sums.share_ms[i];
        line_begin(o.name, sum, "ms");
        for (int i = 0; i < SHARE_COUNT; i++) {
            char key[32];
            snprintf(key, sizeof key, "%s_ms", trace_share_names[i]);
            line_put(key, sums.share_ms[i]);
            fprintf(stderr, "%9.3f ms/step  %s\n", sums.share_ms[i], trace_share_names[i]);
        }
        line_put("element_gb", sums.element_gb);
        line_put("calls", sums.calls);
        line_put("step_ms", all);
        line_end(&o, &m.plan, &log);
    }
    model_stop(&m);
    return rc;
}

/* ---- memory ---- */

static int plan_batch(const struct options *o, int64_t sequences, struct plan *plan, int64_t *bytes, struct error *err)
{
    enum { FIELDS_MAX = 32 };
    char micro[64], global[64], *set[FIELDS_MAX];
    struct bench_job job = o->job;
    struct plan_backend b;
    struct plan_memory m;
    if (job.n + 2 > FIELDS_MAX)
        return error_set(err, ERR_INVALID, "more than %d fields", FIELDS_MAX - 2);
    snprintf(micro, sizeof micro, "parallel.micro_batch=%" PRId64, sequences);
    snprintf(global, sizeof global, "parallel.global_batch=%" PRId64, sequences);
    memcpy(set, job.set, (size_t)job.n * sizeof *set);
    set[job.n++] = micro;
    set[job.n++] = global;
    job.set = set;
    job.cuda = true;
    int rc = job.tp ? ERR_OK : bench_job_tp(job.model, &job.tp, err);
    if (!rc)
        rc = bench_job_plan(&job, plan, err);
    if (rc)
        return rc;
    plan_backend_estimate(plan, &b);
    plan_memory(plan, &b, &m);
    *bytes = m.total;
    return ERR_OK;
}

/* The most sequences within `room`, 0 if there are none; the plan and the bytes of so many. */
static int most_sequences(const struct options *o, int64_t room, int64_t *most, struct error *err)
{
    int64_t low = 0, high = 1, bytes = 0;
    struct plan plan;
    int rc = plan_batch(o, high, &plan, &bytes, err);
    for (; !rc && bytes <= room && high < 1 << 14; high *= 2, rc = plan_batch(o, high, &plan, &bytes, err))
        low = high;
    while (!rc && high - low > 1) {
        int64_t middle = (low + high) / 2;
        rc = plan_batch(o, middle, &plan, &bytes, err);
        if (bytes <= room)
            low = middle;
        else
            high = middle;
    }
    *most = low;
    return rc;
}

/* Steps with this batch, which the device may have no room for after all. */
static int try_batch(const struct options *o, const struct device *d, struct model *m, double *ms, struct error *err)
{
    m->comms = &m->null;
    null_comms(&m->plan, 0, d->alone.world.backend->copy, &m->null);
    int rc = model_start(m, o, err);
    return rc ? rc : model_step(m, ms, err);
}

static int bench_fit(const struct options *o, struct device *d, struct error *err)
{
    struct model m = {.measured = 0};
    struct device_log none = {.mhz = NAN, .mhz_min = NAN, .mhz_max = NAN, .watts = NAN};
    int64_t room = (int64_t)(o->gib * (1 << 30)), most = 0, bytes = 0;
    double ms = NAN;
    int rc = room || o->cpu ? ERR_OK : device_free_before(o, &room, err);
    if (!rc && !o->gib)
        room -= plan_cuda_reserve();
    if (!rc)
        rc = most_sequences(o, room, &most, err);
    if (!rc && most == 0)
        rc = error_set(err, ERR_NOMEM, "one sequence is more than %lld MiB", (long long)(room >> 20));
    if (!rc)
        rc = plan_batch(o, most, &m.plan, &bytes, err);
    if (!rc && !o->cpu)
        rc = try_batch(o, d, &m, &ms, err);
    if (!rc) {
        line_begin(o->name, (double)most, "sequences");
        if (m.plan.tp > 1)
            printf(", \"collectives\": \"NULL\"");
        line_put("room_gib", (double)room / (1 << 30));
        line_put("arena_gib", (double)bytes / (1 << 30));
        line_put("step_ms", ms);
        printf(", \"tried\": %s", o->cpu ? "false" : "true");
        line_end(o, &m.plan, &none);
    }
    model_stop(&m);
    return rc;
}

/* ---- a checkpoint beside the steps ---- */

struct saving {
    char dir[PATH_MAX];
    Boost__AttemptStart start;
    Boost__JobSpec spec;
    Boost__Checkpoint checkpoint;
    struct checkpoint *c;
};

static int open_saving(struct saving *s, const struct model *m, struct error *err)
{
    const char *below = getenv("TMPDIR");
    boost__attempt_start__init(&s->start);
    boost__job_spec__init(&s->spec);
    boost__checkpoint__init(&s->checkpoint);
    snprintf(s->dir, sizeof s->dir, "%s/gpu-bench.XXXXXX", below && *below ? below : "/tmp");
    if (!mkdtemp(s->dir))
        return error_set(err, ERR_IO, "%s cannot be made", s->dir);
    s->spec.checkpoint = &s->checkpoint;
    s->start.spec = &s->spec;
    s->start.run_dir = s->start.checkpoint_dir = s->dir;
    s->start.attempt = 1;
    return checkpoint_open(&s->start, &m->plan, m->engine, 0, NULL, NULL, &s->c, err);
}

static int remove_one(const char *path, const struct stat *info, int kind, struct FTW *walk)
{
    (void)info, (void)kind, (void)walk;
    return remove(path);
}

static void close_saving(struct saving *s)
{
    if (s->c)
        checkpoint_close(s->c);
    if (s->dir[0])
        nftw(s->dir, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

/* Steps from the snapshot until it is on disk; the longest, the first with the snapshot's own time. */
static int save_beside(struct model *m, struct saving *s, double *longest, double *seconds, struct error *err)
{
    struct run_position at = {.step = m->step};
    int64_t start = clock_mono_ns();
    double ms, snapshot;
    *longest = 0;
    int rc = checkpoint_snapshot(s->c, &at, err);
    snapshot = (double)(clock_mono_ns() - start) / (double)NS_PER_MS;
    for (int i = 0; !rc && (i < 3 || checkpoint_busy(s->c)); i++, snapshot = 0) {
        rc = model_step(m, &ms, err);
        *longest = fmax(*longest, ms + snapshot);
    }
    *seconds = (double)(clock_mono_ns() - start) / (double)NS_PER_S;
    return rc ? rc : checkpoint_wait(s->c, err);
}

static int bench_stall(const struct options *o, struct device *d, struct error *err)
{
    struct model m = {.comms = &d->alone};
    struct saving s = {.c = NULL};
    struct device_log log;
    double longest = 0, seconds = 0;
    int rc = plan_alone(&m, o, err);
    if (!rc)
        rc = model_start(&m, o, err);
    if (!rc)
        rc = open_saving(&s, &m, err);
    if (!rc)
        rc = model_run_for(&m, o->warm, false, err);
    device_log_begin(&log);
    if (!rc)
        rc = model_run_for(&m, o->seconds / 2, true, err);
    if (!rc)
        rc = save_beside(&m, &s, &longest, &seconds, err);
    device_log_end(&log);
    if (!rc) {
        double median = model_quantile(&m, 0.5);
        line_begin(o->name, longest - median, "ms");
        line_put("longest_step_ms", longest);
        line_put("step_ms", median);
        line_put("step_ms_max", model_quantile(&m, 1));
        line_put("saving_s", seconds);
        line_put("shard_mib", (double)checkpoint_bytes(s.c) / (1 << 20));
        line_end(o, &m.plan, &log);
    }
    close_saving(&s);
    model_stop(&m);
    return rc;
}

/* ---- the command line ---- */

static const struct mode {
    const char *name;
    int (*run)(const struct options *o, struct device *d, struct error *err);
} modes[] = {{"step", bench_step}, {"layer", bench_layer}, {"profile", bench_profile},
             {"ops", bench_ops},   {"fit", bench_fit},     {"stall", bench_stall}};

int main(int argc, char **argv)
{
    struct options o;
    struct device d = {.cuda = NULL};
    struct error err = {.code = ERR_OK};
    const struct mode *mode = NULL;
    if (options_read(argc, argv, 5, &o) && (!o.layers || !strcmp(o.mode, "profile")))
        for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
            if (!strcmp(modes[i].name, o.mode))
                mode = &modes[i];
    if (!mode) {
        fprintf(stderr,
                "usage: gpu_bench [--name NAME] [--warm S] [--seconds S] [--gib GIB] [--plain] [--layers] [--cpu] "
                "step|layer|profile|ops|fit|stall SIZE,KIND [FIELD=VALUE...]\n");
        return 2;
    }
    int rc = mode->run == bench_profile ? trace_open(&err) : ERR_OK;
    if (!rc)
        rc = device_open(&d, &o, mode->run == bench_layer || o.layers, &err);
    if (!rc) {
        rc = mode->run(&o, &d, &err);
        device_close(&d);
    }
    if (rc)
        fprintf(stderr, "gpu_bench: %s%s%s%s\n", err.message, err.hint[0] ? " (" : "", err.hint,
                err.hint[0] ? ")" : "");
    return rc ? 1 : 0;
}
