/* config.h */
#include "daemon/config.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "daemon/log.h"
#include "proto/base/fs.h"
#include "proto/reflect.h"
#include "proto/text.h"

/* The ranges that config.proto's comments state. */
struct range {
    const char *field;
    int64_t low, high;
};

static const struct range boostd_ranges[] = {
    {"heartbeat_ms", 10, 60000},
    {"suspect_ms", 20, 600000},
    {"node_timeout_ms", 50, 3600000},
    {"restart_grace_ms", 0, 3600000},
    {"backoff_min_ms", 1, 3600000},
    {"backoff_max_ms", 1, 86400000},
    {"rendezvous_timeout_ms", 100, 3600000},
    {"kill_confirm_ms", 100, 3600000},
};
static const struct range agent_ranges[] = {
    {"cpu_slots", 0, 65536},          {"hang_min_ms", 100, 86400000}, {"hang_max_ms", 100, 86400000},
    {"log_keep_bytes", 0, INT64_MAX}, {"ranks_per_gpu", 1, 64},
};

static int check_ranges(const ProtobufCMessage *m, const struct range *ranges, size_t n, struct error *err)
{
    for (size_t i = 0; i < n; i++) {
        const struct range *r = &ranges[i];
        const ProtobufCFieldDescriptor *f = reflect_field(m->descriptor, r->field, strlen(r->field));
        if (!f || !reflect_count(m, f))
            continue;
        const void *at = reflect_get(m, f, 0);
        int64_t v = f->type == PROTOBUF_C_TYPE_INT64 ? *(const int64_t *)at : *(const int32_t *)at;
        if (v < r->low || v > r->high) {
            error_set(err, ERR_INVALID, "configuration: %s = %" PRId64 " is out of range", r->field, v);
            return error_hint(err, "choose %" PRId64 " to %" PRId64, r->low, r->high);
        }
    }
    return ERR_OK;
}

static int below(const char *low_name, int64_t low, const char *high_name, int64_t high, struct error *err)
{
    if (low <= high)
        return ERR_OK;
    error_set(err, ERR_INVALID, "configuration: %s = %" PRId64 " is greater than %s = %" PRId64, low_name, low,
              high_name, high);
    return error_hint(err, "raise %s or lower %s", high_name, low_name);
}

static int apply_set(ProtobufCMessage *m, struct arena *a, const char *assignment, struct error *err)
{
    const char *equals = strchr(assignment, '=');
    if (!equals || equals == assignment) {
        error_set(err, ERR_USAGE, "--set %s: not an assignment", assignment);
        return error_hint(err, "write --set field=value, e.g. --set log_level=debug");
    }
    size_t len = (size_t)(equals - assignment);
    const ProtobufCFieldDescriptor *f = reflect_field(m->descriptor, assignment, len);
    if (!f)
        return reflect_unknown_field_error(err, "--set: ", "", m->descriptor, assignment, len, REFLECT_DOTS);
    const char *value = equals + 1;
    if (f->type == PROTOBUF_C_TYPE_STRING && *value != '"' && *value != '\'') {
        char **at = reflect_add(m, f, a);
        char *copy = arena_strdup(a, value);
        if (!at || !copy)
            return error_set(err, ERR_NOMEM, "--set %s: out of memory", assignment);
        *at = copy;
        return ERR_OK;
    }
    int rc = text_read_value(m, f, a, f->name, value, strlen(value), err);
    return rc ? error_context(err, "--set %s", assignment) : ERR_OK;
}

static ProtobufCMessage *load(const ProtobufCMessageDescriptor *type, const char *path, const char *fallback,
                              const char *const *sets, size_t n, struct arena *a, struct error *err)
{
    if (!path && fallback && fs_exists(fallback))
        path = fallback;
    ProtobufCMessage *m = path ? text_load(type, path, a, err) : reflect_new(a, type);
    if (!m) {
        if (!path)
            error_set(err, ERR_NOMEM, "configuration: out of memory");
        else if (err->code != ERR_NOMEM)
            err->code = ERR_INVALID; /* a file that cannot be read is no valid configuration either */
        return NULL;
    }
    for (size_t i = 0; i < n; i++) {
        if (apply_set(m, a, sets[i], err))
            return NULL;
    }
    return reflect_fill_defaults(m, a, err) ? NULL : m;
}

int config_load_boostd(const char *path, const char *fallback, const char *const *sets, size_t n, struct arena *a,
                       Boost__BoostdConfig **out, struct error *err)
{
    ProtobufCMessage *m = load(&boost__boostd_config__descriptor, path, fallback, sets, n, a, err);
    if (!m)
        return err->code;
    int rc = check_ranges(m, boostd_ranges, sizeof boostd_ranges / sizeof *boostd_ranges, err);
    if (rc)
        return rc;
    Boost__BoostdConfig *c = (Boost__BoostdConfig *)m;
    enum log_level level;
    if (!rc)
        rc = below("suspect_ms", c->suspect_ms, "node_timeout_ms", c->node_timeout_ms, err);
    if (!rc)
        rc = below("heartbeat_ms", c->heartbeat_ms, "suspect_ms", c->suspect_ms, err);
    if (!rc)
        rc = below("backoff_min_ms", c->backoff_min_ms, "backoff_max_ms", c->backoff_max_ms, err);
    if (!rc)
        rc = log_level_by_name(c->log_level, &level, err);
    if (!rc && !*c->state_dir)
        rc = error_set(err, ERR_INVALID, "configuration: state_dir is empty");
    *out = c;
    return rc;
}

int config_load_agent(const char *path, const char *fallback, const char *const *sets, size_t n, struct arena *a,
                      Boost__AgentConfig **out, struct error *err)
{
    ProtobufCMessage *m = load(&boost__agent_config__descriptor, path, fallback, sets, n, a, err);
    if (!m)
        return err->code;
    int rc = check_ranges(m, agent_ranges, sizeof agent_ranges / sizeof *agent_ranges, err);
    Boost__AgentConfig *c = (Boost__AgentConfig *)m;
    enum log_level level;
    if (!rc)
        rc = below("hang_min_ms", c->hang_min_ms, "hang_max_ms", c->hang_max_ms, err);
    if (!rc)
        rc = log_level_by_name(c->log_level, &level, err);
    if (!rc && !(c->peak_tflops >= 0 && c->peak_tflops <= 1e6)) {
        rc = error_set(err, ERR_INVALID, "configuration: peak_tflops = %g is out of range", c->peak_tflops);
        error_hint(err, "choose 0 to 1000000, e.g. 989.4");
    }
    if (!rc && !*c->state_dir)
        rc = error_set(err, ERR_INVALID, "configuration: state_dir is empty");
    *out = c;
    return rc;
}
