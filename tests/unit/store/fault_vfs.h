/* An SQLite VFS over the default one that fails on demand, and that keeps beside the real
 * directory a shadow of what was made durable: each file as of its last successful fsync. */
#ifndef BOOST_TESTS_STORE_FAULT_VFS_H
#define BOOST_TESTS_STORE_FAULT_VFS_H

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>

#include "tests/unit/store/fixture.h"

enum fault_kind { FAULT_NONE, FAULT_WRITE_FULL, FAULT_WRITE_IO, FAULT_SYNC, FAULT_ANY_FULL, FAULT_KINDS };

struct fault_file {
    sqlite3_file base;
    char name[PATH_MAX];
    _Alignas(8) char real[]; /* the file of the VFS below */
};

static struct {
    pthread_mutex_t mutex;
    const char *match;  /* part of the file names that may fail */
    enum fault_kind kind;
    int first;          /* the operation of that kind that fails, from 1 */
    int last;           /* and the last one that does */
    int seen;           /* operations of that kind so far */
    char shadow_of[PATH_MAX], shadow[PATH_MAX]; /* "" = none */
    bool unsynced_wal, unsynced_metrics_wal;
} fault = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static sqlite3_vfs *below, fault_vfs;

static void fault_arm(const char *match, enum fault_kind kind, int first, int last)
{
    pthread_mutex_lock(&fault.mutex);
    fault.match = match;
    fault.kind = kind;
    fault.first = first;
    fault.last = last;
    fault.seen = 0;
    pthread_mutex_unlock(&fault.mutex);
}

static int fault_disarm(void)
{
    pthread_mutex_lock(&fault.mutex);
    int seen = fault.seen;
    fault.kind = FAULT_NONE;
    pthread_mutex_unlock(&fault.mutex);
    return seen;
}

/* SQLITE_OK, or how this operation fails. */
static int failure_now(const char *name, bool sync)
{
    int code = SQLITE_OK;
    pthread_mutex_lock(&fault.mutex);
    bool counts = fault.kind == FAULT_ANY_FULL || (fault.kind == FAULT_SYNC) == sync;
    if (fault.kind != FAULT_NONE && counts && strstr(name, fault.match)) {
        fault.seen++;
        if (fault.seen >= fault.first && fault.seen <= fault.last)
            code = fault.kind == FAULT_SYNC ? SQLITE_IOERR_FSYNC
                   : fault.kind == FAULT_WRITE_IO ? SQLITE_IOERR_WRITE : SQLITE_FULL;
    }
    pthread_mutex_unlock(&fault.mutex);
    return code;
}

static sqlite3_file *real_of(sqlite3_file *f)
{
    return (sqlite3_file *)((struct fault_file *)f)->real;
}

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static void copy_file(const char *from, const char *to)
{
    static char block[1 << 16];
    int in = open(from, O_RDONLY | O_CLOEXEC), out = open(to, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    ssize_t n;
    while (in >= 0 && out >= 0 && (n = read(in, block, sizeof block)) > 0)
        if (write(out, block, (size_t)n) != n)
            abort();
    if (in >= 0)
        close(in);
    if (out >= 0)
        close(out);
}

/* Through the open file: opening it anew and closing that would drop SQLite's locks on it. */
static void copy_to_shadow(struct fault_file *f)
{
    static char block[1 << 16];
    char to[2 * PATH_MAX];
    sqlite3_int64 size = 0;
    sqlite3_file *real = real_of(&f->base);
    snprintf(to, sizeof to, "%s/%s", fault.shadow, base_name(f->name));
    int out = open(to, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (out < 0 || real->pMethods->xFileSize(real, &size))
        abort();
    for (sqlite3_int64 at = 0; at < size;) {
        int n = size - at < (sqlite3_int64)sizeof block ? (int)(size - at) : (int)sizeof block;
        if (real->pMethods->xRead(real, block, n, at) || write(out, block, (size_t)n) != n)
            abort();
        at += n;
    }
    close(out);
}

static bool shadowed(const char *name)
{
    size_t len = strlen(fault.shadow_of);
    return len && !strncmp(name, fault.shadow_of, len) && name[len] == '/';
}

static int fault_close(sqlite3_file *f)
{
    return real_of(f)->pMethods->xClose(real_of(f));
}

static int fault_read(sqlite3_file *f, void *data, int n, sqlite3_int64 at)
{
    return real_of(f)->pMethods->xRead(real_of(f), data, n, at);
}

static int fault_write(sqlite3_file *f, const void *data, int n, sqlite3_int64 at)
{
    struct fault_file *ff = (struct fault_file *)f;
    int failure = failure_now(ff->name, false);
    if (failure) {
        (void)real_of(f)->pMethods->xWrite(real_of(f), data, n / 2, at); /* torn, as a real one may be */
        return failure;
    }
    pthread_mutex_lock(&fault.mutex);
    fault.unsynced_wal |= strstr(ff->name, "state.db-wal") != NULL;
    fault.unsynced_metrics_wal |= strstr(ff->name, "metrics.db-wal") != NULL;
    pthread_mutex_unlock(&fault.mutex);
    return real_of(f)->pMethods->xWrite(real_of(f), data, n, at);
}

static int fault_truncate(sqlite3_file *f, sqlite3_int64 size)
{
    return real_of(f)->pMethods->xTruncate(real_of(f), size);
}

static int fault_sync(sqlite3_file *f, int flags)
{
    struct fault_file *ff = (struct fault_file *)f;
    int rc = failure_now(ff->name, true);
    if (rc)
        return rc;
    rc = real_of(f)->pMethods->xSync(real_of(f), flags);
    pthread_mutex_lock(&fault.mutex);
    if (strstr(ff->name, "state.db-wal"))
        fault.unsynced_wal = false;
    if (strstr(ff->name, "metrics.db-wal"))
        fault.unsynced_metrics_wal = false;
    if (!rc && shadowed(ff->name))
        copy_to_shadow(ff);
    pthread_mutex_unlock(&fault.mutex);
    return rc;
}

static int fault_size(sqlite3_file *f, sqlite3_int64 *size)
{
    return real_of(f)->pMethods->xFileSize(real_of(f), size);
}

static int fault_lock(sqlite3_file *f, int level)
{
    return real_of(f)->pMethods->xLock(real_of(f), level);
}

static int fault_unlock(sqlite3_file *f, int level)
{
    return real_of(f)->pMethods->xUnlock(real_of(f), level);
}

static int fault_check_lock(sqlite3_file *f, int *out)
{
    return real_of(f)->pMethods->xCheckReservedLock(real_of(f), out);
}

static int fault_control(sqlite3_file *f, int op, void *arg)
{
    return real_of(f)->pMethods->xFileControl(real_of(f), op, arg);
}

static int fault_sector(sqlite3_file *f)
{
    return real_of(f)->pMethods->xSectorSize(real_of(f));
}

static int fault_traits(sqlite3_file *f)
{
    return real_of(f)->pMethods->xDeviceCharacteristics(real_of(f));
}

static int fault_shm_map(sqlite3_file *f, int page, int size, int extend, void volatile **out)
{
    return real_of(f)->pMethods->xShmMap(real_of(f), page, size, extend, out);
}

static int fault_shm_lock(sqlite3_file *f, int offset, int n, int flags)
{
    return real_of(f)->pMethods->xShmLock(real_of(f), offset, n, flags);
}

static void fault_shm_barrier(sqlite3_file *f)
{
    real_of(f)->pMethods->xShmBarrier(real_of(f));
}

static int fault_shm_unmap(sqlite3_file *f, int remove)
{
    return real_of(f)->pMethods->xShmUnmap(real_of(f), remove);
}

static const sqlite3_io_methods fault_methods = {
    .iVersion = 2,
    .xClose = fault_close,
    .xRead = fault_read,
    .xWrite = fault_write,
    .xTruncate = fault_truncate,
    .xSync = fault_sync,
    .xFileSize = fault_size,
    .xLock = fault_lock,
    .xUnlock = fault_unlock,
    .xCheckReservedLock = fault_check_lock,
    .xFileControl = fault_control,
    .xSectorSize = fault_sector,
    .xDeviceCharacteristics = fault_traits,
    .xShmMap = fault_shm_map,
    .xShmLock = fault_shm_lock,
    .xShmBarrier = fault_shm_barrier,
    .xShmUnmap = fault_shm_unmap,
};

static int fault_open(sqlite3_vfs *vfs, const char *name, sqlite3_file *f, int flags, int *out_flags)
{
    (void)vfs;
    struct fault_file *ff = (struct fault_file *)f;
    snprintf(ff->name, sizeof ff->name, "%s", name ? name : "");
    int rc = below->xOpen(below, name, real_of(f), flags, out_flags);
    ff->base.pMethods = rc ? NULL : &fault_methods;
    return rc;
}

static int fault_delete(sqlite3_vfs *vfs, const char *name, int sync_dir)
{
    (void)vfs;
    char path[2 * PATH_MAX];
    int rc = below->xDelete(below, name, sync_dir);
    pthread_mutex_lock(&fault.mutex);
    if (!rc && shadowed(name)) {
        snprintf(path, sizeof path, "%s/%s", fault.shadow, base_name(name));
        unlink(path);
    }
    pthread_mutex_unlock(&fault.mutex);
    return rc;
}

/* Becomes the default VFS of this process. */
static int fault_install(void **state)
{
    (void)state;
    below = sqlite3_vfs_find(NULL);
    fault_vfs = *below;
    fault_vfs.zName = "fault";
    fault_vfs.szOsFile = (int)sizeof(struct fault_file) + below->szOsFile;
    fault_vfs.xOpen = fault_open;
    fault_vfs.xDelete = fault_delete;
    return sqlite3_vfs_register(&fault_vfs, 1);
}

#endif
