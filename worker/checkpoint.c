/* checkpoint.h: taking one. restore.c reads them. */
#include "worker/checkpoint_internal.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/fs.h"
#include "worker/safetensors.h"
#include "worker/shard_writer.h"

enum {
    FIXED_META = 17 + SHARD_CONSTANTS,
    IMAGE_ALIGN = 4096,
    CHOICES_ROOM = 64 << 10, /* in the header, of a backend that makes choices */
};
#define WRITER_CPU 0.15 /* of a processor, while training is done on it */

const enum state_kind shard_kinds[SHARD_KINDS] = {STATE_WEIGHT, STATE_MOMENT1, STATE_MOMENT2};
static const char *const state_suffix[SHARD_KINDS] = {"", ".m", ".v"};

/* The metadata of a shard while it is written. */
struct meta_list {
    struct safetensors_meta *items;
    size_t n;
    char (*keys)[SHARD_NAME_BYTES + 8];
    char (*values)[SHARD_VALUE_BYTES];
};

struct checkpoint {
    const Boost__AttemptStart *start;
    const struct plan *plan;
    struct engine *engine;
    int rank;
    const char *data; /* of rank 0, or NULL */
    struct shard_writer *writer;
    size_t n;                          /* parameters written here */
    int64_t *index;                    /* [n] engine tensor numbers */
    struct safetensors_entry *entries; /* [n * SHARD_KINDS] */
    char (*names)[SHARD_NAME_BYTES];
    struct meta_list meta;
    struct buffer choices; /* of the kernels, as text */
    bool choices_missed;   /* has been told */
    struct buffer header;
    size_t header_bytes; /* room kept for the header at the front of the image */
    size_t data_bytes;
    char *image;            /* the file as it will be, in memory that copies from the device want */
    struct kstream *copies; /* into it; the writer's while it is busy. NULL: they are done when it is handed over */
};

void shard_file_name(char out[64], int rank, int world)
{
    snprintf(out, 64, "rank-%05d-of-%05d.safetensors", rank, world);
}

void shard_entry_name(char out[SHARD_NAME_BYTES], const char *name, int kind)
{
    snprintf(out, SHARD_NAME_BYTES, "%s%s", name, state_suffix[kind]);
}

/* ---- metadata ------------------------------------------------------------------ */

int shard_constants(const struct plan *p, struct shard_constant out[SHARD_CONSTANTS])
{
    static const char *const keys[SHARD_CONSTANTS] = {"model.rope_theta", "model.norm_eps", "model.mlp_activation",
                                                      "model.lax_base"};
    for (int i = 0; i < SHARD_CONSTANTS; i++)
        out[i].key = keys[i];
    number_from_double(p->rope_theta, out[0].value);
    number_from_double(p->norm_eps, out[1].value);
    snprintf(out[2].value, sizeof out[2].value, "%s", p->mlp_silu ? "ON" : "OFF");
    snprintf(out[3].value, sizeof out[3].value, "%s", p->latent_silu ? "COLA" : "SVD");
    return p->lax ? SHARD_CONSTANTS : SHARD_CONSTANTS - 1;
}

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

void shard_slice_text(char *out, size_t cap, const struct plan_tensor *t)
{
    snprintf(out, cap, "%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64, t->rows, t->cols, t->row0, t->col0);
}

static bool is_whole(const struct state_tensor *t)
{
    return t->count == t->tensor.nrows * t->tensor.ncols;
}

static void owned_text(char *out, size_t cap, const struct state_tensor *t)
{
    shard_slice_text(out, cap, &t->tensor);
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
    struct shard_constant constants[SHARD_CONSTANTS];
    for (int i = 0, n = shard_constants(p, constants); i < n; i++)
        put_meta(m, constants[i].key, "%s", constants[i].value);
    if (c->data)
        m->items[m->n++] = (struct safetensors_meta){"data", c->data};
    const struct spike *s = &at->spike;
    put_meta(m, "spike", "%" PRId64 " %.17g %.17g %.17g %.17g", s->count, s->weight, s->squares, s->mean,
             s->deviations);
    for (size_t i = 0; i < c->n; i++) {
        struct state_tensor t;
        engine_tensor(c->engine, c->index[i], STATE_WEIGHT, &t);
        char key[sizeof *m->keys], value[SHARD_VALUE_BYTES];
        snprintf(key, sizeof key, "shard:%s", t.tensor.name);
        owned_text(value, sizeof value, &t);
        put_meta(m, key, "%s", value);
    }
}

static void miss_choices(struct checkpoint *c, const char *why)
{
    if (!c->choices_missed)
        engine_tell(c->engine,
                    "the algorithms chosen for this device are not in the checkpoint (%s): a run from it chooses anew, "
                    "same model, other last bits",
                    why);
    c->choices_missed = true;
}

/* What the kernels chose so far goes along, unless there is more of it than room: a run goes on without them. */
static bool add_choices(struct checkpoint *c)
{
    const struct kernels *k = engine_kernels(c->engine);
    struct error err;
    buffer_clear(&c->choices);
    if (!k->choices_save)
        return false;
    if (k->choices_save(engine_stream(c->engine), &c->choices, &err)) {
        miss_choices(c, err.message);
        return false;
    }
    if (!c->choices.len)
        return false;
    c->meta.items[c->meta.n++] = (struct safetensors_meta){"choices", (const char *)c->choices.data};
    return true;
}

static int make_header(struct checkpoint *c, size_t bytes, struct error *err)
{
    buffer_clear(&c->header);
    return safetensors_header(&c->header, c->entries, c->n * SHARD_KINDS, c->meta.items, c->meta.n, bytes, err);
}

/* ---- opening ---------------------------------------------------------------------- */

static int list_tensors(struct checkpoint *c, struct error *err)
{
    int64_t all = engine_tensor_count(c->engine);
    c->index = calloc((size_t)all + 1, sizeof *c->index);
    c->entries = calloc((size_t)all * SHARD_KINDS + 1, sizeof *c->entries);
    c->names = calloc((size_t)all * SHARD_KINDS + 1, sizeof *c->names);
    if (!c->index || !c->entries || !c->names || meta_room(&c->meta, (size_t)all + FIXED_META, err))
        return error_set(err, ERR_NOMEM, "no memory for the list of %" PRId64 " tensors", all);
    for (int64_t i = 0; i < all; i++) {
        struct state_tensor t;
        engine_tensor(c->engine, i, STATE_WEIGHT, &t);
        if (!t.tensor.counted || !t.count)
            continue;
        for (int k = 0; k < SHARD_KINDS; k++) {
            engine_tensor(c->engine, i, shard_kinds[k], &t);
            struct safetensors_entry *e = &c->entries[c->n * SHARD_KINDS + (size_t)k];
            shard_entry_name(c->names[c->n * SHARD_KINDS + (size_t)k], t.tensor.name, k);
            *e = (struct safetensors_entry){.name = c->names[c->n * SHARD_KINDS + (size_t)k],
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
        INT64_MIN, wide, INT64_MIN, INT64_MIN, INT64_MIN, INT64_MIN, {0, INT64_MIN, wide, wide, wide, wide}, NULL};
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
                    const char *data, struct rank_status *status, struct checkpoint **out, struct error *err)
{
    struct checkpoint *c = calloc(1, sizeof *c);
    if (!c)
        return error_set(err, ERR_NOMEM, "out of memory");
    c->start = start;
    c->plan = plan;
    c->engine = engine;
    c->rank = rank;
    c->data = rank == 0 ? data : NULL;
    buffer_init(&c->header, SAFETENSORS_MAX_HEADER);
    buffer_init(&c->choices, CHOICES_ROOM);
    char records[PATH_MAX];
    if (fs_make_dirs(start->checkpoint_dir, 0755, err)) /* for all of the run; what is in the way the first write says */
        error_clear(err);
    int rc = list_tensors(c, err);
    if (!rc)
        rc = allocate_image(c, err);
    if (!rc)
        rc = rank_file_path(records, sizeof records, start->run_dir, rank, "shards", err);
    /* Where the host does not compute the steps it has time for the writer. */
    struct shard_pace pace = {.mib_s = start->spec->checkpoint->write_mib_s,
                              .cpu = engine_kernels(engine)->stream_beside ? 0 : WRITER_CPU};
    if (!rc)
        rc = shard_writer_create(records, rank, &pace, status ? &status->bytes : NULL, &c->writer, err);
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

/* A value is not finite where all bits of its exponent are set: then one more makes a carry into the sign's place. The
 * carries are or-ed in lanes, so that there is neither a branch nor a chain. */
enum { LANES = 16 };

static bool finite_f32(const uint32_t *x, size_t n)
{
    uint32_t carries[LANES] = {0}, any = 0;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++)
            carries[j] |= (x[i + (size_t)j] & 0x7f800000u) + 0x00800000u;
    for (; i < n; i++)
        any |= (x[i] & 0x7f800000u) + 0x00800000u;
    for (int j = 0; j < LANES; j++)
        any |= carries[j];
    return !(any >> 31);
}

static bool finite_f64(const uint64_t *x, size_t n)
{
    uint64_t carries[LANES] = {0}, any = 0;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++)
            carries[j] |= (x[i + (size_t)j] & 0x7ff0000000000000u) + 0x0010000000000000u;
    for (; i < n; i++)
        any |= (x[i] & 0x7ff0000000000000u) + 0x0010000000000000u;
    for (int j = 0; j < LANES; j++)
        any |= carries[j];
    return !(any >> 63);
}

/* The copies are made meanwhile; then the image is complete. */
static int image_ready(const void *arg, struct error *err)
{
    const struct checkpoint *c = arg;
    int rc = c->copies ? engine_kernels(c->engine)->stream_sync(c->copies, err) : ERR_OK;
    return rc ? error_context(err, "cannot copy the state") : ERR_OK;
}

/* Of the entries, which lie one behind the other, the first that ends behind byte `at` of the data. */
static size_t entry_at(const struct checkpoint *c, size_t at)
{
    size_t low = 0, high = c->n * SHARD_KINDS;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (c->entries[middle].end > at)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* Finite gradients can still bring a weight or a moment out of range. A state that no training can go on from must
 * not become the newest checkpoint, which makes retention delete those that are good. */
static int check_finite(const void *arg, size_t from, size_t to, struct error *err)
{
    const struct checkpoint *c = arg;
    from = from > c->header_bytes ? from - c->header_bytes : 0;
    to = to > c->header_bytes ? to - c->header_bytes : 0;
    for (size_t i = entry_at(c, from); i < c->n * SHARD_KINDS && c->entries[i].begin < to; i++) {
        const struct safetensors_entry *e = &c->entries[i];
        size_t size = dtype_size(e->dtype), begin = from > e->begin ? from - e->begin : 0;
        size_t end = (to < e->end ? to : e->end) - e->begin;
        begin /= size; /* an element across the border is looked at twice */
        end = (end + size - 1) / size;
        const char *at = c->image + c->header_bytes + e->begin + begin * size;
        if (e->dtype == DTYPE_F64 ? finite_f64((const uint64_t *)at, end - begin)
                                  : finite_f32((const uint32_t *)at, end - begin))
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
                            .ready = image_ready,
                            .check = check_finite,
                            .arg = c};
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
        miss_choices(c, "they do not fit its header");
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
    for (size_t i = 0; i < c->n * SHARD_KINDS; i++) {
        struct state_tensor t;
        engine_tensor(c->engine, c->index[i / SHARD_KINDS], shard_kinds[i % SHARD_KINDS], &t);
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
