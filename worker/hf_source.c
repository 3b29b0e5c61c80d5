/* hf.h: a directory of Hugging Face's transformers, or of the public CoLA code, opened, checked and read. */
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/base/bf16.h"
#include "proto/base/f16.h"
#include "proto/base/fs.h"
#include "proto/manifest.h"
#include "worker/ckpt_weights.h"
#include "worker/hf.h"

enum { JSON_MAX = 64 << 20, FILES_MAX = 4096, COMPARED_AT_ONCE = 1 << 16 };

struct hf_source {
    char *dir;
    json_t *config, *map; /* map: tensor to file, or NULL: all are in model.safetensors */
    bool cola;
    struct safetensors_file *files; /* [n], opened */
    size_t n;
    Boost__JobSpec *spec;
    struct plan plan;
};

static int load_json(const char *dir, const char *file, json_t **out, struct error *err)
{
    char path[PATH_MAX];
    json_error_t where;
    struct buffer text;
    buffer_init(&text, JSON_MAX);
    int rc = fs_join(path, sizeof path, err, dir, file);
    if (!rc)
        rc = fs_read_linked(path, &text, err); /* of the hub's cache, a directory of links */
    if (!rc && !(*out = json_loadb(text.data ? (char *)text.data : "", text.len, 0, &where)))
        rc = error_set(err, ERR_CORRUPT, "%s: line %d: %s", path, where.line, where.text);
    buffer_free(&text);
    return rc;
}

/* ---- files ---- */

static int open_file(struct hf_source *s, const char *name, struct safetensors_file **out, struct error *err)
{
    char path[PATH_MAX];
    int rc = strchr(name, '/') ? error_set(err, ERR_CORRUPT, "the index names a file '%s'", name)
                               : fs_join(path, sizeof path, err, s->dir, name);
    if (rc)
        return rc;
    for (size_t i = 0; i < s->n; i++)
        if (!strcmp(s->files[i].path, path)) {
            *out = &s->files[i];
            return ERR_OK;
        }
    if (s->n == FILES_MAX)
        return error_set(err, ERR_UNSUPPORTED, "%s has more than %d files", s->dir, FILES_MAX);
    rc = safetensors_open(&s->files[s->n], path, err);
    if (rc == ERR_CORRUPT)
        error_hint(err, "the file is cut or damaged, or no safetensors file: copy it again; or it holds another type than "
                        "F32, F16 or BF16: save it as one of these");
    else if (rc == ERR_NOT_FOUND && s->map)
        error_hint(err, "model.safetensors.index.json names it: copy all files of the directory");
    else if (rc == ERR_NOT_FOUND)
        error_hint(err, "weights are read from model.safetensors, or the files of its index; others "
                        "(pytorch_model.bin) have to be saved again as safetensors");
    if (!rc)
        *out = &s->files[s->n++];
    return rc;
}

static int find_tensor(struct hf_source *s, const char *name, struct safetensors_file **f,
                       const struct safetensors_entry **e, struct error *err)
{
    const char *file = s->map ? json_string_value(json_object_get(s->map, name)) : "model.safetensors";
    if (!file)
        return error_set(err, ERR_NOT_FOUND, "%s/model.safetensors.index.json has no tensor %s", s->dir, name);
    int rc = open_file(s, file, f, err);
    if (!rc && !(*e = safetensors_find(*f, name)))
        rc = error_set(err, ERR_NOT_FOUND, "%s has no tensor %s", (*f)->path, name);
    return rc;
}

/* All files that there are. */
static int open_files(struct hf_source *s, struct error *err)
{
    struct safetensors_file *f;
    const char *tensor;
    json_t *file;
    int rc = s->map ? ERR_OK : open_file(s, "model.safetensors", &f, err);
    json_object_foreach(s->map, tensor, file)
    {
        if (!rc && !json_is_string(file))
            rc = error_set(err, ERR_CORRUPT, "%s/model.safetensors.index.json: no file is named for %s", s->dir,
                           tensor);
        if (!rc)
            rc = open_file(s, json_string_value(file), &f, err);
    }
    return rc;
}

/* ---- rows ---- */

/* `count` elements from number `first` on, as fp32. */
static int read_elements(const struct safetensors_file *f, const struct safetensors_entry *e, int64_t first,
                         int64_t count, float *out, struct error *err)
{
    size_t size = dtype_size(e->dtype);
    uint64_t at = f->data_at + e->begin + (uint64_t)first * size;
    if (e->dtype == DTYPE_F32)
        return safetensors_read_at(f->fd, f->path, at, (uint64_t)count * size, out, err);
    void *raw = malloc((size_t)count * size);
    int rc = raw ? safetensors_read_at(f->fd, f->path, at, (uint64_t)count * size, raw, err)
                 : error_set(err, ERR_NOMEM, "out of memory");
    for (int64_t i = 0; i < count && !rc; i++) {
        if (e->dtype == DTYPE_F64)
            out[i] = (float)((const double *)raw)[i];
        else if (e->dtype == DTYPE_F16)
            out[i] = from_f16(((const uint16_t *)raw)[i]);
        else
            out[i] = from_bf16(((const uint16_t *)raw)[i]);
    }
    free(raw);
    return rc;
}

static void shape_text(const struct safetensors_entry *e, char *out, size_t cap)
{
    size_t used = (size_t)snprintf(out, cap, "[");
    for (int i = 0; i < e->dims && used < cap; i++)
        used += (size_t)snprintf(out + used, cap - used, "%s%" PRId64, i ? ", " : "", e->shape[i]);
    if (used < cap)
        snprintf(out + used, cap - used, "]");
}

/* A and B of COLA lie there transposed. */
static bool is_transposed(const struct hf_source *s, const struct plan_tensor *t)
{
    return s->cola && (t->role == ROLE_DOWN || t->role == ROLE_UP);
}

static int find_source(struct hf_source *s, const struct plan_tensor *t, struct safetensors_file **f,
                       const struct safetensors_entry **e, struct error *err)
{
    char name[TENSOR_NAME], has[128], wanted[64];
    hf_name(t, name, sizeof name);
    int rc = find_tensor(s, name, f, e, err);
    if (rc == ERR_NOT_FOUND && t->role == ROLE_HEAD && !err->hint[0])
        error_hint(err, "where it is the embedding's table, config.json has tie_word_embeddings: true");
    if (rc)
        return rc;
    bool gain = t->role == ROLE_GAIN, turned = is_transposed(s, t);
    int64_t rows = turned ? t->cols : t->rows, cols = turned ? t->rows : t->cols;
    bool fits = gain ? (*e)->dims == 1 && (*e)->shape[0] == t->cols
                     : (*e)->dims == 2 && (*e)->shape[0] == rows && (*e)->shape[1] == cols;
    if (!fits) {
        shape_text(*e, has, sizeof has);
        if (gain)
            snprintf(wanted, sizeof wanted, "[%" PRId64 "]", t->cols);
        else
            snprintf(wanted, sizeof wanted, "[%" PRId64 ", %" PRId64 "]", rows, cols);
        return error_set(err, ERR_INVALID, "%s: %s is of shape %s, by config.json it is %s", (*f)->path, name, has,
                         wanted);
    }
    if ((*e)->dtype == DTYPE_I32)
        return error_set(err, ERR_UNSUPPORTED, "%s: %s is I32", (*f)->path, name);
    return ERR_OK;
}

int hf_read(struct hf_source *s, const struct plan_tensor *t, float *out, struct error *err)
{
    struct safetensors_file *f;
    const struct safetensors_entry *e;
    bool turned = is_transposed(s, t);
    int rc = find_source(s, t, &f, &e, err);
    if (rc || (!turned && t->ncols == t->cols))
        return rc ? rc : read_elements(f, e, t->row0 * t->cols, t->nrows * t->cols, out, err);
    for (int64_t i = 0; i < t->nrows && !turned && !rc; i++)
        rc = read_elements(f, e, (t->row0 + i) * t->cols + t->col0, t->ncols, out + i * t->ncols, err);
    /* There [cols, rows]: of each row the part that belongs here. */
    float *line = turned ? malloc((size_t)t->nrows * sizeof *line) : NULL;
    if (turned && !line)
        rc = error_set(err, ERR_NOMEM, "out of memory");
    for (int64_t k = 0; k < t->ncols && turned && !rc; k++) {
        rc = read_elements(f, e, (t->col0 + k) * t->rows + t->row0, t->nrows, line, err);
        for (int64_t i = 0; i < t->nrows && !rc; i++)
            out[i * t->ncols + k] = line[i];
    }
    free(line);
    return rc;
}

/* ---- what is there besides ---- */

/* A head that was saved beside tied embeddings: the same numbers, or config.json is wrong. */
static int check_tied_head(struct hf_source *s, const struct safetensors_file *f, const struct safetensors_entry *e,
                           struct error *err)
{
    static const char table[] = "model.embed_tokens.weight";
    struct safetensors_file *g;
    const struct safetensors_entry *t;
    int rc = find_tensor(s, table, &g, &t, err);
    if (rc)
        return rc;
    bool same = e->dims == 2 && e->shape[0] == t->shape[0] && e->shape[1] == t->shape[1] && e->dtype != DTYPE_I32;
    float *a = malloc(COMPARED_AT_ONCE * sizeof *a), *b = malloc(COMPARED_AT_ONCE * sizeof *b);
    rc = a && b ? ERR_OK : error_set(err, ERR_NOMEM, "out of memory");
    for (int64_t at = 0, all = t->shape[0] * t->shape[1]; at < all && same && !rc; at += COMPARED_AT_ONCE) {
        int64_t n = all - at < COMPARED_AT_ONCE ? all - at : COMPARED_AT_ONCE;
        rc = read_elements(f, e, at, n, a, err);
        if (!rc)
            rc = read_elements(g, t, at, n, b, err);
        same = rc || !memcmp(a, b, (size_t)n * sizeof *a);
    }
    free(a);
    free(b);
    if (rc || same)
        return rc;
    error_set(err, ERR_INVALID, "%s: %s is not %s, though config.json has tie_word_embeddings: true", f->path, e->name,
              table);
    return error_hint(err, "set tie_word_embeddings to false where the model has a head of its own");
}

static int by_text(const void *a, const void *b)
{
    return strcmp(a, b);
}

/* Nothing is left behind: every tensor of the files is one of the model. */
static int check_rest(struct hf_source *s, struct error *err)
{
    static const char rotary[] = ".rotary_emb.inv_freq";
    int64_t n = plan_tensor_count(&s->plan);
    char(*names)[TENSOR_NAME] = calloc((size_t)n, sizeof *names);
    int rc = names ? ERR_OK : error_set(err, ERR_NOMEM, "no memory for the names of %" PRId64 " tensors", n);
    for (int64_t i = 0; i < n && !rc; i++) {
        struct plan_tensor t;
        plan_tensor_at(&s->plan, 0, i, &t);
        hf_name(&t, names[i], sizeof names[i]);
    }
    if (!rc)
        qsort(names, (size_t)n, sizeof *names, by_text);
    for (size_t k = 0; k < s->n && !rc; k++)
        for (size_t i = 0; i < s->files[k].n && !rc; i++) {
            const struct safetensors_entry *e = &s->files[k].entries[i];
            size_t len = strlen(e->name), tail = sizeof rotary - 1;
            if (bsearch(e->name, names, (size_t)n, sizeof *names, by_text) ||
                (len > tail && !strcmp(e->name + len - tail, rotary)))
                continue;
            if (s->plan.tied && !strcmp(e->name, "lm_head.weight")) {
                rc = check_tied_head(s, &s->files[k], e, err);
                continue;
            }
            error_set(err, ERR_INVALID, "%s holds a tensor %.200s, which the model of config.json does not have",
                      s->files[k].path, e->name);
            bool bias = len > 5 && !strcmp(e->name + len - 5, ".bias");
            rc = error_hint(err, bias ? "layers here have no biases" : "config.json has to be that of the weights");
        }
    free(names);
    return rc;
}

/* ---- the whole ---- */

/* The width of the pairs, which is one for all here. */
static int rank_of(struct hf_source *s, Boost__Model *m, struct error *err)
{
    struct safetensors_file *f;
    const struct safetensors_entry *e;
    int rc = find_tensor(s, "model.layers.0.self_attn.q_proj.cola_a", &f, &e, err);
    if (rc || m->has_rank)
        return rc;
    if (e->dims != 2 || e->shape[1] < 1 || e->shape[1] > INT32_MAX)
        return error_set(err, ERR_INVALID, "%s: %s is no matrix", f->path, e->name);
    m->has_rank = true;
    m->rank = (int32_t)e->shape[1];
    return ERR_OK;
}

static int open_source(struct hf_source *s, struct error *err)
{
    json_t *index = NULL;
    s->files = calloc(FILES_MAX, sizeof *s->files);
    int rc = s->files ? load_json(s->dir, "config.json", &s->config, err) : error_set(err, ERR_NOMEM, "out of memory");
    if (rc)
        return rc;
    struct error why;
    rc = load_json(s->dir, "model.safetensors.index.json", &index, &why);
    if (rc && rc != ERR_NOT_FOUND) {
        *err = why;
        return rc;
    }
    json_t *map = json_object_get(index, "weight_map");
    if (index && !json_object_size(map))
        rc = error_set(err, ERR_CORRUPT, "%s/model.safetensors.index.json has no weight_map", s->dir);
    else
        rc = ERR_OK;
    s->map = json_incref(map);
    json_decref(index);
    return rc;
}

/* Its model as a job, and that all of it is there and nothing else. */
static int check_source(struct hf_source *s, struct error *err)
{
    Boost__Model model = BOOST__MODEL__INIT;
    int64_t seq_len;
    int rc = hf_config_read(s->config, &model, &seq_len, err);
    s->cola = model.factorization == BOOST__FACTORIZATION__VALUE__COLA;
    if (!rc)
        rc = open_files(s, err);
    if (!rc && s->cola)
        rc = rank_of(s, &model, err);
    if (!rc)
        rc = weights_spec(&model, seq_len, &s->spec, err);
    if (!rc)
        rc = plan_make(s->spec, &s->plan, err);
    for (int64_t i = 0, n = rc ? 0 : plan_tensor_count(&s->plan); i < n && !rc; i++) {
        struct plan_tensor t;
        struct safetensors_file *f;
        const struct safetensors_entry *e;
        plan_tensor_at(&s->plan, 0, i, &t);
        rc = find_source(s, &t, &f, &e, err);
    }
    return rc ? rc : check_rest(s, err);
}

int hf_open(const char *dir, struct hf_source **out, struct error *err)
{
    struct hf_source *s = calloc(1, sizeof *s);
    if (!s || !(s->dir = strdup(dir))) {
        free(s);
        return error_set(err, ERR_NOMEM, "out of memory");
    }
    int rc = open_source(s, err);
    if (!rc)
        rc = check_source(s, err);
    if (rc)
        hf_close(s);
    else
        *out = s;
    return rc;
}

void hf_close(struct hf_source *s)
{
    if (!s)
        return;
    if (s->spec)
        boost__job_spec__free_unpacked(s->spec, NULL);
    for (size_t i = 0; i < s->n; i++)
        safetensors_close(&s->files[i]);
    free(s->files);
    free(s->dir);
    json_decref(s->config);
    json_decref(s->map);
    free(s);
}

const Boost__JobSpec *hf_spec(const struct hf_source *s)
{
    return s->spec;
}

const struct plan *hf_plan(const struct hf_source *s)
{
    return &s->plan;
}

bool hf_is_dir(const char *dir)
{
    char config[PATH_MAX], manifest[PATH_MAX];
    return !fs_join(config, sizeof config, NULL, dir, "config.json") &&
           !fs_join(manifest, sizeof manifest, NULL, dir, MANIFEST_NAME) && !access(config, F_OK) &&
           access(manifest, F_OK);
}
