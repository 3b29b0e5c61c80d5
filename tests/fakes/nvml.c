/* A stand-in for libnvidia-ml.so.1 whose GPUs stand in the text file that $FAKE_NVML names, read anew at every call:
 *
 *   count 4        GPUs, in front of all else
 *   1 ecc 2        of GPU 1: uncorrected memory errors
 *   2 xid 79       an event, which comes once
 *   0 pid 4711     a process uses it
 *   3 lost 1       it cannot be asked any more
 *   0 wild 1       it fills in bytes of 0xff, texts without an end
 *   1 mig 1        it is in MIG mode
 *   1 same 0       it has the UUID of GPU 0
 *   0 used 900     MiB used, without the driver's own; else 1
 *   0 slow 500     milliseconds that it takes to be asked for its UUID
 *   0 screen 700   MiB that a process for graphics uses
 *   1 link 0       NVLink joins it with GPU 0
 */
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GPUS = 16, SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, IS_LOST = 15 };

struct device {
    int index;
};
static struct device devices[GPUS];
static int events_given;

struct memory {
    unsigned long long total, free, used;
};
struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};
struct pci {
    char legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char id[32];
};
struct process {
    unsigned pid;
    unsigned long long bytes;
    unsigned gpu_instance, compute_instance;
};
struct event {
    struct device *device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
};

int nvmlInit_v2(void);
int nvmlShutdown(void);
const char *nvmlErrorString(int code);
int nvmlSystemGetDriverVersion(char *out, unsigned len);
int nvmlDeviceGetCount_v2(unsigned *out);
int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **out);
int nvmlDeviceGetUUID(struct device *d, char *out, unsigned len);
int nvmlDeviceGetName(struct device *d, char *out, unsigned len);
int nvmlDeviceGetMemoryInfo(struct device *d, struct memory *out);
int nvmlDeviceGetPciInfo_v3(struct device *d, struct pci *out);
int nvmlDeviceGetComputeRunningProcesses_v3(struct device *d, unsigned *count, struct process *out);
int nvmlDeviceGetGraphicsRunningProcesses_v3(struct device *d, unsigned *count, struct process *out);
int nvmlDeviceGetTotalEccErrors(struct device *d, int type, int counter, unsigned long long *out);
int nvmlDeviceGetRemappedRows(struct device *d, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                              unsigned *failed);
int nvmlDeviceGetMemoryInfo_v2(struct device *d, struct memory_v2 *out);
int nvmlDeviceGetMinorNumber(struct device *d, unsigned *out);
int nvmlDeviceGetMigMode(struct device *d, unsigned *current, unsigned *pending);
int nvmlDeviceGetP2PStatus(struct device *a, struct device *b, int what, int *status);
int nvmlEventSetCreate(void **out);
int nvmlDeviceRegisterEvents(struct device *d, unsigned long long types, void *set);
int nvmlEventSetWait_v2(void *set, struct event *out, unsigned timeout_ms);
int nvmlEventSetFree(void *set);

/* The value of the nth line (from 0) of that kind, of one GPU or (-1) of any; -1: there is none. */
static long line(int index, const char *what, int nth, int *whose)
{
    const char *path = getenv("FAKE_NVML");
    FILE *f = path ? fopen(path, "r") : NULL;
    char text[128];
    long found = -1;
    while (f && found < 0 && fgets(text, sizeof text, f)) {
        char *rest = text;
        long gpu = strncmp(text, "count ", 6) == 0 ? -2 : strtol(text, &rest, 10);
        rest += *rest == ' ';
        size_t len = strlen(what);
        if (strncmp(rest, what, len) != 0 || rest[len] != ' ' || (index >= 0 && gpu != index) || nth-- > 0)
            continue;
        found = strtol(rest + len + 1, NULL, 10);
        if (whose)
            *whose = (int)gpu;
    }
    if (f)
        fclose(f);
    return found;
}

static int put(char *out, unsigned len, const char *text)
{
    snprintf(out, len, "%s", text);
    return SUCCESS;
}

int nvmlInit_v2(void)
{
    return SUCCESS;
}

int nvmlShutdown(void)
{
    return SUCCESS;
}

const char *nvmlErrorString(int code)
{
    return code == IS_LOST ? "GPU is lost" : "Unknown Error";
}

int nvmlSystemGetDriverVersion(char *out, unsigned len)
{
    return put(out, len, "580.00.fake");
}

int nvmlDeviceGetCount_v2(unsigned *out)
{
    long n = line(-1, "count", 0, NULL);
    *out = n > 0 && n <= GPUS ? (unsigned)n : 0;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **out)
{
    if (index >= GPUS)
        return NOT_FOUND;
    devices[index].index = (int)index;
    *out = &devices[index];
    return SUCCESS;
}

static bool wild(const struct device *d, void *out, size_t bytes)
{
    bool is = line(d->index, "wild", 0, NULL) > 0;
    if (is)
        memset(out, 0xff, bytes);
    return is;
}

int nvmlDeviceGetUUID(struct device *d, char *out, unsigned len)
{
    long slow = line(d->index, "slow", 0, NULL);
    if (slow > 0)
        poll(NULL, 0, (int)slow);
    if (line(d->index, "lost", 0, NULL) > 0)
        return IS_LOST;
    if (!wild(d, out, len))
        snprintf(out, len, "GPU-fake-%ld",
                 line(d->index, "same", 0, NULL) >= 0 ? line(d->index, "same", 0, NULL) : d->index);
    return SUCCESS;
}

int nvmlDeviceGetName(struct device *d, char *out, unsigned len)
{
    return wild(d, out, len) ? SUCCESS : put(out, len, "NVIDIA H200");
}

int nvmlDeviceGetMemoryInfo(struct device *d, struct memory *out)
{
    long used = line(d->index, "used", 0, NULL);
    if (wild(d, out, sizeof *out))
        return SUCCESS;
    out->total = 143771ULL << 20;
    out->used = (770ULL + (unsigned long long)(used >= 0 ? used : 1)) << 20; /* the driver's own too */
    out->free = out->total - out->used;
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(struct device *d, struct pci *out)
{
    if (wild(d, out, sizeof *out))
        return SUCCESS;
    memset(out, 0, sizeof *out);
    snprintf(out->id, sizeof out->id, "00000000:%02X:00.0", d->index + 1);
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(struct device *d, unsigned *count, struct process *out)
{
    unsigned cap = *count;
    if (wild(d, out, cap * sizeof *out))
        return SUCCESS;
    *count = 0;
    for (long pid; *count < cap && (pid = line(d->index, "pid", (int)*count, NULL)) >= 0;)
        out[(*count)++] = (struct process){.pid = (unsigned)pid, .bytes = 1 << 20};
    if (*count < cap || line(d->index, "pid", (int)cap, NULL) < 0)
        return SUCCESS;
    memset(out, 0, cap * sizeof *out); /* as the real one, which fills in nothing of a list that is too short */
    *count = cap + 1;
    return INSUFFICIENT_SIZE;
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(struct device *d, unsigned *count, struct process *out)
{
    long mib = line(d->index, "screen", 0, NULL);
    if (wild(d, out, *count * sizeof *out))
        return SUCCESS;
    *count = mib > 0;
    if (mib > 0)
        *out = (struct process){.pid = 1, .bytes = (unsigned long long)mib << 20};
    return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(struct device *d, int type, int counter, unsigned long long *out)
{
    long n = line(d->index, "ecc", 0, NULL);
    *out = type == 1 && counter == 0 && n > 0 ? (unsigned long long)n : 0;
    return SUCCESS;
}

int nvmlDeviceGetRemappedRows(struct device *d, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                              unsigned *failed)
{
    (void)d;
    *corrected = *uncorrected = *pending = *failed = 0;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(struct device *d, struct memory_v2 *out)
{
    long used = line(d->index, "used", 0, NULL);
    if (out->version != (2U << 24 | sizeof *out))
        return INVALID_ARGUMENT;
    if (wild(d, out, sizeof *out))
        return SUCCESS;
    out->total = 143771ULL << 20;
    out->reserved = 600ULL << 20;
    out->used = (unsigned long long)(used >= 0 ? used : 1) << 20;
    out->free = out->total - out->reserved - out->used;
    return SUCCESS;
}

int nvmlDeviceGetMinorNumber(struct device *d, unsigned *out)
{
    *out = (unsigned)d->index;
    return SUCCESS;
}

int nvmlDeviceGetMigMode(struct device *d, unsigned *current, unsigned *pending)
{
    *current = *pending = line(d->index, "mig", 0, NULL) == 1;
    return SUCCESS;
}

int nvmlDeviceGetP2PStatus(struct device *a, struct device *b, int what, int *status)
{
    bool joined = false;
    for (int n = 0; line(a->index, "link", n, NULL) >= 0; n++)
        joined = joined || line(a->index, "link", n, NULL) == b->index;
    for (int n = 0; line(b->index, "link", n, NULL) >= 0; n++)
        joined = joined || line(b->index, "link", n, NULL) == a->index;
    *status = what == 2 && joined ? 0 : 5;
    return SUCCESS;
}

int nvmlEventSetCreate(void **out)
{
    *out = devices;
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(struct device *d, unsigned long long types, void *set)
{
    (void)d;
    return types == 8 && set == devices ? SUCCESS : NOT_FOUND;
}

int nvmlEventSetWait_v2(void *set, struct event *out, unsigned timeout_ms)
{
    int index;
    long xid = set == devices && timeout_ms == 0 ? line(-1, "xid", events_given, &index) : -1;
    if (xid < 0)
        return TIMEOUT;
    events_given++;
    *out = (struct event){.device = &devices[index], .type = 8, .data = (unsigned long long)xid};
    return SUCCESS;
}

int nvmlEventSetFree(void *set)
{
    (void)set;
    return SUCCESS;
}
