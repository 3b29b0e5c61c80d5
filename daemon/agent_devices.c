/* agent_devices.h */
#include "daemon/agent_devices.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <uv.h>

#include "daemon/agent_choose.h"
#include "daemon/agent_leftover.h"
#include "daemon/agent_node.h"
#include "daemon/agent_nvml.h"
#include "daemon/log.h"
#include "proto/base/buffer.h"
#include "proto/base/clock.h"
#include "worker/plan/flops.h"

enum {
    LOOK_MS = 2000,
    /* A driver without persistence mode takes seconds a GPU to start. Waiting longer could cost the node its jobs: the
     * controller waits for this agent. */
    FIRST_LOOK_MS = 3000,
    STALLED_MS = 30000,
    XID_RECENT_MS = 60000, /* an Xid that came before is not about a rank that ends now */
};

struct agent_devices {
    struct agent *agent;
    uv_work_t work;
    bool looking, again, closing;
    uint64_t begun, done; /* looks */
    int64_t begun_ns, done_ns;
    /* the thread's, while `looking` */
    struct nvml *nvml;
    struct nvml_picture next;
    int rc;
    struct error err;
    /* the loop's */
    struct nvml_picture now;
    bool stalled;
    int last_rc;                /* so that the same trouble is logged once */
    struct buffer report, told; /* packed DeviceReports: the last one made, the last one that got through */
};

/* ---- looking ---- */

static bool too_much_unknown(const struct agent *agent, const struct nvml_gpu *g)
{
    int64_t limit = agent->config->gpu_unknown_mib;
    return limit > 0 && g->unknown_bytes >> 20 >= limit;
}

/* Memory that no process is known to use: whoever has the device open may have it all the same. */
static void find_holders(struct agent_devices *d)
{
    for (int i = 0; i < d->next.n; i++) {
        struct nvml_gpu *g = &d->next.gpus[i];
        char path[64];
        g->holder = 0;
        snprintf(path, sizeof path, "/dev/nvidia%d", g->minor);
        if (g->minor >= 0 && too_much_unknown(d->agent, g))
            g->holder = file_holder(path, g->holder_name);
    }
}

static void look(uv_work_t *work)
{
    struct agent_devices *d = work->data;
    d->rc = ERR_OK;
    if (!d->nvml)
        d->rc = nvml_open(d->agent->config->nvml_library, &d->nvml, &d->err);
    if (!d->rc)
        d->rc = nvml_look(d->nvml, &d->next, &d->err);
    if (!d->rc)
        find_holders(d);
}

/* A device that cannot be asked any more keeps its name. */
static void keep_identity(const struct nvml_picture *was, struct nvml_picture *now)
{
    for (int i = 0; i < now->n && i < was->n; i++) {
        if (now->gpus[i].uuid[0])
            continue;
        memcpy(now->gpus[i].uuid, was->gpus[i].uuid, sizeof now->gpus[i].uuid);
        memcpy(now->gpus[i].name, was->gpus[i].name, sizeof now->gpus[i].name);
        memcpy(now->gpus[i].bus, was->gpus[i].bus, sizeof now->gpus[i].bus);
        now->gpus[i].memory_bytes = was->gpus[i].memory_bytes;
    }
}

static void log_changes(const struct nvml_picture *was, const struct nvml_picture *now)
{
    if (was->n != now->n)
        log_line(LOG_INFO, "%d GPU%s, driver %s", now->n, now->n == 1 ? "" : "s", now->driver);
    for (int i = 0; i < now->n; i++) {
        const struct nvml_gpu *g = &now->gpus[i];
        if (strcmp(g->trouble, i < was->n ? was->gpus[i].trouble : "") != 0)
            log_line(LOG_WARN, "gpu %d (%s): %s", i, g->name, g->trouble[0] ? g->trouble : "sound again");
        if (g->last_xid && (i >= was->n || g->last_xid_ns != was->gpus[i].last_xid_ns))
            log_line(LOG_WARN, "gpu %d (%s): Xid %u", i, g->name, g->last_xid);
    }
}

/* Most nodes have no driver; a library that was named and is not there is a slip. */
static void say_no_library(const struct agent_devices *d)
{
    static const Boost__AgentConfig defaults = BOOST__AGENT_CONFIG__INIT;
    const char *library = d->agent->config->nvml_library;
    if (strcmp(library, defaults.nvml_library) != 0)
        log_line(LOG_WARN, "nvml_library cannot be loaded, so this node gives away CPU slots only: %s", d->err.message);
    else
        log_line(LOG_INFO, "no NVIDIA driver (%s is not here): this node gives away CPU slots only", library);
}

static void begin(struct agent_devices *d, int64_t now);

static void looked(uv_work_t *work, int status)
{
    struct agent_devices *d = work->data;
    d->looking = false;
    d->done = d->begun;
    d->done_ns = clock_mono_ns();
    d->stalled = false;
    if (status == UV_ECANCELED || d->closing)
        return;
    if (!d->rc) {
        keep_identity(&d->now, &d->next);
        log_changes(&d->now, &d->next);
        d->now = d->next;
    } else if (d->rc == ERR_NOT_FOUND && d->last_rc != ERR_NOT_FOUND) {
        say_no_library(d);
    } else if (d->rc != d->last_rc) {
        log_error(LOG_WARN, &d->err, "the GPUs of this node cannot be looked at");
    }
    for (int i = 0; d->rc && d->rc != ERR_NOT_FOUND && i < d->now.n; i++)
        snprintf(d->now.gpus[i].trouble, sizeof d->now.gpus[i].trouble, "%.120s", d->err.message);
    d->last_rc = d->rc;
    if (d->again)
        begin(d, d->done_ns);
    if (d->done > 1)
        agent_poll_soon(d->agent);
}

static void begin(struct agent_devices *d, int64_t now)
{
    d->again = false;
    d->begun++;
    d->begun_ns = now;
    d->looking = uv_queue_work(d->agent->loop, &d->work, look, looked) == 0;
}

uint64_t devices_look_now(struct agent *agent)
{
    struct agent_devices *d = agent->devices;
    if (!d)
        return 0;
    if (d->looking) { /* what it has seen already may be older than what is asked for */
        d->again = true;
        return d->begun + 1;
    }
    begin(d, clock_mono_ns());
    return d->begun;
}

uint64_t devices_looked(const struct agent_devices *d)
{
    return d ? d->done : UINT64_MAX;
}

int devices_open(struct agent *agent, struct agent_devices **out, struct error *err)
{
    *out = NULL;
    if (!*agent->config->nvml_library)
        return ERR_OK;
    struct agent_devices *d = calloc(1, sizeof *d);
    if (!d)
        return error_set(err, ERR_NOMEM, "no memory for the GPUs");
    d->agent = agent;
    d->work.data = d;
    buffer_init(&d->report, LIMIT_FRAME);
    buffer_init(&d->told, LIMIT_FRAME);
    int64_t now = clock_mono_ns(), deadline = now + FIRST_LOOK_MS * NS_PER_MS;
    begin(d, now);
    while (d->looking && clock_mono_ns() < deadline) {
        uv_run(agent->loop, UV_RUN_NOWAIT);
        poll(NULL, 0, 2);
    }
    if (d->looking)
        log_line(LOG_WARN, "NVIDIA's driver has not answered for %d s: no GPU is given away until it does",
                 FIRST_LOOK_MS / 1000);
    *out = d;
    return ERR_OK;
}

int devices_count(const struct agent_devices *d)
{
    return d ? d->now.n : 0;
}

bool devices_busy(const struct agent_devices *d)
{
    return d && d->looking;
}

void devices_close(struct agent_devices *d)
{
    if (!d)
        return;
    d->closing = true;
    nvml_close(d->nvml);
    buffer_free(&d->report);
    buffer_free(&d->told);
    free(d);
}

/* ---- who has what ---- */

/* The n-th rank (from 0) that has the device. */
struct user {
    const struct agent_attempt *a;
    int rank;
};

static bool nth_user(const struct agent *agent, const char *uuid, int nth, struct user *out)
{
    for (const struct agent_attempt *a = agent->attempts; a; a = a->next)
        for (size_t i = 0; attempt_alive(a) && i < a->start->n_devices && i < a->start->n_ranks; i++) {
            const char *has = a->start->devices[i]->uuid;
            if (!has || strcmp(has, uuid) != 0 || nth-- > 0)
                continue;
            *out = (struct user){a, a->start->ranks[i]};
            return true;
        }
    return false;
}

static int users(const struct agent *agent, const char *uuid)
{
    int n = 0;
    struct user ignored;
    while (nth_user(agent, uuid, n, &ignored))
        n++;
    return n;
}

static const char *trouble_of(const struct agent_devices *d, int i)
{
    return d->stalled ? "NVIDIA's driver has stopped answering" : d->now.gpus[i].trouble;
}

enum { CROWD = -1, NOBODY = -2, STRANGER_TEXT = 160 };

/* A process on a device that no rank of ours has, CROWD for more than can be listed, NOBODY where memory is used by
 * none that is known; 0: none. One that the kernel does
 * not know under this pid is of another container, or just gone: which of them cannot be told. */
static int64_t stranger(const struct agent *agent, int i)
{
    const struct nvml_gpu *g = &agent->devices->now.gpus[i];
    if (agent->config->ranks_per_gpu > 1 || users(agent, g->uuid))
        return 0;
    for (int k = 0; k < g->n_processes; k++)
        if (kill((pid_t)g->processes[k].pid, 0) == 0 || errno == EPERM)
            return g->processes[k].pid;
    if (g->crowded)
        return CROWD;
    return too_much_unknown(agent, g) ? NOBODY : 0;
}

static void say_stranger(const struct agent *agent, int i, int64_t pid, char out[STRANGER_TEXT])
{
    const struct nvml_gpu *g = &agent->devices->now.gpus[i];
    if (pid == NOBODY && g->holder)
        snprintf(out, STRANGER_TEXT, "process %" PRId64 " (%s) has it open, and %" PRId64 " MiB of it are used",
                 g->holder, g->holder_name, g->unknown_bytes >> 20);
    else if (pid == NOBODY)
        snprintf(out, STRANGER_TEXT, "%" PRId64 " MiB of it are used by no process that is known",
                 g->unknown_bytes >> 20);
    else if (pid == CROWD)
        snprintf(out, STRANGER_TEXT, "more than %d processes use it, which are not of BOOST", (int)NVML_PROCESSES_MAX);
    else
        snprintf(out, STRANGER_TEXT, "process %" PRId64 " uses it, which is not of BOOST", pid);
}

/* ---- telling ---- */

static Boost__DeviceInfo *info_of(struct agent *agent, int i, int share, struct arena *arena)
{
    const struct nvml_gpu *g = &agent->devices->now.gpus[i];
    Boost__DeviceInfo *x = arena_alloc(arena, sizeof *x);
    struct user user;
    if (!x)
        return NULL;
    boost__device_info__init(x);
    x->has_index = x->has_memory_mib = x->has_used_mib = true;
    x->index = i;
    x->uuid = arena_strdup(arena, g->uuid);
    x->name = arena_strdup(arena, g->name);
    x->pci_bus_id = arena_strdup(arena, g->bus);
    x->memory_mib = (g->memory_bytes >> 20) / agent->config->ranks_per_gpu;
    x->used_mib = g->used_bytes >> 20;
    x->has_nvlink_group = g->nvlink_group >= 0;
    x->nvlink_group = g->nvlink_group;
    x->trouble = arena_strdup(arena, trouble_of(agent->devices, i));
    int64_t pid = stranger(agent, i);
    x->has_taken = x->taken = pid != 0;
    if (pid) {
        char who[STRANGER_TEXT];
        say_stranger(agent, i, pid, who);
        x->note = arena_strdup(arena, who);
    }
    if (nth_user(agent, g->uuid, share, &user)) {
        bool ours = attempt_is_ours(user.a);
        x->has_job = x->has_attempt = x->has_rank = ours;
        x->job = user.a->job;
        x->attempt = user.a->attempt;
        x->rank = user.rank;
        if (!ours)
            x->note = arena_printf(arena, "a job of another controller has it");
    }
    return x->uuid && x->name && x->pci_bus_id && x->trouble ? x : NULL;
}

static bool is_listed(const struct agent_devices *d, const char *uuid)
{
    for (int i = 0; i < d->now.n; i++)
        if (strcmp(d->now.gpus[i].uuid, uuid) == 0)
            return true;
    return false;
}

/* Those that the driver no longer lists while a rank has them: else the controller would count the rank to another. */
static bool add_vanished(const struct agent *agent, struct arena *arena, Boost__DeviceReport *r, size_t room)
{
    for (const struct agent_attempt *a = agent->attempts; a; a = a->next)
        for (size_t i = 0; attempt_alive(a) && i < a->start->n_devices && i < a->start->n_ranks; i++) {
            const Boost__RankDevice *has = a->start->devices[i];
            if (!has->uuid || is_listed(agent->devices, has->uuid) || r->n_devices == room)
                continue;
            Boost__DeviceInfo *x = arena_alloc(arena, sizeof *x);
            if (!x)
                return false;
            boost__device_info__init(x);
            x->has_index = true;
            x->index = has->index;
            x->uuid = has->uuid;
            x->name = a->start->device_name;
            x->trouble = arena_strdup(arena, "the driver no longer lists it");
            x->has_job = x->has_attempt = x->has_rank = attempt_is_ours(a);
            x->job = a->job;
            x->attempt = a->attempt;
            x->rank = a->start->ranks[i];
            r->devices[r->n_devices++] = x;
        }
    return true;
}

Boost__DeviceReport *devices_report(struct agent *agent, struct arena *arena)
{
    struct agent_devices *d = agent->devices;
    Boost__DeviceReport *r = arena_alloc(arena, sizeof *r);
    if (!r || (d && !d->done))
        return NULL;
    boost__device_report__init(r);
    if (!d)
        return r;
    int shares = agent->config->ranks_per_gpu;
    size_t room = (size_t)(d->now.n * shares) + NVML_GPUS_MAX;
    Boost__DeviceInfo **list = arena_alloc(arena, room * sizeof *list);
    if (!list)
        return NULL;
    r->devices = list;
    r->driver = arena_strdup(arena, d->now.driver);
    for (int i = 0; i < d->now.n * shares; i++) {
        list[i] = info_of(agent, i / shares, i % shares, arena);
        if (!list[i])
            return NULL;
        r->n_devices++;
    }
    if (!d->stalled && !d->last_rc && !add_vanished(agent, arena, r, room))
        return NULL;
    buffer_clear(&d->report);
    uint8_t *at = buffer_reserve(&d->report, boost__device_report__get_packed_size(r));
    if (at)
        d->report.len = boost__device_report__pack(r, at);
    return r;
}

void devices_told(struct agent_devices *d)
{
    if (!d)
        return;
    buffer_clear(&d->told);
    if (d->report.len)
        buffer_append(&d->told, d->report.data, d->report.len);
}

static void tell_changes(struct agent *agent)
{
    enum { ARENA = 4 << 20 };
    struct agent_devices *d = agent->devices;
    struct arena arena;
    if (!link_up_ready(agent->link))
        return;
    arena_init(&arena, ARENA);
    Boost__DeviceReport *r = devices_report(agent, &arena);
    bool same =
        d->report.len == d->told.len && (!d->report.len || memcmp(d->report.data, d->told.data, d->report.len) == 0);
    if (r && !same && agent_send(agent, BOOST__AGENT_MESSAGE__BODY_DEVICES, &r->base))
        devices_told(d);
    arena_free(&arena);
}

void devices_run(struct agent *agent, int64_t now)
{
    struct agent_devices *d = agent->devices;
    if (!d)
        return;
    if (d->looking && !d->stalled && now - d->begun_ns > STALLED_MS * NS_PER_MS) {
        d->stalled = true;
        log_line(LOG_ERROR, "NVIDIA's driver has not answered for %d s: no GPU is given away until it does",
                 STALLED_MS / 1000);
    }
    if (!d->looking && now - d->done_ns > LOOK_MS * NS_PER_MS)
        begin(d, now);
    tell_changes(agent);
}

bool devices_unsound(const struct agent *agent, char *why, size_t cap)
{
    const struct agent_devices *d = agent->devices;
    if (!d || !d->done)
        return false;
    if (d->stalled || (d->last_rc && d->last_rc != ERR_NOT_FOUND)) {
        snprintf(why, cap, "%s", d->stalled ? "NVIDIA's driver has stopped answering" : d->err.message);
        return true;
    }
    for (int i = 0; i < d->now.n; i++)
        if (!*trouble_of(d, i))
            return false;
    if (d->now.n)
        snprintf(why, cap, "none of %d GPU%s works; gpu 0: %s", d->now.n, d->now.n == 1 ? "" : "s", trouble_of(d, 0));
    return d->now.n > 0;
}

/* ---- giving ---- */

static int too_few(const struct agent *agent, size_t found, size_t wanted, struct error *err)
{
    const struct agent_devices *d = agent->devices;
    struct buffer why;
    buffer_init(&why, 4096);
    if (d && !d->done)
        buffer_append_str(&why, "NVIDIA's driver has not answered yet");
    for (int i = 0; d && i < d->now.n; i++) {
        const char *trouble = trouble_of(d, i);
        int64_t pid = stranger(agent, i);
        char who[STRANGER_TEXT] = "";
        if (pid)
            say_stranger(agent, i, pid, who);
        if (*trouble || pid)
            buffer_printf(&why, "%sgpu %d: %s", why.len ? ", " : "", i, *trouble ? trouble : who);
    }
    error_set(err, ERR_BUSY, "%zu of %zu GPUs can be had on node %s%s%.300s", found, wanted, agent->node,
              why.len ? ": " : "", why.len ? (const char *)why.data : "");
    error_hint(err, "end what else uses them, or reset those that have failed (boostctl -o wide node ls)");
    buffer_free(&why);
    return ERR_BUSY;
}

static bool add_device(Boost__AttemptStart *s, int index, const char *uuid)
{
    Boost__RankDevice *x = malloc(sizeof *x);
    if (!x)
        return false;
    boost__rank_device__init(x);
    x->has_index = true;
    x->index = index;
    x->uuid = strdup(uuid);
    s->devices[s->n_devices++] = x;
    return x->uuid != NULL;
}

/* The peak of a rank's share of a device. */
static double peak_of(const struct agent *agent, const char *name)
{
    double peak = agent->config->peak_tflops > 0 ? agent->config->peak_tflops * 1e12 : plan_peak_flops(name);
    return name ? peak / agent->config->ranks_per_gpu : peak;
}

int devices_assign(struct agent *agent, Boost__AttemptStart *s, struct error *err)
{
    const struct agent_devices *d = agent->devices;
    bool cuda = s->spec->resources && s->spec->resources->device == BOOST__DEVICE__VALUE__CUDA;
    s->has_peak_flops = true;
    s->peak_flops = peak_of(agent, NULL);
    if (!cuda)
        return ERR_OK;
    s->devices = calloc(s->n_ranks, sizeof(Boost__RankDevice *)); /* the message's: freed with it */
    if (!s->devices)
        return error_set(err, ERR_NOMEM, "no memory for the attempt");
    int group[NVML_GPUS_MAX], room[NVML_GPUS_MAX], *order = calloc(s->n_ranks, sizeof *order);
    int n = d ? d->now.n : 0, given = 0;
    for (int i = 0; i < n; i++) {
        const struct nvml_gpu *g = &d->now.gpus[i];
        bool usable = g->uuid[0] && !*trouble_of(d, i) && !stranger(agent, i);
        int left = usable ? agent->config->ranks_per_gpu - users(agent, g->uuid) : 0;
        room[i] = left > 0 ? left : 0;
        group[i] = g->nvlink_group;
    }
    if (order)
        given = choose_gpus(group, room, n, (int)s->n_ranks, order);
    bool ok = order != NULL;
    for (int i = 0; ok && i < given; i++)
        ok = add_device(s, order[i], d->now.gpus[order[i]].uuid);
    free(order);
    if (!ok)
        return error_set(err, ERR_NOMEM, "no memory for the attempt");
    if (s->n_devices < s->n_ranks)
        return too_few(agent, s->n_devices, s->n_ranks, err);
    s->device_name = strdup(d->now.gpus[s->devices[0]->index].name);
    s->peak_flops = peak_of(agent, s->device_name);
    return s->device_name ? ERR_OK : error_set(err, ERR_NOMEM, "no memory for the attempt");
}

bool devices_released(const struct agent *agent, const Boost__AttemptStart *s)
{
    const struct agent_devices *d = agent->devices;
    for (size_t i = 0; d && i < s->n_devices; i++)
        for (int g = 0; g < d->now.n; g++)
            if (s->devices[i]->uuid && strcmp(s->devices[i]->uuid, d->now.gpus[g].uuid) == 0 &&
                stranger(agent, g) == NOBODY)
                return false;
    return true;
}

char *devices_describe(const struct agent *agent, const Boost__AttemptStart *s, int rank)
{
    const struct agent_devices *d = agent->devices;
    for (size_t i = 0; i < s->n_ranks && i < s->n_devices; i++) {
        const Boost__RankDevice *x = s->devices[i];
        char *text = NULL, why[192] = "";
        if (s->ranks[i] != rank)
            continue;
        for (int g = 0; d && g < d->now.n; g++) {
            const struct nvml_gpu *gpu = &d->now.gpus[g];
            if (!x->uuid || strcmp(x->uuid, gpu->uuid) != 0)
                continue;
            if (*trouble_of(d, g))
                snprintf(why, sizeof why, ": %s", trouble_of(d, g));
            else if (gpu->last_xid && clock_mono_ns() - gpu->last_xid_ns < XID_RECENT_MS * NS_PER_MS)
                snprintf(why, sizeof why, ": Xid %u", gpu->last_xid);
        }
        if (asprintf(&text, "gpu %d (%s)%s", x->index, s->device_name ? s->device_name : "?", why) < 0)
            return NULL;
        return text;
    }
    return NULL;
}
