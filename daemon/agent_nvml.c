/* agent_nvml.h */
#include "daemon/agent_nvml.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/clock.h"

/* ---- of nvml.h, whose functions and structures are fixed by their version suffix ---- */

enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NO_PERMISSION = 4,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_TIMEOUT = 10,
    NVML_ERROR_GPU_IS_LOST = 15,
};
enum { NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1, NVML_VOLATILE_ECC = 0 };
enum { NVML_DEVICE_MIG_ENABLE = 1, NVML_P2P_CAPS_INDEX_NVLINK = 2, NVML_P2P_STATUS_OK = 0 };
#define NVML_EVENT_TYPE_XID 8ULL

struct device_handle;
struct event_set;
struct memory_info {
    unsigned long long total, free, used;
};
struct memory_info_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};
#define NVML_MEMORY_V2 ((unsigned)sizeof(struct memory_info_v2) | 2U << 24)
struct pci_info {
    char bus_id_legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};
struct process_info {
    unsigned pid;
    unsigned long long bytes; /* all ones: not known */
    unsigned gpu_instance, compute_instance;
};
struct event_data {
    struct device_handle *device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
};

struct calls {
    int (*init)(void);
    int (*shutdown)(void);
    const char *(*error_string)(int);
    int (*driver_version)(char *, unsigned);
    int (*count)(unsigned *);
    int (*handle)(unsigned, struct device_handle **);
    int (*uuid)(struct device_handle *, char *, unsigned);
    int (*name)(struct device_handle *, char *, unsigned);
    int (*memory)(struct device_handle *, struct memory_info *);
    int (*pci)(struct device_handle *, struct pci_info *);
    int (*processes)(struct device_handle *, unsigned *, struct process_info *);
    int (*ecc)(struct device_handle *, int, int, unsigned long long *);
    int (*remapped)(struct device_handle *, unsigned *, unsigned *, unsigned *, unsigned *);
    int (*events_create)(struct event_set **);
    int (*events_register)(struct device_handle *, unsigned long long, struct event_set *);
    int (*events_wait)(struct event_set *, struct event_data *, unsigned);
    int (*events_free)(struct event_set *);
    int (*graphics)(struct device_handle *, unsigned *, struct process_info *);
    int (*memory_v2)(struct device_handle *, struct memory_info_v2 *);
    int (*minor)(struct device_handle *, unsigned *);
    int (*mig)(struct device_handle *, unsigned *, unsigned *);
    int (*p2p)(struct device_handle *, struct device_handle *, int, int *);
};

/* `optional`: older drivers lack it, and then it is not known what it would tell. */
static const struct {
    const char *name;
    size_t at;
    bool optional;
} symbols[] = {
    {"nvmlInit_v2", offsetof(struct calls, init), false},
    {"nvmlShutdown", offsetof(struct calls, shutdown), false},
    {"nvmlErrorString", offsetof(struct calls, error_string), false},
    {"nvmlSystemGetDriverVersion", offsetof(struct calls, driver_version), false},
    {"nvmlDeviceGetCount_v2", offsetof(struct calls, count), false},
    {"nvmlDeviceGetHandleByIndex_v2", offsetof(struct calls, handle), false},
    {"nvmlDeviceGetUUID", offsetof(struct calls, uuid), false},
    {"nvmlDeviceGetName", offsetof(struct calls, name), false},
    {"nvmlDeviceGetMemoryInfo", offsetof(struct calls, memory), false},
    {"nvmlDeviceGetPciInfo_v3", offsetof(struct calls, pci), false},
    {"nvmlDeviceGetComputeRunningProcesses_v3", offsetof(struct calls, processes), false},
    {"nvmlDeviceGetTotalEccErrors", offsetof(struct calls, ecc), false},
    {"nvmlDeviceGetRemappedRows", offsetof(struct calls, remapped), true},
    {"nvmlEventSetCreate", offsetof(struct calls, events_create), false},
    {"nvmlDeviceRegisterEvents", offsetof(struct calls, events_register), false},
    {"nvmlEventSetWait_v2", offsetof(struct calls, events_wait), false},
    {"nvmlEventSetFree", offsetof(struct calls, events_free), false},
    {"nvmlDeviceGetGraphicsRunningProcesses_v3", offsetof(struct calls, graphics), true},
    {"nvmlDeviceGetMemoryInfo_v2", offsetof(struct calls, memory_v2), true},
    {"nvmlDeviceGetMinorNumber", offsetof(struct calls, minor), true},
    {"nvmlDeviceGetMigMode", offsetof(struct calls, mig), true},
    {"nvmlDeviceGetP2PStatus", offsetof(struct calls, p2p), true},
};

/* ---- Xids that take a device out ---- */

/* Errors that stay until the device is reset, or for good: NVIDIA, "XID Errors". All others leave the device usable:
 * faults of one program (13, 31, 43, 45, 68, 69), messages (63: a row was put aside for the next reset; 92, 93). */
static const struct {
    unsigned xid;
    const char *what;
} bad_xids[] = {
    {48, "double-bit memory error"},                   /* data was lost; the row is replaced at a reset */
    {62, "internal micro-controller halted"},          /* only a reset starts it again */
    {64, "a bad memory row could not be put aside"},   /* it will be hit again */
    {74, "NVLink error"},                              /* collectives over it would fail or hang */
    {79, "fell off the bus"},                          /* nothing reaches it any more */
    {94, "memory error, contained"},                   /* the program died, its row is replaced at a reset */
    {95, "memory error, not contained"},               /* other programs' data may be wrong too */
    {119, "its firmware does not answer"},             /* GSP: calls to it time out from then on */
    {120, "its firmware failed"},                      /* GSP */
    {140, "memory error that could not be corrected"}, /* newer drivers' word for 48 and 95 */
    {143, "could not be initialised"},
};

static const char *bad_xid(unsigned xid)
{
    for (size_t i = 0; i < sizeof bad_xids / sizeof *bad_xids; i++)
        if (bad_xids[i].xid == xid)
            return bad_xids[i].what;
    return NULL;
}

/* ---- the library ---- */

struct nvml {
    void *library;
    struct calls call;
    struct event_set *events;
    int linked; /* so many devices have their groups; 0: not asked yet */
    struct {
        int group;                    /* of those that NVLink joins, the lowest index in it */
        struct device_handle *handle; /* NULL: could not be had yet */
        unsigned xid, last_xid;       /* xid: the first that takes it out */
        int64_t last_xid_ns;
    } gpus[NVML_GPUS_MAX];
};

static int load(struct nvml *n, const char *library, struct error *err)
{
    n->library = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!n->library)
        return error_set(err, ERR_NOT_FOUND, "%s", dlerror());
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *symbol = dlsym(n->library, symbols[i].name);
        if (!symbol && !symbols[i].optional) {
            error_set(err, ERR_DEVICE, "%s has no %s", library, symbols[i].name);
            return error_hint(err, "install a newer NVIDIA driver");
        }
        memcpy((char *)&n->call + symbols[i].at, &symbol, sizeof symbol);
    }
    return ERR_OK;
}

static int failed(struct nvml *n, int code, const char *what, struct error *err)
{
    const char *text = n->call.error_string(code);
    return error_set(err, ERR_DEVICE, "NVIDIA's driver: %s: %s", what, text ? text : "unknown error");
}

int nvml_open(const char *library, struct nvml **out, struct error *err)
{
    struct nvml *n = calloc(1, sizeof *n);
    *out = NULL;
    if (!n)
        return error_set(err, ERR_NOMEM, "no memory for the GPUs");
    int rc = load(n, library, err);
    if (!rc) {
        int code = n->call.init();
        rc = code ? failed(n, code, "nvmlInit", err) : ERR_OK;
    }
    if (rc) {
        if (n->library)
            dlclose(n->library);
        free(n);
        return rc;
    }
    if (n->call.events_create(&n->events)) /* without events the counters still tell */
        n->events = NULL;
    *out = n;
    return ERR_OK;
}

void nvml_close(struct nvml *n)
{
    if (!n)
        return;
    if (n->events)
        n->call.events_free(n->events);
    n->call.shutdown();
    dlclose(n->library);
    free(n);
}

/* ---- looking ---- */

/* What a driver fills in, which a broken one may do with anything: an end, and nothing that a log or a terminal
 * would read as more than text. */
static void make_text(char *text, size_t room)
{
    text[room - 1] = '\0';
    for (; *text; text++)
        if (*text < ' ' || *text > '~')
            *text = '?';
}

/* All ones: not known. */
static int64_t known(unsigned long long bytes)
{
    return bytes <= INT64_MAX ? (int64_t)bytes : 0;
}

/* What came since the last look; never waits. */
static void take_events(struct nvml *n)
{
    enum { AT_ONCE = 1000 };
    struct event_data e;
    for (int i = 0; n->events && i < AT_ONCE && n->call.events_wait(n->events, &e, 0) == NVML_SUCCESS; i++) {
        if (!(e.type & NVML_EVENT_TYPE_XID))
            continue;
        for (int g = 0; g < NVML_GPUS_MAX; g++) {
            if (!n->gpus[g].handle || n->gpus[g].handle != e.device)
                continue;
            n->gpus[g].last_xid = (unsigned)e.data;
            n->gpus[g].last_xid_ns = clock_mono_ns();
            if (!n->gpus[g].xid && bad_xid((unsigned)e.data))
                n->gpus[g].xid = (unsigned)e.data;
        }
    }
}

/* What a screen's processes use. They are no strangers: a GPU with a screen on it is given away all the same. */
static int64_t used_by_graphics(struct nvml *n, struct device_handle *handle, bool *all_told)
{
    struct process_info list[NVML_PROCESSES_MAX];
    unsigned count = NVML_PROCESSES_MAX;
    int64_t bytes = 0;
    int code = n->call.graphics ? n->call.graphics(handle, &count, list) : NVML_SUCCESS;
    *all_told = *all_told && code != NVML_ERROR_INSUFFICIENT_SIZE; /* else it knows no such processes */
    for (unsigned i = 0; n->call.graphics && code == NVML_SUCCESS && i < count && i < NVML_PROCESSES_MAX; i++) {
        bytes += known(list[i].bytes);
        *all_told = *all_told && list[i].bytes <= INT64_MAX;
    }
    return bytes;
}

static void look_at_processes(struct nvml *n, struct device_handle *handle, struct nvml_gpu *out)
{
    struct process_info list[NVML_PROCESSES_MAX];
    unsigned count = NVML_PROCESSES_MAX;
    int64_t named = 0;
    bool all_told = true; /* how much each of them uses */
    int code = n->call.processes(handle, &count, list);
    out->crowded = code == NVML_ERROR_INSUFFICIENT_SIZE; /* where the list is too short nothing of it is filled in */
    for (unsigned i = 0; code == NVML_SUCCESS && i < count && i < NVML_PROCESSES_MAX; i++) {
        named += known(list[i].bytes);
        all_told = all_told && list[i].bytes <= INT64_MAX;
        if (list[i].pid == 0 || list[i].pid > INT_MAX)
            continue; /* no process: of another container, or nonsense, and to kill() a group */
        out->processes[out->n_processes++] = (struct nvml_process){list[i].pid, known(list[i].bytes)};
    }
    named += used_by_graphics(n, handle, &all_told);
    struct memory_info_v2 memory = {.version = NVML_MEMORY_V2};
    /* The older call counts what the driver keeps for itself as used. */
    if (code == NVML_SUCCESS && all_told && n->call.memory_v2 && !n->call.memory_v2(handle, &memory) &&
        known(memory.used) > named)
        out->unknown_bytes = known(memory.used) - named;
}

static void look_at_health(struct nvml *n, struct device_handle *handle, struct nvml_gpu *out)
{
    unsigned long long errors = 0;
    unsigned corrected, uncorrected, pending, broken = 0, mig = 0;
    if (n->call.mig && n->call.mig(handle, &mig, &pending) == NVML_SUCCESS && mig == NVML_DEVICE_MIG_ENABLE)
        snprintf(out->trouble, sizeof out->trouble, "MIG mode: not supported");
    else if (n->call.ecc(handle, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, &errors) == NVML_SUCCESS &&
             errors)
        snprintf(out->trouble, sizeof out->trouble, "%llu uncorrected memory error%s since its last reset", errors,
                 errors == 1 ? "" : "s");
    else if (n->call.remapped && !n->call.remapped(handle, &corrected, &uncorrected, &pending, &broken) && broken)
        snprintf(out->trouble, sizeof out->trouble, "a bad memory row could not be put aside");
}

static void look_at(struct nvml *n, unsigned index, struct nvml_gpu *out)
{
    struct device_handle *handle = n->gpus[index].handle;
    struct memory_info memory = {0};
    struct pci_info pci = {0};
    int code = NVML_SUCCESS;
    if (!handle) {
        code = n->call.handle(index, &handle);
        if (!code && n->events) /* a device that knows no events is as good as one on which none come */
            (void)n->call.events_register(handle, NVML_EVENT_TYPE_XID, n->events);
        n->gpus[index].handle = code ? NULL : handle;
    }
    if (!code)
        code = n->call.uuid(handle, out->uuid, sizeof out->uuid);
    if (!code)
        code = n->call.name(handle, out->name, sizeof out->name);
    if (!code)
        code = n->call.memory(handle, &memory);
    if (!code && !n->call.pci(handle, &pci))
        snprintf(out->bus, sizeof out->bus, "%.*s", (int)sizeof pci.bus_id - 1, pci.bus_id);
    unsigned minor;
    out->minor = !code && n->call.minor && !n->call.minor(handle, &minor) && minor <= INT_MAX ? (int)minor : -1;
    make_text(out->uuid, sizeof out->uuid);
    make_text(out->name, sizeof out->name);
    make_text(out->bus, sizeof out->bus);
    if (code) {
        const char *text = n->call.error_string(code);
        snprintf(out->trouble, sizeof out->trouble, "%.100s", text ? text : "cannot be asked");
        make_text(out->trouble, sizeof out->trouble);
    } else {
        out->memory_bytes = known(memory.total);
        out->used_bytes = known(memory.used);
        look_at_processes(n, handle, out);
        look_at_health(n, handle, out);
    }
    out->last_xid = n->gpus[index].last_xid;
    out->last_xid_ns = n->gpus[index].last_xid_ns;
    if (n->gpus[index].xid)
        snprintf(out->trouble, sizeof out->trouble, "Xid %u (%s)", n->gpus[index].xid, bad_xid(n->gpus[index].xid));
}

/* ---- among each other ---- */

/* CUDA_VISIBLE_DEVICES could not tell them apart. */
static void find_twins(struct nvml_picture *p)
{
    for (int i = 0; i < p->n; i++)
        for (int k = 0; k < p->n; k++)
            if (i != k && p->gpus[i].uuid[0] && strcmp(p->gpus[i].uuid, p->gpus[k].uuid) == 0 && !p->gpus[i].trouble[0])
                snprintf(p->gpus[i].trouble, sizeof p->gpus[i].trouble, "gpu %d has the same UUID", k);
}

/* Asked once: what NVLink joins does not change while the driver is loaded. */
static void look_at_links(struct nvml *n, int count)
{
    if (n->linked == count)
        return;
    for (int i = 0; i < count; i++)
        n->gpus[i].group = i;
    for (int i = 0; n->call.p2p && i < count; i++)
        for (int k = 0; k < i; k++) {
            int status = -1;
            struct device_handle *a = n->gpus[i].handle, *b = n->gpus[k].handle;
            if (!a || !b || n->call.p2p(a, b, NVML_P2P_CAPS_INDEX_NVLINK, &status) || status != NVML_P2P_STATUS_OK)
                continue;
            int from = n->gpus[i].group, to = n->gpus[k].group;
            for (int j = 0; j < count; j++) /* joins the two groups under the lower number */
                if (n->gpus[j].group == (from > to ? from : to))
                    n->gpus[j].group = from > to ? to : from;
        }
    n->linked = count;
    for (int i = 0; i < count; i++)
        if (!n->gpus[i].handle) /* one that could not be had yet is asked when it can */
            n->linked = 0;
}

static void tell_links(const struct nvml *n, struct nvml_picture *p)
{
    for (int i = 0; i < p->n; i++) {
        p->gpus[i].nvlink_group = -1;
        for (int k = 0; k < p->n; k++)
            if (k != i && n->gpus[k].group == n->gpus[i].group)
                p->gpus[i].nvlink_group = n->gpus[i].group;
    }
}

int nvml_look(struct nvml *n, struct nvml_picture *out, struct error *err)
{
    unsigned count = 0;
    memset(out, 0, sizeof *out);
    int code = n->call.count(&count);
    if (code)
        return failed(n, code, "nvmlDeviceGetCount", err);
    take_events(n);
    out->n = count < NVML_GPUS_MAX ? (int)count : NVML_GPUS_MAX;
    for (int i = 0; i < out->n; i++)
        look_at(n, (unsigned)i, &out->gpus[i]);
    find_twins(out);
    look_at_links(n, out->n);
    tell_links(n, out);
    if (n->call.driver_version(out->driver, sizeof out->driver))
        out->driver[0] = '\0';
    make_text(out->driver, sizeof out->driver);
    return ERR_OK;
}
