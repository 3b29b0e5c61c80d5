/* checkpoint.h */
#include "worker/checkpoint.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/fs.h"
#include "worker/safetensors.h"
#include "worker/shard_writer.h"

enum { KINDS = 3, NAME_MAX_BYTES = PLAN_NAME_MAX + 2, META_VALUE = 128, FIXED_META = 16, IMAGE_ALIGN = 4096 };

static const enum state_kind state_kinds[KINDS] = {STATE_WEIGHT, STATE_MOMENT1, STATE_MOMENT2};
static const char *const state_suffix[KINDS] = {"", ".m", ".v"};

/* The metadata of a shard while it is written. */
struct meta_list {
    struct safetensors_meta *items;
    size_t n;
    char (*keys)[NAME_MAX_BYTES + 8];
    char (*values)[META_VALUE];
};

struct checkpoint {
    const Boost__AttemptStart *start;
    const struct plan *plan;
    struct engine *engine;
    int rank;
    struct shard_writer *writer;
    size_t n; /* parameters written here */
    int64_t *index; /* [n] engine tensor numbers */
    struct safetensors_entry *entries; /* [n * KINDS] */
    char (*names)[NAME_MAX_BYTES];
    struct meta_list meta;
    struct buffer header;
    size_t header_bytes; /* room kept for the header at the front of the image */
    size_t data_bytes;
    char *image; /* the file as it will be */
};

static void shard_file_name(char out[64], int rank, int world)
{
    snprintf(out, 64, "rank-%05d-of-%05d.safetensors", rank, world);
}

static void entry_name(char out[NAME_MAX_BYTES], const char *name, int kind)
{
    snprintf(out, NAME_MAX_BYTES, "%s%s", name, state_suffix[kind]);
}

/* ---- metadata ------------------------------------------------------------------ */

static int meta_room(struct meta_list *m, size_t n, struct error *err)
{
    m->items = calloc(n, sizeof *m->items);
    m->keys = calloc(n, sizeof *m->keys);
    m->values = calloc(n, sizeof *m->values);
    return m->items && m->keys && m->values ? ERR_OK : error_set(err, ERR_NOMEM, "out of memory");
}

static void meta_free(struct meta_list *m)
{
    free(m->items);
    free(m->keys);
    free(m->values);
}

static void PRINTF_LIKE(3, 4) put_meta(struct meta_list *m, const char *key, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    snprintf(m->keys[m->n], sizeof m->keys[m->n], "%s", key);
    vsnprintf(m->values[m->n], sizeof m->values[m->n], fmt, ap);
    va_end(ap);
    m->items[m->n] = (struct safetensors_meta){m->keys[m->n], m->values[m->n]};
    m->n++;
}

static void slice_text(char *out, size_t cap, const struct plan_tensor *t)
{
    snprintf(out, cap, "%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64, t->rows, t->cols, t->row0, t->col0);
}

static void fill_meta(struct checkpoint *c, const struct run_position *at)
{
    const struct plan *p = c->plan;
    struct meta_list *m = &c->meta;
    m->n = 0;
    put_meta(m, "format", "boost.shard/1");
    put_meta(m, "job", "%" PRId64, c->start->job);
    put_meta(m, "attempt", "%d", c->start->attempt);
    put_meta(m, "rank", "%d", c->rank);
    put_meta(m, "layout", "tp=%d pp=%d dp=%d", p->tp, p->pp, p->dp);
    put_meta(m, "step", "%" PRId64, at->step);
    put_meta(m, "adam_t", "%.17g", at->adam_t);
    put_meta(m, "samples", "%" PRId64, at->samples);
    put_meta(m, "tokens", "%" PRId64, at->tokens);
    put_meta(m, "skipped", "%" PRId64, at->skipped);
    put_meta(m, "skipped_run", "%" PRId64, at->skipped_run);
    put_meta(m, "data_seed", "%" PRIu64, p->data_seed);
    for (size_t i = 0; i < c->n; i++) {
        struct state_tensor t;
        engine_tensor(c->engine, c->index[i], STATE_WEIGHT, &t);
        char key[sizeof *m->keys], value[META_VALUE];
        snprintf(key, sizeof key, "shard:%s", t.tensor.name);
        slice_text(value, sizeof value, &t.tensor);
        put_meta(m, key, "%s", value);
    }
}

/* ---- opening ---------------------------------------------------------------------- */

static int list_tensors(struct checkpoint *c, struct error *err)
{
    int64_t all = engine_tensor_count(c->engine);
    c->index = calloc((size_t)all + 1, sizeof *c->index);
    c->entries = calloc((size_t)all * KINDS + 1, sizeof *c->entries);
    c->names = calloc((size_t)all * KINDS + 1, sizeof *c->names);
    if (!c->index || !c->entries || !c->names || meta_room(&c->meta, (size_t)all + FIXED_META, err))
        return error_set(err, ERR_NOMEM, "no memory for the list of %" PRId64 " tensors", all);
    for (int64_t i = 0; i < all; i++) {
        struct state_tensor t;
        engine_tensor(c->engine, i, STATE_WEIGHT, &t);
        if (!t.tensor.counted)
            continue;
        for (int k = 0; k < KINDS; k++) {
            engine_tensor(c->engine, i, state_kinds[k], &t);
            struct safetensors_entry *e = &c->entries[c->n * KINDS + (size_t)k];
            entry_name(c->names[c->n * KINDS + (size_t)k], t.tensor.name, k);
            *e = (struct safetensors_entry){.name = c->names[c->n * KINDS + (size_t)k],
                                            .dtype = t.dtype,
                                            .dims = 2,
                                            .shape = {t.tensor.nrows, t.tensor.ncols},
                                            .begin = c->data_bytes};
            c->data_bytes += (size_t)(t.tensor.nrows * t.tensor.ncols) * dtype_size(t.dtype);
            e->end = c->data_bytes;
        }
        c->index[c->n++] = i;
    }
    return ERR_OK;
}

/* The header with the longest numbers that its metadata can hold says how much room it needs. */
static int allocate_image(struct checkpoint *c, struct error *err)
{
    struct run_position longest = {INT64_MIN, -1.2345678901234567e-300, INT64_MIN, INT64_MIN, INT64_MIN, INT64_MIN};
    fill_meta(c, &longest);
    int rc = safetensors_header(&c->header, c->entries, c->n * KINDS, c->meta.items, c->meta.n, 0, err);
    if (rc)
        return rc;
    c->header_bytes = c->header.len;
    size_t size = (c->header_bytes + c->data_bytes + IMAGE_ALIGN - 1) / IMAGE_ALIGN * IMAGE_ALIGN;
    c->image = aligned_alloc(IMAGE_ALIGN, size);
    if (!c->image)
        return error_set(err, ERR_NOMEM, "no memory for the host copy of a checkpoint shard (%zu bytes)", size);
    memset(c->image, 0, size); /* its pages are ours before the first step */
    return ERR_OK;
}

int checkpoint_open(const Boost__AttemptStart *start, const struct plan *plan, struct engine *engine, int rank,
                    struct rank_status *status, struct checkpoint **out, struct error *err)
{
    struct checkpoint *c = calloc(1, sizeof *c);
    if (!c)
        return error_set(err, ERR_NOMEM, "out of memory");
    c->start = start;
    c->plan = plan;
    c->engine = engine;
    c->rank = rank;
    buffer_init(&c->header, SAFETENSORS_MAX_HEADER);
    char records[PATH_MAX];
    int rc = list_tensors(c, err);
    if (!rc)
        rc = allocate_image(c, err);
    if (!rc)
        rc = rank_file_path(records, sizeof records, start->run_dir, rank, "shards", err);
    if (!rc)
        rc = shard_writer_create(records, rank, start->spec->checkpoint->write_mib_s, status ? &status->bytes : NULL,
                                 &c->writer, err);
    if (rc) {
        checkpoint_close(c);
        return rc;
    }
    *out = c;
    return ERR_OK;
}

void checkpoint_close(struct checkpoint *c)
{
    if (!c)
        return;
    shard_writer_destroy(c->writer);
    buffer_free(&c->header);
    meta_free(&c->meta);
    free(c->index);
    free(c->entries);
    free(c->names);
    free(c->image);
    free(c);
}

/* ---- taking one -------------------------------------------------------------------- */

bool checkpoint_busy(struct checkpoint *c)
{
    return shard_writer_busy(c->writer);
}

int checkpoint_wait(struct checkpoint *c, struct error *err)
{
    return shard_writer_wait(c->writer, err);
}

int64_t checkpoint_bytes(const struct checkpoint *c)
{
    return (int64_t)(c->header_bytes + c->data_bytes);
}

int checkpoint_snapshot(struct checkpoint *c, const struct run_position *at, struct error *err)
{
    struct shard_job job = {.step = at->step, .data = c->image, .size = c->header_bytes + c->data_bytes};
    shard_file_name(job.file, c->rank, c->plan->world);
    int used = snprintf(job.dir, sizeof job.dir, "%s/step-%" PRId64 ".a%d", c->start->checkpoint_dir, at->step,
                        c->start->attempt);
    if (used < 0 || (size_t)used >= sizeof job.dir) {
        error_set(err, ERR_INVALID, "checkpoint path too long: %s", c->start->checkpoint_dir);
        return error_hint(err, "set checkpoint.dir to a shorter path");
    }
    /* The writer reads the image: it must be done with the last one. Its outcome has been told in its record. */
    (void)shard_writer_wait(c->writer, NULL);
    fill_meta(c, at);
    buffer_clear(&c->header);
    int rc = safetensors_header(&c->header, c->entries, c->n * KINDS, c->meta.items, c->meta.n, c->header_bytes, err);
    if (rc)
        return rc;
    if (c->header.len != c->header_bytes)
        return error_set(err, ERR_INTERNAL, "checkpoint header of %zu bytes, room for %zu", c->header.len,
                         c->header_bytes);
    memcpy(c->image, c->header.data, c->header.len);
    const struct kernels *k = engine_kernels(c->engine);
    struct kstream *ks = engine_stream(c->engine);
    for (size_t i = 0; i < c->n * KINDS; i++) {
        struct state_tensor t;
        engine_tensor(c->engine, c->index[i / KINDS], state_kinds[i % KINDS], &t);
        const struct safetensors_entry *e = &c->entries[i];
        k->download(ks, c->image + c->header_bytes + e->begin, t.device, e->end - e->begin);
    }
    rc = k->stream_sync(ks, err);
    if (!rc)
        shard_writer_start(c->writer, &job);
    return rc;
}

/* ---- restoring ---------------------------------------------------------------------- */

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

static int open_shard(struct safetensors_file *f, const char *dir, const struct plan *plan, int rank,
                      struct error *err)
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

/* Reads one state tensor through `host` (large enough) after comparing everything that the file says of it. */
static int restore_tensor(const struct safetensors_file *f, struct engine *engine, int64_t i, int kind, void *host,
                          struct error *err)
{
    struct state_tensor t;
    engine_tensor(engine, i, state_kinds[kind], &t);
    const struct plan_tensor *p = &t.tensor;
    char name[NAME_MAX_BYTES], key[NAME_MAX_BYTES + 8], slice[META_VALUE];
    entry_name(name, p->name, kind);
    const struct safetensors_entry *e = safetensors_find(f, name);
    if (!e) {
        error_set(err, ERR_INVALID, "%s has no tensor %s", f->path, name);
        return error_hint(err, "the model section of the job must be that of the checkpoint");
    }
    snprintf(key, sizeof key, "shard:%s", p->name);
    slice_text(slice, sizeof slice, p);
    const char *theirs = safetensors_meta(f, key);
    if (e->dims != 2 || e->shape[0] != p->nrows || e->shape[1] != p->ncols || !theirs || strcmp(theirs, slice)) {
        error_set(err, ERR_INVALID,
                  "%s: tensor %s is [%" PRId64 ", %" PRId64 "] of (rows,cols,row0,col0) %s, this job needs [%" PRId64
                  ", %" PRId64 "] of %s",
                  f->path, name, e->shape[0], e->shape[1], theirs ? theirs : "?", p->nrows, p->ncols, slice);
        return error_hint(err, "the model section of the job must be that of the checkpoint");
    }
    if (e->dtype != t.dtype) {
        error_set(err, ERR_INVALID, "%s: tensor %s is %s, this job keeps it as %s", f->path, name,
                  dtype_name(e->dtype), dtype_name(t.dtype));
        return error_hint(err, "resume with the run.precision that wrote the checkpoint");
    }
    int rc = safetensors_read(f, e, host, err);
    if (rc)
        return rc;
    engine_kernels(engine)->upload(engine_stream(engine), t.device, host, e->end - e->begin);
    return engine_kernels(engine)->stream_sync(engine_stream(engine), err);
}

/* The largest state tensor in bytes. */
static size_t largest(struct engine *engine)
{
    size_t most = 1;
    for (int64_t i = 0; i < engine_tensor_count(engine); i++)
        for (int k = 0; k < KINDS; k++) {
            struct state_tensor t;
            engine_tensor(engine, i, state_kinds[k], &t);
            size_t bytes = (size_t)(t.tensor.nrows * t.tensor.ncols) * dtype_size(t.dtype);
            most = bytes > most ? bytes : most;
        }
    return most;
}

static int restore_tensors(const struct safetensors_file *own, const struct safetensors_file *first,
                           struct engine *engine, struct rank_status *status, struct error *err)
{
    void *host = malloc(largest(engine));
    if (!host)
        return error_set(err, ERR_NOMEM, "no memory for the largest tensor");
    int rc = ERR_OK;
    size_t counted = 0;
    for (int64_t i = 0; i < engine_tensor_count(engine) && !rc; i++) {
        struct state_tensor t;
        engine_tensor(engine, i, STATE_WEIGHT, &t);
        counted += t.tensor.counted;
        for (int k = 0; k < KINDS && !rc; k++)
            rc = restore_tensor(t.tensor.counted ? own : first, engine, i, k, host, err);
        if (status)
            __atomic_fetch_add(&status->bytes,
                               (uint64_t)(t.tensor.nrows * t.tensor.ncols) * dtype_size(t.dtype) * KINDS,
                               __ATOMIC_RELAXED);
    }
    free(host);
    if (!rc && own->n != counted * KINDS) {
        rc = error_set(err, ERR_INVALID, "%s holds %zu tensors, this job's model has %zu", own->path, own->n,
                       counted * KINDS);
        error_hint(err, "the model section of the job must be that of the checkpoint");
    }
    return rc;
}

int checkpoint_restore(const char *dir, const struct plan *plan, struct engine *engine, int rank,
                       struct rank_status *status, struct run_position *at, struct error *err)
{
    struct safetensors_file own = {.fd = -1}, first = {.fd = -1};
    int rc = open_shard(&own, dir, plan, rank, err);
    /* What is replicated over tp is counted, and written, by tp rank 0 only. */
    if (!rc)
        rc = open_shard(&first, dir, plan, rank - plan_tp_rank(plan, rank), err);
    if (!rc)
        rc = read_position(&own, plan, at, err);
    if (!rc)
        rc = restore_tensors(&own, &first, engine, status, err);
    if (!rc)
        rc = engine_set_adam_t(engine, at->adam_t, err);
    if (!rc)
        rc = engine_weights_changed(engine, err);
    safetensors_close(&first);
    safetensors_close(&own);
    if (rc)
        error_context(err, "resume");
    return rc;
}
