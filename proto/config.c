/* config.h */
#include "proto/config.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "proto/address.h"
#include "proto/base/fs.h"
#include "proto/reflect.h"
#include "proto/text.h"
#include "proto/validate.h"

enum { LABELS_MAX = 64, ENV_MAX = 256 };

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
    {"fetch_tries", 0, 1000000},
    {"rendezvous_timeout_ms", 100, 3600000},
    {"kill_confirm_ms", 100, 3600000},
    {"backup_every_s", 1, 86400},
    {"fair_share_half_life_s", 0, 31536000},
    {"preempt_gap", 1, 100},
    {"user_running_jobs", 0, 1000000},
    {"user_devices", 0, 1000000},
    {"user_queued_jobs", 0, 100000000},
};
static const struct range agent_ranges[] = {
    {"cpu_slots", 0, 65536},
    {"hang_min_ms", 100, 86400000},
    {"hang_max_ms", 100, 86400000},
    {"log_keep_bytes", 0, INT64_MAX},
    {"ranks_per_gpu", 1, 64},
    {"health_interval_ms", 0, 86400000},
    {"memory_floor_mib", 0, 1 << 30},
    {"gpu_unknown_mib", 0, 1 << 30},
    {"health_timeout_ms", 100, 3600000},
    {"prolog_timeout_ms", 100, 86400000},
    {"epilog_timeout_ms", 100, 86400000},
    {"s3_stall_ms", 100, 3600000},
    {"s3_part_kib", 16, 4 << 20},
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

static int check_log_level(const char *level, struct error *err)
{
    static const char *const levels[] = {"debug", "info", "warn", "error"};
    for (size_t i = 0; i < sizeof levels / sizeof *levels; i++)
        if (strcmp(level, levels[i]) == 0)
            return ERR_OK;
    error_set(err, ERR_INVALID, "configuration: log_level = \"%s\" is unknown", level);
    return error_hint(err, "use debug, info, warn or error");
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

static int check_user_limits(const Boost__BoostdConfig *c, struct error *err)
{
    for (size_t i = 0; i < c->n_user_limit; i++) {
        const Boost__UserLimit *x = c->user_limit[i];
        const char *user = x->user ? x->user : "";
        if (*user && x->running_jobs >= 0 && x->devices >= 0 && x->queued_jobs >= 0)
            continue;
        error_set(err, ERR_INVALID, "configuration: user_limit[%zu] %s", i,
                  *user ? "has a limit below 0" : "names no user");
        return error_hint(err, "write user_limit { user: \"ann\" devices: 16 }; 0 is no limit");
    }
    return ERR_OK;
}

/* Told here and not when they are used, which may be after the certificates have been read. */
static int check_addresses(char *const *list, size_t n, bool listen, const char *field, struct error *err)
{
    struct address ignored;
    int rc = ERR_OK;
    for (size_t i = 0; !rc && i < n; i++)
        rc = address_parse(list[i], listen, field, &ignored, err);
    return rc;
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
    if (!rc)
        rc = below("suspect_ms", c->suspect_ms, "node_timeout_ms", c->node_timeout_ms, err);
    if (!rc)
        rc = below("heartbeat_ms", c->heartbeat_ms, "suspect_ms", c->suspect_ms, err);
    if (!rc)
        rc = below("backoff_min_ms", c->backoff_min_ms, "backoff_max_ms", c->backoff_max_ms, err);
    if (!rc)
        rc = check_log_level(c->log_level, err);
    if (!rc)
        rc = check_user_limits(c, err);
    if (!rc)
        rc = check_addresses(c->listen, c->n_listen, true, "configuration: listen", err);
    if (!rc && !*c->state_dir)
        rc = error_set(err, ERR_INVALID, "configuration: state_dir is empty");
    *out = c;
    return rc;
}

/* ---- what a node is ---- */

static int check_labels(const Boost__AgentConfig *c, struct error *err)
{
    if (c->n_label > LABELS_MAX) {
        error_set(err, ERR_INVALID, "configuration: %zu labels", c->n_label);
        return error_hint(err, "a node has at most %d", (int)LABELS_MAX);
    }
    for (size_t i = 0; i < c->n_label; i++) {
        const char *key = c->label[i]->key, *value = c->label[i]->value;
        if (!key || !validate_name(key) || (value && *value && !validate_name(value))) {
            error_set(err, ERR_INVALID,
                      "configuration: label \"%s\": \"%s\" is not of [A-Za-z0-9._-], at most 64 bytes", key ? key : "",
                      value ? value : "");
            return error_hint(err, "write label { key: \"rack\" value: \"r1\" }");
        }
        for (size_t k = 0; k < i; k++)
            if (strcmp(c->label[k]->key, key) == 0) {
                error_set(err, ERR_INVALID, "configuration: label \"%s\" stands there twice", key);
                return error_hint(err, "leave one of them");
            }
    }
    if (*c->switch_ && !validate_name(c->switch_)) {
        error_set(err, ERR_INVALID, "configuration: switch \"%s\" is not of [A-Za-z0-9._-], at most 64 bytes",
                  c->switch_);
        return error_hint(err, "name it as its neighbours' agents do, e.g. \"leaf1\"");
    }
    return ERR_OK;
}

/* What the agent sets itself cannot be set for it. */
static int check_env(const Boost__AgentConfig *c, struct error *err)
{
    static const char *const ours[] = {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"};
    if (c->n_env > ENV_MAX) {
        error_set(err, ERR_INVALID, "configuration: %zu environment variables", c->n_env);
        return error_hint(err, "a node has at most %d", (int)ENV_MAX);
    }
    for (size_t i = 0; i < c->n_env; i++) {
        const char *key = c->env[i]->key ? c->env[i]->key : "";
        bool taken = strncmp(key, "BOOST_", 6) == 0;
        for (size_t k = 0; k < sizeof ours / sizeof *ours; k++)
            taken = taken || strcmp(key, ours[k]) == 0;
        if (taken) {
            error_set(err, ERR_INVALID, "configuration: env \"%s\" is set by the agent itself", key);
            return error_hint(err, "leave it out");
        }
        if (!*key || strchr(key, '=')) {
            error_set(err, ERR_INVALID, "configuration: env \"%s\" is no name of a variable", key);
            return error_hint(err, "write env { key: \"NCCL_SOCKET_IFNAME\" value: \"eth0\" }");
        }
    }
    return ERR_OK;
}

static int check_scripts(const Boost__AgentConfig *c, struct error *err)
{
    const struct {
        const char *field, *path;
    } scripts[] = {{"health_script", c->health_script}, {"prolog", c->prolog}, {"epilog", c->epilog}};
    for (size_t i = 0; i < sizeof scripts / sizeof *scripts; i++) {
        const char *path = scripts[i].path;
        if (!*path)
            continue;
        if (*path != '/') {
            error_set(err, ERR_INVALID, "configuration: %s = \"%s\" is no absolute path", scripts[i].field, path);
            return error_hint(err, "write the whole path, e.g. /etc/boost/%s.sh", scripts[i].field);
        }
        if (access(path, X_OK) < 0) {
            error_errno(err, errno, "configuration: %s = %s cannot be run", scripts[i].field, path);
            err->code = ERR_INVALID;
            return error_hint(err, "make it an executable file that the agent's user may run");
        }
    }
    return ERR_OK;
}

/* The agent's own working directory is no place that anybody would look for it. */
static int check_s3(const Boost__AgentConfig *c, struct error *err)
{
    const char *e = c->s3_endpoint, *file = c->s3_credentials;
    if (*e && strncmp(e, "https://", 8) != 0 && strncmp(e, "http://", 7) != 0) {
        error_set(err, ERR_INVALID, "configuration: s3_endpoint = \"%s\" is no address", e);
        return error_hint(err, "write https://host or https://host:port");
    }
    if (*file && *file != '/' && strncmp(file, "~/", 2) != 0) {
        error_set(err, ERR_INVALID, "configuration: s3_credentials = \"%s\" is no absolute path", file);
        return error_hint(err, "begin it with / or with ~/ for the home of each job's user");
    }
    return ERR_OK;
}

int config_load_agent(const char *path, const char *fallback, const char *const *sets, size_t n, struct arena *a,
                      Boost__AgentConfig **out, struct error *err)
{
    ProtobufCMessage *m = load(&boost__agent_config__descriptor, path, fallback, sets, n, a, err);
    if (!m)
        return err->code;
    int rc = check_ranges(m, agent_ranges, sizeof agent_ranges / sizeof *agent_ranges, err);
    Boost__AgentConfig *c = (Boost__AgentConfig *)m;
    if (!rc)
        rc = below("hang_min_ms", c->hang_min_ms, "hang_max_ms", c->hang_max_ms, err);
    if (!rc)
        rc = check_log_level(c->log_level, err);
    if (!rc && c->health_interval_ms > 0 && c->health_interval_ms < 100) {
        error_set(err, ERR_INVALID, "configuration: health_interval_ms = %d is out of range", c->health_interval_ms);
        rc = error_hint(err, "choose 100 to 86400000, or 0 for checks at the agent's start and before attempts only");
    }
    if (!rc && !(c->peak_tflops >= 0 && c->peak_tflops <= 1e6)) {
        rc = error_set(err, ERR_INVALID, "configuration: peak_tflops = %g is out of range", c->peak_tflops);
        error_hint(err, "choose 0 to 1000000, e.g. 989.4");
    }
    if (!rc)
        rc = check_labels(c, err);
    if (!rc)
        rc = check_env(c, err);
    if (!rc)
        rc = check_scripts(c, err);
    if (!rc)
        rc = check_s3(c, err);
    if (!rc)
        rc = check_addresses(c->controller_address, c->n_controller_address, false, "configuration: controller_address",
                             err);
    if (!rc && !*c->state_dir)
        rc = error_set(err, ERR_INVALID, "configuration: state_dir is empty");
    *out = c;
    return rc;
}
