/* What a process is: (boot id, pid, start time), since a pid alone may by now be
 * somebody else's. Nothing in this product signals a bare pid: a signal goes through
 * a pidfd whose identity was checked after it was opened, or, on a kernel without
 * pidfd, right after the check.
 *
 * Any thread; no state beyond a cached boot id. */
#ifndef BOOST_DAEMON_PROCID_H
#define BOOST_DAEMON_PROCID_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "proto/base/error.h"

enum { BOOT_ID_TEXT = 40 };

struct procid {
    char boot_id[BOOT_ID_TEXT];
    pid_t pid;
    uint64_t start; /* clock ticks since boot, /proc/PID/stat field 22 */
};

/* One line of /proc/PID/stat, and the owner of the process. */
struct proc_info {
    pid_t pid, ppid, pgrp;
    char state;
    uint64_t start;
    uid_t uid; /* effective */
};

/* The kernel's boot id without its newline, "" when it cannot be read. */
const char *procid_boot_id(void);
/* False: there is no such process. */
bool proc_read(pid_t pid, struct proc_info *out);
/* ERR_NOT_FOUND when there is no such process. */
MUST_USE int procid_get(pid_t pid, struct procid *out, struct error *err);
/* As a file: "<boot id> <pid> <start>\n", durable. ERR_CORRUPT when it does not parse. */
MUST_USE int procid_save(const char *path, const struct procid *id, struct error *err);
MUST_USE int procid_load(const char *path, struct procid *out, struct error *err);

/* Whether this very process still runs; a zombie does not. */
bool procid_alive(const struct procid *id);
/* ERR_NOT_FOUND: this process is gone, nothing was signalled. */
MUST_USE int procid_signal(const struct procid *id, int sig, struct error *err);

/* How to find the processes of an attempt whose keeper is gone: those that carry
 * `marker` ("KEY=value") in their initial environment, the leaders, the process
 * groups of leaders that are still there, and all descendants of any of these. */
struct proc_sweep {
    const char *marker;
    const struct procid *leaders;
    int leader_count;
    bool only_uid; /* leave alone whatever does not belong to `uid` */
    uid_t uid;
};
/* Sends `sig` (0: none) to each found process except the caller; returns how many
 * are alive (zombies are not), or -1 when /proc cannot be read. */
int proc_sweep(const struct proc_sweep *sweep, int sig);
/* SIGKILL to the caller's direct children; nobody but the caller can reap them, so their pids are theirs
 * as long as no other thread of it waits for children. */
void proc_kill_children(void);

#endif
