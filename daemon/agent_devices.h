/* The GPUs that this node gives away: which rank has which, which of them are sound, and who else uses them. A thread
 * looks at them every two seconds and asks nothing of the loop; what is given away stands in the start.pb of the
 * attempts that are here, so a new agent knows it too. All on the agent's loop. */
#ifndef BOOST_DAEMON_AGENT_DEVICES_H
#define BOOST_DAEMON_AGENT_DEVICES_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/arena.h"
#include "proto/base/error.h"
#include "proto/rpc.pb-c.h"
#include "proto/worker.pb-c.h"

struct agent;
struct agent_devices;

/* Looks for the first time, some seconds at most; a driver that takes longer is heard of when it answers. *out stays
 * NULL where the configuration wants no GPUs. */
MUST_USE int devices_open(struct agent *agent, struct agent_devices **out, struct error *err);
/* Whether a thread still looks: then devices_close() has to wait, or not be called. */
bool devices_busy(const struct agent_devices *d);
void devices_close(struct agent_devices *d);

/* GPUs there are, whoever has them and whatever their state. */
int devices_count(const struct agent_devices *d);
/* For the clock: looks again when it is time, and tells the controller what has changed. */
void devices_run(struct agent *agent, int64_t now);
/* What it is to be told, in `arena`; NULL: not known yet, or out of memory. */
Boost__DeviceReport *devices_report(struct agent *agent, struct arena *arena);
/* It has been told what devices_report() gave last. */
void devices_told(struct agent_devices *d);

/* Whether no GPU of a node that should have some can be had for what is wrong with them, and why. */
bool devices_unsound(const struct agent *agent, char *why, size_t cap);

/* Fills in devices, device_name and peak_flops of an order: for a job on CUDA GPUs that are sound, free and
 * used by nobody else, joined by NVLink where that can be (agent_choose.h). ERR_BUSY says why there are too few. */
MUST_USE int devices_assign(struct agent *agent, Boost__AttemptStart *start, struct error *err);

/* The number of a look that begins after this call; devices_looked() reaches it when it is over. */
uint64_t devices_look_now(struct agent *agent);
uint64_t devices_looked(const struct agent_devices *d);
/* Whether the last look found nobody's memory (gpu_unknown_mib) on the GPUs of an attempt that has ended: the driver
 * takes some time to free what a process had. */
bool devices_released(const struct agent *agent, const Boost__AttemptStart *start);
/* "gpu 3 (NVIDIA H200): Xid 79 (fell off the bus)": of a rank of the order, with what is known to be wrong. NULL: it
 * has no GPU, or no memory. The caller frees it. */
char *devices_describe(const struct agent *agent, const Boost__AttemptStart *start, int rank);

#endif
