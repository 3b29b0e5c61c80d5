/* ckpt_weights.h: a checkpoint as a directory of Hugging Face's transformers, or of the public CoLA code. */
#include <inttypes.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/fs.h"
#include "worker/ckpt_weights.h"

static const char *const modules[PROJ_COUNT] = {
    [PROJ_Q] = "self_attn.q_proj",   [PROJ_K] = "self_attn.k_proj", [PROJ_V] = "self_attn.v_proj",
    [PROJ_O] = "self_attn.o_proj",   [PROJ_GATE] = "mlp.gate_proj", [PROJ_UP] = "mlp.up_proj",
    [PROJ_DOWN] = "mlp.down_proj",
};

void hf_name(const struct plan_tensor *t, char *out, size_t cap)
{
    if (t->role == ROLE_EMBEDDING)
        snprintf(out, cap, "model.embed_tokens.weight");
    else if (t->role == ROLE_HEAD)
        snprintf(out, cap, "lm_head.weight");
    else if (t->role == ROLE_GAIN && t->layer < 0)
        snprintf(out, cap, "model.norm.weight");
    else if (t->role == ROLE_GAIN)
        snprintf(out, cap, "model.layers.%d.%s.weight", t->layer,
                 t->projection == PROJ_Q ? "input_layernorm" : "post_attention_layernorm");
    else
        snprintf(out, cap, "model.layers.%d.%s", t->layer, modules[t->projection]);
}

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
    char name[TENSOR_NAME - 16];
    bool cola = p->factorization == BOOST__FACTORIZATION__VALUE__COLA;
    plan_tensor_at(p, 0, i, &t);
    hf_name(&t, name, sizeof name);
    *out = (struct tensor_item){.dims = 2, .rows = t.rows, .cols = t.cols, .source = {i, -1}, .how = WEIGHTS_COPY};
    if (t.role == ROLE_GAIN)
        out->dims = 1;
    if (t.role == ROLE_DOWN && !cola)
        return false;
    if (t.role == ROLE_UP && !cola) {
        out->source[1] = partner(p, &t);
        out->cols = plan_in_width(p, (enum plan_projection)t.projection);
        out->how = WEIGHTS_MERGE;
    } else if (t.role == ROLE_DOWN || t.role == ROLE_UP) {
        out->rows = t.cols;
        out->cols = t.rows;
        out->how = WEIGHTS_TRANSPOSE;
    }
    const char *suffix = t.layer < 0 || t.role == ROLE_GAIN ? ""
                         : !cola                            ? ".weight"
                         : t.role == ROLE_DOWN              ? ".cola_a"
                                                            : ".cola_b";
    snprintf(out->name, sizeof out->name, "%s%s", name, suffix);
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

/* ---- config.json ---- */

static json_t *config_json(const struct plan *p, enum dtype dtype)
{
    bool cola = p->factorization == BOOST__FACTORIZATION__VALUE__COLA;
    const char *type = dtype == DTYPE_BF16 ? "bfloat16" : "float32";
    json_t *c = json_pack(
        "{s:[s], s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:f, s:{s:s, s:f}, s:b, s:s, s:b, s:b, s:f, s:b, s:s, "
        "s:s}",
        "architectures", cola ? "ColaForCausalLM" : "LlamaForCausalLM", "model_type", cola ? "cola" : "llama",
        "hidden_size", (json_int_t)p->d, "intermediate_size", (json_int_t)p->f, "num_hidden_layers", (json_int_t)p->L,
        "num_attention_heads", (json_int_t)p->h, "num_key_value_heads", (json_int_t)p->hk, "head_dim", (json_int_t)p->e,
        "vocab_size", (json_int_t)p->V, "max_position_embeddings", (json_int_t)p->s, "rms_norm_eps", p->norm_eps,
        "rope_theta", p->rope_theta, "rope_parameters", "rope_type", "default", "rope_theta", p->rope_theta,
        "tie_word_embeddings", p->tied, "hidden_act", p->mlp_silu ? "silu" : "linear", "attention_bias", 0, "mlp_bias",
        0, "initializer_range", 0.02, "use_cache", 1, "dtype", type, "torch_dtype", type);
    if (c && cola) {
        json_object_set_new(c, "attn_rank", json_integer(p->r));
        json_object_set_new(c, "mlp_rank", json_integer(p->r));
        json_object_set_new(c, "lr_act", json_true());
        json_object_set_new(c, "lr_act_type", json_string("silu"));
    }
    return c;
}

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

/* ---- files ---- */

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

static int check_model(const struct plan *p, struct error *err)
{
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
    struct new_dir out = {.temp = ""};
    struct tensor_item *items = NULL;
    size_t n = 0;
    bool begun = false;
    int rc = ckpt_dir_open(&d, from, err);
    weights_init(&w, &d, 0);
    if (!rc)
        rc = check_model(&d.plan, err);
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
        rc = write_json(out.temp, "config.json", config_json(&d.plan, dtype), err);
    if (begun)
        rc = new_dir_end(&out, rc, err);
    free(items);
    weights_free(&w);
    ckpt_dir_close(&d);
    return rc;
}
