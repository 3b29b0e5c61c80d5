/* What people see of nodes: the list with their GPUs, and totals. Nothing here changes anything. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "daemon/core_internal.h"
#include "proto/reflect.h"

static double seconds(int64_t ns)
{
    return (double)ns / (double)NS_PER_S;
}

static Boost__DeviceInfo *device_info(const Boost__DeviceInfo *d, const char *node, struct arena *mem)
{
    Boost__DeviceInfo *x = arena_alloc(mem, sizeof *x);
    if (!x)
        return NULL;
    *x = *d;
    x->base.n_unknown_fields = 0;
    x->base.unknown_fields = NULL;
    /* The core's copy may go before the answer has. */
    x->uuid = arena_strdup(mem, d->uuid ? d->uuid : "");
    x->name = arena_strdup(mem, d->name ? d->name : "");
    x->pci_bus_id = arena_strdup(mem, d->pci_bus_id ? d->pci_bus_id : "");
    x->trouble = arena_strdup(mem, d->trouble ? d->trouble : "");
    x->note = arena_strdup(mem, d->note ? d->note : "");
    x->node = node ? arena_strdup(mem, node) : NULL;
    return x->uuid && x->name && x->pci_bus_id && x->trouble && x->note ? x : NULL;
}

bool show_devices(const struct node *n, const struct job *job, struct arena *mem, Boost__DeviceInfo ***list,
                  size_t *count)
{
    size_t add = n->devices ? n->devices->n_devices : 0;
    Boost__DeviceInfo **all = arena_alloc(mem, (*count + add + 1) * sizeof *all);
    if (!all)
        return false;
    if (*count)
        memcpy(all, *list, *count * sizeof *all);
    *list = all;
    for (size_t i = 0; i < add; i++) {
        const Boost__DeviceInfo *d = n->devices->devices[i];
        if (job && (d->job != job->id || d->attempt != job->n_attempts))
            continue;
        all[*count] = device_info(d, job ? n->name : NULL, mem);
        if (!all[(*count)++])
            return false;
    }
    return true;
}

/* "gpu 3: Xid 79 (...); gpu 4: ..." behind what is there already. */
static char *with_trouble(const struct node *n, char *reason, struct arena *mem)
{
    int last = -1;
    for (size_t i = 0; reason && n->devices && i < n->devices->n_devices; i++) {
        const Boost__DeviceInfo *d = n->devices->devices[i];
        if (d->trouble && *d->trouble && d->index != last)
            reason = arena_printf(mem, "%s%sgpu %d: %s", reason, *reason ? "; " : "", d->index, d->trouble);
        last = d->index;
    }
    return reason;
}

/* What keeps devices taken without a process. */
static char *with_epilogs(const struct node *n, char *reason, struct arena *mem)
{
    for (int i = 0; reason && i < n->n_holdings; i++)
        if (n->holdings[i].epilog)
            reason = arena_printf(mem, "%s%sthe epilog of %" PRId64 ".%d runs", reason, *reason ? "; " : "",
                                  n->holdings[i].job, n->holdings[i].attempt);
    return reason;
}

/* Copies of n messages: the core's own may go before the answer has. */
static bool copy_list(const void *list, size_t n, struct arena *mem, void *out)
{
    ProtobufCMessage *const *from = list;
    ProtobufCMessage **to = arena_alloc(mem, (n + 1) * sizeof *to);
    for (size_t i = 0; to && i < n; i++)
        if (!(to[i] = reflect_copy(mem, from[i])))
            return false;
    memcpy(out, &to, sizeof to);
    return to != NULL;
}

/* What the node has told of itself, and who has set it aside. */
static bool add_told(const struct node *n, Boost__NodeInfo *x, struct arena *mem)
{
    bool ok = true;
    if (n->told) {
        x->n_label = n->told->n_label;
        x->n_env = n->told->n_env;
        x->switch_ = *node_switch(n) ? arena_strdup(mem, node_switch(n)) : NULL;
        ok = copy_list(n->told->label, x->n_label, mem, &x->label) && copy_list(n->told->env, x->n_env, mem, &x->env);
    }
    if (n->health) {
        x->n_failed_checks = n->health->n_failed;
        x->has_health_pending = n->health->pending;
        x->health_pending = n->health->pending;
        ok = ok && copy_list(n->health->failed, x->n_failed_checks, mem, &x->failed_checks);
    }
    if (n->admin != ADMIN(NONE)) {
        x->admin_by = n->admin_by && *n->admin_by ? arena_strdup(mem, n->admin_by) : NULL;
        x->has_admin_wall_ns = n->admin_ns > 0;
        x->admin_wall_ns = n->admin_ns;
    }
    x->has_cores = n->cores > 0;
    x->cores = n->cores;
    return ok;
}

static Boost__NodeInfo *node_info(struct core *c, const struct node *n, struct arena *mem)
{
    Boost__NodeInfo *x = arena_alloc(mem, sizeof *x);
    if (!x)
        return NULL;
    boost__node_info__init(x);
    x->has_liveness = x->has_admin = x->has_devices = x->has_devices_busy = x->has_memory_mib = true;
    x->name = arena_strdup(mem, n->name);
    x->liveness = n->liveness;
    x->admin = n->admin;
    x->reason = arena_strdup(mem, n->admin_reason ? n->admin_reason : "");
    x->has_drain_in_s = n->drain_due != 0;
    x->drain_in_s = n->drain_due ? seconds(n->drain_due - now_mono(c)) : 0;
    x->has_cpu_slots = x->has_cpu_slots_busy = true;
    x->cpu_slots = n->cpu_slots;
    x->cpu_slots_busy = node_busy(n, SCHED_CPU);
    x->devices = n->gpus ? n->gpus : n->cpu_slots;
    x->devices_busy = node_busy(n, n->gpus ? SCHED_GPU : SCHED_CPU);
    x->device_kind = arena_strdup(mem, n->gpus && n->gpu_name && *n->gpu_name ? n->gpu_name : n->gpus ? "gpu" : "cpu");
    x->driver = n->devices && n->devices->driver ? arena_strdup(mem, n->devices->driver) : NULL;
    if (!show_devices(n, NULL, mem, &x->gpus, &x->n_gpus))
        return NULL;
    x->memory_mib = n->memory_mib;
    if (!add_told(n, x, mem))
        return NULL;
    x->has_last_seen_s = n->registered;
    x->last_seen_s = seconds(now_mono(c) - n->last_seen);
    x->version = arena_strdup(mem, n->version ? n->version : "");
    x->address = arena_strdup(mem, n->data_address ? n->data_address : "");
    x->jobs = arena_alloc(mem, (size_t)(n->n_holdings + 1) * sizeof *x->jobs);
    for (int i = 0; x->jobs && i < n->n_holdings; i++)
        if (n->holdings[i].job > 0)
            x->jobs[x->n_jobs++] = n->holdings[i].job;
        else if (x->reason && !*x->reason) /* of another store: see rebuild_holdings() */
            x->reason = arena_printf(mem, "job %" PRId64 " of another controller has %d device%s until it ends",
                                     -n->holdings[i].job, n->holdings[i].slots, n->holdings[i].slots == 1 ? "" : "s");
    x->reason = with_epilogs(n, with_trouble(n, x->reason, mem), mem);
    return x->name && x->reason && x->device_kind && x->version && x->address && x->jobs ? x : NULL;
}

Boost__NodesReply *core_nodes(struct core *c, struct arena *arena)
{
    Boost__NodesReply *r = arena_alloc(arena, sizeof *r);
    size_t n = 0;
    for (struct node *x = c->nodes; x; x = x->next)
        n++;
    if (!r)
        return NULL;
    boost__nodes_reply__init(r);
    r->nodes = arena_alloc(arena, (n + 1) * sizeof *r->nodes);
    if (!r->nodes)
        return NULL;
    for (struct node *x = c->nodes; x; x = x->next) {
        r->nodes[r->n_nodes] = node_info(c, x, arena);
        if (!r->nodes[r->n_nodes++])
            return NULL;
    }
    return r;
}

Boost__Totals *core_totals(struct core *c, struct arena *arena)
{
    Boost__Totals *t = arena_alloc(arena, sizeof *t);
    if (!t)
        return NULL;
    boost__totals__init(t);
    t->has_running = t->has_recovering = t->has_queued = t->has_held = t->has_nodes_up = t->has_nodes_down = true;
    t->has_nodes_cordoned = t->has_nodes_draining = t->has_devices = t->has_devices_busy = true;
    t->has_cpu_slots = t->has_cpu_slots_busy = true;
    t->running = c->n_state[STATE(RUNNING)] + c->n_state[STATE(STARTING)] + c->n_state[STATE(STOPPING)];
    t->recovering = c->n_state[STATE(RECOVERING)];
    t->queued = c->n_state[STATE(QUEUED)];
    t->held = c->n_state[STATE(HELD)];
    for (struct node *n = c->nodes; n; n = n->next) {
        bool up = n->liveness == LIVENESS(UP) || n->liveness == LIVENESS(SUSPECT);
        t->nodes_up += up;
        t->nodes_down += n->liveness == LIVENESS(DOWN);
        t->nodes_cordoned += n->admin == ADMIN(CORDONED);
        t->nodes_draining += n->admin == ADMIN(DRAINING) || n->admin == ADMIN(DRAINED);
        if (!up)
            continue;
        t->devices += n->gpus ? n->gpus : n->cpu_slots;
        t->devices_busy += node_busy(n, n->gpus ? SCHED_GPU : SCHED_CPU);
        t->cpu_slots += n->gpus ? n->cpu_slots : 0;
        t->cpu_slots_busy += n->gpus ? node_busy(n, SCHED_CPU) : 0;
    }
    return t;
}
