/* agent_preflight.h */
#include "daemon/agent_preflight.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/agent_user.h"
#include "proto/base/fs.h"

enum { PROBE_BYTES = 4096 };

/* Bytes of a token, as worker/data.c reads the format; 0: not built. */
static int token_bytes(Boost__Format__Value format, const char *path)
{
    switch (format) {
    case BOOST__FORMAT__VALUE__TEXT:
        return 1;
    case BOOST__FORMAT__VALUE__U16:
        return 2;
    case BOOST__FORMAT__VALUE__U32:
        return 4;
    case BOOST__FORMAT__VALUE__AUTO: {
        const char *dot = strrchr(path, '.');
        if (dot && !strcmp(dot, ".u16"))
            return 2;
        if (dot && !strcmp(dot, ".u32"))
            return 4;
        return dot && (!strcmp(dot, ".bin") || !strcmp(dot, ".idx")) ? 0 : 1;
    }
    default:
        return 0;
    }
}

static int open_data(const char *path, struct stat *st, struct error *err)
{
    /* Not a device or fifo: opening one could block for ever. */
    if (stat(path, st) < 0) {
        int errnum = errno;
        error_errno(err, errnum, "data file %s cannot be opened", path);
        err->code = ERR_INVALID;
        return error_hint(err, errnum == EACCES ? "give the job's user access to it"
                                                : "correct the path; it has to exist on the node that runs the job");
    }
    if (!S_ISREG(st->st_mode)) {
        error_set(err, ERR_INVALID, "data file %s is not a regular file", path);
        return error_hint(err, "name a file of tokens");
    }
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        error_errno(err, errno, "data file %s cannot be read", path);
        err->code = ERR_INVALID;
        return error_hint(err, "give the job's user read permission");
    }
    close(fd);
    return ERR_OK;
}

static int check_data_file(const char *path, Boost__Format__Value format, int64_t seq_len, struct error *err)
{
    struct stat st;
    if (!path || !*path)
        return error_set(err, ERR_INVALID, "a data file has no path");
    if (strstr(path, "://")) {
        error_set(err, ERR_UNSUPPORTED, "data file %s: fetching by URL is not built in this version", path);
        return error_hint(err, "copy the file to the node and name it by its path");
    }
    int rc = open_data(path, &st, err);
    if (rc)
        return rc;
    int width = token_bytes(format, path);
    if (!width) {
        error_set(err, ERR_UNSUPPORTED, "%s: this version reads token files of format TEXT, U16 and U32", path);
        return error_hint(err, "set data.format to TEXT (bytes), U16 or U32 (little-endian ids)");
    }
    if (st.st_size % width) {
        error_set(err, ERR_INVALID, "data file %s: %lld bytes are not a whole number of %d-byte tokens", path,
                  (long long)st.st_size, width);
        return error_hint(err, "the file is cut short, or data.format is not its format");
    }
    if (st.st_size / width < seq_len + 1) {
        error_set(err, ERR_INVALID, "data file %s has %lld tokens, one window of seq_len %lld needs %lld", path,
                  (long long)st.st_size / width, (long long)seq_len, (long long)seq_len + 1);
        return error_hint(err, "use a longer file or a smaller data.seq_len");
    }
    return ERR_OK;
}

static int check_data(const Boost__Data *data, struct error *err)
{
    int rc = ERR_OK;
    for (size_t i = 0; i < data->n_train && !rc; i++)
        rc = check_data_file(data->train[i]->path, data->format, data->seq_len, err);
    for (size_t i = 0; i < data->n_eval && !rc; i++)
        rc = check_data_file(data->eval[i]->path, data->format, data->seq_len, err);
    return rc;
}

/* Whether files can be made in dir: by making one, since only that tells of quotas and full disks. */
static int probe_dir(const char *dir, struct error *err)
{
    char path[PATH_MAX];
    static const char zeros[PROBE_BYTES];
    int used = snprintf(path, sizeof path, "%s/.boost-probe-XXXXXX", dir);
    if (used < 0 || (size_t)used >= sizeof path)
        return error_set(err, ERR_INVALID, "path too long: %s", dir);
    int fd = mkostemp(path, O_CLOEXEC);
    if (fd < 0)
        return error_errno(err, errno, "checkpoint directory %s cannot be written", dir);
    int rc = fs_write_all(fd, zeros, sizeof zeros, err);
    if (!rc && fsync(fd) < 0)
        rc = error_errno(err, errno, "fsync");
    if (rc)
        error_context(err, "checkpoint directory %s cannot be written", dir);
    close(fd);
    unlink(path);
    return rc;
}

static int check_checkpoint_dir(const char *dir, Boost__Reason__Value *reason, struct error *err)
{
    int rc = fs_make_dirs(dir, 0777, err);
    if (!rc)
        rc = probe_dir(dir, err);
    else
        error_context(err, "checkpoint.dir %s", dir);
    if (rc == ERR_NOSPACE) {
        *reason = BOOST__REASON__VALUE__DiskFull;
        return error_hint(err, "make room on that file system, or set checkpoint.dir to another one");
    }
    if (rc) {
        err->code = ERR_INVALID;
        rc = error_hint(err, "set checkpoint.dir to a directory that the job's user can make and write");
    }
    return rc;
}

static int check_workdir(const char *dir, struct error *err)
{
    struct stat st;
    if (stat(dir, &st) == 0 && S_ISDIR(st.st_mode))
        return ERR_OK;
    error_set(err, ERR_INVALID, "workdir %s is not a directory that the job's user can reach", dir);
    return error_hint(err, "make it on the node, or leave workdir out");
}

int agent_preflight(const Boost__JobSpec *spec, uint32_t uid, uint32_t gid, Boost__Reason__Value *reason,
                    struct error *err)
{
    struct as_user user;
    *reason = BOOST__REASON__VALUE__SpecError;
    if (!spec || !spec->data || !spec->checkpoint || !spec->checkpoint->dir || !*spec->checkpoint->dir)
        return error_set(err, ERR_INVALID, "the job has no data or no checkpoint.dir");
    int rc = as_user_begin(&user, uid, gid, err);
    if (rc)
        return rc;
    rc = check_data(spec->data, err);
    if (rc)
        *reason = BOOST__REASON__VALUE__DataError;
    if (!rc)
        rc = check_checkpoint_dir(spec->checkpoint->dir, reason, err);
    if (!rc && spec->workdir && *spec->workdir)
        rc = check_workdir(spec->workdir, err);
    as_user_end(&user);
    return rc;
}
