/* agent_shared.h */
#include "daemon/agent_shared.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "proto/base/clock.h"
#include "proto/base/fs.h"
#include "proto/validate.h"

#define PREFIX ".boost-shared-"
enum { LOOK_MS = 3000, PAUSE_MS = 50, CONTENT_MAX = 256 };

/* "<store>-<job>." of the nonce. */
static void sweep(const char *dir, const char *nonce)
{
    char ours[128];
    int len = snprintf(ours, sizeof ours, PREFIX "%.*s", (int)strcspn(nonce, ".") + 1, nonce);
    DIR *d = opendir(dir);
    for (struct dirent *e; d && (e = readdir(d));) {
        if (strncmp(e->d_name, ours, (size_t)len) == 0)
            unlinkat(dirfd(d), e->d_name, 0);
    }
    if (d)
        closedir(d);
}

static int put(const char *dir, const char *path, const char *nonce, struct error *err)
{
    int rc = fs_make_dirs(dir, 0777, err);
    if (rc)
        return rc;
    sweep(dir, nonce);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0)
        return error_errno(err, errno, "cannot make %s", path);
    rc = fs_write_all(fd, nonce, strlen(nonce), err);
    if (!rc && fsync(fd) < 0)
        rc = error_errno(err, errno, "fsync of %s", path);
    close(fd);
    return rc;
}

static int look(const char *path, const char *nonce, struct error *err)
{
    int64_t deadline = clock_mono_ns() + LOOK_MS * NS_PER_MS;
    for (;;) {
        struct buffer content;
        buffer_init(&content, CONTENT_MAX);
        int rc = fs_read_regular(path, &content, err);
        bool same = !rc && content.len == strlen(nonce) && memcmp(content.data, nonce, content.len) == 0;
        buffer_free(&content);
        if (same)
            return ERR_OK;
        if (rc != ERR_OK && rc != ERR_NOT_FOUND)
            return rc;
        if (clock_mono_ns() >= deadline)
            return rc ? rc : error_set(err, ERR_CORRUPT, "%s is not what was written there", path);
        poll(NULL, 0, PAUSE_MS);
    }
}

int agent_prove_shared(const Boost__ProveShared *order, struct error *err)
{
    char path[PATH_MAX];
    if (!order->dir || *order->dir != '/' || !order->nonce || !validate_name(order->nonce))
        return error_set(err, ERR_PROTOCOL, "a proof of a shared directory without directory or name");
    int len = snprintf(path, sizeof path, "%s/" PREFIX "%s", order->dir, order->nonce);
    if (len < 0 || (size_t)len >= sizeof path)
        return error_set(err, ERR_INVALID, "checkpoint.dir is too long");
    switch (order->what) {
    case BOOST__PROVE_SHARED__WHAT__PUT:
        return put(order->dir, path, order->nonce, err);
    case BOOST__PROVE_SHARED__WHAT__LOOK:
        return look(path, order->nonce, err);
    default:
        return unlink(path) == 0 || errno == ENOENT ? ERR_OK : error_errno(err, errno, "cannot remove %s", path);
    }
}
