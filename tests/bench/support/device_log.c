/* device_log.h */
#include "tests/bench/support/device_log.h"

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { NVML_CLOCK_SM = 1, SAMPLE_NS = 50 * 1000 * 1000 };

struct nvml {
    void *library, *device;
    int (*clock)(void *device, int kind, unsigned *mhz);
    int (*power)(void *device, unsigned *milliwatts);
};

/* A function of a library that was opened by hand; false: it has none of this name. */
static bool symbol(void *library, const char *name, void *out)
{
    void *found = library ? dlsym(library, name) : NULL;
    memcpy(out, &found, sizeof found);
    return found != NULL;
}

/* A process's first device is the one that its environment names, by number or by UUID. */
static bool find_device(struct nvml *n)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    char first[96];
    snprintf(first, sizeof first, "%s", visible ? visible : "0");
    first[strcspn(first, ",")] = 0;
    int (*by_index)(unsigned index, void **device);
    int (*by_uuid)(const char *uuid, void **device);
    if (!strncmp(first, "GPU-", 4))
        return symbol(n->library, "nvmlDeviceGetHandleByUUID", &by_uuid) && by_uuid(first, &n->device) == 0;
    return symbol(n->library, "nvmlDeviceGetHandleByIndex_v2", &by_index) &&
           by_index((unsigned)strtoul(first, NULL, 10), &n->device) == 0;
}

static struct nvml *open_nvml(void)
{
    struct nvml *n = calloc(1, sizeof *n);
    if (!n)
        return NULL;
    int (*init)(void);
    n->library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (symbol(n->library, "nvmlInit_v2", &init) && init() == 0 && find_device(n) &&
        symbol(n->library, "nvmlDeviceGetClockInfo", &n->clock) &&
        symbol(n->library, "nvmlDeviceGetPowerUsage", &n->power))
        return n;
    if (n->library)
        dlclose(n->library);
    free(n);
    return NULL;
}

static void close_nvml(struct nvml *n)
{
    int (*shutdown)(void);
    if (!n)
        return;
    if (symbol(n->library, "nvmlShutdown", &shutdown))
        shutdown();
    dlclose(n->library);
    free(n);
}

static void *sample(void *arg)
{
    struct device_log *log = arg;
    const struct timespec pause = {.tv_nsec = SAMPLE_NS};
    double mhz_sum = 0, watts_sum = 0;
    while (!__atomic_load_n(&log->stop, __ATOMIC_ACQUIRE)) {
        unsigned mhz, milliwatts;
        if (log->nvml->clock(log->nvml->device, NVML_CLOCK_SM, &mhz) == 0 &&
            log->nvml->power(log->nvml->device, &milliwatts) == 0) {
            mhz_sum += mhz;
            watts_sum += milliwatts / 1e3;
            log->mhz_min = log->n ? fmin(log->mhz_min, mhz) : mhz;
            log->mhz_max = log->n ? fmax(log->mhz_max, mhz) : mhz;
            log->watts_max = log->n ? fmax(log->watts_max, milliwatts / 1e3) : milliwatts / 1e3;
            log->n++;
        }
        nanosleep(&pause, NULL);
    }
    if (log->n) {
        log->mhz = mhz_sum / (double)log->n;
        log->watts = watts_sum / (double)log->n;
    }
    return NULL;
}

void device_log_begin(struct device_log *log)
{
    *log = (struct device_log){.mhz = NAN, .mhz_min = NAN, .mhz_max = NAN, .watts = NAN, .watts_max = NAN};
    log->nvml = open_nvml();
    log->running = log->nvml && !pthread_create(&log->thread, NULL, sample, log);
}

void device_log_end(struct device_log *log)
{
    __atomic_store_n(&log->stop, 1, __ATOMIC_RELEASE);
    if (log->running)
        pthread_join(log->thread, NULL);
    log->running = false;
    close_nvml(log->nvml);
    log->nvml = NULL;
}

int device_free_bytes(int64_t *bytes, struct error *err)
{
    size_t free_bytes = 0, total = 0;
    int (*get)(size_t * free_bytes, size_t * total);
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    int status = symbol(driver, "cuMemGetInfo_v2", &get) ? get(&free_bytes, &total) : -1;
    if (driver)
        dlclose(driver);
    *bytes = (int64_t)free_bytes;
    return status ? error_set(err, ERR_DEVICE, "the driver does not say what is free (%d)", status) : ERR_OK;
}
