/* procid.h */
#include "daemon/procid.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "proto/base/buffer.h"
#include "proto/base/fs.h"

enum { STAT_TEXT = 4096, ENVIRON_MAX = 4 << 20, ID_FILE_MAX = 256 };

/* Up to cap - 1 bytes of a /proc file, NUL-terminated; -1 when it is not there. */
static ssize_t read_proc(const char *path, char *out, size_t cap)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    size_t used = 0;
    while (used < cap - 1) {
        ssize_t n = read(fd, out + used, cap - 1 - used);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            close(fd);
            return -1;
        }
        if (n == 0)
            break;
        used += (size_t)n;
    }
    close(fd);
    out[used] = '\0';
    return (ssize_t)used;
}

const char *procid_boot_id(void)
{
    static _Thread_local char id[BOOT_ID_TEXT];
    if (!id[0] && read_proc("/proc/sys/kernel/random/boot_id", id, sizeof id) > 0)
        id[strcspn(id, "\n")] = '\0';
    return id;
}

bool proc_read(pid_t pid, struct proc_info *out)
{
    char path[64], text[STAT_TEXT];
    snprintf(path, sizeof path, "/proc/%ld/stat", (long)pid);
    if (pid <= 0 || read_proc(path, text, sizeof text) <= 0)
        return false;
    /* The command name may hold spaces and parentheses: fields count from the last ')'. */
    char *at = strrchr(text, ')');
    if (!at || at[1] != ' ' || !at[2])
        return false;
    *out = (struct proc_info){.pid = pid, .state = at[2]};
    at += 3;
    for (int field = 4; field <= 22; field++) {
        char *end;
        long long value = strtoll(at, &end, 10);
        if (end == at)
            return false;
        at = end;
        if (field == 4)
            out->ppid = (pid_t)value;
        else if (field == 5)
            out->pgrp = (pid_t)value;
        else if (field == 22)
            out->start = (uint64_t)value;
    }
    struct stat st;
    snprintf(path, sizeof path, "/proc/%ld", (long)pid);
    if (stat(path, &st) < 0)
        return false;
    out->uid = st.st_uid;
    return true;
}

static bool is_dead(char state)
{
    return state == 'Z' || state == 'X' || state == 'x';
}

int procid_get(pid_t pid, struct procid *out, struct error *err)
{
    struct proc_info info;
    if (!proc_read(pid, &info))
        return error_set(err, ERR_NOT_FOUND, "no process %ld", (long)pid);
    *out = (struct procid){.pid = pid, .start = info.start};
    snprintf(out->boot_id, sizeof out->boot_id, "%s", procid_boot_id());
    return ERR_OK;
}

int procid_save(const char *path, const struct procid *id, struct error *err)
{
    char text[ID_FILE_MAX];
    int len = snprintf(text, sizeof text, "%s %ld %llu\n", id->boot_id, (long)id->pid, (unsigned long long)id->start);
    return fs_write_durable(path, text, (size_t)len, 0644, err);
}

int procid_load(const char *path, struct procid *out, struct error *err)
{
    struct buffer text;
    buffer_init(&text, ID_FILE_MAX);
    int rc = fs_read_regular(path, &text, err);
    if (rc)
        goto out;
    *out = (struct procid){0};
    char *at = text.data ? (char *)text.data : (char[]){""};
    size_t id_len = strcspn(at, " \n");
    char *end = at + id_len;
    if (id_len > 0 && id_len < sizeof out->boot_id && *end == ' ') {
        memcpy(out->boot_id, at, id_len);
        out->pid = (pid_t)strtol(end, &end, 10);
        out->start = *end == ' ' ? strtoull(end, &end, 10) : 0;
    }
    if (out->pid <= 0 || !out->start || *end != '\n')
        rc = error_set(err, ERR_CORRUPT, "%s does not hold a process identity", path);
out:
    buffer_free(&text);
    return rc;
}

/* The process of that pid is the one meant, zombie or not. */
static bool is_same(const struct procid *id, struct proc_info *info)
{
    return !strcmp(id->boot_id, procid_boot_id()) && proc_read(id->pid, info) && info->start == id->start;
}

bool procid_alive(const struct procid *id)
{
    struct proc_info info;
    return is_same(id, &info) && !is_dead(info.state);
}

int procid_signal(const struct procid *id, int sig, struct error *err)
{
    struct proc_info info;
    int rc = ERR_OK;
    int fd = (int)syscall(SYS_pidfd_open, id->pid, 0);
    bool no_pidfd = fd < 0 && errno != ESRCH;
    /* The descriptor pins the process that had the pid when it was opened, so the check comes after. */
    if ((fd < 0 && !no_pidfd) || !is_same(id, &info) || is_dead(info.state))
        rc = error_set(err, ERR_NOT_FOUND, "process %ld is gone", (long)id->pid);
    else if ((no_pidfd ? kill(id->pid, sig) : (int)syscall(SYS_pidfd_send_signal, fd, sig, NULL, 0)) < 0)
        rc = errno == ESRCH ? error_set(err, ERR_NOT_FOUND, "process %ld is gone", (long)id->pid)
                            : error_errno(err, errno, "cannot signal process %ld", (long)id->pid);
    if (fd >= 0)
        close(fd);
    return rc;
}

/* ---- sweep ---- */

struct found {
    struct proc_info info;
    bool ours;
};

struct found_list {
    struct found *items;
    size_t count, cap;
};

static bool has_marker(pid_t pid, const char *marker, struct buffer *scratch)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%ld/environ", (long)pid);
    buffer_clear(scratch);
    if (fs_read_file(path, scratch, NULL))
        return false;
    size_t len = strlen(marker);
    for (size_t i = 0; i < scratch->len;) {
        const char *entry = (const char *)scratch->data + i;
        size_t entry_len = strlen(entry);
        if (entry_len == len && !memcmp(entry, marker, len))
            return true;
        i += entry_len + 1;
    }
    return false;
}

static bool collect(struct found_list *list)
{
    DIR *dir = opendir("/proc");
    if (!dir)
        return false;
    struct dirent *e;
    while ((e = readdir(dir))) {
        char *end;
        long pid = strtol(e->d_name, &end, 10);
        struct found f = {0};
        if (*end || pid <= 0 || pid == getpid() || !proc_read((pid_t)pid, &f.info) || is_dead(f.info.state))
            continue;
        if (list->count == list->cap) {
            size_t cap = list->cap ? list->cap * 2 : 256;
            struct found *items = realloc(list->items, cap * sizeof *items);
            if (!items) {
                closedir(dir);
                return false;
            }
            list->items = items;
            list->cap = cap;
        }
        list->items[list->count++] = f;
    }
    closedir(dir);
    return true;
}

static bool led_by_ours(const struct proc_sweep *sweep, const struct proc_info *p)
{
    struct proc_info leader;
    for (int i = 0; i < sweep->leader_count; i++) {
        /* A group's number is its leader's pid and pinned while the leader, dead or not, is there. */
        if (p->pgrp == sweep->leaders[i].pid && is_same(&sweep->leaders[i], &leader))
            return true;
    }
    return false;
}

int proc_sweep(const struct proc_sweep *sweep, int sig)
{
    struct found_list list = {0};
    struct buffer environment;
    buffer_init(&environment, ENVIRON_MAX);
    int alive = -1;
    if (!collect(&list))
        goto out;
    for (size_t i = 0; i < list.count; i++) {
        struct found *f = &list.items[i];
        f->ours =
            led_by_ours(sweep, &f->info) || (sweep->marker && has_marker(f->info.pid, sweep->marker, &environment));
    }
    for (bool changed = true; changed;) {
        changed = false;
        for (size_t i = 0; i < list.count; i++) {
            for (size_t j = 0; j < list.count && !list.items[i].ours; j++) {
                if (list.items[j].ours && list.items[j].info.pid == list.items[i].info.ppid)
                    changed = list.items[i].ours = true;
            }
        }
    }
    alive = 0;
    for (size_t i = 0; i < list.count; i++) {
        struct found *f = &list.items[i];
        if (!f->ours || (sweep->only_uid && f->info.uid != sweep->uid))
            continue;
        struct procid id = {.pid = f->info.pid, .start = f->info.start};
        snprintf(id.boot_id, sizeof id.boot_id, "%s", procid_boot_id());
        if (sig ? procid_signal(&id, sig, NULL) != ERR_NOT_FOUND : procid_alive(&id))
            alive++;
    }
out:
    free(list.items);
    buffer_free(&environment);
    return alive;
}

void proc_kill_children(void)
{
    struct found_list list = {0};
    if (collect(&list)) {
        for (size_t i = 0; i < list.count; i++) {
            if (list.items[i].info.ppid == getpid())
                kill(list.items[i].info.pid, SIGKILL);
        }
    }
    free(list.items);
}
