/* json_out.h */
#include "ctl/json_out.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/format.h"
#include "proto/base/clock.h"
#include "proto/base/utf8.h"
#include "proto/json.h"

json_t *json_document(const char *schema)
{
    json_t *object = json_object();
    json_put(object, "schema", json_string(schema));
    return object;
}

void json_put(json_t *object, const char *key, json_t *value)
{
    if (value)
        json_object_set_new(object, key, value);
}

json_t *json_bytes(const void *data, size_t len)
{
    const unsigned char *s = data;
    char *clean = malloc(3 * len + 1);
    if (!clean)
        return NULL;
    size_t used = 0;
    for (size_t i = 0; i < len;) {
        size_t n = utf8_length(s + i, len - i);
        if (n) {
            memcpy(clean + used, s + i, n);
            used += n;
        } else {
            memcpy(clean + used, UTF8_REPLACEMENT, 3);
            used += 3;
        }
        i += n ? n : 1;
    }
    json_t *value = json_stringn_nocheck(clean, used);
    free(clean);
    return value;
}

json_t *json_text(const char *s)
{
    return s ? json_bytes(s, strlen(s)) : json_string("");
}

json_t *json_time(int64_t wall_ns)
{
    char text[CLOCK_TEXT];
    return json_string(clock_rfc3339(wall_ns, text));
}

json_t *json_number(double v)
{
    return isfinite(v) ? json_real(v) : NULL;
}

static json_t *text_list(char *const *items, size_t n)
{
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++)
        json_array_append_new(list, json_text(items[i]));
    return list;
}

json_t *json_summary(const Boost__JobSummary *s)
{
    json_t *o = json_object();
    json_put(o, "id", json_integer(s->id));
    json_put(o, "name", json_text(s->name));
    json_put(o, "state", json_string(state_name(s->state)));
    json_put(o, "reason", json_string(reason_name(s->reason)));
    json_put(o, "info", json_text(s->info));
    json_put(o, "user", json_text(s->user));
    json_put(o, "priority", json_integer(s->priority));
    if (s->has_step)
        json_put(o, "step", json_integer(s->step));
    json_put(o, "steps", json_integer(s->steps));
    if (s->has_attempt_step)
        json_put(o, "attempt_step", json_integer(s->attempt_step));
    if (s->has_loss)
        json_put(o, "loss", json_number(s->loss));
    if (s->has_eval_loss)
        json_put(o, "eval_loss", json_number(s->eval_loss));
    if (s->has_tokens_per_s)
        json_put(o, "tokens_per_s", json_number(s->tokens_per_s));
    if (s->has_mfu)
        json_put(o, "mfu", json_number(s->mfu));
    if (s->has_attempt)
        json_put(o, "attempt", json_integer(s->attempt));
    json_put(o, "restarts", json_integer(s->restarts));
    if (s->has_array_job) {
        json_put(o, "array_job", json_integer(s->array_job));
        json_put(o, "array_index", json_integer(s->array_index));
    }
    json_put(o, "devices", json_integer(s->devices));
    json_put(o, "nodes", text_list(s->nodes, s->n_nodes));
    if (s->has_elapsed_s)
        json_put(o, "elapsed_s", json_number(s->elapsed_s));
    if (s->has_last_checkpoint_step)
        json_put(o, "last_checkpoint_step", json_integer(s->last_checkpoint_step));
    if (s->has_submitted_wall_ns)
        json_put(o, "submitted", json_time(s->submitted_wall_ns));
    if (s->has_ended_wall_ns)
        json_put(o, "ended", json_time(s->ended_wall_ns));
    return o;
}

json_t *json_event(const Boost__Event *e)
{
    json_t *o = json_object();
    json_put(o, "id", json_integer(e->id));
    json_put(o, "time", json_time(e->wall_ns));
    if (e->has_job && e->job)
        json_put(o, "job", json_integer(e->job));
    if (e->has_attempt && e->attempt)
        json_put(o, "attempt", json_integer(e->attempt));
    if (e->node && *e->node)
        json_put(o, "node", json_text(e->node));
    json_put(o, "actor", json_text(e->actor));
    json_put(o, "kind", json_text(e->kind));
    json_put(o, "text", json_text(e->text));
    return o;
}

json_t *json_checkpoint(const Boost__CheckpointInfo *c)
{
    json_t *o = json_object();
    json_put(o, "step", json_integer(c->step));
    json_put(o, "attempt", json_integer(c->attempt));
    json_put(o, "state", json_string(enum_name(&boost__checkpoint_state__value__descriptor, (int)c->state)));
    json_put(o, "path", json_text(c->path));
    json_put(o, "shards", json_integer(c->shards));
    json_put(o, "world", json_integer(c->world));
    json_put(o, "bytes", json_integer(c->bytes));
    if (c->has_wall_ns && c->wall_ns)
        json_put(o, "time", json_time(c->wall_ns));
    if (c->note && *c->note)
        json_put(o, "note", json_text(c->note));
    if (c->has_mirror)
        json_put(o, "mirror", json_string(enum_name(&boost__mirror_state__value__descriptor, (int)c->mirror)));
    if (c->mirror_note && *c->mirror_note)
        json_put(o, "mirror_note", json_text(c->mirror_note));
    if (c->has_mirror_total) {
        json_put(o, "mirror_bytes_done", json_integer(c->mirror_done));
        json_put(o, "mirror_bytes_total", json_integer(c->mirror_total));
    }
    if (c->mirror_url)
        json_put(o, "mirror_url", json_text(c->mirror_url));
    if (c->has_mirror_retry_s)
        json_put(o, "mirror_retry_s", json_number(c->mirror_retry_s));
    if (c->pinned)
        json_put(o, "pinned", json_true());
    return o;
}

json_t *json_metric_row(const Boost__MetricRow *r)
{
    json_t *o = json_object();
    json_put(o, "attempt", json_integer(r->attempt));
    json_put(o, "step", json_integer(r->step));
    json_put(o, "time", json_time(r->wall_ns));
    for (size_t i = 0; i < r->n_values; i++)
        json_put(o, r->values[i]->name, json_number(r->values[i]->value));
    return o;
}

/* Keys are absent where there is nothing to say. */
static json_t *device_array(Boost__DeviceInfo *const *list, size_t n)
{
    json_t *array = json_array();
    for (size_t i = 0; i < n; i++) {
        const Boost__DeviceInfo *d = list[i];
        json_t *o = json_object();
        if (d->node && *d->node)
            json_put(o, "node", json_text(d->node));
        json_put(o, "index", json_integer(d->index));
        json_put(o, "name", json_text(d->name));
        json_put(o, "uuid", json_text(d->uuid));
        if (d->pci_bus_id && *d->pci_bus_id)
            json_put(o, "pci_bus_id", json_text(d->pci_bus_id));
        json_put(o, "memory_mib", json_integer(d->memory_mib));
        json_put(o, "used_mib", json_integer(d->used_mib));
        json_put(o, "healthy", json_boolean(!d->trouble || !*d->trouble));
        if (d->trouble && *d->trouble)
            json_put(o, "trouble", json_text(d->trouble));
        if (d->note && *d->note)
            json_put(o, "note", json_text(d->note));
        if (d->has_nvlink_group)
            json_put(o, "nvlink_group", json_integer(d->nvlink_group));
        if (d->has_job) {
            json_put(o, "job", json_integer(d->job));
            json_put(o, "attempt", json_integer(d->attempt));
            json_put(o, "rank", json_integer(d->rank));
        }
        json_array_append_new(array, o);
    }
    return array;
}

static json_t *pair_object(Boost__KeyValue *const *list, size_t n)
{
    json_t *o = json_object();
    for (size_t i = 0; i < n; i++)
        if (list[i]->key && *list[i]->key)
            json_put(o, list[i]->key, json_text(list[i]->value));
    return o;
}

static json_t *check_array(Boost__FailedCheck *const *list, size_t n)
{
    json_t *array = json_array();
    for (size_t i = 0; i < n; i++) {
        json_t *o = json_object();
        json_put(o, "check", json_text(list[i]->check));
        json_put(o, "text", json_text(list[i]->text));
        json_array_append_new(array, o);
    }
    return array;
}

json_t *json_node(const Boost__NodeInfo *n)
{
    json_t *o = json_object();
    json_put(o, "name", json_text(n->name));
    json_put(o, "state", json_string(enum_name(&boost__node_liveness__value__descriptor, (int)n->liveness)));
    json_put(o, "admin", json_string(enum_name(&boost__node_admin__value__descriptor, (int)n->admin)));
    json_put(o, "reason", json_text(n->reason));
    json_put(o, "device_kind", json_text(n->device_kind));
    json_put(o, "devices", json_integer(n->devices));
    json_put(o, "devices_busy", json_integer(n->devices_busy));
    if (n->has_cpu_slots)
        json_put(o, "cpu_slots", json_integer(n->cpu_slots));
    if (n->has_cpu_slots_busy)
        json_put(o, "cpu_slots_busy", json_integer(n->cpu_slots_busy));
    if (n->driver && *n->driver)
        json_put(o, "driver", json_text(n->driver));
    if (n->n_gpus)
        json_put(o, "gpus", device_array(n->gpus, n->n_gpus));
    json_put(o, "memory_mib", json_integer(n->memory_mib));
    json_t *jobs = json_array();
    for (size_t i = 0; i < n->n_jobs; i++)
        json_array_append_new(jobs, json_integer(n->jobs[i]));
    json_put(o, "jobs", jobs);
    if (n->has_last_seen_s)
        json_put(o, "last_seen_s", json_number(n->last_seen_s));
    json_put(o, "version", json_text(n->version));
    if (n->address && *n->address)
        json_put(o, "address", json_text(n->address));
    if (n->admin_by && *n->admin_by)
        json_put(o, "admin_by", json_text(n->admin_by));
    if (n->has_admin_wall_ns)
        json_put(o, "admin_since", json_time(n->admin_wall_ns));
    if (n->has_drain_in_s)
        json_put(o, "drain_in_s", json_number(n->drain_in_s));
    if (n->has_cores)
        json_put(o, "cores", json_integer(n->cores));
    if (n->switch_ && *n->switch_)
        json_put(o, "switch", json_text(n->switch_));
    if (n->n_label)
        json_put(o, "labels", pair_object(n->label, n->n_label));
    if (n->n_env)
        json_put(o, "env", pair_object(n->env, n->n_env));
    if (n->has_health_pending)
        json_put(o, "health_pending", json_boolean(n->health_pending));
    if (n->n_failed_checks)
        json_put(o, "failed_checks", check_array(n->failed_checks, n->n_failed_checks));
    return o;
}

static json_t *attempt_object(const Boost__AttemptInfo *a)
{
    json_t *o = json_object();
    json_put(o, "attempt", json_integer(a->attempt));
    json_put(o, "from_step", json_integer(a->from_step));
    if (a->has_to_step)
        json_put(o, "to_step", json_integer(a->to_step));
    json_put(o, "nodes", text_list(a->nodes, a->n_nodes));
    if (a->has_devices)
        json_put(o, "devices", json_integer(a->devices));
    if (a->has_dp)
        json_put(o, "dp", json_integer(a->dp));
    if (a->n_spares)
        json_put(o, "spares", text_list(a->spares, a->n_spares));
    if (a->has_start_wall_ns && a->start_wall_ns)
        json_put(o, "start", json_time(a->start_wall_ns));
    if (a->has_end_wall_ns && a->end_wall_ns)
        json_put(o, "end", json_time(a->end_wall_ns));
    json_put(o, "reason", json_string(reason_name(a->reason)));
    json_put(o, "text", json_text(a->text));
    return o;
}

static json_t *straggler_object(const Boost__StragglerInfo *x)
{
    json_t *o = json_object();
    json_put(o, "rank", json_integer(x->rank));
    json_put(o, "node", json_text(x->node));
    json_put(o, "outside_ms", json_number(x->outside_ms));
    json_put(o, "fastest_ms", json_number(x->fastest_ms));
    json_put(o, "fastest_rank", json_integer(x->fastest_rank));
    json_put(o, "best_ms", json_number(x->best_ms));
    json_put(o, "factor", json_number(x->factor));
    json_put(o, "against", json_string(x->itself ? "ITSELF" : "FASTEST"));
    return o;
}

json_t *json_show(const Boost__ShowReply *r)
{
    json_t *o = json_document("boost.show/1");
    json_put(o, "job", json_summary(r->summary));
    json_put(o, "reason_text", json_text(r->reason_text));
    json_put(o, "restarts_used", json_integer(r->restarts_used));
    if (r->has_checkpoint_every_s) {
        json_put(o, "checkpoint_every_s", json_number(r->checkpoint_every_s));
        json_put(o, "checkpoint_cost_s", json_number(r->checkpoint_cost_s));
        json_put(o, "mean_failure_s", json_number(r->mean_failure_s));
    }
    json_t *list = json_array();
    for (size_t i = 0; i < r->n_attempts; i++)
        json_array_append_new(list, attempt_object(r->attempts[i]));
    json_put(o, "attempts", list);
    if (r->n_devices)
        json_put(o, "devices", device_array(r->devices, r->n_devices));
    list = json_array();
    for (size_t i = 0; i < r->n_stragglers; i++)
        json_array_append_new(list, straggler_object(r->stragglers[i]));
    json_put(o, "stragglers", list);
    list = json_array();
    for (size_t i = 0; i < r->n_checkpoints; i++)
        json_array_append_new(list, json_checkpoint(r->checkpoints[i]));
    json_put(o, "checkpoints", list);
    list = json_array();
    for (size_t i = 0; i < r->n_waits; i++) {
        json_t *wait = json_object();
        json_put(wait, "name", json_text(r->waits[i]->name));
        json_put(wait, "elapsed_s", json_number(r->waits[i]->elapsed_s));
        if (r->waits[i]->has_limit_s)
            json_put(wait, "limit_s", json_number(r->waits[i]->limit_s));
        if (r->waits[i]->has_bytes_done)
            json_put(wait, "bytes_done", json_integer(r->waits[i]->bytes_done));
        if (r->waits[i]->has_bytes_total)
            json_put(wait, "bytes_total", json_integer(r->waits[i]->bytes_total));
        json_array_append_new(list, wait);
    }
    json_put(o, "waits", list);
    if (r->goodput) {
        json_t *g = json_object();
        json_put(g, "productive_s", json_number(r->goodput->productive_s));
        json_put(g, "detection_s", json_number(r->goodput->detection_s));
        json_put(g, "restart_s", json_number(r->goodput->restart_s));
        json_put(g, "replay_s", json_number(r->goodput->replay_s));
        json_put(g, "queue_s", json_number(r->goodput->queue_s));
        json_put(g, "stall_s", json_number(r->goodput->stall_s));
        json_put(g, "device_s", json_number(r->goodput->device_s));
        json_put(o, "goodput", g);
    }
    list = json_array();
    for (size_t i = 0; i < r->n_events; i++)
        json_array_append_new(list, json_event(r->events[i]));
    json_put(o, "events", list);
    if (r->spec)
        json_put(o, "spec", json_tree(&r->spec->base));
    if (r->resolved)
        json_put(o, "resolved", json_tree(&r->resolved->base));
    return o;
}

void json_emit(json_t *value, bool one_line)
{
    json_dumpf(value, stdout, (one_line ? JSON_COMPACT : JSON_INDENT(2)) | JSON_REAL_PRECISION(17));
    putchar('\n');
    json_decref(value);
}
