/* fs.h */
#include "proto/base/fs.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

bool fs_exists(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0;
}

int fs_join(char *out, size_t cap, struct error *err, const char *dir, const char *name)
{
    size_t len = strlen(dir);
    const char *slash = len && dir[len - 1] == '/' ? "" : "/";
    int used = snprintf(out, cap, "%s%s%s", dir, slash, name);
    if (used < 0 || (size_t)used >= cap)
        return error_set(err, ERR_INVALID, "path too long: %s/%s", dir, name);
    return ERR_OK;
}

void fs_parent(char *out, const char *path)
{
    if (out != path)
        snprintf(out, PATH_MAX, "%s", path);
    char *slash = strrchr(out, '/');
    if (slash)
        *(slash == out ? slash + 1 : slash) = '\0';
    else
        snprintf(out, PATH_MAX, ".");
}

int fs_write_all(int fd, const void *data, size_t len, struct error *err)
{
    const char *at = data;
    while (len) {
        ssize_t n = write(fd, at, len);
        if (n < 0) {
            if (errno == EINTR)
                continue;
            return error_errno(err, errno, "write");
        }
        at += n;
        len -= (size_t)n;
    }
    return ERR_OK;
}

int fs_sync_dir(const char *path, struct error *err)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return error_errno(err, errno, "cannot open directory %s", path);
    int rc = ERR_OK;
    if (fsync(fd) < 0)
        rc = error_errno(err, errno, "fsync of directory %s", path);
    close(fd);
    return rc;
}

static int write_replace(const char *path, const void *data, size_t len, mode_t mode, bool durable,
                         struct error *err)
{
    char temp[PATH_MAX];
    int used = snprintf(temp, sizeof temp, "%s.tmp.%ld", path, (long)getpid());
    if (used < 0 || (size_t)used >= sizeof temp)
        return error_set(err, ERR_INVALID, "path too long: %s", path);
    int fd = open(temp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, mode);
    if (fd < 0)
        return error_errno(err, errno, "cannot create %s", temp);
    int rc = fs_write_all(fd, data, len, err);
    if (rc)
        error_context(err, "%s", temp);
    else if (durable && fsync(fd) < 0)
        rc = error_errno(err, errno, "fsync of %s", temp);
    if (close(fd) < 0 && !rc)
        rc = error_errno(err, errno, "close of %s", temp);
    if (!rc && rename(temp, path) < 0)
        rc = error_errno(err, errno, "rename %s to %s", temp, path);
    if (rc) {
        unlink(temp);
        return rc;
    }
    if (!durable)
        return ERR_OK;
    char dir[PATH_MAX];
    fs_parent(dir, path);
    return fs_sync_dir(dir, err);
}

int fs_write_durable(const char *path, const void *data, size_t len, mode_t mode, struct error *err)
{
    return write_replace(path, data, len, mode, true, err);
}

int fs_write_atomic(const char *path, const void *data, size_t len, mode_t mode, struct error *err)
{
    return write_replace(path, data, len, mode, false, err);
}

static int read_all(int fd, const char *path, struct buffer *out, struct error *err)
{
    int rc = ERR_OK;
    char chunk[64 << 10];
    for (;;) {
        ssize_t n = read(fd, chunk, sizeof chunk);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            rc = error_errno(err, errno, "cannot read %s", path);
        else if (n > 0 && buffer_append(out, chunk, (size_t)n))
            rc = error_set(err, ERR_INVALID, "%s is larger than the limit of %zu bytes", path, out->max);
        if (n <= 0 || rc)
            break;
    }
    return rc;
}

int fs_read_file(const char *path, struct buffer *out, struct error *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return error_errno(err, errno, "cannot open %s", path);
    int rc = read_all(fd, path, out, err);
    close(fd);
    return rc;
}

int fs_read_regular(const char *path, struct buffer *out, struct error *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0 && (errno == ENOTDIR || errno == ELOOP || errno == ENXIO))
        return error_set(err, ERR_CORRUPT, "%s is not a regular file: %s", path, strerror(errno));
    if (fd < 0)
        return error_errno(err, errno, "cannot open %s", path);
    struct stat st;
    int rc = fstat(fd, &st) == 0 && S_ISREG(st.st_mode) ? read_all(fd, path, out, err)
                                                        : error_set(err, ERR_CORRUPT, "%s is not a regular file", path);
    close(fd);
    return rc;
}

int fs_open_linked(const char *path, int *fd, struct error *err)
{
    struct stat st;
    *fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (*fd < 0 && errno == ENXIO) /* a socket */
        return error_set(err, ERR_CORRUPT, "%s is not a regular file", path);
    if (*fd < 0)
        return error_errno(err, errno, "cannot open %s", path);
    if (fstat(*fd, &st) == 0 && S_ISREG(st.st_mode))
        return ERR_OK;
    close(*fd);
    *fd = -1;
    return error_set(err, ERR_CORRUPT, "%s is not a regular file", path);
}

int fs_read_linked(const char *path, struct buffer *out, struct error *err)
{
    int fd, rc = fs_open_linked(path, &fd, err);
    if (rc)
        return rc;
    rc = read_all(fd, path, out, err);
    close(fd);
    return rc;
}

/* So that a directory just made is there after a power cut, and what is put in it with it. Not where that cannot be had:
 * in a parent that may not be read, or on a file system that does not know it. */
static int sync_parent_of(const char *path, struct error *err)
{
    char dir[PATH_MAX];
    fs_parent(dir, path);
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return errno == EACCES ? ERR_OK : error_errno(err, errno, "cannot open directory %s", dir);
    int rc = ERR_OK;
    if (fsync(fd) < 0 && errno != EINVAL && errno != ENOTSUP && errno != ENOSYS)
        rc = error_errno(err, errno, "fsync of directory %s", dir);
    close(fd);
    return rc;
}

int fs_make_dirs(const char *path, mode_t mode, struct error *err)
{
    char part[PATH_MAX];
    size_t len = strlen(path);
    if (!len || len >= sizeof part)
        return error_set(err, ERR_INVALID, "bad directory path '%s'", path);
    memcpy(part, path, len + 1);
    for (size_t i = 1; i <= len; i++) {
        if (part[i] != '/' && part[i] != '\0')
            continue;
        char keep = part[i];
        part[i] = '\0';
        if (mkdir(part, mode) == 0) {
            int rc = sync_parent_of(part, err);
            if (rc)
                return rc;
        } else {
            int errnum = errno;
            struct stat st;
            /* EEXIST is not the only answer for a directory that is there: a
             * read-only file system says EROFS, a closed parent EACCES. */
            if (stat(part, &st) < 0)
                return error_errno(err, errnum, "cannot create directory %s", part);
            if (!S_ISDIR(st.st_mode))
                return error_set(err, ERR_IO, "cannot create directory %s: %s is not a directory", path, part);
        }
        part[i] = keep;
    }
    return ERR_OK;
}

static int remove_at(int parent, const char *name, int depth);

/* Empties the directory and closes it; 0, or -1 with errno. */
static int empty_dir(int fd, int depth)
{
    DIR *dir = fdopendir(fd);
    if (!dir) {
        close(fd);
        return -1;
    }
    int rc = 0;
    for (struct dirent *e; !rc && (errno = 0, e = readdir(dir));) {
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, ".."))
            rc = remove_at(fd, e->d_name, depth);
    }
    int errnum = errno;
    closedir(dir);
    errno = errnum;
    return rc || errnum ? -1 : 0;
}

/* By descriptors and not by paths: a directory that is swapped for a link on the way leads nowhere. */
static int remove_at(int parent, const char *name, int depth)
{
    if (unlinkat(parent, name, 0) == 0 || errno == ENOENT)
        return 0;
    if (errno != EISDIR)
        return -1;
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return -1;
    if (depth >= FS_MAX_DEPTH) {
        close(fd);
        errno = ENAMETOOLONG;
        return -1;
    }
    if (empty_dir(fd, depth + 1) < 0)
        return -1;
    return unlinkat(parent, name, AT_REMOVEDIR) < 0 && errno != ENOENT ? -1 : 0;
}

int fs_remove_tree(const char *path, struct error *err)
{
    return remove_at(AT_FDCWD, path, 0) < 0 ? error_errno(err, errno, "cannot remove %s", path) : ERR_OK;
}

int fs_self_dir(char *out, size_t cap, struct error *err)
{
    char exe[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    if (n < 0)
        return error_errno(err, errno, "cannot read /proc/self/exe");
    exe[n] = '\0';
    char dir[PATH_MAX];
    fs_parent(dir, exe);
    if (strlen(dir) >= cap)
        return error_set(err, ERR_INVALID, "path too long: %s", dir);
    memcpy(out, dir, strlen(dir) + 1);
    return ERR_OK;
}
