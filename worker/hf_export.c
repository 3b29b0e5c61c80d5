/* ckpt_weights.h: a checkpoint as a directory of Hugging Face's transformers, or of the public CoLA code. */
#include <inttypes.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/fs.h"
#include "worker/ckpt_weights.h"
#include "worker/hf.h"
#include "worker/new_dir.h"

/* ---- what there is to write ---- */

/* The A that belongs to a B. */
static int64_t partner(const struct plan *p, const struct plan_tensor *b)
{
    char name[PLAN_NAME_MAX];
    snprintf(name, sizeof name, "%s", b->name);
    name[strlen(name) - 1] = 'A';
    return ckpt_plan_find(p, name);
}

/* False: nothing is written for it by itself. */
static bool item_of(const struct plan *p, int64_t i, struct tensor_item *out)
{
    struct plan_tensor t;
    bool cola = p->factorization == BOOST__FACTORIZATION__VALUE__COLA;
    plan_tensor_at(p, 0, i, &t);
    *out = (struct tensor_item){.dims = 2, .rows = t.rows, .cols = t.cols, .source = {i, -1}, .how = WEIGHTS_COPY};
    if (t.role == ROLE_GAIN)
        out->dims = 1;
    if (t.role == ROLE_DOWN && !cola)
        return false;
    if (t.role == ROLE_UP && !cola) {
        out->source[1] = partner(p, &t);
        out->cols = plan_in_width(p, (enum plan_projection)t.projection);
        out->how = WEIGHTS_MERGE;
        t.role = ROLE_DENSE;
    } else if (t.role == ROLE_UP && (t.projection == PROJ_K || t.projection == PROJ_V)) {
        out->rows = t.cols;
        out->cols = p->h * p->e;
        out->how = WEIGHTS_REPEAT;
    } else if (t.role == ROLE_DOWN || t.role == ROLE_UP) {
        out->rows = t.cols;
        out->cols = t.rows;
        out->how = WEIGHTS_TRANSPOSE;
    }
    hf_name(&t, out->name, sizeof out->name);
    return true;
}

static int list_items(const struct plan *p, struct tensor_item **items, size_t *n, struct error *err)
{
    int64_t all = plan_tensor_count(p);
    *n = 0;
    *items = calloc((size_t)all, sizeof **items);
    if (!*items)
        return error_set(err, ERR_NOMEM, "no memory for a list of %" PRId64 " tensors", all);
    for (int64_t i = 0; i < all; i++)
        *n += item_of(p, i, &(*items)[*n]);
    return ERR_OK;
}

/* ---- files ---- */

static int write_json(const char *dir, const char *file, json_t *value, struct error *err)
{
    char path[PATH_MAX];
    char *text = value ? json_dumps(value, JSON_INDENT(2)) : NULL;
    int rc = text ? fs_join(path, sizeof path, err, dir, file) : error_set(err, ERR_NOMEM, "no memory for %s", file);
    if (!rc)
        rc = fs_write_durable(path, text, strlen(text), 0644, err);
    free(text);
    json_decref(value);
    return rc;
}

static int64_t item_bytes(const struct tensor_item *t, enum dtype dtype)
{
    return t->rows * t->cols * (int64_t)dtype_size(dtype);
}

/* How many of the items from `first` on go into one file. */
static size_t fits(const struct tensor_item *items, size_t n, size_t first, enum dtype dtype, int64_t max_file)
{
    int64_t sum = item_bytes(&items[first], dtype);
    size_t count = 1;
    while (first + count < n && sum + item_bytes(&items[first + count], dtype) <= max_file)
        sum += item_bytes(&items[first + count++], dtype);
    return count;
}

static int write_files(struct weights *w, const char *dir, const struct tensor_item *items, size_t n, enum dtype dtype,
                       int64_t max_file, struct error *err)
{
    const struct safetensors_meta meta = {"format", "pt"}; /* transformers asks for it */
    json_t *map = json_object();
    int64_t total = 0;
    int files = 0, number = 0;
    int rc = map ? ERR_OK : error_set(err, ERR_NOMEM, "out of memory");
    for (size_t i = 0; i < n; i += fits(items, n, i, dtype, max_file))
        files++;
    for (size_t i = 0, count; i < n && !rc; i += count) {
        char file[64], path[PATH_MAX];
        struct tensor_written sum;
        count = fits(items, n, i, dtype, max_file);
        snprintf(file, sizeof file, "model-%05d-of-%05d.safetensors", ++number, files);
        rc = fs_join(path, sizeof path, err, dir, file);
        if (!rc)
            rc = tensor_file_write(path, items + i, count, dtype, &meta, 1, weights_rows, w, &sum, err);
        for (size_t k = i; k < i + count; k++) {
            total += item_bytes(&items[k], dtype);
            json_object_set_new(map, items[k].name, json_string(file));
        }
    }
    if (rc) {
        json_decref(map);
        return rc;
    }
    json_t *index = json_pack("{s:{s:I}, s:o}", "metadata", "total_size", (json_int_t)total, "weight_map", map);
    return write_json(dir, "model.safetensors.index.json", index, err);
}

static int check_model(const struct plan *p, const char *to, struct error *err)
{
    int64_t step, attempt;
    if (ckpt_dir_parse(to, &step, &attempt)) { /* among a job's checkpoints it would be taken for a torn one */
        error_set(err, ERR_REFUSED, "%s has the name of a checkpoint, which an export is not", to);
        return error_hint(err, "name the directory otherwise");
    }
    if (p->lax) {
        error_set(err, ERR_UNSUPPORTED, "a LAX model has no other form: its latents go from layer to layer");
        return error_hint(err, "export is for FULL_RANK, SVD and COLA");
    }
    return ERR_OK;
}

int hf_export(const char *from, const char *to, enum dtype dtype, int64_t max_file, struct error *err)
{
    struct ckpt_dir d;
    struct weights w;
    struct new_dir out;
    struct tensor_item *items = NULL;
    size_t n = 0;
    bool begun = false;
    int rc = ckpt_dir_open(&d, from, err);
    weights_init(&w, &d, 0);
    if (!rc)
        rc = check_model(&d.plan, to, err);
    if (!rc)
        rc = ckpt_dir_index(&d, err);
    if (!rc)
        rc = list_items(&d.plan, &items, &n, err);
    if (!rc) {
        rc = new_dir_begin(&out, to, err);
        begun = true;
    }
    if (!rc)
        rc = write_files(&w, out.temp, items, n, dtype, max_file, err);
    if (!rc)
        rc = write_json(out.temp, "config.json", hf_config_write(&d.plan, dtype), err);
    if (begun)
        rc = new_dir_end(&out, rc, err);
    free(items);
    weights_free(&w);
    ckpt_dir_close(&d);
    return rc;
}
