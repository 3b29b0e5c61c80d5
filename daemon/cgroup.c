/* cgroup.h */
#include "daemon/cgroup.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "proto/base/buffer.h"
#include "proto/base/fs.h"

enum { PROC_TEXT = 1 << 20, GROUP_MAGIC = 0x63677270 /* CGROUP2_SUPER_MAGIC */ };
static const char *const group_prefix = "boost-";

/* The mount point of the cgroup2 hierarchy, from /proc/self/mountinfo: fields 4 (root)
 * and 5 (mount point), and the type after " - ". Only a mount of the whole hierarchy will do. */
static bool find_mount(char out[PATH_MAX])
{
    struct buffer text;
    buffer_init(&text, PROC_TEXT);
    bool found = false;
    if (!fs_read_file("/proc/self/mountinfo", &text, NULL)) {
        for (char *line = (char *)text.data; line && *line && !found;) {
            char *next = strchr(line, '\n');
            if (next)
                *next++ = '\0';
            if (strstr(line, " - cgroup2 ")) {
                const char *field = line;
                for (int i = 1; field && i < 5; i++)
                    field = (field = strchr(field, ' ')) ? field + 1 : NULL;
                found = field && snprintf(out, PATH_MAX, "%.*s", (int)strcspn(field, " "), field) < PATH_MAX;
            }
            line = next;
        }
    }
    buffer_free(&text);
    return found;
}

/* This process's place in the hierarchy: the line "0::/path" of /proc/self/cgroup. */
static bool find_own(char out[PATH_MAX])
{
    struct buffer text;
    buffer_init(&text, PROC_TEXT);
    bool found = false;
    if (!fs_read_file("/proc/self/cgroup", &text, NULL) && text.data) {
        char *at = !strncmp((char *)text.data, "0::", 3) ? (char *)text.data : strstr((char *)text.data, "\n0::");
        if (at) {
            at = strchr(at, '/');
            if (at) {
                at[strcspn(at, "\n")] = '\0';
                found = snprintf(out, PATH_MAX, "%s", strcmp(at, "/") ? at : "") < PATH_MAX;
            }
        }
    }
    buffer_free(&text);
    return found;
}

static bool is_group(const char *path)
{
    struct statfs fs;
    const char *name = strrchr(path, '/');
    return name && !strncmp(name + 1, group_prefix, strlen(group_prefix)) && statfs(path, &fs) == 0 &&
           fs.f_type == GROUP_MAGIC;
}

static bool group_file(const struct cgroup *cg, const char *name, char out[PATH_MAX])
{
    return cg->path[0] && !fs_join(out, PATH_MAX, NULL, cg->path, name);
}

int cgroup_create(struct cgroup *cg, const char *name, struct error *err)
{
    char mount[PATH_MAX], own[PATH_MAX], path[PATH_MAX];
    cg->path[0] = '\0';
    if (!find_mount(mount) || !find_own(own))
        return error_set(err, ERR_UNSUPPORTED, "no cgroup2 mount");
    int used = snprintf(path, sizeof path, "%s%s/%s%s", mount, own, group_prefix, name);
    if (used < 0 || (size_t)used >= sizeof path)
        return error_set(err, ERR_UNSUPPORTED, "cgroup path too long");
    if (mkdir(path, 0755) < 0 && errno != EEXIST)
        return error_set(err, ERR_UNSUPPORTED, "cannot create the cgroup %s: %s", path, strerror(errno));
    memcpy(cg->path, path, (size_t)used + 1);
    char kill_file[PATH_MAX];
    int fd = cgroup_join_fd(cg);
    bool usable = is_group(path) && fd >= 0 && group_file(cg, "cgroup.kill", kill_file) && !access(kill_file, W_OK);
    if (fd >= 0)
        close(fd);
    if (usable)
        return ERR_OK;
    cgroup_remove(cg);
    return error_set(err, ERR_UNSUPPORTED, "the cgroup %s cannot be used", path);
}

void cgroup_adopt(struct cgroup *cg, const char *path)
{
    cg->path[0] = '\0';
    if (is_group(path) && strlen(path) < sizeof cg->path)
        memcpy(cg->path, path, strlen(path) + 1);
}

int cgroup_join_fd(const struct cgroup *cg)
{
    char path[PATH_MAX];
    return group_file(cg, "cgroup.procs", path) ? open(path, O_WRONLY | O_CLOEXEC) : -1;
}

bool cgroup_kill(const struct cgroup *cg)
{
    char path[PATH_MAX];
    int fd = group_file(cg, "cgroup.kill", path) ? open(path, O_WRONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return false;
    bool done = write(fd, "1", 1) == 1;
    close(fd);
    return done;
}

/* The number after "key " in a flat-keyed file of the group; -1 when it is not there. */
static int64_t keyed_value(const struct cgroup *cg, const char *file, const char *key)
{
    char path[PATH_MAX];
    struct buffer text;
    buffer_init(&text, PROC_TEXT);
    int64_t value = -1;
    if (group_file(cg, file, path) && !fs_read_file(path, &text, NULL) && text.data) {
        size_t len = strlen(key);
        for (const char *line = (const char *)text.data; line && *line; line = strchr(line, '\n')) {
            line += *line == '\n';
            if (!strncmp(line, key, len) && line[len] == ' ')
                value = strtoll(line + len, NULL, 10);
        }
    }
    buffer_free(&text);
    return value;
}

bool cgroup_populated(const struct cgroup *cg)
{
    return keyed_value(cg, "cgroup.events", "populated") > 0;
}

int64_t cgroup_oom_kills(const struct cgroup *cg)
{
    return keyed_value(cg, "memory.events", "oom_kill");
}

void cgroup_remove(struct cgroup *cg)
{
    if (cg->path[0])
        rmdir(cg->path);
    cg->path[0] = '\0';
}
