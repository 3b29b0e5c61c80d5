/* hf.h: names and config.json. The CoLA code meant is that of arXiv 2502.10940 (ColaForCausalLM, ColaConfig). */
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "worker/hf.h"

enum { SEQ_DEFAULT = 2048, SEQ_MAX = 1 << 20 };

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
        snprintf(out, cap, "model.layers.%d.%s.%s", t->layer, modules[t->projection],
                 t->role == ROLE_DENSE  ? "weight"
                 : t->role == ROLE_DOWN ? "cola_a"
                                        : "cola_b");
}

/* ---- writing ---- */

json_t *hf_config_write(const struct plan *p, enum dtype dtype)
{
    bool cola = p->factorization == BOOST__FACTORIZATION__VALUE__COLA;
    const char *type = dtype == DTYPE_BF16 ? "bfloat16" : "float32";
    json_t *c = json_pack(
        "{s:[s], s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:f, s:{s:s, s:f}, s:b, s:s, s:b, s:b, s:f, s:b, s:s, "
        "s:s}",
        "architectures", cola ? "ColaForCausalLM" : "LlamaForCausalLM", "model_type", cola ? "cola" : "llama",
        "hidden_size", (json_int_t)p->d, "intermediate_size", (json_int_t)p->f, "num_hidden_layers", (json_int_t)p->L,
        "num_attention_heads", (json_int_t)p->h, "num_key_value_heads", (json_int_t)(cola ? p->h : p->hk), "head_dim",
        (json_int_t)p->e, "vocab_size", (json_int_t)p->V, "max_position_embeddings", (json_int_t)p->s, "rms_norm_eps",
        p->norm_eps, "rope_theta", p->rope_theta, "rope_parameters", "rope_type", "default", "rope_theta",
        p->rope_theta, "tie_word_embeddings", p->tied, "hidden_act", cola || p->mlp_silu ? "silu" : "linear",
        "attention_bias", 0, "mlp_bias", 0, "initializer_range", 0.02, "use_cache", 1, "dtype", type, "torch_dtype",
        type);
    if (c && cola) {
        json_object_set_new(c, "rank", json_integer(p->r));
        json_object_set_new(c, "lr_act_type", json_string("silu"));
        json_object_set_new(c, "only_lr_act", json_boolean(!p->mlp_silu));
    }
    return c;
}

/* ---- reading ---- */

/* False: it is not there, or null. */
static bool has(const json_t *config, const char *key)
{
    const json_t *v = json_object_get(config, key);
    return v && !json_is_null(v);
}

static int number(const json_t *config, const char *key, int32_t *out, struct error *err)
{
    const json_t *v = json_object_get(config, key);
    int64_t n = json_integer_value(v);
    if (!json_is_integer(v) || n < 1 || n > INT32_MAX)
        return error_set(err, ERR_INVALID, "config.json has no %s that is a number from 1", key);
    *out = (int32_t)n;
    return ERR_OK;
}

static int real(const json_t *config, const char *key, double *out, struct error *err)
{
    const json_t *v = json_object_get(config, key);
    if (!has(config, key))
        return ERR_OK;
    *out = json_number_value(v);
    return json_is_number(v) && *out > 0 ? ERR_OK
                                         : error_set(err, ERR_INVALID, "config.json: %s is no number above 0", key);
}

static bool is_true(const json_t *config, const char *key)
{
    return json_is_true(json_object_get(config, key));
}

/* Of "rope_scaling" and of "rope_parameters", which newer configurations have instead. */
static bool rope_is_plain(const json_t *config, const char *key)
{
    const json_t *rope = json_object_get(config, key);
    const char *type = json_string_value(json_object_get(rope, "rope_type"));
    if (!type)
        type = json_string_value(json_object_get(rope, "type"));
    double part = 1;
    if (has(rope, "partial_rotary_factor"))
        part = json_number_value(json_object_get(rope, "partial_rotary_factor"));
    return !has(config, key) || (json_is_object(rope) && part == 1 &&
                                 (type ? !strcmp(type, "default") : !has(rope, "factor")));
}

static bool is_silu(const char *act)
{
    return !act || !strcmp(act, "silu") || !strcmp(act, "swish");
}

/* What such a model may have there and has not here. */
static int check_features(const json_t *c, bool cola, struct error *err)
{
    static const char *const flags[] = {"attention_bias", "mlp_bias"};
    const char *act = json_string_value(json_object_get(c, "hidden_act"));
    const char *latent = cola ? json_string_value(json_object_get(c, "lr_act_type")) : NULL;
    if (!is_silu(act) && (cola || strcmp(act, "linear") != 0))
        return error_set(err, ERR_UNSUPPORTED, "config.json: hidden_act is %.40s, models here have silu", act);
    if (!is_silu(latent))
        return error_set(err, ERR_UNSUPPORTED, "config.json: lr_act_type is %.40s, latents here have silu", latent);
    if (!rope_is_plain(c, "rope_scaling") || !rope_is_plain(c, "rope_parameters")) {
        error_set(err, ERR_UNSUPPORTED, "config.json: rotary positions are scaled (%s), which is not built here",
                  rope_is_plain(c, "rope_scaling") ? "rope_parameters" : "rope_scaling");
        return error_hint(err, "only rope_type default can be imported");
    }
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++)
        if (is_true(c, flags[i]))
            return error_set(err, ERR_UNSUPPORTED, "config.json: %s is true, and layers here have no biases", flags[i]);
    if (has(c, "quantization_config")) {
        error_set(err, ERR_UNSUPPORTED, "config.json: the weights are quantized (quantization_config)");
        return error_hint(err, "import the F32, F16 or BF16 weights that they were made of");
    }
    return ERR_OK;
}

static int check_type(const json_t *c, bool *cola, struct error *err)
{
    const char *type = json_string_value(json_object_get(c, "model_type"));
    const char *class = json_string_value(json_array_get(json_object_get(c, "architectures"), 0));
    *cola = type && !strcmp(type, "cola");
    if (!type || (!*cola && strcmp(type, "llama") != 0)) {
        error_set(err, ERR_UNSUPPORTED, "config.json: model_type is %.60s", type ? type : "missing");
        return error_hint(err, "llama (FULL_RANK) and cola (COLA) can be imported");
    }
    const char *want = *cola ? "ColaForCausalLM" : "LlamaForCausalLM";
    if (!class || !strcmp(class, want))
        return ERR_OK;
    error_set(err, ERR_UNSUPPORTED, "config.json: architectures is %.60s, only %s can be imported", class, want);
    return error_hint(err, "load it with its own code and save its weights under the names of a %s", want);
}

/* The numbers that every model has. */
static int read_sizes(const json_t *c, Boost__Model *m, int64_t *seq_len, struct error *err)
{
    int32_t head_dim = 0, longest;
    int rc = number(c, "hidden_size", &m->hidden, err);
    rc = rc ? rc : number(c, "intermediate_size", &m->intermediate, err);
    rc = rc ? rc : number(c, "num_hidden_layers", &m->layers, err);
    rc = rc ? rc : number(c, "num_attention_heads", &m->heads, err);
    rc = rc ? rc : number(c, "vocab_size", &m->vocab, err);
    m->kv_heads = m->heads;
    if (!rc && has(c, "num_key_value_heads"))
        rc = number(c, "num_key_value_heads", &m->kv_heads, err);
    if (!rc && has(c, "head_dim"))
        rc = number(c, "head_dim", &head_dim, err);
    if (!rc && has(c, "head_dim") && (int64_t)head_dim * m->heads != m->hidden)
        rc = error_set(err, ERR_UNSUPPORTED,
                       "config.json: head_dim %d times num_attention_heads %d is not hidden_size %d", head_dim,
                       m->heads, m->hidden);
    if (!rc && m->heads % m->kv_heads)
        rc = error_set(err, ERR_INVALID, "config.json: num_key_value_heads %d does not divide num_attention_heads %d",
                       m->kv_heads, m->heads);
    m->norm_eps = 1e-6;
    m->rope_theta = 10000;
    rc = rc ? rc : real(c, "rms_norm_eps", &m->norm_eps, err);
    rc = rc ? rc : real(c, "rope_theta", &m->rope_theta, err);
    rc = rc ? rc : real(json_object_get(c, "rope_parameters"), "rope_theta", &m->rope_theta, err);
    bool told = !number(c, "max_position_embeddings", &longest, NULL) || !number(c, "max_sequence_length", &longest, NULL);
    *seq_len = told && longest <= SEQ_MAX ? longest : SEQ_DEFAULT;
    return rc;
}

int hf_config_read(const json_t *c, Boost__Model *m, int64_t *seq_len, struct error *err)
{
    bool cola;
    int rc = check_type(c, &cola, err);
    rc = rc ? rc : check_features(c, cola, err);
    rc = rc ? rc : read_sizes(c, m, seq_len, err);
    if (rc)
        return rc;
    m->has_factorization = m->has_hidden = m->has_layers = m->has_heads = m->has_kv_heads = m->has_intermediate = true;
    m->has_vocab = m->has_rope_theta = m->has_norm_eps = m->has_tie_embeddings = m->has_mlp_activation = true;
    m->factorization = cola ? BOOST__FACTORIZATION__VALUE__COLA : BOOST__FACTORIZATION__VALUE__FULL_RANK;
    m->tie_embeddings = is_true(c, "tie_word_embeddings");
    bool plain = cola ? !has(c, "only_lr_act") || is_true(c, "only_lr_act")
                      : !is_silu(json_string_value(json_object_get(c, "hidden_act")));
    m->mlp_activation = plain ? BOOST__SWITCH__VALUE__OFF : BOOST__SWITCH__VALUE__ON;
    m->has_rank = cola && has(c, "rank");
    return m->has_rank ? number(c, "rank", &m->rank, err) : ERR_OK;
}
