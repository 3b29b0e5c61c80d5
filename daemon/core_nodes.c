/* Nodes: liveness by what is heard of them, what their devices are taken by, draining. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"
#include "proto/reflect.h"

/* Index of the first node of that name or a later one. */
static int place_of(const struct core *c, const char *name)
{
    int lo = 0, hi = c->n_nodes;
    while (lo < hi) {
        int mid = lo + (hi - lo) / 2;
        if (strcmp(c->node_index[mid]->name, name) < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

struct node *node_find(struct core *c, const char *name)
{
    int i = place_of(c, name);
    return i < c->n_nodes && strcmp(c->node_index[i]->name, name) == 0 ? c->node_index[i] : NULL;
}

void node_free(struct node *n)
{
    free(n->name);
    free(n->boot_id);
    free(n->instance);
    free(n->version);
    free(n->data_address);
    free(n->admin_reason);
    free(n->admin_by);
    free(n->gpu_name);
    if (n->devices)
        boost__device_report__free_unpacked(n->devices, NULL);
    if (n->told)
        boost__register__free_unpacked(n->told, NULL);
    if (n->health)
        boost__health_report__free_unpacked(n->health, NULL);
    free(n->holdings);
    free(n);
}

struct node *node_get(struct core *c, const char *name)
{
    struct node *n = node_find(c, name);
    if (n)
        return n;
    if (c->n_nodes == c->cap_nodes) {
        int cap = c->cap_nodes ? 2 * c->cap_nodes : 64;
        struct node **index = realloc(c->node_index, (size_t)cap * sizeof *index);
        if (!index)
            return NULL;
        c->node_index = index;
        c->cap_nodes = cap;
    }
    n = calloc(1, sizeof *n);
    if (n)
        n->name = strdup(name);
    if (!n || !n->name) {
        free(n);
        return NULL;
    }
    n->liveness = LIVENESS(JOINING);
    n->last_seen = c->up_since;
    int at = place_of(c, name);
    memmove(&c->node_index[at + 1], &c->node_index[at], (size_t)(c->n_nodes - at) * sizeof(struct node *));
    c->node_index[at] = n;
    c->n_nodes++;
    n->next = at + 1 < c->n_nodes ? c->node_index[at + 1] : NULL;
    *(at ? &c->node_index[at - 1]->next : &c->nodes) = n;
    return n;
}

struct holding *node_holding(struct node *n, int64_t job, int attempt)
{
    for (int i = 0; i < n->n_holdings; i++)
        if (n->holdings[i].job == job && n->holdings[i].attempt == attempt)
            return &n->holdings[i];
    return NULL;
}

struct holding *node_hold(struct node *n, int64_t job, int attempt, enum sched_pool pool, int slots)
{
    struct holding *h = node_holding(n, job, attempt);
    if (h)
        return h;
    struct holding *list = realloc(n->holdings, (size_t)(n->n_holdings + 1) * sizeof *list);
    if (!list)
        return NULL;
    n->holdings = list;
    list[n->n_holdings] = (struct holding){.job = job, .attempt = attempt, .pool = pool, .slots = slots};
    return &list[n->n_holdings++];
}

void node_release(struct core *c, struct node *n, int64_t job, int attempt)
{
    struct holding *h = node_holding(n, job, attempt);
    if (!h)
        return;
    bool overdue = h->overdue;
    if (h->epilog) { /* the node tells again when it is over */
        h->kill_due = 0;
        h->overdue = false;
        if (overdue)
            node_undrain(c, n);
        return;
    }
    *h = n->holdings[--n->n_holdings];
    c->schedule = true;
    if (overdue)
        node_undrain(c, n);
    node_emptied(c, n);
}

static bool works(const Boost__DeviceInfo *d)
{
    return !d->trouble || !*d->trouble;
}

int node_slots(const struct node *n, enum sched_pool pool)
{
    int slots = 0;
    if (pool == SCHED_CPU)
        return n->cpu_slots;
    if (!n->devices)
        return n->gpus;
    for (size_t i = 0; i < n->devices->n_devices; i++)
        slots += works(n->devices->devices[i]);
    return slots;
}

int node_busy(const struct node *n, enum sched_pool pool)
{
    int slots = 0;
    for (int i = 0; i < n->n_holdings; i++)
        slots += n->holdings[i].pool == pool ? n->holdings[i].slots : 0;
    return slots;
}

int node_room(const struct node *n, enum sched_pool pool)
{
    int slots = node_slots(n, pool) - node_busy(n, pool);
    /* One that broke under an attempt is neither among those that work nor does it take one of them. */
    for (size_t i = 0; pool == SCHED_GPU && n->devices && i < n->devices->n_devices; i++) {
        const Boost__DeviceInfo *d = n->devices->devices[i];
        slots -= works(d) && d->taken && !d->has_job;
        for (int k = 0; !works(d) && d->has_job && k < n->n_holdings; k++)
            slots += n->holdings[k].job == d->job && n->holdings[k].attempt == d->attempt;
    }
    return slots;
}

int node_free_slots(const struct node *n, enum sched_pool pool)
{
    int slots = node_room(n, pool);
    return slots > 0 ? slots : 0;
}

/* ---- GPUs ---- */

static const Boost__DeviceInfo *device_of(const Boost__DeviceReport *r, int index)
{
    for (size_t i = 0; r && i < r->n_devices; i++)
        if (r->devices[i]->index == index)
            return r->devices[i];
    return NULL;
}

bool same_but_numbers(const char *a, const char *b)
{
    const char digits[] = "0123456789";
    for (;;) {
        a += strspn(a, digits);
        b += strspn(b, digits);
        if (*a != *b || !*a)
            return *a == *b;
        a++, b++;
    }
}

static void tell_health(struct core *c, struct node *n, const Boost__DeviceReport *was, const Boost__DeviceReport *now)
{
    for (size_t i = 0; i < now->n_devices; i++) {
        const Boost__DeviceInfo *d = now->devices[i];
        if (device_of(now, d->index) != d)
            continue; /* a second share of the same */
        const Boost__DeviceInfo *old = device_of(was, d->index);
        const char *name = d->name ? d->name : "?";
        if (!works(d) && (!old || works(old) || !same_but_numbers(old->trouble, d->trouble)))
            add_event(c, NULL, 0, n->name, "controller", "device-unhealthy",
                      "gpu %d (%s) of %s is not given to new attempts: %.300s", d->index, name, n->name, d->trouble);
        else if (works(d) && old && !works(old))
            add_event(c, NULL, 0, n->name, "controller", "device-healthy", "gpu %d (%s) of %s works again", d->index,
                      name, n->name);
    }
    for (size_t i = 0; was && i < was->n_devices; i++) {
        const Boost__DeviceInfo *old = was->devices[i];
        if (device_of(was, old->index) == old && !device_of(now, old->index))
            add_event(c, NULL, 0, n->name, "controller", "device-gone", "gpu %d (%s) of %s is no longer there",
                      old->index, old->name ? old->name : "?", n->name);
    }
}

void node_devices(struct core *c, struct node *n, const Boost__DeviceReport *report)
{
    Boost__DeviceReport *copy = report ? (Boost__DeviceReport *)reflect_clone(&report->base) : NULL;
    if (!copy)
        return; /* the picture of before is told again with the next change */
    int64_t least = 0;
    for (size_t i = 0; i < copy->n_devices; i++) { /* one that is no longer listed has none */
        int64_t mib = copy->devices[i]->memory_mib;
        if (mib > 0 && (least == 0 || mib < least))
            least = mib;
    }
    const char *name = copy->n_devices && copy->devices[0]->name ? copy->devices[0]->name : "";
    if (n->gpus != (int)copy->n_devices || n->gpu_mib != least || strcmp(n->gpu_name ? n->gpu_name : "", name) != 0)
        mark_node(c, n);
    tell_health(c, n, n->devices, copy);
    n->gpus = (int)copy->n_devices;
    n->gpu_mib = least;
    text_set(&n->gpu_name, name);
    if (n->devices)
        boost__device_report__free_unpacked(n->devices, NULL);
    n->devices = copy;
    c->gpus.known = false;
    c->schedule = true;
}

bool node_usable(const struct node *n)
{
    return n->liveness == LIVENESS(UP) && n->connected;
}

static void set_liveness(struct core *c, struct node *n, Boost__NodeLiveness__Value to)
{
    if (n->liveness == to)
        return;
    n->liveness = to;
    c->schedule = true;
    c->work = true;
}

void node_seen(struct core *c, struct node *n)
{
    bool was_down = n->liveness == LIVENESS(DOWN);
    n->last_seen = now_mono(c);
    due_at(c, n->last_seen + c->suspect_ns);
    if (n->liveness == LIVENESS(UP))
        return;
    if (n->liveness == LIVENESS(SUSPECT))
        core_log_line(c, CORE_LOG_INFO, "node %s is heard of again", n->name);
    set_liveness(c, n, LIVENESS(UP));
    if (!was_down)
        return;
    /* On the same connection: it never heard that it was given up. */
    add_event(c, NULL, 0, n->name, "controller", "node-up", "%s is heard of again", n->name);
    for (int i = 0; i < n->n_holdings; i++) {
        struct holding *h = &n->holdings[i];
        struct job *job = core_job(c, h->job);
        struct attempt *a = job ? job_live_attempt(job) : NULL;
        bool live = a && a->number == h->attempt;
        for (int p = 0; live && p < a->n_parts; p++)
            live = strcmp(a->parts[p].node, n->name) != 0 || !a->parts[p].lost;
        if (!live && !h->reserved && !h->spare)
            holding_kill(c, n, h);
    }
    (void)node_recheck(c, n, false);
}

bool send_to(struct core *c, struct node *n, const Boost__ControllerMessage *m)
{
    return n->connected && c->ops.send(c->ops.arg, n->name, m);
}

void holding_kill(struct core *c, struct node *n, struct holding *h)
{
    Boost__StopAttempt stop = BOOST__STOP_ATTEMPT__INIT;
    Boost__ControllerMessage m = BOOST__CONTROLLER_MESSAGE__INIT;
    if (h->epilog) /* nothing is left to kill */
        return;
    stop.has_job = stop.has_attempt = stop.has_how = true;
    stop.job = h->job;
    stop.attempt = h->attempt;
    stop.how = BOOST__STOP_ATTEMPT__HOW__KILL;
    m.body_case = BOOST__CONTROLLER_MESSAGE__BODY_STOP;
    m.stop = &stop;
    if (send_to(c, n, &m) && !h->kill_due)
        holding_kill_sent(c, h);
}

void holding_kill_sent(struct core *c, struct holding *h)
{
    h->kill_from = now_mono(c);
    h->kill_due = h->kill_from + c->kill_confirm_ns;
    due_at(c, h->kill_due);
}

/* SIGKILL was sent and the node does not confirm: something there cannot die. The job goes on elsewhere, the
 * devices stay taken until the node says so, and no one else is sent into the same trap. */
static void kill_overdue(struct core *c, struct node *n, int index)
{
    struct holding *h = &n->holdings[index];
    struct job *job = core_job(c, h->job);
    int64_t job_id = h->job;
    int attempt = h->attempt;
    char reason[256];
    h->overdue = true;
    h->kill_due = 0;
    snprintf(reason, sizeof reason, "job %lld attempt %d: %d rank%s not confirmed dead %.1f s after SIGKILL",
             (long long)job_id, attempt, h->slots, h->slots == 1 ? "" : "s",
             (double)(now_mono(c) - h->kill_from) / (double)NS_PER_S);
    node_drain(c, n, reason);
    struct attempt *a = job ? job_live_attempt(job) : NULL;
    if (a && a->number == attempt)
        attempt_part_over(c, job, a, n->name, true, reason);
}

static void node_down(struct core *c, struct node *n, int64_t now)
{
    double silent = (double)(now - n->last_seen) / (double)NS_PER_S;
    bool was_joining = n->liveness == LIVENESS(JOINING);
    set_liveness(c, n, LIVENESS(DOWN));
    char note[128];
    if (was_joining)
        snprintf(note, sizeof note, "did not come back in %.0f s after the controller's start", silent);
    else
        snprintf(note, sizeof note, "no heartbeat for %.0f s", silent);
    add_event(c, NULL, 0, n->name, "controller", "node-down", "%s: %s", n->name, note);
    tasks_lost(c, n);
    spares_lost(c, n, note);
    for (int i = 0; i < n->n_holdings; i++)
        n->holdings[i].kill_due = 0; /* an unreachable node is not waited for */
    for (struct job *job = c->busy.head, *next; job; job = next) {
        next = job->busy.next;
        struct attempt *a = job_live_attempt(job);
        if (job->starting)
            for (int i = 0; i < job->starting->n_nodes; i++)
                if (job->starting->nodes[i] == n) {
                    start_cancel(c, job);
                    break;
                }
        for (int p = 0; a && p < a->n_parts; p++) {
            if (strcmp(a->parts[p].node, n->name) == 0 && !a->parts[p].gone && !a->parts[p].lost) {
                account_detection(c, job, now - n->last_seen);
                attempt_part_over(c, job, a, n->name, true, note);
                break;
            }
        }
    }
}

int64_t nodes_run(struct core *c, int64_t now)
{
    int64_t next = INT64_MAX;
    for (struct node *n = c->nodes; n; n = n->next) {
        if (n->drain_due && now >= n->drain_due)
            node_drain_over(c, n);
        else if (n->drain_due && n->drain_due < next)
            next = n->drain_due;
        int64_t down = n->last_seen + c->node_timeout_ns;
        if (down < c->up_since + c->restart_grace_ns)
            down = c->up_since + c->restart_grace_ns;
        int64_t suspect = n->last_seen + c->suspect_ns;
        if (n->liveness != LIVENESS(DOWN) && now >= down) {
            node_down(c, n, now);
        } else if (n->liveness == LIVENESS(UP) && now >= suspect) {
            core_log_line(c, CORE_LOG_WARN, "node %s is suspect: silent for %.1f s", n->name,
                          (double)(now - n->last_seen) / (double)NS_PER_S);
            set_liveness(c, n, LIVENESS(SUSPECT));
        }
        if (n->liveness == LIVENESS(UP) && suspect < next)
            next = suspect;
        if (n->liveness != LIVENESS(DOWN) && down < next)
            next = down;
        for (int i = 0; i < n->n_holdings; i++) {
            if (n->holdings[i].kill_due && now >= n->holdings[i].kill_due)
                kill_overdue(c, n, i);
            else if (n->holdings[i].kill_due && n->holdings[i].kill_due < next)
                next = n->holdings[i].kill_due;
        }
    }
    return next;
}
