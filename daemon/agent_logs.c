/* agent_logs.h */
#include "daemon/agent_logs.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/agent_node.h"
#include "proto/base/fs.h"

struct kept {
    char path[PATH_MAX];
    int64_t bytes;
    struct timespec newest;
};

static bool is_log(const char *name)
{
    const char *dot = strstr(name, ".log");
    return dot && (!strcmp(dot, ".log") || !strcmp(dot, ".log.1") || !strcmp(dot, ".log.pos") ||
                   !strcmp(dot, ".log.times"));
}

static int move_logs(const char *from, const char *to, struct error *err)
{
    DIR *dir = opendir(from);
    if (!dir)
        return error_errno(err, errno, "cannot read %s", from);
    int rc = ERR_OK;
    struct dirent *e;
    while (!rc && (e = readdir(dir))) {
        char source[PATH_MAX], target[PATH_MAX];
        if (!is_log(e->d_name))
            continue;
        rc = fs_join(source, sizeof source, err, from, e->d_name);
        if (!rc)
            rc = fs_join(target, sizeof target, err, to, e->d_name);
        if (!rc && rename(source, target) < 0)
            rc = error_errno(err, errno, "cannot move %s to %s", source, target);
    }
    closedir(dir);
    return rc;
}

int agent_logs_keep(struct agent *agent, const char *run_dir, struct error *err)
{
    char to[PATH_MAX];
    int rc = fs_join(to, sizeof to, err, agent->logs_dir, strrchr(run_dir, '/') + 1);
    if (!rc)
        rc = fs_make_dirs(to, 0700, err);
    if (!rc)
        rc = move_logs(run_dir, to, err);
    return rc ? rc : agent_logs_trim(agent->logs_dir, agent->config->log_keep_bytes, err);
}

static void measure(struct kept *k)
{
    DIR *dir = opendir(k->path);
    struct dirent *e;
    while (dir && (e = readdir(dir))) {
        struct stat st;
        if (fstatat(dirfd(dir), e->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0 || !S_ISREG(st.st_mode))
            continue;
        k->bytes += st.st_size;
        if (st.st_mtim.tv_sec > k->newest.tv_sec ||
            (st.st_mtim.tv_sec == k->newest.tv_sec && st.st_mtim.tv_nsec > k->newest.tv_nsec))
            k->newest = st.st_mtim;
    }
    if (dir)
        closedir(dir);
}

static int older_first(const void *x, const void *y)
{
    const struct timespec *a = &((const struct kept *)x)->newest, *b = &((const struct kept *)y)->newest;
    if (a->tv_sec != b->tv_sec)
        return a->tv_sec < b->tv_sec ? -1 : 1;
    return (a->tv_nsec > b->tv_nsec) - (a->tv_nsec < b->tv_nsec);
}

int agent_logs_trim(const char *logs_dir, int64_t limit, struct error *err)
{
    DIR *dir = opendir(logs_dir);
    if (!dir)
        return error_errno(err, errno, "cannot read %s", logs_dir);
    struct kept *list = NULL;
    size_t count = 0, cap = 0;
    int64_t total = 0;
    int rc = ERR_OK;
    struct dirent *e;
    while (!rc && (e = readdir(dir))) {
        if (e->d_name[0] == '.')
            continue;
        if (count == cap) {
            cap = cap ? cap * 2 : 64;
            struct kept *more = realloc(list, cap * sizeof *list);
            if (!more) {
                rc = error_set(err, ERR_NOMEM, "no memory to look through %s", logs_dir);
                break;
            }
            list = more;
        }
        list[count] = (struct kept){.bytes = 0};
        rc = fs_join(list[count].path, sizeof list[count].path, err, logs_dir, e->d_name);
        if (rc)
            break;
        measure(&list[count]);
        total += list[count++].bytes;
    }
    closedir(dir);
    if (count)
        qsort(list, count, sizeof *list, older_first);
    for (size_t i = 0; i < count && !rc && total > limit; i++) {
        rc = fs_remove_tree(list[i].path, err);
        total -= list[i].bytes;
    }
    free(list);
    return rc;
}
