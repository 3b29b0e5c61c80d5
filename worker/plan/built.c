/* built.h: the table, and the walk that refuses what it does not allow. */
#include "worker/plan/built.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "proto/reflect.h"
#include "worker/plan/internal.h"

#define BIT(v) (INT64_C(1) << (v))

static const char notices[] = "notifications";

const struct built_rule built_rules[] = {
    {"spec_version", BUILT_ANY, 0, NULL},
    {"name", BUILT_ANY, 0, NULL},

    {"model.factorization", BUILT_ANY, 0, NULL},
    {"model.hidden", BUILT_ANY, 0, NULL},
    {"model.layers", BUILT_ANY, 0, NULL},
    {"model.heads", BUILT_ANY, 0, NULL},
    {"model.kv_heads", BUILT_ANY, 0, NULL},
    {"model.intermediate", BUILT_ANY, 0, NULL},
    {"model.rank", BUILT_ANY, 0, NULL},
    {"model.vocab", BUILT_ANY, 0, NULL},
    {"model.rope_theta", BUILT_ANY, 0, NULL},
    {"model.norm_eps", BUILT_ANY, 0, NULL},
    {"model.tie_embeddings", BUILT_ANY, 0, NULL},
    {"model.mlp_activation", BUILT_ANY, 0, NULL},
    {"model.lax_base", BUILT_ANY, 0, NULL},
    {"model.lax_gate", BUILT_ANY, 0, NULL},

    {"parallel.strategy", BUILT_ANY, 0, NULL},
    {"parallel.tp", BUILT_ANY, 0, NULL},
    {"parallel.pp", BUILT_ANY, 0, NULL},
    {"parallel.dp", BUILT_ANY, 0, NULL},
    {"parallel.micro_batch", BUILT_ANY, 0, NULL},
    {"parallel.global_batch", BUILT_ANY, 0, NULL},
    {"parallel.auto", BUILT_ONLY, 0, "choosing the layout by the cost model"},
    {"parallel.norm", BUILT_ANY, 0, NULL},
    {"parallel.grouped", BUILT_ANY, 0, NULL},
    {"parallel.recompute", BUILT_ANY, 0, NULL},
    {"parallel.overlap", BUILT_ANY, 0, NULL},
    {"parallel.zero", BUILT_ANY, 0, NULL},
    {"parallel.vanilla_attention", BUILT_ANY, 0, NULL},
    {"parallel.attention", BUILT_ANY, 0, NULL},
    {"parallel.deterministic", BUILT_ANY, 0, NULL},
    {"parallel.bucket_mib", BUILT_ANY, 0, NULL},

    {"data.train", BUILT_ANY, 0, NULL},
    {"data.train.path", BUILT_ANY, 0, NULL},
    {"data.train.weight", BUILT_ANY, 0, NULL},
    {"data.eval", BUILT_ANY, 0, NULL},
    {"data.eval.path", BUILT_ANY, 0, NULL},
    {"data.eval.weight", BUILT_ONLY, 1, "weighted evaluation; its windows are spread evenly over all files"},
    {"data.format", BUILT_ANY, 0, NULL},
    {"data.seq_len", BUILT_ANY, 0, NULL},
    {"data.seed", BUILT_ANY, 0, NULL},
    {"data.eod_id", BUILT_ANY, 0, NULL},
    {"data.pad_id", BUILT_ANY, 0, NULL},
    {"data.mask_eod", BUILT_ANY, 0, NULL},
    {"data.cache_dir", BUILT_ANY, 0, NULL},
    {"data.cache_max_mib", BUILT_ANY, 0, NULL},

    {"optimizer.kind", BUILT_ANY, 0, NULL},
    {"optimizer.decay_embeddings", BUILT_ANY, 0, NULL},
    {"optimizer.lr", BUILT_ANY, 0, NULL},
    {"optimizer.beta1", BUILT_ANY, 0, NULL},
    {"optimizer.beta2", BUILT_ANY, 0, NULL},
    {"optimizer.eps", BUILT_ANY, 0, NULL},
    {"optimizer.weight_decay", BUILT_ANY, 0, NULL},
    {"optimizer.grad_clip", BUILT_ANY, 0, NULL},
    {"optimizer.schedule", BUILT_ANY, 0, NULL},
    {"optimizer.warmup_steps", BUILT_ANY, 0, NULL},
    {"optimizer.min_lr_ratio", BUILT_ANY, 0, NULL},
    {"optimizer.wsd_decay_steps", BUILT_ANY, 0, NULL},
    {"optimizer.max_skipped", BUILT_ANY, 0, NULL},

    {"run.steps", BUILT_ANY, 0, NULL},
    {"run.eval_every", BUILT_ANY, 0, NULL},
    {"run.eval_tokens", BUILT_ANY, 0, NULL},
    {"run.log_every", BUILT_ANY, 0, NULL},
    {"run.seed", BUILT_ANY, 0, NULL},
    {"run.precision", BUILT_ANY, 0, NULL},
    {"run.tensorboard_dir", BUILT_ANY, 0, NULL},

    {"checkpoint.dir", BUILT_ANY, 0, NULL},
    {"checkpoint.interval", BUILT_ANY, 0, NULL},
    {"checkpoint.every_steps", BUILT_ANY, 0, NULL},
    {"checkpoint.every_seconds", BUILT_ANY, 0, NULL},
    {"checkpoint.keep", BUILT_ANY, 0, NULL},
    {"checkpoint.keep_every", BUILT_ANY, 0, NULL},
    {"checkpoint.mirror", BUILT_ANY, 0, NULL},
    {"checkpoint.write_mib_s", BUILT_ANY, 0, NULL},
    {"checkpoint.init_from.path", BUILT_ANY, 0, NULL},
    {"checkpoint.init_from.weights_only", BUILT_ANY, 0, NULL},

    {"resources.device", BUILT_ANY, 0, NULL},
    {"resources.nodes", BUILT_ANY, 0, NULL},
    {"resources.min_nodes", BUILT_ANY, 0, NULL},
    {"resources.devices_per_node", BUILT_ANY, 0, NULL},
    {"resources.spares", BUILT_ANY, 0, NULL},
    {"resources.threads_per_rank", BUILT_ANY, 0, NULL},
    {"resources.memory_mib", BUILT_ANY, 0, NULL},
    {"resources.constraint", BUILT_ANY, 0, NULL},
    {"resources.nodelist", BUILT_ANY, 0, NULL},
    {"resources.exclude", BUILT_ANY, 0, NULL},
    {"resources.exclusive", BUILT_ANY, 0, NULL},

    {"restart.max_restarts", BUILT_ANY, 0, NULL},
    {"restart.no_progress_limit", BUILT_ANY, 0, NULL},

    {"notify.url", BUILT_EMPTY, 0, notices},
    {"notify.events", BUILT_EMPTY, 0, notices},
    {"notify.template", BUILT_ANY, 0, NULL}, /* nothing is sent without a url, and that is refused above */
    {"notify.secret_file", BUILT_EMPTY, 0, notices},

    {"priority", BUILT_ANY, 0, NULL},
    {"time_limit_s", BUILT_ANY, 0, NULL},
    {"stop_grace_s", BUILT_ANY, 0, NULL},
    {"after", BUILT_ANY, 0, NULL},
    {"label.key", BUILT_ANY, 0, NULL},
    {"label.value", BUILT_ANY, 0, NULL},
    {"workdir", BUILT_ANY, 0, NULL},
    {"env.key", BUILT_ANY, 0, NULL},
    {"env.value", BUILT_ANY, 0, NULL},
};
const size_t built_rule_count = sizeof built_rules / sizeof built_rules[0];

static const char *enum_name(const ProtobufCFieldDescriptor *f, int64_t value)
{
    const ProtobufCEnumValue *v = protobuf_c_enum_descriptor_get_value(f->descriptor, (int)value);
    return v ? v->name : "?";
}

/* A number as the user would write it. */
static const char *show(const ProtobufCFieldDescriptor *f, double value, char *out, size_t cap)
{
    if (f->type == PROTOBUF_C_TYPE_ENUM)
        snprintf(out, cap, "%s", enum_name(f, (int64_t)value));
    else if (f->type == PROTOBUF_C_TYPE_BOOL)
        snprintf(out, cap, "%s", value != 0 ? "true" : "false");
    else
        snprintf(out, cap, "%.15g", value);
    return out;
}

static double number_at(const ProtobufCFieldDescriptor *f, const void *at)
{
    switch (f->type) {
    case PROTOBUF_C_TYPE_ENUM:
        return *(const int *)at;
    case PROTOBUF_C_TYPE_BOOL:
        return *(const protobuf_c_boolean *)at != 0;
    case PROTOBUF_C_TYPE_INT64:
        return (double)*(const int64_t *)at;
    case PROTOBUF_C_TYPE_DOUBLE:
        return *(const double *)at;
    default:
        return *(const int32_t *)at;
    }
}

static const char *allowed_enums(const ProtobufCFieldDescriptor *f, int64_t mask, char *out, size_t cap)
{
    const ProtobufCEnumDescriptor *e = f->descriptor;
    size_t used = 0;
    out[0] = '\0';
    for (unsigned i = 0; i < e->n_values && used < cap; i++)
        if (mask & BIT(e->values[i].value)) {
            int wrote = snprintf(out + used, cap - used, "%s%s", used ? " or " : "", e->values[i].name);
            used += wrote > 0 ? (size_t)wrote : 0;
        }
    return out;
}

static void refuse(struct faults *f, const struct built_rule *rule, const char *path, const char *value,
                   const char *mend)
{
    faults_add(f, mend, "%s = %s is not built in this version (%s)", path, value, rule->what);
}

static void check_value(struct faults *f, const struct built_rule *rule, const ProtobufCMessage *m,
                        const ProtobufCFieldDescriptor *field, const char *path)
{
    size_t count = reflect_count(m, field);
    char mend[384], text[128], allowed[96];
    if (!count || rule->kind == BUILT_ANY)
        return;
    const void *at = reflect_get(m, field, 0);
    if (rule->kind == BUILT_EMPTY) {
        const char *s = *(char *const *)at;
        if (field->label != PROTOBUF_C_LABEL_REPEATED && (!s || !*s))
            return;
        snprintf(text, sizeof text, "\"%.80s\"", s ? s : "");
        snprintf(mend, sizeof mend, "leave %s out", path);
        refuse(f, rule, path, text, mend);
        return;
    }
    double value = number_at(field, at);
    show(field, value, text, sizeof text);
    if (rule->kind == BUILT_ABSENT) {
        snprintf(mend, sizeof mend, "leave %s out", path);
        refuse(f, rule, path, text, mend);
    } else if (rule->kind == BUILT_ONLY && value != (double)rule->value) {
        snprintf(mend, sizeof mend, "set %s: %s", path, show(field, (double)rule->value, allowed, sizeof allowed));
        refuse(f, rule, path, text, mend);
    } else if (rule->kind == BUILT_VALUES && !(rule->value & BIT((int)value))) {
        snprintf(mend, sizeof mend, "set %s: %s", path, allowed_enums(field, rule->value, allowed, sizeof allowed));
        refuse(f, rule, path, text, mend);
    }
}

/* Follows rule->path from `m`, through every entry of a list on the way. */
static void walk(struct faults *f, const struct built_rule *rule, const ProtobufCMessage *m, const char *rest,
                 const char *where)
{
    size_t len = strcspn(rest, ".");
    const ProtobufCFieldDescriptor *field = reflect_field(m->descriptor, rest, len);
    if (!field)
        return;
    char path[REFLECT_PATH];
    if (!rest[len]) {
        reflect_path(path, where, field->name, -1);
        check_value(f, rule, m, field, path);
        return;
    }
    for (size_t i = 0, n = reflect_count(m, field); i < n; i++) {
        bool list = field->label == PROTOBUF_C_LABEL_REPEATED;
        reflect_path(path, where, field->name, list ? (long)i : -1);
        walk(f, rule, *(ProtobufCMessage *const *)reflect_get(m, field, i), rest + len + 1, path);
    }
}

int built_check(const Boost__JobSpec *spec, struct error *err)
{
    struct faults f = {.err = err, .code = ERR_UNSUPPORTED};
    for (size_t i = 0; i < built_rule_count; i++)
        walk(&f, &built_rules[i], &spec->base, built_rules[i].path, "");
    return faults_end(&f);
}
