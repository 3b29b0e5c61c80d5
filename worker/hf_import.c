/* ckpt_weights.h: a directory of Hugging Face's transformers, or of the public CoLA code, as a checkpoint. */
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/bf16.h"
#include "proto/base/fs.h"
#include "worker/ckpt_weights.h"

enum { JSON_MAX = 64 << 20, FILES_MAX = 4096, SEQ_DEFAULT = 2048 };

struct source {
    const char *dir;
    json_t *config, *map; /* map: tensor to file, or NULL: all are in model.safetensors */
    bool cola;
    struct safetensors_file *files; /* [n], opened */
    size_t n;
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
        rc = fs_read_file(path, &text, err);
    if (!rc && !(*out = json_loadb(text.data ? (char *)text.data : "", text.len, 0, &where)))
        rc = error_set(err, ERR_CORRUPT, "%s: line %d: %s", path, where.line, where.text);
    buffer_free(&text);
    return rc;
}

/* ---- files ---- */

static int open_file(struct source *s, const char *name, struct safetensors_file **out, struct error *err)
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
    if (!rc)
        *out = &s->files[s->n++];
    return rc;
}

static int find_tensor(struct source *s, const char *name, struct safetensors_file **f,
                       const struct safetensors_entry **e, struct error *err)
{
    const char *file = s->map ? json_string_value(json_object_get(s->map, name)) : "model.safetensors";
    if (!file)
        return error_set(err, ERR_NOT_FOUND, "%s has no tensor %s", s->dir, name);
    int rc = open_file(s, file, f, err);
    if (!rc && !(*e = safetensors_find(*f, name)))
        rc = error_set(err, ERR_NOT_FOUND, "%s has no tensor %s", (*f)->path, name);
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
        else
            out[i] = from_bf16(((const uint16_t *)raw)[i]);
    }
    free(raw);
    return rc;
}

/* What it is called there. */
static void name_there(const struct source *s, const struct plan_tensor *t, char *out, size_t cap)
{
    hf_name(t, out, cap);
    size_t used = strlen(out);
    const char *suffix = t->layer < 0 || t->role == ROLE_GAIN ? ""
                         : !s->cola                           ? ".weight"
                         : t->role == ROLE_DOWN               ? ".cola_a"
                                                              : ".cola_b";
    snprintf(out + used, cap - used, "%s", suffix);
}

static int find_source(struct source *s, const struct tensor_item *item, struct safetensors_file **f,
                       const struct safetensors_entry **e, struct error *err)
{
    struct plan_tensor t;
    char name[TENSOR_NAME];
    plan_tensor_at(&s->plan, 0, item->source[0], &t);
    name_there(s, &t, name, sizeof name);
    int rc = find_tensor(s, name, f, e, err);
    if (rc)
        return rc;
    bool gain = t.role == ROLE_GAIN;
    int64_t rows = item->how == WEIGHTS_TRANSPOSE ? t.cols : t.rows;
    int64_t cols = item->how == WEIGHTS_TRANSPOSE ? t.rows : t.cols;
    bool fits = gain ? (*e)->dims == 1 && (*e)->shape[0] == t.cols
                     : (*e)->dims == 2 && (*e)->shape[0] == rows && (*e)->shape[1] == cols;
    if (!fits)
        return error_set(err, ERR_INVALID, "%s: %s is not of shape [%" PRId64 ", %" PRId64 "], which config.json asks for",
                         (*f)->path, name, rows, cols);
    if ((*e)->dtype == DTYPE_I32)
        return error_set(err, ERR_UNSUPPORTED, "%s: %s is I32", (*f)->path, name);
    return ERR_OK;
}

static int rows_there(void *arg, const struct tensor_item *item, int64_t row0, int64_t nrows, float *out,
                      struct error *err)
{
    struct safetensors_file *f;
    const struct safetensors_entry *e;
    int rc = find_source(arg, item, &f, &e, err);
    if (rc)
        return rc;
    if (item->how == WEIGHTS_COPY)
        return read_elements(f, e, row0 * item->cols, nrows * item->cols, out, err);
    /* There [cols, rows]: of each row the part that belongs here. */
    float *line = malloc((size_t)nrows * sizeof *line);
    rc = line ? ERR_OK : error_set(err, ERR_NOMEM, "out of memory");
    for (int64_t k = 0; k < item->cols && !rc; k++) {
        rc = read_elements(f, e, k * item->rows + row0, nrows, line, err);
        for (int64_t i = 0; i < nrows && !rc; i++)
            out[i * item->cols + k] = line[i];
    }
    free(line);
    return rc;
}

/* ---- config.json ---- */

static int number(const json_t *config, const char *key, int64_t *out, struct error *err)
{
    const json_t *v = json_object_get(config, key);
    *out = json_integer_value(v);
    if (json_is_integer(v) && *out > 0 && *out <= INT32_MAX)
        return ERR_OK;
    return error_set(err, ERR_INVALID, "config.json has no %s that is a number from 1", key);
}

/* What a model may have there and has not here. */
static int check_config(const struct source *s, struct error *err)
{
    const char *act = json_string_value(json_object_get(s->config, "hidden_act"));
    const json_t *scaling = json_object_get(s->config, "rope_scaling");
    const json_t *rope = json_object_get(s->config, "rope_parameters");
    const char *type = json_string_value(json_object_get(rope, "rope_type"));
    if (act && strcmp(act, "silu") != 0 && strcmp(act, "linear") != 0)
        return error_set(err, ERR_UNSUPPORTED, "config.json: hidden_act is %s, models here have silu", act);
    if ((scaling && !json_is_null(scaling)) || (type && strcmp(type, "default") != 0))
        return error_set(err, ERR_UNSUPPORTED, "config.json: rotary positions are scaled, which models here do not have");
    if (json_is_true(json_object_get(s->config, "attention_bias")) ||
        json_is_true(json_object_get(s->config, "mlp_bias")))
        return error_set(err, ERR_UNSUPPORTED, "config.json: layers have biases, which models here do not have");
    return ERR_OK;
}

static double real(const json_t *config, const char *key, double otherwise)
{
    const json_t *v = json_object_get(config, key);
    return json_is_number(v) ? json_number_value(v) : otherwise;
}

static int model_of(const struct source *s, Boost__Model *m, int64_t *seq_len, struct error *err)
{
    const json_t *c = s->config;
    int64_t d, f, layers, heads, kv, vocab;
    int rc = check_config(s, err);
    rc = rc ? rc : number(c, "hidden_size", &d, err);
    rc = rc ? rc : number(c, "intermediate_size", &f, err);
    rc = rc ? rc : number(c, "num_hidden_layers", &layers, err);
    rc = rc ? rc : number(c, "num_attention_heads", &heads, err);
    rc = rc ? rc : number(c, "vocab_size", &vocab, err);
    if (rc)
        return rc;
    if (number(c, "num_key_value_heads", &kv, NULL))
        kv = heads;
    if (number(c, "max_position_embeddings", seq_len, NULL) || *seq_len > 1 << 20)
        *seq_len = SEQ_DEFAULT;
    int64_t head_dim;
    if (!number(c, "head_dim", &head_dim, NULL) && head_dim * heads != d)
        return error_set(err, ERR_UNSUPPORTED, "config.json: head_dim times num_attention_heads is not hidden_size");
    m->has_factorization = m->has_hidden = m->has_layers = m->has_heads = m->has_kv_heads = m->has_intermediate = true;
    m->has_vocab = m->has_rope_theta = m->has_norm_eps = m->has_tie_embeddings = m->has_mlp_activation = true;
    m->factorization = s->cola ? BOOST__FACTORIZATION__VALUE__COLA : BOOST__FACTORIZATION__VALUE__FULL_RANK;
    m->hidden = (int32_t)d;
    m->intermediate = (int32_t)f;
    m->layers = (int32_t)layers;
    m->heads = (int32_t)heads;
    m->kv_heads = (int32_t)kv;
    m->vocab = (int32_t)vocab;
    m->norm_eps = real(c, "rms_norm_eps", 1e-6);
    m->rope_theta = real(json_object_get(c, "rope_parameters"), "rope_theta", real(c, "rope_theta", 10000));
    m->tie_embeddings = json_is_true(json_object_get(c, "tie_word_embeddings"));
    const char *act = json_string_value(json_object_get(c, "hidden_act"));
    m->mlp_activation = act && !strcmp(act, "linear") ? BOOST__SWITCH__VALUE__OFF : BOOST__SWITCH__VALUE__ON;
    return ERR_OK;
}

/* The width of the pairs, which is one for all here. */
static int rank_of(struct source *s, Boost__Model *m, struct error *err)
{
    struct safetensors_file *f;
    const struct safetensors_entry *e;
    int rc = s->cola ? find_tensor(s, "model.layers.0.self_attn.q_proj.cola_a", &f, &e, err) : ERR_OK;
    if (rc || !s->cola)
        return rc;
    if (e->dims != 2)
        return error_set(err, ERR_INVALID, "%s: %s is no matrix", f->path, e->name);
    m->has_rank = true;
    m->rank = (int32_t)e->shape[1];
    return ERR_OK;
}

static int open_source(struct source *s, struct error *err)
{
    json_t *index = NULL;
    s->files = calloc(FILES_MAX, sizeof *s->files);
    int rc = s->files ? load_json(s->dir, "config.json", &s->config, err) : error_set(err, ERR_NOMEM, "out of memory");
    if (rc)
        return rc;
    const char *type = json_string_value(json_object_get(s->config, "model_type"));
    s->cola = type && !strcmp(type, "cola");
    if (!type || (!s->cola && strcmp(type, "llama") != 0)) {
        error_set(err, ERR_UNSUPPORTED, "%s/config.json: model_type is %s", s->dir, type ? type : "missing");
        return error_hint(err, "llama (FULL_RANK) and cola (COLA) can be imported");
    }
    struct error why;
    rc = load_json(s->dir, "model.safetensors.index.json", &index, &why);
    if (rc && rc != ERR_NOT_FOUND) {
        *err = why;
        return rc;
    }
    s->map = index ? json_incref(json_object_get(index, "weight_map")) : NULL;
    json_decref(index);
    return ERR_OK;
}

int hf_import(const char *from, const char *to, char *out, size_t cap, struct error *err)
{
    struct source s = {.dir = from};
    Boost__Model model = BOOST__MODEL__INIT;
    Boost__JobSpec *spec = NULL;
    struct tensor_item *items = NULL;
    size_t n = 0;
    int64_t seq_len = SEQ_DEFAULT;
    int rc = open_source(&s, err);
    if (!rc)
        rc = model_of(&s, &model, &seq_len, err);
    if (!rc)
        rc = rank_of(&s, &model, err);
    if (!rc)
        rc = weights_spec(&model, seq_len, &spec, err);
    if (!rc)
        rc = plan_make(spec, &s.plan, err);
    if (!rc)
        rc = plan_items(&s.plan, &items, &n, err);
    for (size_t i = 0; i < n && !rc; i++) {
        struct plan_tensor t;
        struct safetensors_file *f;
        const struct safetensors_entry *e;
        plan_tensor_at(&s.plan, 0, (int64_t)i, &t);
        items[i].source[0] = (int64_t)i;
        items[i].how = s.cola && (t.role == ROLE_DOWN || t.role == ROLE_UP) ? WEIGHTS_TRANSPOSE : WEIGHTS_COPY;
        rc = find_source(&s, &items[i], &f, &e, err);
    }
    if (!rc)
        rc = ckpt_write_weights(to, 0, spec, items, n, rows_there, &s, out, cap, err);
    if (spec)
        boost__job_spec__free_unpacked(spec, NULL);
    for (size_t i = 0; i < s.n; i++)
        safetensors_close(&s.files[i]);
    free(s.files);
    free(items);
    json_decref(s.config);
    json_decref(s.map);
    return rc;
}
