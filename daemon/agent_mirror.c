/* agent_mirror.h */
#include "daemon/agent_mirror.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/agent_checkpoint.h"
#include "proto/base/crc32c.h"
#include "proto/base/fs.h"
#include "proto/manifest.h"

enum { CHUNK = 1 << 20, KEYS_MAX = 64 << 20 };
static const char fetching[] = ".fetching";

/* ---- places ---- */

/* Of the file in the copy of `dir`; "": of the copy itself. *job: the length of what all copies of the job share. */
static int place(const char *mirror, const char *dir, const char *file, struct s3_url *out, size_t *job,
                 struct error *err)
{
    const char *step = strrchr(dir, '/'), *parent = step;
    while (parent && parent > dir && parent[-1] != '/')
        parent--;
    int rc = s3_url_parse(mirror, out, err);
    if (rc)
        return rc;
    size_t used = strlen(out->key), cap = sizeof out->key;
    int n = snprintf(out->key + used, cap - used, "%s%.*s%s/%s", used ? "/" : "", (int)(step - parent), parent, step,
                     file);
    if (n < 0 || (size_t)n >= cap - used)
        return error_set(err, ERR_INVALID, "checkpoint.mirror %s is too long", mirror);
    if (job)
        *job = used + (used > 0) + (size_t)(step - parent) + 1;
    return ERR_OK;
}

/* One thread of all agents that see the directory works on its copy. */
static int lock_dir(const char *dir, int *fd, struct error *err)
{
    *fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (*fd < 0)
        return error_errno(err, errno, "cannot open %s", dir);
    if (flock(*fd, LOCK_EX | LOCK_NB) == 0)
        return ERR_OK;
    int rc = errno == EWOULDBLOCK ? error_set(err, ERR_BUSY, "%s is being copied already", dir)
                                  : error_errno(err, errno, "cannot lock %s", dir);
    close(*fd);
    *fd = -1;
    return rc;
}

/* ---- to the store ---- */

static int64_t bytes_of(Boost__ShardRecord *const *shards, size_t n)
{
    int64_t sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += shards[i]->bytes;
    return sum;
}

static int give_up_others(struct s3 *s, const char *mirror, const char *dir, struct error *err)
{
    struct s3_url own, all;
    size_t job;
    int count = 0;
    int rc = place(mirror, dir, "", &own, &job, err);
    if (rc)
        return rc;
    all = own;
    all.key[job] = '\0';
    return s3_abort_uploads(s, &all, own.key, &count, err);
}

static int copy_shard(struct s3 *s, const Boost__MirrorCheckpoint *o, const Boost__ShardRecord *shard, int64_t *moved,
                      struct error *err)
{
    struct s3_url at;
    int fd = -1;
    int64_t sent = 0;
    int rc = checkpoint_open_shard(o->dir, shard->file, shard->bytes, &fd, err);
    if (!rc)
        rc = place(o->mirror, o->dir, shard->file, &at, NULL, err);
    if (!rc)
        rc = s3_upload(s, &at, fd, shard->bytes, shard->crc32c, &sent, err);
    *moved += sent;
    if (fd >= 0)
        close(fd);
    return rc;
}

static int copy_manifest(struct s3 *s, const Boost__MirrorCheckpoint *o, int64_t *moved, struct error *err)
{
    char path[PATH_MAX], crc[16];
    struct buffer text;
    struct s3_url at;
    buffer_init(&text, MANIFEST_MAX);
    int rc = fs_join(path, sizeof path, err, o->dir, MANIFEST_NAME);
    if (!rc)
        rc = fs_read_regular(path, &text, err);
    if (!rc)
        rc = place(o->mirror, o->dir, MANIFEST_NAME, &at, NULL, err);
    if (!rc) {
        snprintf(crc, sizeof crc, "%08x", crc32c(0, text.data, text.len));
        rc = s3_put(s, &at, text.data, text.len, crc, err);
    }
    *moved += rc ? 0 : (int64_t)text.len;
    buffer_free(&text);
    return rc;
}

int mirror_copy(struct s3 *s, const Boost__MirrorCheckpoint *o, struct http_progress *progress, int64_t *moved,
                struct error *err)
{
    int lock = -1;
    *moved = 0;
    int rc = checkpoint_check_dir(o->dir, o->step, o->attempt, err);
    if (!rc && !o->mirror)
        rc = error_set(err, ERR_PROTOCOL, "an order to copy says not where to");
    if (!rc)
        rc = lock_dir(o->dir, &lock, err);
    if (!rc)
        rc = give_up_others(s, o->mirror, o->dir, err);
    http_progress_total(progress, bytes_of(o->shards, o->n_shards));
    for (size_t i = 0; i < o->n_shards && !rc; i++) {
        rc = copy_shard(s, o, o->shards[i], moved, err);
        if (!rc)
            http_progress_passed(progress, o->shards[i]->bytes);
    }
    if (!rc)
        rc = copy_manifest(s, o, moved, err);
    if (lock >= 0)
        close(lock);
    return rc;
}

/* ---- from the store ---- */

static int sum_of(int fd, uint32_t *sum, const char *path, struct error *err)
{
    uint8_t *chunk = malloc(CHUNK);
    off_t at = 0;
    *sum = 0;
    if (!chunk)
        return error_set(err, ERR_NOMEM, "no memory to read %s", path);
    for (;;) {
        ssize_t n = pread(fd, chunk, CHUNK, at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            free(chunk);
            return n < 0 ? error_errno(err, errno, "%s cannot be read", path) : ERR_OK;
        }
        *sum = crc32c(*sum, chunk, (size_t)n);
        at += n;
    }
}

static int fetch_shard(struct s3 *s, const char *tmp, const struct s3_url *at, const Boost__ShardRecord *shard,
                       int64_t *moved, struct error *err)
{
    char path[PATH_MAX];
    struct stat st;
    uint32_t sum = 0;
    int rc = fs_join(path, sizeof path, err, tmp, shard->file);
    if (rc)
        return rc;
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0644);
    if (fd < 0 || fstat(fd, &st) < 0)
        rc = error_errno(err, errno, "cannot write %s", path);
    int64_t have = rc || st.st_size > shard->bytes ? 0 : st.st_size;
    for (bool again = have > 0; !rc; again = false, have = 0) {
        int64_t before = have;
        if (ftruncate(fd, have) < 0)
            rc = error_errno(err, errno, "cannot write %s", path);
        else
            rc = s3_get(s, at, fd, &have, shard->bytes, NULL, err);
        *moved += have > before ? have - before : 0;
        if (!rc)
            rc = sum_of(fd, &sum, path, err);
        if (rc || sum == shard->crc32c)
            break;
        /* What an earlier try had left may be what is wrong. */
        if (!again)
            rc = error_set(err, ERR_CORRUPT, "s3://%s/%s is damaged: its CRC-32C is %08x, %08x was written", at->bucket,
                           at->key, sum, shard->crc32c);
    }
    if (!rc && fsync(fd) < 0)
        rc = error_errno(err, errno, "cannot write %s", path);
    if (fd >= 0)
        close(fd);
    return rc;
}

/* A web server that answers every path with a page, or with nothing, has not damaged the copy. */
static int check_page(const struct buffer *manifest, const struct s3_url *at, struct error *err)
{
    size_t i = 0;
    while (i < manifest->len && strchr(" \t\r\n", manifest->data[i]))
        i++;
    if (i < manifest->len && manifest->data[i] != '<')
        return ERR_OK;
    error_set(err, ERR_REFUSED, "s3://%s/%s is %s, not a manifest", at->bucket, at->key,
              i < manifest->len ? "a page" : "empty");
    return error_hint(err, "what answers there is no object store: set s3_endpoint of agent.conf to one");
}

static int fetch_all(struct s3 *s, const Boost__VerifyCheckpoint *o, const char *tmp, struct http_progress *progress,
                     int64_t *moved, struct error *err)
{
    struct s3_url at;
    struct buffer manifest;
    char path[PATH_MAX];
    buffer_init(&manifest, MANIFEST_MAX);
    int rc = place(o->mirror, o->dir, MANIFEST_NAME, &at, NULL, err);
    if (!rc)
        rc = s3_get_text(s, &at, &manifest, err);
    if (!rc)
        rc = check_page(&manifest, &at, err);
    http_progress_total(progress, bytes_of(o->shards, o->n_shards));
    for (size_t i = 0; i < o->n_shards && !rc; i++) {
        const char *file = o->shards[i]->file;
        if (!file || !*file || *file == '.' || strchr(file, '/'))
            rc = error_set(err, ERR_REFUSED, "'%s' is not the name of a shard", file ? file : "");
        if (!rc)
            rc = place(o->mirror, o->dir, file, &at, NULL, err);
        if (!rc)
            rc = fetch_shard(s, tmp, &at, o->shards[i], moved, err);
        if (!rc)
            http_progress_passed(progress, o->shards[i]->bytes);
    }
    if (!rc)
        rc = fs_join(path, sizeof path, err, tmp, MANIFEST_NAME);
    if (!rc)
        rc = fs_write_durable(path, manifest.data, manifest.len, 0644, err);
    *moved += rc ? 0 : (int64_t)manifest.len;
    buffer_free(&manifest);
    return rc;
}

int mirror_fetch(struct s3 *s, const Boost__VerifyCheckpoint *o, struct http_progress *progress, int64_t *moved,
                 struct error *err)
{
    char tmp[PATH_MAX], parent[PATH_MAX];
    int lock = -1;
    *moved = 0;
    int rc = checkpoint_check_dir(o->dir, o->step, o->attempt, err);
    if (rc)
        return rc;
    if (snprintf(tmp, sizeof tmp, "%s%s", o->dir, fetching) >= (int)sizeof tmp)
        return error_set(err, ERR_INVALID, "path too long: %s", o->dir);
    fs_parent(parent, o->dir);
    rc = fs_make_dirs(tmp, 0777, err);
    if (!rc)
        rc = lock_dir(tmp, &lock, err);
    if (!rc)
        rc = fetch_all(s, o, tmp, progress, moved, err);
    if (!rc)
        rc = checkpoint_delete(o->dir, err); /* what is damaged there */
    if (!rc && rename(tmp, o->dir) < 0)
        rc = error_errno(err, errno, "cannot rename %s to %s", tmp, o->dir);
    if (!rc)
        rc = fs_sync_dir(parent, err);
    if (lock >= 0)
        close(lock);
    return rc ? error_context(err, "from its copy") : ERR_OK;
}

/* ---- removal ---- */

struct keys {
    struct buffer names; /* each with its NUL */
};

static int remember(void *arg, const char *key, int64_t bytes, struct error *err)
{
    struct keys *k = arg;
    (void)bytes;
    return buffer_append(&k->names, key, strlen(key) + 1) ? error_set(err, ERR_NOMEM, "no memory for a list of keys")
                                                         : ERR_OK;
}

int mirror_delete(struct s3 *s, const char *dir, const char *mirror, struct error *err)
{
    struct s3_url at, prefix;
    struct keys keys;
    int count = 0;
    buffer_init(&keys.names, KEYS_MAX);
    int rc = place(mirror, dir, MANIFEST_NAME, &at, NULL, err);
    if (!rc)
        rc = s3_delete(s, &at, err);
    if (!rc)
        rc = place(mirror, dir, "", &prefix, NULL, err);
    if (!rc)
        rc = s3_abort_uploads(s, &prefix, NULL, &count, err);
    if (!rc)
        rc = s3_list(s, &prefix, remember, &keys, err);
    for (size_t used = 0; !rc && used < keys.names.len;) {
        const char *key = (const char *)keys.names.data + used;
        used += strlen(key) + 1;
        snprintf(at.key, sizeof at.key, "%s", key);
        rc = s3_delete(s, &at, err);
    }
    buffer_free(&keys.names);
    return rc ? error_context(err, "the copy of the checkpoint") : ERR_OK;
}

int mirror_forget(const char *dir, struct error *err)
{
    char tmp[PATH_MAX];
    if (snprintf(tmp, sizeof tmp, "%s%s", dir, fetching) >= (int)sizeof tmp)
        return ERR_OK; /* none was made */
    return fs_remove_tree(tmp, err);
}
