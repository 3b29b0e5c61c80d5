/* GPUs of this node through NVIDIA's management library, opened at run time: what there is, who uses it, whether it is
 * sound. The declarations of the library that are used stand in agent_nvml.c; another library with the same functions
 * can take its place (tests).
 *
 * Calls may block for as long as the driver does, so they belong into a thread; one at a time. */
#ifndef BOOST_DAEMON_AGENT_NVML_H
#define BOOST_DAEMON_AGENT_NVML_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/error.h"

enum { NVML_GPUS_MAX = 64, NVML_PROCESSES_MAX = 32 };

struct nvml_process {
    int64_t pid; /* in the driver's eyes: of the host, where we are in a container */
    int64_t bytes;
};
struct nvml_gpu {
    char uuid[96]; /* "" when it cannot even be asked that */
    char name[96];
    char bus[32];
    int64_t memory_bytes, used_bytes;
    int64_t unknown_bytes; /* used by none of the processes that the driver names, not by itself either; 0: not known */
    int minor;             /* /dev/nvidia<minor>; -1: not known */
    int nvlink_group;      /* the lowest index of those that NVLink joins it with; -1: none, or not known */
    struct nvml_process processes[NVML_PROCESSES_MAX];
    int n_processes;
    bool crowded; /* more than the list holds use it; none of them is in it */
    /* Of one with unknown_bytes, for agent_devices.c to fill in: a process that has it open, 0: none is seen. */
    int64_t holder;
    char holder_name[32];
    /* Why it should get no new work, "" = sound. Of an Xid for the life of the handle: what a reset has mended is
     * told anew by a new agent; what no reset mends the device says of itself again. */
    char trouble[128];
    unsigned last_xid; /* of any kind; 0: none came */
    int64_t last_xid_ns;
};
struct nvml_picture {
    struct nvml_gpu gpus[NVML_GPUS_MAX]; /* by index, the order of the PCI bus */
    int n;
    char driver[80];
};

struct nvml;
/* ERR_NOT_FOUND: there is no such library, so no NVIDIA driver. ERR_DEVICE: it is there and does not work. */
MUST_USE int nvml_open(const char *library, struct nvml **out, struct error *err);
MUST_USE int nvml_look(struct nvml *n, struct nvml_picture *out, struct error *err);
void nvml_close(struct nvml *n);

#endif
