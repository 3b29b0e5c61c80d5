/* checkpoint.h: reading one. */
#include "worker/checkpoint_internal.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/number.h"
#include "worker/hf.h"
#include "worker/safetensors.h"
#include "worker/shard_index.h"

int checkpoint_attempt_of(const char *dir)
{
    const char *name = strrchr(dir, '/');
    name = name ? name + 1 : dir;
    if (strncmp(name, "step-", 5))
        return 0;
    char *end;
    errno = 0;
    (void)strtoll(name + 5, &end, 10);
    if (end == name + 5 || errno || strncmp(end, ".a", 2) || end[2] < '1' || end[2] > '9')
        return 0;
    const char *digits = end + 2;
    long attempt = strtol(digits, &end, 10);
    return *end || errno || attempt > INT_MAX ? 0 : (int)attempt;
}

static int meta_int(const struct safetensors_file *f, const char *key, int64_t *out, struct error *err)
{
    const char *text = safetensors_meta(f, key);
    char *end = NULL;
    errno = 0;
    *out = text ? strtoll(text, &end, 10) : 0;
    if (!text || end == text || *end || errno || *out < 0)
        return error_set(err, ERR_CORRUPT, "%s: metadata '%s' is missing or not a number", f->path, key);
    return ERR_OK;
}

/* The statistics of losses; anew where the checkpoint was written without them. */
static int read_spike(const struct safetensors_file *f, struct spike *s, struct error *err)
{
    const char *text = safetensors_meta(f, "spike");
    double *values[] = {&s->weight, &s->squares, &s->mean, &s->deviations};
    char *end = NULL;
    spike_init(s, SPIKE_FADE);
    if (!text)
        return ERR_OK;
    errno = 0;
    s->count = strtoll(text, &end, 10);
    bool good = end > text && !errno && s->count >= 0;
    for (size_t i = 0; i < sizeof values / sizeof *values && good; i++) {
        const char *from = end;
        *values[i] = strtod(from, &end);
        good = *from == ' ' && end > from && isfinite(*values[i]) && (values[i] == &s->mean || *values[i] >= 0);
    }
    if (good && !*end)
        return ERR_OK;
    spike_init(s, SPIKE_FADE);
    return error_set(err, ERR_CORRUPT, "%s: metadata 'spike' is impossible", f->path);
}

static int read_position(const struct safetensors_file *f, const struct plan *plan, struct run_position *at,
                         struct error *err)
{
    const struct {
        const char *key;
        int64_t *value;
    } numbers[] = {{"step", &at->step},
                   {"samples", &at->samples},
                   {"tokens", &at->tokens},
                   {"skipped", &at->skipped},
                   {"skipped_run", &at->skipped_run}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        int rc = meta_int(f, numbers[i].key, numbers[i].value, err);
        if (rc)
            return rc;
    }
    const char *text = safetensors_meta(f, "adam_t");
    char *end = NULL;
    at->adam_t = text ? strtod(text, &end) : -1;
    if (!text || end == text || *end || !(at->adam_t >= 0 && at->adam_t <= (double)at->step))
        return error_set(err, ERR_CORRUPT, "%s: metadata 'adam_t' is missing or impossible", f->path);
    int rc = read_spike(f, &at->spike, err);
    if (rc)
        return rc;
    if (at->samples != at->step * plan->global_batch) {
        error_set(err, ERR_INVALID,
                  "checkpoint %s had consumed %" PRId64 " samples in %" PRId64
                  " steps; with parallel.global_batch = %" PRId64 " the data would not go on where it was",
                  f->path, at->samples, at->step, plan->global_batch);
        return error_hint(err, "resume with the global_batch that wrote it");
    }
    const char *seed = safetensors_meta(f, "data_seed");
    char ours[32];
    snprintf(ours, sizeof ours, "%" PRIu64, plan->data_seed);
    if (!seed || strcmp(seed, ours)) {
        error_set(err, ERR_INVALID, "checkpoint %s was trained in the sample order of data.seed = %s, this job has %s",
                  f->path, seed ? seed : "?", ours);
        return error_hint(err, "resume with the data.seed that wrote it");
    }
    return ERR_OK;
}

/* As plan_continues() compares them. */
static bool same_constant(const char *a, const char *b)
{
    char *after_a, *after_b;
    double x = number_to_double(a, &after_a), y = number_to_double(b, &after_b);
    return !strcmp(a, b) || (after_a > a && !*after_a && after_b > b && !*after_b && number_same_float(x, y));
}

/* The same function, not only the same shapes. Checkpoints that are older than these keys do not have them. */
static int check_constants(const struct safetensors_file *f, const struct plan *plan, struct error *err)
{
    struct shard_constant ours[SHARD_CONSTANTS];
    for (int i = 0, n = shard_constants(plan, ours); i < n; i++) {
        const char *text = safetensors_meta(f, ours[i].key);
        if (!text || same_constant(text, ours[i].value))
            continue;
        error_set(err, ERR_INVALID, "%s = %s, checkpoint %s has %s", ours[i].key, ours[i].value, f->path, text);
        return error_hint(err, "--set %s=%s", ours[i].key, text);
    }
    return ERR_OK;
}

/* What a restore needs at hand. */
struct restoring {
    struct engine *engine;
    struct rank_status *status;
    struct shard_index *index;
    void *host; /* room for the largest slice */
};

/* `count` values of r->host to where the engine has them. */
static int put_values(struct restoring *r, const struct state_tensor *t, int64_t count, struct error *err)
{
    size_t bytes = (size_t)count * dtype_size(t->dtype);
    struct kstream *ks = engine_stream(r->engine);
    engine_kernels(r->engine)->upload(ks, t->device ? t->device : t->own, r->host, bytes);
    if (r->status)
        __atomic_fetch_add(&r->status->bytes, (uint64_t)bytes, __ATOMIC_RELAXED);
    return engine_kernels(r->engine)->stream_sync(ks, err);
}

/* Of a tensor, what this rank keeps: the slice, or under zero 1 its part of one. */
static int restore_tensor(struct restoring *r, int64_t i, int kind, struct error *err)
{
    struct state_tensor t;
    engine_tensor(r->engine, i, shard_kinds[kind], &t);
    int64_t first = t.device ? 0 : t.first, count = t.device ? t.tensor.nrows * t.tensor.ncols : t.count;
    if (!count)
        return ERR_OK;
    int rc = shard_index_read(r->index, i, kind, first, count, r->host, err);
    return rc ? rc : put_values(r, &t, count, err);
}

/* The largest slice in bytes. */
static size_t largest(struct engine *engine)
{
    size_t most = 1;
    for (int64_t i = 0; i < engine_tensor_count(engine); i++) {
        struct state_tensor t;
        engine_tensor(engine, i, STATE_WEIGHT, &t);
        size_t bytes = (size_t)(t.tensor.nrows * t.tensor.ncols) * dtype_size(t.dtype);
        most = bytes > most ? bytes : most;
    }
    return most;
}

/* Of the first `kinds` of shard_kinds: all, or weights alone. */
static int restore_tensors(struct restoring *r, int kinds, struct error *err)
{
    r->host = malloc(largest(r->engine));
    int rc = r->host ? ERR_OK : error_set(err, ERR_NOMEM, "no memory to read the checkpoint");
    for (int64_t i = 0; i < engine_tensor_count(r->engine); i++)
        for (int k = 0; k < kinds && !rc; k++)
            rc = restore_tensor(r, i, k, err);
    free(r->host);
    return rc;
}

/* The choices with which the run went on until here. Made elsewhere, or for other shapes, they mean nothing, and the
 * model goes on with the device's own: the same numbers up to rounding. */
static int restore_choices(struct restoring *r, struct error *err)
{
    const struct kernels *k = engine_kernels(r->engine);
    const char *text = shard_index_choices(r->index);
    struct error why = {.code = ERR_OK};
    if (!k->choices_load)
        return ERR_OK;
    if (!shard_index_same_layout(r->index)) {
        engine_tell(r->engine, "computes in another layout than the checkpoint's %s: same model, other last bits",
                    shard_index_layout(r->index));
        return ERR_OK;
    }
    int rc = text ? k->choices_load(engine_stream(r->engine), text, strlen(text), &why)
                  : error_set(&why, ERR_UNSUPPORTED, "the checkpoint holds no choices of algorithms");
    if (rc == ERR_UNSUPPORTED) {
        engine_tell(r->engine, "computes on another device or library: same model, other last bits (%s)", why.message);
        return ERR_OK;
    }
    if (rc && err)
        *err = why;
    return rc;
}

int checkpoint_restore(const char *dir, const struct plan *plan, struct engine *engine, int rank,
                       struct rank_status *status, struct run_position *at, struct error *err)
{
    struct restoring r = {.engine = engine, .status = status};
    at->data = NULL;
    int rc = shard_index_open(dir, plan, engine, rank, &r.index, err);
    if (!rc && shard_index_weights_only(r.index)) {
        error_set(err, ERR_INVALID, "checkpoint %s holds weights alone", dir);
        rc = error_hint(err, "set checkpoint.init_from.weights_only: true");
    }
    if (!rc)
        rc = check_constants(shard_index_shared(r.index), plan, err);
    if (!rc)
        rc = read_position(shard_index_shared(r.index), plan, at, err);
    const char *data = rc || rank ? NULL : safetensors_meta(shard_index_shared(r.index), "data");
    if (data && !(at->data = strdup(data)))
        rc = error_set(err, ERR_NOMEM, "out of memory");
    if (!rc)
        rc = restore_tensors(&r, SHARD_KINDS, err);
    if (!rc)
        rc = restore_choices(&r, err);
    if (!rc)
        rc = engine_set_adam_t(engine, at->adam_t, err);
    if (!rc)
        rc = engine_weights_changed(engine, err);
    shard_index_close(r.index);
    if (rc)
        error_context(err, "resume");
    return rc;
}

int checkpoint_restore_weights(const char *dir, const struct plan *plan, struct engine *engine, int rank,
                               struct rank_status *status, struct error *err)
{
    struct restoring r = {.engine = engine, .status = status};
    int rc = shard_index_open(dir, plan, engine, rank, &r.index, err);
    if (!rc)
        rc = check_constants(shard_index_shared(r.index), plan, err);
    if (!rc)
        rc = restore_tensors(&r, 1, err);
    if (!rc)
        rc = engine_weights_changed(engine, err);
    shard_index_close(r.index);
    return rc ? error_context(err, "init_from") : ERR_OK;
}

/* ---- from Hugging Face's layout ---- */

/* Of one tensor the slice, or under zero 1 the part of it that this rank keeps; `wide` has room for the slice. */
static int restore_slice(struct restoring *r, struct hf_source *hf, int64_t i, float *wide, struct error *err)
{
    struct state_tensor t;
    engine_tensor(r->engine, i, STATE_WEIGHT, &t);
    int64_t first = t.device ? 0 : t.first, count = t.device ? t.tensor.nrows * t.tensor.ncols : t.count;
    if (!count)
        return ERR_OK;
    int rc = hf_read(hf, &t.tensor, wide, err);
    for (int64_t k = 0; k < count && !rc; k++) {
        if (t.dtype == DTYPE_F64)
            ((double *)r->host)[k] = wide[first + k];
        else
            ((float *)r->host)[k] = wide[first + k];
    }
    return rc ? rc : put_values(r, &t, count, err);
}

int checkpoint_restore_hf(const char *dir, const Boost__JobSpec *spec, struct engine *engine,
                          struct rank_status *status, struct error *err)
{
    struct restoring r = {.engine = engine, .status = status};
    struct hf_source *hf = NULL;
    float *wide = NULL;
    int rc = hf_open(dir, &hf, err);
    if (!rc)
        rc = plan_continues(hf_spec(hf), spec, true, err);
    if (!rc) {
        wide = malloc(largest(engine));
        r.host = malloc(largest(engine));
        rc = wide && r.host ? ERR_OK : error_set(err, ERR_NOMEM, "no memory to read the weights");
    }
    for (int64_t i = 0; i < engine_tensor_count(engine) && !rc; i++)
        rc = restore_slice(&r, hf, i, wide, err);
    if (!rc)
        rc = engine_weights_changed(engine, err);
    free(wide);
    free(r.host);
    hf_close(hf);
    return rc ? error_context(err, "init_from") : ERR_OK;
}
