/* listener.h */
#include "daemon/listener.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/log.h"
#include "proto/base/fs.h"

enum { BACKLOG = 1024 };

static int make_directory(const char *path, struct error *err)
{
    char dir[SOCKET_PATH_MAX];
    snprintf(dir, sizeof dir, "%s", path);
    char *slash = strrchr(dir, '/');
    if (!slash || slash == dir)
        return ERR_OK;
    *slash = '\0';
    struct stat st;
    if (stat(dir, &st) < 0) {
        int rc = fs_make_dirs(dir, geteuid() == 0 ? 0755 : 0700, err);
        return rc ? error_context(err, "directory of the socket") : ERR_OK;
    }
    if ((st.st_mode & S_IWOTH) && !(st.st_mode & S_ISVTX))
        log_line(LOG_WARN, "every user can replace the socket in %s: chmod o-w it", dir);
    return ERR_OK;
}

static int open_socket(int *fd, struct error *err)
{
    *fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    return *fd < 0 ? error_errno(err, errno, "cannot make a socket") : ERR_OK;
}

/* Removes what a boostd that was killed has left. */
static int remove_stale(const struct sockaddr_un *address, struct error *err)
{
    const char *path = address->sun_path;
    struct stat st;
    if (lstat(path, &st) < 0)
        return errno == ENOENT ? ERR_OK : error_errno(err, errno, "socket %s", path);
    if (!S_ISSOCK(st.st_mode)) {
        error_set(err, ERR_INVALID, "%s is there and is not a socket", path);
        return error_hint(err, "move it away, or name another socket with --socket");
    }
    int fd;
    int rc = open_socket(&fd, err);
    if (rc)
        return rc;
    int failed = connect(fd, (const struct sockaddr *)address, sizeof *address) < 0 ? errno : 0;
    close(fd);
    if (!failed || failed == EAGAIN) {
        error_set(err, ERR_BUSY, "another boostd listens on %s", path);
        return error_hint(err, "stop that one, or name another socket with --socket");
    }
    if (failed != ECONNREFUSED)
        return failed == ENOENT ? ERR_OK : error_errno(err, failed, "socket %s", path);
    if (unlink(path) < 0 && errno != ENOENT)
        return error_errno(err, errno, "cannot remove the stale socket %s", path);
    log_line(LOG_INFO, "removed the stale socket %s", path);
    return ERR_OK;
}

int listener_open(struct listener *l, const char *path, struct error *err)
{
    *l = (struct listener){.fd = -1, .file = -1};
    if (strlen(path) >= sizeof l->path)
        return error_set(err, ERR_INVALID, "socket path has %zu bytes, the system's limit is %d: %s", strlen(path),
                         SOCKET_PATH_MAX - 1, path);
    memcpy(l->path, path, strlen(path) + 1);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, path, strlen(path) + 1);
    int rc = make_directory(path, err);
    if (!rc)
        rc = remove_stale(&address, err);
    if (!rc)
        rc = open_socket(&l->fd, err);
    if (rc)
        return rc;
    if (bind(l->fd, (const struct sockaddr *)&address, sizeof address) < 0) {
        rc = error_errno(err, errno, "cannot make the socket %s", path);
        error_hint(err, "name another one with --socket");
    } else if ((l->file = open(path, O_PATH | O_NOFOLLOW | O_CLOEXEC)) < 0 || chmod(path, 0666) < 0 ||
               listen(l->fd, BACKLOG) < 0) {
        rc = error_errno(err, errno, "cannot listen on %s", path);
    } else {
        return ERR_OK;
    }
    listener_close(l);
    return rc;
}

void listener_close(struct listener *l)
{
    if (l->fd >= 0)
        close(l->fd);
    l->fd = -1;
    struct stat ours, there;
    if (l->file < 0)
        return;
    if (fstat(l->file, &ours) == 0 && lstat(l->path, &there) == 0 && ours.st_dev == there.st_dev &&
        ours.st_ino == there.st_ino)
        unlink(l->path);
    close(l->file);
    l->file = -1;
}
