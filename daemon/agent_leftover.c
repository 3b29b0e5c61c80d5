/* agent_leftover.h */
#include "daemon/agent_leftover.h"

#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/base/buffer.h"
#include "proto/base/fs.h"

enum { ENVIRON_MAX = 4 << 20 };

/* Whatever a process may call itself, as one line of text. */
static void process_name(long pid, char out[32])
{
    char path[64];
    struct buffer text;
    snprintf(path, sizeof path, "/proc/%ld/comm", pid);
    buffer_init(&text, 4096);
    snprintf(out, 32, "?");
    if (!fs_read_file(path, &text, NULL) && text.len)
        snprintf(out, 32, "%.*s", (int)strcspn((char *)text.data, "\n"), (char *)text.data);
    for (char *c = out; *c; c++)
        if (*c < ' ' || *c > '~')
            *c = '?';
    buffer_free(&text);
}

/* The next directory of a process other than this one; 0: no more. */
static long next_process(DIR *proc)
{
    struct dirent *e;
    while ((e = readdir(proc))) {
        char *end;
        long pid = strtol(e->d_name, &end, 10);
        if (!*end && pid > 0 && pid != (long)getpid())
            return pid;
    }
    return 0;
}

/* The part of the environment behind `prefix`, or NULL. */
static const char *environment_with(long pid, const char *prefix, struct buffer *scratch)
{
    char path[64];
    size_t len = strlen(prefix);
    snprintf(path, sizeof path, "/proc/%ld/environ", pid);
    buffer_clear(scratch);
    if (fs_read_file(path, scratch, NULL))
        return NULL;
    for (size_t i = 0; i < scratch->len; i += strlen((char *)scratch->data + i) + 1)
        if (strncmp((char *)scratch->data + i, prefix, len) == 0)
            return (char *)scratch->data + i + len;
    return NULL;
}

static bool listed(const char *list, const char *name)
{
    while (*list && strcmp(list, name) != 0)
        list += strlen(list) + 1;
    return *list != '\0';
}

int leftovers_find(const char *attempts_dir, const char *live, struct leftover out[LEFTOVERS_MAX])
{
    char prefix[PATH_MAX + 32];
    struct buffer environment;
    DIR *proc = opendir("/proc");
    int n = 0;
    if (!proc)
        return -1;
    snprintf(prefix, sizeof prefix, "BOOST_RUN_DIR=%s/", attempts_dir);
    buffer_init(&environment, ENVIRON_MAX);
    for (long pid; n < LEFTOVERS_MAX && (pid = next_process(proc));) {
        struct leftover *x = &out[n];
        const char *attempt = environment_with(pid, prefix, &environment);
        struct proc_info info;
        if (!attempt || listed(live, attempt) || procid_get((pid_t)pid, &x->id, NULL) || !procid_alive(&x->id) ||
            !proc_read((pid_t)pid, &info))
            continue;
        x->uid = info.uid;
        snprintf(x->attempt, sizeof x->attempt, "%s", attempt);
        process_name(pid, x->name);
        n++;
    }
    closedir(proc);
    buffer_free(&environment);
    return n;
}

static bool has_open(long pid, const char *path)
{
    char dir[64], name[PATH_MAX], target[PATH_MAX];
    bool found = false;
    snprintf(dir, sizeof dir, "/proc/%ld/fd", pid);
    DIR *fds = opendir(dir);
    for (struct dirent *e; fds && !found && (e = readdir(fds));) {
        snprintf(name, sizeof name, "%s/%.200s", dir, e->d_name);
        ssize_t len = readlink(name, target, sizeof target - 1);
        target[len > 0 ? len : 0] = '\0';
        found = strcmp(target, path) == 0;
    }
    if (fds)
        closedir(fds);
    return found;
}

pid_t file_holder(const char *path, char name[32])
{
    DIR *proc = opendir("/proc");
    long pid = 0;
    while (proc && (pid = next_process(proc)) && !has_open(pid, path))
        ;
    if (proc)
        closedir(proc);
    if (pid)
        process_name(pid, name);
    return (pid_t)pid;
}
