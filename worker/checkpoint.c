/* checkpoint.h */
#include "worker/checkpoint.h"

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
#include "worker/shard_writer.h"

enum {
    KINDS = 3,
    NAME_MAX_BYTES = PLAN_NAME_MAX + 2,
    META_VALUE = 128,
    FIXED_META = 16,
    IMAGE_ALIGN = 4096,
    CHOICES_ROOM = 64 << 10, /* in the header, of a backend that makes choices */
};

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
    size_t n;                          /* parameters written here */
    int64_t *index;                    /* [n] engine tensor numbers */
    struct safetensors_entry *entries; /* [n * KINDS] */
    char (*names)[NAME_MAX_BYTES];
    struct meta_list meta;
    struct buffer choices; /* of the kernels, as text */
    struct buffer header;
    size_t header_bytes; /* room kept for the header at the front of the image */
    size_t data_bytes;
    char *image;            /* the file as it will be, in memory that copies from the device want */
    struct kstream *copies; /* into it; the writer's while it is busy. NULL: they are done when it is handed over */
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

static bool is_whole(const struct state_tensor *t)
{
    return t->count == t->tensor.nrows * t->tensor.ncols;
}

static void owned_text(char *out, size_t cap, const struct state_tensor *t)
{
    slice_text(out, cap, &t->tensor);
    size_t used = strlen(out);
    if (!is_whole(t))
        snprintf(out + used, cap - used, ",%" PRId64 ",%" PRId64 ",%" PRId64, t->tensor.nrows, t->tensor.ncols,
                 t->first);
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
    const struct spike *s = &at->spike;
    put_meta(m, "spike", "%" PRId64 " %.17g %.17g %.17g %.17g", s->count, s->weight, s->squares, s->mean,
             s->deviations);
    for (size_t i = 0; i < c->n; i++) {
        struct state_tensor t;
        engine_tensor(c->engine, c->index[i], STATE_WEIGHT, &t);
        char key[sizeof *m->keys], value[META_VALUE];
        snprintf(key, sizeof key, "shard:%s", t.tensor.name);
        owned_text(value, sizeof value, &t);
        put_meta(m, key, "%s", value);
    }
}

/* What the kernels chose so far goes along, unless there is more of it than room: a run goes on without them. */
static bool add_choices(struct checkpoint *c)
{
    const struct kernels *k = engine_kernels(c->engine);
    struct error err;
    buffer_clear(&c->choices);
    if (!k->choices_save || k->choices_save(engine_stream(c->engine), &c->choices, &err) || !c->choices.len)
        return false;
    c->meta.items[c->meta.n++] = (struct safetensors_meta){"choices", (const char *)c->choices.data};
    return true;
}

static int make_header(struct checkpoint *c, size_t bytes, struct error *err)
{
    buffer_clear(&c->header);
    return safetensors_header(&c->header, c->entries, c->n * KINDS, c->meta.items, c->meta.n, bytes, err);
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
        if (!t.tensor.counted || !t.count)
            continue;
        for (int k = 0; k < KINDS; k++) {
            engine_tensor(c->engine, i, state_kinds[k], &t);
            struct safetensors_entry *e = &c->entries[c->n * KINDS + (size_t)k];
            entry_name(c->names[c->n * KINDS + (size_t)k], t.tensor.name, k);
            *e = (struct safetensors_entry){.name = c->names[c->n * KINDS + (size_t)k],
                                            .dtype = t.dtype,
                                            .dims = is_whole(&t) ? 2 : 1,
                                            .shape = {is_whole(&t) ? t.tensor.nrows : t.count, t.tensor.ncols},
                                            .begin = c->data_bytes};
            c->data_bytes += (size_t)t.count * dtype_size(t.dtype);
            e->end = c->data_bytes;
        }
        c->index[c->n++] = i;
    }
    return ERR_OK;
}

/* The header with the longest numbers that its metadata can hold says how much room it needs. */
static int allocate_image(struct checkpoint *c, struct error *err)
{
    const double wide = -1.2345678901234567e-300;
    struct run_position longest = {
        INT64_MIN, wide, INT64_MIN, INT64_MIN, INT64_MIN, INT64_MIN, {0, INT64_MIN, wide, wide, wide, wide}};
    const struct kernels *k = engine_kernels(c->engine);
    fill_meta(c, &longest);
    int rc = make_header(c, 0, err);
    if (rc)
        return rc;
    c->header_bytes = c->header.len + (k->choices_save ? CHOICES_ROOM : 0);
    size_t size = (c->header_bytes + c->data_bytes + IMAGE_ALIGN - 1) / IMAGE_ALIGN * IMAGE_ALIGN;
    c->image = k->host_alloc(size, err);
    if (!c->image)
        return error_context(err, "no memory for the host copy of a checkpoint shard (%zu bytes)", size);
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
    buffer_init(&c->choices, CHOICES_ROOM);
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
    buffer_free(&c->choices);
    meta_free(&c->meta);
    free(c->index);
    free(c->entries);
    free(c->names);
    if (c->image)
        engine_kernels(c->engine)->host_release(c->image);
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

/* A value is finite unless all bits of its exponent are set. `any` is or-ed, so that the loop has no branch. */
static bool finite_f32(const uint32_t *x, size_t n)
{
    uint32_t any = 0;
    for (size_t i = 0; i < n; i++)
        any |= (x[i] & 0x7f800000u) == 0x7f800000u;
    return !any;
}

static bool finite_f64(const uint64_t *x, size_t n)
{
    uint64_t any = 0;
    for (size_t i = 0; i < n; i++)
        any |= (x[i] & 0x7ff0000000000000u) == 0x7ff0000000000000u;
    return !any;
}

/* The copies are made meanwhile; then the image is complete.
 *
 * Finite gradients can still bring a weight or a moment out of range. A state that no training can go on from must
 * not become the newest checkpoint, which makes retention delete those that are good. */
static int check_image(const void *arg, struct error *err)
{
    const struct checkpoint *c = arg;
    int rc = c->copies ? engine_kernels(c->engine)->stream_sync(c->copies, err) : ERR_OK;
    if (rc)
        return error_context(err, "cannot copy the state");
    for (size_t i = 0; i < c->n * KINDS; i++) {
        const struct safetensors_entry *e = &c->entries[i];
        const void *at = c->image + c->header_bytes + e->begin;
        size_t n = (e->end - e->begin) / dtype_size(e->dtype);
        if (e->dtype == DTYPE_F64 ? finite_f64(at, n) : finite_f32(at, n))
            continue;
        error_set(err, ERR_REFUSED, "the state is not finite: %s holds an infinity or a NaN", e->name);
        return error_hint(err, "look at the losses before it; lower optimizer.lr, or raise optimizer.eps");
    }
    return ERR_OK;
}

int checkpoint_snapshot(struct checkpoint *c, const struct run_position *at, struct error *err)
{
    struct shard_job job = {.step = at->step,
                            .data = c->image,
                            .size = c->header_bytes + c->data_bytes,
                            .check = check_image,
                            .check_arg = c};
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
    bool choices = add_choices(c);
    int rc = make_header(c, c->header_bytes, err);
    if (!rc && choices && c->header.len > c->header_bytes) {
        c->meta.n--;
        rc = make_header(c, c->header_bytes, err);
    }
    if (rc)
        return rc;
    if (c->header.len != c->header_bytes)
        return error_set(err, ERR_INTERNAL, "checkpoint header of %zu bytes, room for %zu", c->header.len,
                         c->header_bytes);
    memcpy(c->image, c->header.data, c->header.len);
    const struct kernels *k = engine_kernels(c->engine);
    struct kstream *ks;
    rc = engine_copies_begin(c->engine, &ks, err);
    if (rc)
        return rc;
    for (size_t i = 0; i < c->n * KINDS; i++) {
        struct state_tensor t;
        engine_tensor(c->engine, c->index[i / KINDS], state_kinds[i % KINDS], &t);
        const struct safetensors_entry *e = &c->entries[i];
        k->download(ks, c->image + c->header_bytes + e->begin, t.own, e->end - e->begin);
    }
    engine_copies_end(c->engine);
    bool beside = ks != engine_stream(c->engine);
    c->copies = beside ? ks : NULL;
    if (!beside)
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
    int64_t *covered; /* [tensors * KINDS] elements that came in */
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
    char slice[META_VALUE];
    slice_text(slice, sizeof slice, p);
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
    char key[NAME_MAX_BYTES + 8], slice[META_VALUE];
    snprintf(key, sizeof key, "shard:%s", p->name);
    slice_text(slice, sizeof slice, p);
    const char *theirs = safetensors_meta(f, key);
    *first = 0;
    if (e->dims == 2) {
        *count = p->nrows * p->ncols;
        bool same = e->shape[0] == p->nrows && e->shape[1] == p->ncols && theirs && !strcmp(theirs, slice);
        return same ? ERR_OK : other_model(f, name, theirs, p, err);
    }
    char prefix[META_VALUE + 64], *end = NULL;
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
    engine_tensor(r->engine, i, state_kinds[kind], &t);
    char name[NAME_MAX_BYTES];
    entry_name(name, t.tensor.name, kind);
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
    r->covered[i * KINDS + kind] += to - from;
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
        for (int k = 0; k < KINDS && !rc; k++)
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
        for (int k = 0; k < KINDS; k++) {
            struct state_tensor t;
            char name[NAME_MAX_BYTES];
            engine_tensor(r->engine, i, state_kinds[k], &t);
            entry_name(name, t.tensor.name, k);
            expected += safetensors_find(own, name) != NULL;
            int64_t need = t.device ? t.tensor.nrows * t.tensor.ncols : t.count;
            if (r->covered[i * KINDS + k] == need)
                continue;
            if (r->covered[i * KINDS + k])
                error_set(err, ERR_INVALID, "checkpoint %s has %" PRId64 " of %" PRId64 " elements of tensor %s", r->dir,
                          r->covered[i * KINDS + k], need, name);
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
    r->covered = calloc((size_t)engine_tensor_count(r->engine) * KINDS, sizeof *r->covered);
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
