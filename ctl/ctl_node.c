/* boostctl node: the nodes in a table, or one in detail; out of use and back. */
#include "ctl/ctl_node.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/format.h"
#include "ctl/json_out.h"
#include "ctl/options.h"
#include "proto/base/buffer.h"
#include "proto/base/clock.h"

enum { PAIRS_MAX = 64 << 10, NODES_ARENA = 1 << 30 };

/* One line a GPU. */
void device_table(const struct ctl *ctl, Boost__DeviceInfo *const *list, size_t n, int indent)
{
    static const char *const headers[] = {"NODE", "GPU", "NAME", "NVLINK", "MEMORY",
                                          "USED", "JOB", "RANK", "HEALTH", "UUID"};
    struct table *t = table_new(10, headers, "lrlrrrrrll");
    for (size_t i = 0; i < n; i++) {
        const Boost__DeviceInfo *d = list[i];
        char memory[FORMAT_TEXT], used[FORMAT_TEXT];
        bool works = !d->trouble || !*d->trouble;
        table_cell(t, "%s", d->node ? d->node : "");
        table_cell(t, "%d", d->index);
        table_cell(t, "%s", d->name ? d->name : "");
        if (d->has_nvlink_group) /* those with the same number are joined */
            table_cell(t, "%d", d->nvlink_group);
        else
            table_cell(t, "-");
        table_cell(t, "%s", format_bytes(d->memory_mib << 20, memory));
        table_cell(t, "%s", format_bytes(d->used_mib << 20, used));
        if (d->has_job) {
            table_cell(t, "%lld.%d", (long long)d->job, d->attempt);
            table_cell(t, "%d", d->rank);
        } else {
            table_cell(t, "-");
            table_cell(t, "-");
        }
        table_cell(t, "%s%s%s", works ? "ok" : d->trouble, d->note && *d->note ? "; " : "", d->note ? d->note : "");
        table_color(t, works ? "\033[32m" : "\033[31m");
        table_cell(t, "%s", d->uuid ? d->uuid : "");
    }
    table_print(t, stdout, ctl->color, indent);
    table_free(t);
}

/* "rack=r1,fast" */
static char *pairs(struct arena *arena, Boost__KeyValue *const *list, size_t n)
{
    struct buffer b;
    buffer_init(&b, PAIRS_MAX);
    for (size_t i = 0; i < n; i++)
        buffer_printf(&b, "%s%s%s%s", i ? "," : "", list[i]->key ? list[i]->key : "",
                      list[i]->value && *list[i]->value ? "=" : "", list[i]->value ? list[i]->value : "");
    char *text = arena_strdup(arena, b.len ? (const char *)b.data : "");
    buffer_free(&b);
    return text;
}

static void node_jobs(const Boost__NodeInfo *n, char *out, size_t cap)
{
    snprintf(out, cap, "-");
    for (size_t j = 0, used = 0; j < n->n_jobs && used < cap - 1; j++)
        used += (size_t)snprintf(out + used, cap - used, "%s%lld", j ? "," : "", (long long)n->jobs[j]);
}

/* Under -o wide with switch and labels. */
static void node_table(const struct ctl *ctl, const Boost__NodesReply *r, struct arena *arena)
{
    static const char *const headers[] = {"NODE",   "STATE", "ADMIN", "DEVICES", "KIND",
                                          "MEMORY", "SEEN",  "JOBS",  "INFO"};
    static const char *const wide_headers[] = {"NODE", "STATE", "ADMIN",  "DEVICES", "KIND", "MEMORY",
                                               "SEEN", "JOBS",  "SWITCH", "LABELS",  "INFO"};
    bool wide = ctl->output == OUTPUT_WIDE;
    struct table *t = wide ? table_new(11, wide_headers, "lllrlrrllll") : table_new(9, headers, "lllrlrrll");
    for (size_t i = 0; i < r->n_nodes; i++) {
        const Boost__NodeInfo *n = r->nodes[i];
        char memory[FORMAT_TEXT], seen[FORMAT_TEXT], jobs[256];
        node_jobs(n, jobs, sizeof jobs);
        const char *admin = enum_name(&boost__node_admin__value__descriptor, (int)n->admin);
        table_cell(t, "%s", n->name ? n->name : "");
        table_cell(t, "%s", enum_name(&boost__node_liveness__value__descriptor, (int)n->liveness));
        table_color(t, n->liveness == BOOST__NODE_LIVENESS__VALUE__UP ? "\033[32m" : "\033[31m");
        table_cell(t, "%s", n->admin ? admin : "-");
        table_cell(t, "%d/%d busy", n->devices_busy, n->devices);
        table_cell(t, "%s", n->device_kind ? n->device_kind : "");
        table_cell(t, "%s", format_bytes(n->memory_mib << 20, memory));
        table_cell(t, "%s", n->has_last_seen_s ? format_duration(n->last_seen_s, seen) : "-");
        table_cell(t, "%s", jobs);
        if (wide) {
            const char *labels = pairs(arena, n->label, n->n_label);
            table_cell(t, "%s", n->switch_ && *n->switch_ ? n->switch_ : "-");
            table_cell(t, "%s", labels && *labels ? labels : "-");
        }
        table_cell(t, "%s", n->reason ? n->reason : "");
    }
    table_print(t, stdout, ctl->color, 0);
    table_free(t);
}

/* Under -o wide, GPU by GPU. */
static void node_gpus(const struct ctl *ctl, const Boost__NodesReply *r)
{
    size_t n = 0;
    for (size_t i = 0; i < r->n_nodes; i++)
        n += r->nodes[i]->n_gpus;
    Boost__DeviceInfo **all = n ? malloc(n * sizeof *all) : NULL;
    if (!all)
        return;
    n = 0;
    for (size_t i = 0; i < r->n_nodes; i++)
        for (size_t k = 0; k < r->nodes[i]->n_gpus; k++) {
            all[n] = r->nodes[i]->gpus[k];
            all[n++]->node = r->nodes[i]->name;
        }
    putchar('\n');
    device_table(ctl, all, n, 0);
    free(all);
}

/* ---- one node ---- */

static void show_state(const Boost__NodeInfo *n)
{
    char text[512], ago[FORMAT_TEXT], when[CLOCK_TEXT];
    int used = snprintf(text, sizeof text, "%s", enum_name(&boost__node_liveness__value__descriptor, (int)n->liveness));
    if (n->has_last_seen_s)
        snprintf(text + used, sizeof text - (size_t)used, ", heard of %s ago", format_duration(n->last_seen_s, ago));
    print_line("state", text);
    if (n->admin) {
        used = snprintf(text, sizeof text, "%s", enum_name(&boost__node_admin__value__descriptor, (int)n->admin));
        if (n->admin_by && *n->admin_by)
            used += snprintf(text + used, sizeof text - (size_t)used, " by %.200s", n->admin_by);
        if (n->has_admin_wall_ns)
            snprintf(text + used, sizeof text - (size_t)used, " since %s", clock_rfc3339(n->admin_wall_ns, when));
        print_line("admin", text);
    }
    print_line("reason", n->reason);
    if (n->has_drain_in_s) {
        snprintf(text, sizeof text, "in %s its jobs checkpoint and are queued again",
                 format_duration(n->drain_in_s > 0 ? n->drain_in_s : 0, ago));
        print_line("deadline", text);
    }
}

static void show_health(const Boost__NodeInfo *n)
{
    char text[512];
    if (n->health_pending)
        print_line("health", "its check has not ended");
    for (size_t i = 0; i < n->n_failed_checks; i++) {
        const Boost__FailedCheck *f = n->failed_checks[i];
        snprintf(text, sizeof text, "%s failed: %s", f->check ? f->check : "?", f->text ? f->text : "");
        print_line("health", text);
    }
}

static void show_node(const struct ctl *ctl, const Boost__NodesReply *r, struct arena *arena)
{
    const Boost__NodeInfo *n = r->nodes[0];
    char text[512], memory[FORMAT_TEXT], jobs[400];
    printf("%snode ", ctl->color ? "\033[1m" : "");
    print_safe(stdout, n->name ? n->name : "");
    puts(ctl->color ? "\033[0m" : "");
    show_state(n);
    show_health(n);
    snprintf(text, sizeof text, "%d of %d busy (%s)", n->devices_busy, n->devices,
             n->device_kind ? n->device_kind : "?");
    print_line("devices", text);
    if (n->n_gpus && n->has_cpu_slots) {
        snprintf(text, sizeof text, "%d of %d busy", n->cpu_slots_busy, n->cpu_slots);
        print_line("CPU slots", text);
    }
    snprintf(text, sizeof text, "%d", n->cores);
    print_line("cores", n->has_cores ? text : "");
    print_line("memory", format_bytes(n->memory_mib << 20, memory));
    node_jobs(n, jobs, sizeof jobs);
    print_line("jobs", jobs);
    print_line("switch", n->switch_);
    print_line("labels", pairs(arena, n->label, n->n_label));
    for (size_t i = 0; i < n->n_env; i++) {
        snprintf(text, sizeof text, "%s=%s", n->env[i]->key ? n->env[i]->key : "",
                 n->env[i]->value ? n->env[i]->value : "");
        print_line("environment", text);
    }
    print_line("address", n->address);
    print_line("agent", n->version);
    print_line("driver", n->driver);
    if (n->n_gpus)
        node_gpus(ctl, r);
}

/* ---- the command ---- */

static void print_nodes(const struct ctl *ctl, const Boost__NodesReply *r, bool one, struct arena *arena)
{
    if (ctl->output == OUTPUT_JSON || ctl->output == OUTPUT_JSONL) {
        json_t *document = json_document(one ? "boost.node/1" : "boost.nodes/1");
        json_t *list = json_array();
        for (size_t i = 0; !one && i < r->n_nodes; i++)
            json_array_append_new(list, json_node(r->nodes[i]));
        json_put(document, one ? "node" : "nodes", one ? json_node(r->nodes[0]) : json_incref(list));
        json_decref(list);
        json_emit(document, ctl->output == OUTPUT_JSONL);
    } else if (ctl->output == OUTPUT_NAME) {
        for (size_t i = 0; i < r->n_nodes; i++)
            printf("%s\n", r->nodes[i]->name);
    } else if (one) {
        show_node(ctl, r, arena);
    } else {
        node_table(ctl, r, arena);
        if (ctl->output == OUTPUT_WIDE)
            node_gpus(ctl, r);
    }
}

/* Asks for all nodes, or for one (name not NULL). */
static int list_nodes(struct ctl *ctl, char *name)
{
    struct arena arena;
    arena_init(&arena, NODES_ARENA); /* all pages, since a table is as wide as its widest row */
    Boost__NodesRequest body = BOOST__NODES_REQUEST__INIT;
    Boost__Request request = BOOST__REQUEST__INIT;
    request.body_case = BOOST__REQUEST__BODY_NODES;
    request.nodes = &body;
    body.node = name;
    int code;
    Boost__NodesReply all = BOOST__NODES_REPLY__INIT;
    Boost__Reply *reply = ctl_ask(ctl, &request, BOOST__REPLY__BODY_NODES, &arena, &code);
    struct error err;
    while (reply) {
        Boost__NodeInfo **list = realloc(all.nodes, (all.n_nodes + reply->nodes->n_nodes + 1) * sizeof *list);
        if (!list)
            abort();
        all.nodes = list;
        for (size_t i = 0; i < reply->nodes->n_nodes; i++)
            list[all.n_nodes++] = reply->nodes->nodes[i];
        if (!reply->more)
            break;
        reply = ctl_more(ctl, &arena, &err);
        if (reply && reply->body_case != BOOST__REPLY__BODY_NODES) {
            error_set(&err, ERR_PROTOCOL, "boostd answered with something else");
            reply = NULL;
        }
        if (!reply)
            code = ctl_fail(&err);
    }
    if (reply && name && all.n_nodes != 1) {
        error_set(&err, ERR_NOT_FOUND, "there is no node %s", name);
        error_hint(&err, "boostctl node ls names them all");
        code = ctl_fail(&err);
    } else if (reply) {
        print_nodes(ctl, &all, name != NULL, &arena);
    }
    free(all.nodes);
    arena_free(&arena);
    return code;
}

static int node_control(struct ctl *ctl, Boost__NodeControlRequest__Verb verb, char *name, const char *reason,
                        const char *deadline)
{
    struct arena arena;
    int code;
    Boost__NodeControlRequest body = BOOST__NODE_CONTROL_REQUEST__INIT;
    Boost__Request request = BOOST__REQUEST__INIT;
    if (deadline && !parse_duration(deadline, &body.deadline_s))
        return ctl_usage("node", "--deadline takes 90s, 10m, 2h, 1d, not '%s'", deadline);
    ctl_arena(&arena);
    body.has_verb = true;
    body.verb = verb;
    body.node = name;
    body.reason = reason ? arena_strdup(&arena, reason) : NULL;
    body.has_deadline_s = deadline != NULL;
    request.body_case = BOOST__REQUEST__BODY_NODE_CONTROL;
    request.node_control = &body;
    Boost__Reply *reply = ctl_ask(ctl, &request, BOOST__REPLY__BODY_NODE_CONTROL, &arena, &code);
    if (reply && (ctl->output == OUTPUT_JSON || ctl->output == OUTPUT_JSONL)) {
        json_t *o = json_document("boost.node_control/1");
        json_put(o, "node", json_text(name));
        json_put(o, "text", json_text(reply->node_control->text));
        json_emit(o, ctl->output == OUTPUT_JSONL);
    } else if (reply && ctl->output == OUTPUT_NAME) {
        printf("%s\n", name);
    } else if (reply && !ctl->quiet) {
        printf("node %s: %s\n", name, reply->node_control->text ? reply->node_control->text : "");
    }
    arena_free(&arena);
    return code;
}

static void help(const struct option_row *rows)
{
    printf("usage: boostctl node ls                  all nodes (-o wide: switch, labels, GPU by GPU)\n"
           "       boostctl node show NODE           health, labels, environment, GPUs of one\n"
           "       boostctl node cordon NODE --reason TEXT     it takes no new work; jobs there go on\n"
           "       boostctl node drain NODE --reason TEXT [--deadline 10m]\n"
           "                                         likewise, until nothing runs there; at the deadline its jobs\n"
           "                                         checkpoint and are queued again\n"
           "       boostctl node resume NODE         it takes work again\n");
    options_help(rows);
}

int verb_node(struct ctl *ctl, int argc, char **argv)
{
    static const struct {
        const char *name;
        Boost__NodeControlRequest__Verb verb;
    } verbs[] = {{"cordon", BOOST__NODE_CONTROL_REQUEST__VERB__CORDON},
                 {"drain", BOOST__NODE_CONTROL_REQUEST__VERB__DRAIN},
                 {"resume", BOOST__NODE_CONTROL_REQUEST__VERB__RESUME}};
    const char *reason = NULL, *deadline = NULL;
    bool wants_help = false;
    const struct option_row rows[] = {
        {0, "reason", "TEXT", "cordon, drain: why, for others to see", NULL, &reason, NULL},
        {0, "deadline", "TIME", "drain: 90s, 10m, 2h; 0: now", NULL, &deadline, NULL},
        {'h', "help", NULL, "this text", &wants_help, NULL, NULL},
        {0, NULL, NULL, NULL, NULL, NULL, NULL},
    };
    int first = options_parse("node", argc, argv, rows);
    if (first < 0)
        return EXIT_USAGE;
    if (wants_help) {
        help(rows);
        return EXIT_OK;
    }
    const char *what = first < argc ? argv[first] : "";
    bool ls = !strcmp(what, "ls"), show = !strcmp(what, "show");
    const int operands = argc - first - 1;
    if ((ls || show) && (reason || deadline))
        return ctl_usage("node", "%s takes neither --reason nor --deadline", what);
    if (ls)
        return operands ? ctl_usage("node", "takes: node ls") : list_nodes(ctl, NULL);
    if (show)
        return operands != 1 ? ctl_usage("node", "takes: node show NODE") : list_nodes(ctl, argv[first + 1]);
    for (size_t i = 0; i < sizeof verbs / sizeof *verbs; i++) {
        if (strcmp(what, verbs[i].name) != 0)
            continue;
        bool drain = verbs[i].verb == BOOST__NODE_CONTROL_REQUEST__VERB__DRAIN;
        bool resume = verbs[i].verb == BOOST__NODE_CONTROL_REQUEST__VERB__RESUME;
        if (operands != 1)
            return ctl_usage("node", "takes one node: node %s NODE", what);
        if (deadline && !drain)
            return ctl_usage("node", "--deadline is of drain");
        if (reason && resume)
            return ctl_usage("node", "--reason is of cordon and drain");
        if (!reason && !resume)
            return ctl_usage("node", "%s needs --reason TEXT", what);
        return node_control(ctl, verbs[i].verb, argv[first + 1], reason, deadline);
    }
    return *what ? ctl_usage("node", "unknown command '%s'", what)
                 : ctl_usage("node", "takes: ls, show, cordon, drain or resume");
}
