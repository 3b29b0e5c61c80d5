/* ckpt_weights.h: making rows, and writing checkpoints of weights alone. */
#include "worker/ckpt_weights.h"

#include <inttypes.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/dense.h"
#include "proto/base/clock.h"
#include "proto/base/fs.h"
#include "proto/json.h"
#include "proto/manifest.h"
#include "proto/version.h"
#include "worker/checkpoint_internal.h"
#include "worker/ckpt_place.h"
#include "worker/new_dir.h"

enum { FACTORS = sizeof((struct weights *)0)->factors / sizeof(struct weights_factor) };

void weights_init(struct weights *w, struct ckpt_dir *dir, int64_t rank)
{
    *w = (struct weights){.dir = dir, .rank = rank, .merge_of = -1};
    for (int i = 0; i < FACTORS; i++)
        w->factors[i].of = -1;
}

static void free_factor(struct weights_factor *f)
{
    free(f->a);
    free(f->b);
    *f = (struct weights_factor){.of = -1};
}

void weights_free(struct weights *w)
{
    free(w->merge_a);
    for (int i = 0; i < FACTORS; i++)
        free_factor(&w->factors[i]);
}

/* ---- rows ---- */

static float *whole(struct ckpt_dir *d, int64_t i, struct plan_tensor *t, struct error *err)
{
    plan_tensor_at(&d->plan, 0, i, t);
    float *out = malloc((size_t)(t->rows * t->cols) * sizeof *out);
    if (!out) {
        error_set(err, ERR_NOMEM, "no memory for the tensor %s", t->name);
        return NULL;
    }
    if (!ckpt_dir_rows(d, i, 0, t->rows, out, err))
        return out;
    free(out);
    return NULL;
}

static int merged_rows(struct weights *w, const struct tensor_item *item, int64_t row0, int64_t nrows, float *out,
                       struct error *err)
{
    struct plan_tensor a, b;
    if (w->merge_of != item->source[1]) {
        free(w->merge_a);
        w->merge_of = -1;
        w->merge_a = whole(w->dir, item->source[1], &a, err);
        if (!w->merge_a)
            return (int)err->code;
        w->merge_of = item->source[1];
    }
    plan_tensor_at(&w->dir->plan, 0, item->source[1], &a);
    plan_tensor_at(&w->dir->plan, 0, item->source[0], &b);
    float *rows = malloc((size_t)(nrows * b.cols) * sizeof *rows);
    int rc = rows ? ckpt_dir_rows(w->dir, item->source[0], row0, nrows, rows, err)
                  : error_set(err, ERR_NOMEM, "out of memory");
    if (!rc)
        rc = dense_product(nrows, a.cols, b.cols, rows, w->merge_a, out, err);
    free(rows);
    return rc;
}

/* Both factors of a dense layer, made once: A of all branches of a layer comes before their B. */
static struct weights_factor *factor_of(struct weights *w, int64_t of, struct error *err)
{
    struct plan_tensor t;
    plan_tensor_at(&w->dir->plan, 0, of, &t);
    struct weights_factor *f = &w->factors[t.projection];
    if (f->of == of)
        return f;
    free_factor(f);
    float *dense = whole(w->dir, of, &t, err);
    if (!dense)
        return NULL;
    f->a = malloc((size_t)(w->rank * t.cols) * sizeof *f->a);
    f->b = malloc((size_t)(t.rows * w->rank) * sizeof *f->b);
    int rc = f->a && f->b ? dense_truncate(t.rows, t.cols, w->rank, dense, f->b, f->a, err)
                          : error_set(err, ERR_NOMEM, "no memory for the factors of %s", t.name);
    free(dense);
    if (rc)
        return NULL;
    f->of = of;
    return f;
}

/* Rows of a transposed B of key or value, widened from kv_heads to heads. */
static int repeated_rows(struct weights *w, const struct tensor_item *item, int64_t row0, int64_t nrows, float *out,
                         struct error *err)
{
    const struct plan *p = &w->dir->plan;
    int64_t narrow = p->hk * p->e, shared = p->h / p->hk;
    float *rows = malloc((size_t)(nrows * narrow) * sizeof *rows);
    int rc = rows ? ckpt_dir_columns(w->dir, item->source[0], row0, nrows, rows, err)
                  : error_set(err, ERR_NOMEM, "out of memory");
    for (int64_t i = 0; i < nrows && !rc; i++)
        for (int64_t head = 0; head < p->h; head++)
            memcpy(out + i * item->cols + head * p->e, rows + i * narrow + head / shared * p->e,
                   (size_t)p->e * sizeof *out);
    free(rows);
    return rc;
}

int weights_rows(void *arg, const struct tensor_item *item, int64_t row0, int64_t nrows, float *out, struct error *err)
{
    struct weights *w = arg;
    switch ((enum weights_how)item->how) {
    case WEIGHTS_COPY:
        return ckpt_dir_rows(w->dir, item->source[0], row0, nrows, out, err);
    case WEIGHTS_TRANSPOSE:
        return ckpt_dir_columns(w->dir, item->source[0], row0, nrows, out, err);
    case WEIGHTS_REPEAT:
        return repeated_rows(w, item, row0, nrows, out, err);
    case WEIGHTS_MERGE:
        return merged_rows(w, item, row0, nrows, out, err);
    case WEIGHTS_DOWN:
    case WEIGHTS_UP:
        break;
    }
    const struct weights_factor *f = factor_of(w, item->source[0], err);
    if (!f)
        return (int)err->code;
    memcpy(out, (item->how == WEIGHTS_DOWN ? f->a : f->b) + row0 * item->cols,
           (size_t)(nrows * item->cols) * sizeof *out);
    return ERR_OK;
}

int plan_items(const struct plan *plan, struct tensor_item **items, size_t *n, struct error *err)
{
    *n = (size_t)plan_tensor_count(plan);
    *items = calloc(*n, sizeof **items);
    if (!*items)
        return error_set(err, ERR_NOMEM, "no memory for a list of %zu tensors", *n);
    for (size_t i = 0; i < *n; i++) {
        struct plan_tensor t;
        plan_tensor_at(plan, 0, (int64_t)i, &t);
        (*items)[i] = (struct tensor_item){.dims = 2, .rows = t.rows, .cols = t.cols, .source = {-1, -1}};
        snprintf((*items)[i].name, TENSOR_NAME, "%s", t.name);
    }
    return ERR_OK;
}

int weights_spec(const Boost__Model *model, int64_t seq_len, Boost__JobSpec **out, struct error *err)
{
    Boost__JobSpec s = BOOST__JOB_SPEC__INIT;
    Boost__Parallel parallel = BOOST__PARALLEL__INIT;
    Boost__TokenFile tokens = BOOST__TOKEN_FILE__INIT, *train[] = {&tokens};
    Boost__Data data = BOOST__DATA__INIT;
    Boost__Optimizer optimizer = BOOST__OPTIMIZER__INIT;
    Boost__Run run = BOOST__RUN__INIT;
    Boost__Checkpoint checkpoint = BOOST__CHECKPOINT__INIT;
    Boost__Resources resources = BOOST__RESOURCES__INIT;
    s.has_spec_version = parallel.has_micro_batch = parallel.has_global_batch = data.has_seq_len = true;
    s.spec_version = parallel.micro_batch = parallel.global_batch = 1;
    s.name = (char *)(uintptr_t) "weights";
    tokens.path = checkpoint.dir = (char *)(uintptr_t) "/none";
    data.n_train = 1;
    data.train = train;
    data.seq_len = (int32_t)seq_len;
    optimizer.has_lr = run.has_steps = run.has_precision = resources.has_device = true;
    optimizer.lr = 1e-3;
    run.steps = 1;
    run.precision = BOOST__PRECISION__VALUE__FP32;
    resources.device = BOOST__DEVICE__VALUE__CPU;
    s.model = (Boost__Model *)(uintptr_t)model;
    s.parallel = &parallel;
    s.data = &data;
    s.optimizer = &optimizer;
    s.run = &run;
    s.checkpoint = &checkpoint;
    s.resources = &resources;
    return plan_resolve(&s, &(struct plan_machine){0}, out, err);
}

/* ---- a checkpoint of weights alone ---- */

enum { FIXED_META = 7 };

static int write_shard(const char *path, int64_t step, const struct plan *plan, const struct tensor_item *items,
                       size_t n, tensor_rows_fn rows, void *arg, struct tensor_written *sum, struct error *err)
{
    char number[32];
    struct shard_constant constants[SHARD_CONSTANTS];
    size_t used = FIXED_META;
    const struct safetensors_meta fixed[FIXED_META] = {
        {"format", "boost.shard/1"}, {"holds", "weights"}, {"layout", "tp=1 pp=1 dp=1"}, {"job", "0"},
        {"attempt", "1"},            {"rank", "0"},        {"step", number}};
    struct safetensors_meta *meta = calloc(n + FIXED_META + SHARD_CONSTANTS, sizeof *meta);
    char(*texts)[2][TENSOR_NAME + 64] = calloc(n + 1, sizeof *texts);
    int rc = meta && texts ? ERR_OK : error_set(err, ERR_NOMEM, "no memory for a list of %zu tensors", n);
    snprintf(number, sizeof number, "%" PRId64, step);
    if (!rc)
        memcpy(meta, fixed, sizeof fixed);
    for (int i = 0, count = shard_constants(plan, constants); i < count && !rc; i++)
        meta[used++] = (struct safetensors_meta){constants[i].key, constants[i].value};
    for (size_t i = 0; i < n && !rc; i++) {
        snprintf(texts[i][0], sizeof texts[i][0], "shard:%s", items[i].name);
        snprintf(texts[i][1], sizeof texts[i][1], "%" PRId64 ",%" PRId64 ",0,0", items[i].rows, items[i].cols);
        meta[used++] = (struct safetensors_meta){texts[i][0], texts[i][1]};
    }
    if (!rc)
        rc = tensor_file_write(path, items, n, DTYPE_F32, meta, used, rows, arg, sum, err);
    free(meta);
    free(texts);
    return rc;
}

static int write_manifest(const char *path, int64_t step, const Boost__JobSpec *spec, const char *file,
                          const struct tensor_written *sum, struct error *err)
{
    char now[CLOCK_TEXT];
    json_t *m = json_pack("{s:s, s:s, s:i, s:i, s:I, s:i, s:s, s:s, s:s, s:s, s:[{s:i, s:s, s:I, s:I}], s:o}", "schema",
                          MANIFEST_SCHEMA, "store_id", "", "job", 0, "attempt", 1, "step", (json_int_t)step,
                          "world", 1, "written", clock_rfc3339(clock_wall_ns(), now), "version", boost_version(),
                          "build", boost_build_id(), "holds", "weights", "shards", "rank", 0, "file", file, "bytes",
                          (json_int_t)sum->bytes, "crc32c", (json_int_t)sum->crc32c, "spec", json_tree(&spec->base));
    char *text = m ? json_dumps(m, JSON_INDENT(1)) : NULL;
    int rc = text ? fs_write_durable(path, text, strlen(text), 0644, err) : error_set(err, ERR_NOMEM, "out of memory");
    free(text);
    json_decref(m);
    return rc;
}

int ckpt_write_weights(const char *to, int64_t step, const Boost__JobSpec *spec, const struct tensor_item *items,
                       size_t n, tensor_rows_fn rows, void *arg, char *out, size_t cap, struct error *err)
{
    char path[PATH_MAX], file[64];
    struct new_dir d;
    struct plan plan;
    struct tensor_written sum;
    int used = snprintf(out, cap, "%s/step-%" PRId64 ".a1", to, step);
    if (used < 0 || (size_t)used >= cap)
        return error_set(err, ERR_INVALID, "path too long: %s", to);
    int rc = plan_make(spec, &plan, err);
    if (!rc)
        rc = ckpt_place_check(out, err);
    if (!rc)
        rc = fs_make_dirs(to, 0755, err);
    if (rc)
        return rc;
    shard_file_name(file, 0, 1);
    rc = new_dir_begin(&d, out, err);
    if (!rc)
        rc = fs_join(path, sizeof path, err, d.temp, file);
    if (!rc)
        rc = write_shard(path, step, &plan, items, n, rows, arg, &sum, err);
    if (!rc)
        rc = fs_join(path, sizeof path, err, d.temp, MANIFEST_NAME);
    if (!rc)
        rc = write_manifest(path, step, spec, file, &sum, err);
    return new_dir_end(&d, rc, err);
}
