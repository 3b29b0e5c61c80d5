/* ckpt_dir.h: opening and reading. ckpt_verify.c verifies. */
#include "worker/ckpt_dir.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/fs.h"
#include "proto/json.h"
#include "proto/manifest.h"
#include "proto/reflect.h"
#include "worker/ckpt_weights.h"

enum {
    SPEC_ARENA = 64 << 20,
    READ_AT_ONCE = 1 << 16,
    ANY_LENGTH = 64,
};

static const char *digits(const char *at, int64_t *value)
{
    char *end;
    if (*at < '0' || *at > '9')
        return NULL;
    errno = 0;
    *value = strtoll(at, &end, 10);
    return errno ? NULL : end;
}

bool ckpt_dir_parse(const char *dir, int64_t *step, int64_t *attempt)
{
    const char *name = strrchr(dir, '/');
    const char *at = !strncmp(name ? name + 1 : dir, "step-", 5) ? digits((name ? name + 1 : dir) + 5, step) : NULL;
    if (!at || strncmp(at, ".a", 2))
        return false;
    at = digits(at + 2, attempt);
    return at && !*at;
}

/* ---- manifest ---- */

int ckpt_dir_manifest(const char *dir, json_t **out, struct error *err)
{
    char path[PATH_MAX];
    json_error_t where;
    struct buffer text;
    *out = NULL;
    buffer_init(&text, MANIFEST_MAX);
    int rc = fs_join(path, sizeof path, err, dir, MANIFEST_NAME);
    if (!rc)
        rc = fs_read_regular(path, &text, err);
    if (!rc && !(*out = json_loadb(text.data ? (char *)text.data : "", text.len, 0, &where)))
        rc = error_set(err, ERR_CORRUPT, "manifest.json is damaged: line %d: %s", where.line, where.text);
    buffer_free(&text);
    return rc;
}

static int load_manifest(struct ckpt_dir *d, struct error *err)
{
    int rc = ckpt_dir_manifest(d->path, &d->manifest, err);
    if (rc == ERR_NOT_FOUND)
        rc = error_set(err, ERR_CORRUPT, "manifest.json is missing: the checkpoint was never complete");
    const char *schema = rc ? NULL : json_string_value(json_object_get(d->manifest, "schema"));
    if (!rc && (!schema || strcmp(schema, MANIFEST_SCHEMA) ||
                json_integer_value(json_object_get(d->manifest, "step")) != d->step ||
                json_integer_value(json_object_get(d->manifest, "attempt")) != d->attempt))
        rc = error_set(err, ERR_CORRUPT, "manifest.json is not that of step %" PRId64 ", attempt %" PRId64, d->step,
                       d->attempt);
    return rc;
}

/* The same model on one rank; what else a plan divides by or takes shares of says nothing about the state. */
static void one_rank(Boost__JobSpec *s)
{
    Boost__Parallel *p = s->parallel;
    p->tp = p->pp = p->dp = 1;
    p->zero = 0;
    p->micro_batch = p->global_batch = 1;
    p->bucket_mib = 1;
    p->has_tp = p->has_pp = p->has_dp = p->has_zero = true;
}

/* The file may hold anything, and all sizes are worked out from this. Of the model only: a rule for jobs that came later
 * is no damage. */
static int check_model(const Boost__Model *m, struct error *err)
{
    Boost__JobSpec *spec = NULL;
    int rc = weights_spec(m, ANY_LENGTH, &spec, err);
    if (spec)
        boost__job_spec__free_unpacked(spec, NULL);
    if (rc && rc != ERR_NOMEM) {
        err->code = rc = ERR_CORRUPT;
        error_context(err, "manifest.json holds a model that cannot be");
    }
    return rc;
}

static int load_spec(struct ckpt_dir *d, struct error *err)
{
    char *text = json_dumps(json_object_get(d->manifest, "spec"), JSON_ENCODE_ANY);
    int rc = text ? ERR_OK : error_set(err, ERR_CORRUPT, "manifest.json holds no job");
    if (!rc && !(d->spec = (Boost__JobSpec *)reflect_new(&d->arena, &boost__job_spec__descriptor)))
        rc = error_set(err, ERR_NOMEM, "no memory for the manifest of %s", d->path);
    if (!rc)
        rc = json_read(&d->spec->base, &d->arena, "manifest.json", text, strlen(text),
                       &(struct read_options){.allow_unknown = true}, err);
    free(text);
    if (!rc && (!d->spec->parallel || !d->spec->model || !d->spec->run))
        rc = error_set(err, ERR_CORRUPT, "manifest.json holds no whole job");
    if (!rc)
        rc = check_model(d->spec->model, err);
    if (rc)
        return rc;
    one_rank(d->spec);
    d->dtype = d->spec->run->precision == BOOST__PRECISION__VALUE__FP64 ? DTYPE_F64 : DTYPE_F32;
    rc = plan_make(d->spec, &d->plan, err);
    if (rc == ERR_INTERNAL) /* of a job that was never resolved */
        rc = error_set(err, ERR_CORRUPT, "manifest.json holds no whole job");
    return rc;
}

int ckpt_dir_open(struct ckpt_dir *d, const char *path, struct error *err)
{
    *d = (struct ckpt_dir){.path = path};
    arena_init(&d->arena, SPEC_ARENA);
    if (!ckpt_dir_parse(path, &d->step, &d->attempt)) {
        error_set(err, ERR_INVALID, "%s is not a checkpoint directory (step-<n>.a<k>)", path);
        return error_hint(err, "boostctl ckpt ls JOB shows the directories of a job's checkpoints");
    }
    int rc = load_manifest(d, err);
    return rc ? rc : load_spec(d, err);
}

void ckpt_dir_close(struct ckpt_dir *d)
{
    shard_index_close(d->index);
    json_decref(d->manifest);
    arena_free(&d->arena);
}

/* ---- tensors ---- */

static void whole_tensor(const void *of, int64_t i, enum state_kind kind, struct state_tensor *out)
{
    const struct ckpt_dir *d = of;
    *out = (struct state_tensor){.kind = kind, .dtype = d->dtype};
    plan_tensor_at(&d->plan, 0, i, &out->tensor);
}

int ckpt_dir_index(struct ckpt_dir *d, struct error *err)
{
    const struct shard_view view = {plan_tensor_count(&d->plan), whole_tensor, d};
    return shard_index_open_view(d->path, &d->plan, &view, 0, &d->index, err);
}

/* `count` elements from `first` on. */
static int read_run(struct ckpt_dir *d, int64_t i, int64_t first, int64_t count, float *out, struct error *err)
{
    if (d->dtype == DTYPE_F32)
        return shard_index_read(d->index, i, 0, first, count, out, err);
    double *wide = malloc(READ_AT_ONCE * sizeof *wide);
    int rc = wide ? ERR_OK : error_set(err, ERR_NOMEM, "out of memory");
    for (int64_t at = 0; at < count && !rc; at += READ_AT_ONCE) {
        int64_t n = count - at < READ_AT_ONCE ? count - at : READ_AT_ONCE;
        rc = shard_index_read(d->index, i, 0, first + at, n, wide, err);
        for (int64_t k = 0; k < n && !rc; k++)
            out[at + k] = (float)wide[k];
    }
    free(wide);
    return rc;
}

int ckpt_dir_rows(struct ckpt_dir *d, int64_t i, int64_t row0, int64_t nrows, float *out, struct error *err)
{
    struct plan_tensor t;
    plan_tensor_at(&d->plan, 0, i, &t);
    return read_run(d, i, row0 * t.cols, nrows * t.cols, out, err);
}

int ckpt_dir_columns(struct ckpt_dir *d, int64_t i, int64_t col0, int64_t ncols, float *out, struct error *err)
{
    struct plan_tensor t;
    plan_tensor_at(&d->plan, 0, i, &t);
    float *line = malloc((size_t)ncols * sizeof *line);
    int rc = line ? ERR_OK : error_set(err, ERR_NOMEM, "out of memory");
    for (int64_t row = 0; row < t.rows && !rc; row++) {
        rc = read_run(d, i, row * t.cols + col0, ncols, line, err);
        for (int64_t k = 0; k < ncols && !rc; k++)
            out[k * t.rows + row] = line[k];
    }
    free(line);
    return rc;
}

int64_t ckpt_plan_find(const struct plan *plan, const char *name)
{
    for (int64_t i = 0, n = plan_tensor_count(plan); i < n; i++) {
        struct plan_tensor t;
        plan_tensor_at(plan, 0, i, &t);
        if (!strcmp(t.name, name))
            return i;
    }
    return -1;
}
