/* new_dir.h */
#include "worker/new_dir.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/base/fs.h"
#include "worker/ckpt_place.h"

enum { TRIES = 10, MADE_UP = 6 };
static const char mark[] = ".partial-";

/* ---- what others left ---- */

static bool is_partial(const char *name, const char *base)
{
    size_t len = strlen(base);
    return !strncmp(name, base, len) && !strncmp(name + len, mark, sizeof mark - 1) &&
           strlen(name + len) == sizeof mark - 1 + MADE_UP;
}

/* Nobody works on it where its lock can be had. */
static void remove_if_left(const char *parent, const char *name)
{
    char path[PATH_MAX];
    struct stat st;
    if (fs_join(path, sizeof path, NULL, parent, name))
        return;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return;
    if (fstat(fd, &st) == 0 && st.st_uid == geteuid() && flock(fd, LOCK_EX | LOCK_NB) == 0)
        (void)!fs_remove_tree(path, NULL);
    close(fd);
}

static void remove_left(const char *to)
{
    char parent[PATH_MAX];
    const char *slash = strrchr(to, '/');
    fs_parent(parent, to);
    DIR *d = opendir(parent);
    for (struct dirent *e; d && (e = readdir(d));)
        if (is_partial(e->d_name, slash ? slash + 1 : to))
            remove_if_left(parent, e->d_name);
    if (d)
        closedir(d);
}

/* ---- one's own ---- */

/* Locked, and still there: another one that began at the same time may have taken it for left. Where the file system
 * knows no locks nobody removes anything either. */
static bool hold(struct new_dir *d)
{
    struct stat here, there;
    d->fd = open(d->temp, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    bool held = d->fd >= 0 && (flock(d->fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) &&
                fstat(d->fd, &here) == 0 && lstat(d->temp, &there) == 0 && here.st_ino == there.st_ino &&
                here.st_dev == there.st_dev;
    if (!held && d->fd >= 0) {
        close(d->fd);
        d->fd = -1;
    }
    return held;
}

static int make_temp(struct new_dir *d, struct error *err)
{
    for (int i = 0; i < TRIES; i++) {
        int used = snprintf(d->temp, sizeof d->temp, "%s%sXXXXXX", d->to, mark);
        if (used < 0 || (size_t)used >= sizeof d->temp) {
            d->temp[0] = '\0';
            return error_set(err, ERR_INVALID, "path too long: %s", d->to);
        }
        if (!mkdtemp(d->temp)) {
            d->temp[0] = '\0';
            return error_errno(err, errno, "cannot make a directory beside %s", d->to);
        }
        if (hold(d))
            return ERR_OK;
    }
    return error_set(err, ERR_BUSY, "others remove what is made beside %s", d->to);
}

int new_dir_begin(struct new_dir *d, const char *to, struct error *err)
{
    struct stat st;
    *d = (struct new_dir){.to = to, .fd = -1};
    int rc = ckpt_place_check(to, err);
    if (rc)
        return rc;
    if (lstat(to, &st) == 0 && rmdir(to) < 0) {
        error_errno(err, errno, "%s is in the way", to);
        err->code = ERR_REFUSED;
        return error_hint(err, "name a directory that is not there yet");
    }
    remove_left(to);
    rc = make_temp(d, err);
    if (!rc && chmod(d->temp, 0755) < 0)
        rc = error_errno(err, errno, "cannot make %s readable", d->temp);
    return rc;
}

int new_dir_end(struct new_dir *d, int rc, struct error *err)
{
    char parent[PATH_MAX];
    fs_parent(parent, d->to);
    if (!rc)
        rc = fs_sync_dir(d->temp, err);
    if (!rc && rename(d->temp, d->to) < 0)
        rc = error_errno(err, errno, "cannot rename %s to %s", d->temp, d->to);
    bool done = !rc;
    if (done)
        rc = fs_sync_dir(parent, err);
    else if (d->temp[0] && fs_remove_tree(d->temp, NULL))
        error_hint(err, "remove %s by hand", d->temp);
    if (d->fd >= 0)
        close(d->fd);
    d->fd = -1;
    return rc;
}
