/* checkpoint.h: reading one. */
#include "worker/checkpoint_internal.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/fs.h"
#include "worker/safetensors.h"

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

/* Ranks that wrote the directory, by the name of any shard in it; 0 when there is none. */
static int world_of(const char *dir)
{
    DIR *d = opendir(dir);
    if (!d)
        return 0;
    int world = 0;
    for (struct dirent *e; !world && (e = readdir(d));) {
        char *end, *of = strstr(e->d_name, "-of-");
        if (strncmp(e->d_name, "rank-", 5) || !of)
            continue;
        long n = strtol(of + 4, &end, 10);
        if (!strcmp(end, ".safetensors") && n > 0 && n <= INT_MAX)
            world = (int)n;
    }
    closedir(d);
    return world;
}

static int other_layout(const char *dir, const char *theirs, const struct plan *plan, struct error *err)
{
    error_set(err, ERR_UNSUPPORTED,
              "checkpoint %s was written with %s, this job has tp=%d pp=%d dp=%d; changing the layout on resume is "
              "not built in this version",
              dir, theirs, plan->tp, plan->pp, plan->dp);
    return error_hint(err, "resume with the layout that wrote it");
}

static int open_shard(struct safetensors_file *f, const char *dir, const struct plan *plan, int rank, struct error *err)
{
    char file[64], path[PATH_MAX], theirs[64];
    shard_file_name(file, rank, plan->world);
    int rc = fs_join(path, sizeof path, err, dir, file);
    if (!rc)
        rc = safetensors_open(f, path, err);
    int world = rc == ERR_NOT_FOUND ? world_of(dir) : 0;
    if (world && world != plan->world) {
        snprintf(theirs, sizeof theirs, "%d ranks", world);
        return other_layout(dir, theirs, plan, err);
    }
    if (rc == ERR_NOT_FOUND) /* verified before the attempt, gone since: another one may do */
        rc = err->code = ERR_CORRUPT;
    if (rc)
        return rc;
    const char *format = safetensors_meta(f, "format"), *layout = safetensors_meta(f, "layout");
    char ours[64];
    snprintf(ours, sizeof ours, "tp=%d pp=%d dp=%d", plan->tp, plan->pp, plan->dp);
    if (!format || strcmp(format, "boost.shard/1"))
        rc = error_set(err, ERR_CORRUPT, "%s is not a shard of a BOOST checkpoint", path);
    else if (!layout || strcmp(layout, ours))
        rc = other_layout(dir, layout ? layout : "an unknown layout", plan, err);
    if (rc)
        safetensors_close(f);
    return rc;
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

/* What a restore needs at hand. */
struct restoring {
    const char *dir;
    const struct plan *plan;
    struct engine *engine;
    int rank;
    struct rank_status *status;
    void *host;       /* room for the largest entry */
    int64_t *covered; /* [tensors * SHARD_KINDS] elements that came in */
    struct open_file {
        int rank; /* -1: none */
        struct safetensors_file file;
    } files[3]; /* of a replica: what this rank, the first of its tp group, and the first stage wrote */
};

static int file_of(struct restoring *r, int writer, const struct safetensors_file **out, struct error *err)
{
    struct open_file *f = r->files, *end = f + sizeof r->files / sizeof *r->files;
    while (f < end && f->rank >= 0 && f->rank != writer)
        f++;
    if (f == end)
        return error_set(err, ERR_INTERNAL, "a rank's state lies in too many shards");
    if (f->rank < 0) {
        int rc = open_shard(&f->file, r->dir, r->plan, writer, err);
        if (rc)
            return rc;
        f->rank = writer;
    }
    *out = &f->file;
    return ERR_OK;
}

static void close_files(struct restoring *r)
{
    for (size_t i = 0; i < sizeof r->files / sizeof *r->files; i++) {
        if (r->files[i].rank >= 0)
            safetensors_close(&r->files[i].file);
        r->files[i].rank = -1;
    }
}

static int other_model(const struct safetensors_file *f, const char *name, const char *theirs,
                       const struct plan_tensor *p, struct error *err)
{
    char slice[SHARD_VALUE_BYTES];
    shard_slice_text(slice, sizeof slice, p);
    error_set(err, ERR_INVALID,
              "%s: tensor %s is of (rows,cols,row0,col0) %s, this job needs [%" PRId64 ", %" PRId64 "] of %s", f->path,
              name, theirs ? theirs : "?", p->nrows, p->ncols, slice);
    return error_hint(err, "the model section of the job must be that of the checkpoint");
}

/* The elements [*first, *first + *count) of slice p that an entry holds, after comparing everything that the file
 * says of it. */
static int entry_range(const struct safetensors_file *f, const struct safetensors_entry *e, const char *name,
                       const struct plan_tensor *p, int64_t *first, int64_t *count, struct error *err)
{
    char key[SHARD_NAME_BYTES + 8], slice[SHARD_VALUE_BYTES];
    snprintf(key, sizeof key, "shard:%s", p->name);
    shard_slice_text(slice, sizeof slice, p);
    const char *theirs = safetensors_meta(f, key);
    *first = 0;
    if (e->dims == 2) {
        *count = p->nrows * p->ncols;
        bool same = e->shape[0] == p->nrows && e->shape[1] == p->ncols && theirs && !strcmp(theirs, slice);
        return same ? ERR_OK : other_model(f, name, theirs, p, err);
    }
    char prefix[SHARD_VALUE_BYTES + 64], *end = NULL;
    size_t len = (size_t)snprintf(prefix, sizeof prefix, "%s,%" PRId64 ",%" PRId64 ",", slice, p->nrows, p->ncols);
    if (e->dims != 1 || !theirs || strncmp(theirs, prefix, len))
        return other_model(f, name, theirs, p, err);
    errno = 0;
    *first = strtoll(theirs + len, &end, 10);
    *count = e->shape[0];
    if (end == theirs + len || *end || errno || *first < 0 || *count > p->nrows * p->ncols - *first)
        return error_set(err, ERR_CORRUPT, "%s: metadata '%s' is impossible", f->path, key);
    return ERR_OK;
}

/* What one shard holds of one state tensor and this rank needs. */
static int restore_entry(struct restoring *r, const struct safetensors_file *f, int64_t i, int kind, struct error *err)
{
    struct state_tensor t;
    engine_tensor(r->engine, i, shard_kinds[kind], &t);
    char name[SHARD_NAME_BYTES];
    shard_entry_name(name, t.tensor.name, kind);
    const struct safetensors_entry *e = safetensors_find(f, name);
    int64_t first = 0, count = 0;
    if (!e)
        return ERR_OK; /* another replica has it, or the sum of what came in will tell */
    int rc = entry_range(f, e, name, &t.tensor, &first, &count, err);
    if (rc)
        return rc;
    if (e->dtype != t.dtype) {
        error_set(err, ERR_INVALID, "%s: tensor %s is %s, this job keeps it as %s", f->path, name, dtype_name(e->dtype),
                  dtype_name(t.dtype));
        return error_hint(err, "resume with the run.precision that wrote the checkpoint");
    }
    int64_t begin = t.device ? 0 : t.first, end = t.device ? t.tensor.nrows * t.tensor.ncols : t.first + t.count;
    int64_t from = first > begin ? first : begin, to = first + count < end ? first + count : end;
    if (from >= to)
        return ERR_OK;
    rc = safetensors_read(f, e, r->host, err);
    if (rc)
        return rc;
    size_t size = dtype_size(t.dtype);
    char *target = t.device ? t.device : t.own;
    engine_kernels(r->engine)->upload(engine_stream(r->engine), target + (size_t)(from - begin) * size,
                                      (const char *)r->host + (size_t)(from - first) * size,
                                      (size_t)(to - from) * size);
    r->covered[i * SHARD_KINDS + kind] += to - from;
    if (r->status)
        __atomic_fetch_add(&r->status->bytes, (uint64_t)(to - from) * size, __ATOMIC_RELAXED);
    return engine_kernels(r->engine)->stream_sync(engine_stream(r->engine), err);
}

/* Everything that one replica wrote of what this rank holds. */
static int restore_replica(struct restoring *r, int replica, struct error *err)
{
    struct plan_stage stage;
    plan_stage_at(r->plan, plan_pp_rank(r->plan, r->rank), &stage);
    int rc = ERR_OK;
    for (int64_t i = 0; i < engine_tensor_count(r->engine) && !rc; i++) {
        const struct safetensors_file *f = NULL;
        rc = file_of(r, plan_writer(r->plan, &stage, r->rank, i, replica), &f, err);
        for (int k = 0; k < SHARD_KINDS && !rc; k++)
            rc = restore_entry(r, f, i, k, err);
    }
    close_files(r);
    return rc;
}

/* Every element came in, once, and this rank's own shard holds nothing else. */
static int check_complete(const struct restoring *r, const struct safetensors_file *own, struct error *err)
{
    size_t expected = 0;
    for (int64_t i = 0; i < engine_tensor_count(r->engine); i++)
        for (int k = 0; k < SHARD_KINDS; k++) {
            struct state_tensor t;
            char name[SHARD_NAME_BYTES];
            engine_tensor(r->engine, i, shard_kinds[k], &t);
            shard_entry_name(name, t.tensor.name, k);
            expected += safetensors_find(own, name) != NULL;
            int64_t need = t.device ? t.tensor.nrows * t.tensor.ncols : t.count;
            if (r->covered[i * SHARD_KINDS + k] == need)
                continue;
            if (r->covered[i * SHARD_KINDS + k])
                error_set(err, ERR_INVALID, "checkpoint %s has %" PRId64 " of %" PRId64 " elements of tensor %s",
                          r->dir, r->covered[i * SHARD_KINDS + k], need, name);
            else
                error_set(err, ERR_INVALID, "checkpoint %s has no tensor %s", r->dir, name);
            return error_hint(err, "the model section of the job must be that of the checkpoint");
        }
    if (own->n == expected)
        return ERR_OK;
    error_set(err, ERR_INVALID, "%s holds %zu tensors, of which this job's model has %zu", own->path, own->n, expected);
    return error_hint(err, "the model section of the job must be that of the checkpoint");
}

/* The largest slice in bytes: no entry that is read is longer. */
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

static int restore_tensors(struct restoring *r, const struct safetensors_file *own, struct error *err)
{
    r->host = malloc(largest(r->engine));
    r->covered = calloc((size_t)engine_tensor_count(r->engine) * SHARD_KINDS, sizeof *r->covered);
    for (size_t i = 0; i < sizeof r->files / sizeof *r->files; i++)
        r->files[i].rank = -1;
    int rc = r->host && r->covered ? ERR_OK : error_set(err, ERR_NOMEM, "no memory to read the checkpoint");
    for (int k = 0; k < r->plan->dp && !rc; k++)
        rc = restore_replica(r, k, err);
    if (!rc)
        rc = check_complete(r, own, err);
    free(r->host);
    free(r->covered);
    return rc;
}

/* The choices with which the run went on until here. Made elsewhere they mean nothing, and the model goes on with the
 * device's own: the same numbers up to rounding. */
static int restore_choices(struct restoring *r, const struct safetensors_file *own, struct error *err)
{
    const struct kernels *k = engine_kernels(r->engine);
    const char *text = safetensors_meta(own, "choices");
    struct error why = {.code = ERR_OK};
    if (!k->choices_load)
        return ERR_OK;
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
    struct safetensors_file own = {.fd = -1};
    struct restoring r = {.dir = dir, .plan = plan, .engine = engine, .rank = rank, .status = status};
    int rc = open_shard(&own, dir, plan, rank, err);
    if (!rc)
        rc = read_position(&own, plan, at, err);
    if (!rc)
        rc = restore_tensors(&r, &own, err);
    if (!rc)
        rc = restore_choices(&r, &own, err);
    if (!rc)
        rc = engine_set_adam_t(engine, at->adam_t, err);
    if (!rc)
        rc = engine_weights_changed(engine, err);
    safetensors_close(&own);
    if (rc)
        error_context(err, "resume");
    return rc;
}
