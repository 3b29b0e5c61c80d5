/* ckpt_dir.h: everything that can be wrong with a checkpoint's files. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/base/crc32c.h"
#include "proto/base/fs.h"
#include "worker/checkpoint_internal.h"
#include "worker/ckpt_dir.h"

enum { CHUNK = 1 << 20, TENSORS_TOLD = 100 };

struct verifying {
    struct ckpt_dir dir;
    bool headers_only;
    ckpt_fault_fn fault;
    void *arg;
    int faults;
    bool skipped; /* a shard of which nothing more can be said */
    struct error *err; /* the first of what says nothing about the files; code 0: none */
};

static void PRINTF_LIKE(2, 3) tell(struct verifying *v, const char *fmt, ...)
{
    char text[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    for (char *c = text; *c; c++)
        if (*c == '\n')
            *c = ' ';
    v->fault(v->arg, text);
    v->faults++;
}

/* Damage is what the files are. That they cannot be looked at (EIO, EACCES, no memory) passes: who took it for damage
 * would go on from an older one, and delete this one in time. */
static void PRINTF_LIKE(3, 4) tell_or_fail(struct verifying *v, const struct error *why, const char *fmt, ...)
{
    char text[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    v->skipped = true;
    if (why->code == ERR_CORRUPT || why->code == ERR_NOT_FOUND || why->code == ERR_INVALID)
        tell(v, "%s", text);
    else if (!v->err->code)
        error_set(v->err, why->code, "%s", text);
}

/* ---- one shard ---- */

static int sum_of(const char *path, uint32_t *sum, struct error *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    uint8_t *chunk = malloc(CHUNK);
    int rc = fd < 0 ? error_errno(err, errno, "cannot open it") : ERR_OK;
    if (!rc && !chunk)
        rc = error_set(err, ERR_NOMEM, "out of memory");
    for (*sum = 0; !rc;) {
        ssize_t n = read(fd, chunk, CHUNK);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            rc = error_errno(err, errno, "cannot read it");
        if (n <= 0)
            break;
        *sum = crc32c(*sum, chunk, (size_t)n);
    }
    if (fd >= 0)
        close(fd);
    free(chunk);
    return rc;
}

static void check_sum(struct verifying *v, const char *path, const char *file, uint32_t want)
{
    struct error err;
    uint32_t found;
    if (sum_of(path, &found, &err))
        tell_or_fail(v, &err, "%s: %s", file, err.message);
    else if (found != want)
        tell(v, "%s is damaged: its CRC-32C is %08x, %08x was written", file, found, want);
}

/* Whether there is a file of the right size to look into. */
static bool there(struct verifying *v, const char *path, const char *file, int64_t bytes)
{
    struct stat st;
    struct error err;
    bool missing = lstat(path, &st) < 0, gone = missing && (errno == ENOENT || errno == ENOTDIR), regular = !missing && S_ISREG(st.st_mode);
    if (!missing && regular && st.st_size == bytes)
        return true;
    v->skipped = true;
    if (missing && !gone) {
        error_errno(&err, errno, "cannot look at %s", path);
        tell_or_fail(v, &err, "%s", err.message);
        return false;
    }
    if (v->headers_only)
        return false;
    if (missing)
        tell(v, "%s is missing", file);
    else if (!regular)
        tell(v, "%s is not a regular file", file);
    else
        tell(v, "%s has %lld bytes, %lld were written", file, (long long)st.st_size, (long long)bytes);
    return false;
}

static void same(struct verifying *v, const struct safetensors_file *f, const char *file, const char *key,
                 const char *want)
{
    const char *says = safetensors_meta(f, key);
    if (!says || strcmp(says, want))
        tell(v, "%s is of another checkpoint: %s %s, this one is of %s", file, key, says ? says : "?", want);
}

static void check_identity(struct verifying *v, const struct safetensors_file *f, const char *file, int rank)
{
    char text[32];
    const char *format = safetensors_meta(f, "format");
    if (!format || strcmp(format, "boost.shard/1")) {
        tell(v, "%s is no shard of a BOOST checkpoint", file);
        v->skipped = true;
        return;
    }
    const struct {
        const char *key;
        int64_t want;
    } numbers[] = {{"job", json_integer_value(json_object_get(v->dir.manifest, "job"))},
                   {"attempt", v->dir.attempt},
                   {"step", v->dir.step},
                   {"rank", rank}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        snprintf(text, sizeof text, "%" PRId64, numbers[i].want);
        same(v, f, file, numbers[i].key, text);
    }
}

static void check_shard(struct verifying *v, const json_t *s, int64_t world)
{
    char path[PATH_MAX], want[64];
    struct error err;
    struct safetensors_file f;
    const char *file = json_string_value(json_object_get(s, "file"));
    int64_t rank = json_is_integer(json_object_get(s, "rank")) ? json_integer_value(json_object_get(s, "rank")) : -1;
    if (rank < 0 || rank >= world) {
        tell(v, "manifest.json lists a shard of rank %" PRId64 " of %" PRId64, rank, world);
        v->skipped = true;
        return;
    }
    shard_file_name(want, (int)rank, (int)world);
    if (!file || strcmp(file, want)) {
        tell(v, "manifest.json calls the shard of rank %" PRId64 " '%s', not %s", rank, file ? file : "", want);
        v->skipped = true;
        return;
    }
    if (fs_join(path, sizeof path, &err, v->dir.path, file)) {
        tell(v, "%s", err.message);
        return;
    }
    if (!there(v, path, file, json_integer_value(json_object_get(s, "bytes"))))
        return;
    if (!v->headers_only)
        check_sum(v, path, file, (uint32_t)json_integer_value(json_object_get(s, "crc32c")));
    if (safetensors_open(&f, path, &err)) {
        tell_or_fail(v, &err, "%s", err.message);
        return;
    }
    int before = v->faults;
    check_identity(v, &f, file, (int)rank);
    v->skipped |= v->faults != before;
    safetensors_close(&f);
}

/* ---- all of them ---- */

static void check_shards(struct verifying *v)
{
    const json_t *shards = json_object_get(v->dir.manifest, "shards");
    int64_t world = json_integer_value(json_object_get(v->dir.manifest, "world"));
    size_t i;
    json_t *s;
    if (!json_array_size(shards) || (int64_t)json_array_size(shards) != world || world > INT_MAX) {
        tell(v, "manifest.json lists %zu shards of %" PRId64 " ranks", json_array_size(shards), world);
        v->skipped = true;
        return;
    }
    bool *seen = calloc((size_t)world, sizeof *seen);
    json_array_foreach(shards, i, s)
    {
        int64_t rank = json_integer_value(json_object_get(s, "rank"));
        if (seen && rank >= 0 && rank < world && seen[rank])
            tell(v, "manifest.json lists rank %" PRId64 " twice", rank);
        else if (seen && rank >= 0 && rank < world)
            seen[rank] = true;
        check_shard(v, s, world);
    }
    free(seen);
}

/* Shards of other worlds beside the right ones. */
static void check_strangers(struct verifying *v)
{
    int64_t world = json_integer_value(json_object_get(v->dir.manifest, "world"));
    DIR *d = opendir(v->dir.path);
    char tail[48];
    snprintf(tail, sizeof tail, "-of-%05" PRId64 ".safetensors", world);
    for (struct dirent *e; d && (e = readdir(d));) {
        size_t len = strlen(e->d_name), end = strlen(tail);
        bool shard = !strncmp(e->d_name, "rank-", 5) && len > 12 && !strcmp(e->d_name + len - 12, ".safetensors");
        if (!shard)
            continue;
        int64_t rank = strtoll(e->d_name + 5, NULL, 10);
        if (len < end || strcmp(e->d_name + len - end, tail) || rank >= world) {
            tell(v, "%s does not belong to this checkpoint of %" PRId64 " shards", e->d_name, world);
            v->skipped = true; /* the index counts by names */
        }
    }
    if (d)
        closedir(d);
}

static void check_coverage(struct verifying *v)
{
    struct error err;
    if (ckpt_dir_index(&v->dir, &err)) {
        tell_or_fail(v, &err, "%s", err.message);
        return;
    }
    int told = 0, kinds = shard_index_weights_only(v->dir.index) ? 1 : SHARD_KINDS;
    for (int64_t i = 0, n = plan_tensor_count(&v->dir.plan); i < n && told < TENSORS_TOLD; i++)
        for (int kind = 0; kind < kinds && told < TENSORS_TOLD; kind++)
            if (shard_index_check(v->dir.index, i, kind, &err)) {
                tell(v, "%s", err.message);
                told++;
            }
}

int ckpt_verify(const char *dir, bool headers_only, ckpt_fault_fn fault, void *arg, struct error *err)
{
    struct error unseen;
    error_clear(&unseen);
    struct verifying v = {.headers_only = headers_only, .fault = fault, .arg = arg, .err = &unseen};
    int rc = ckpt_dir_open(&v.dir, dir, err);
    if (rc == ERR_CORRUPT) {
        tell(&v, "%s", err->message);
        rc = ERR_OK;
    } else if (!rc) {
        check_shards(&v);
        check_strangers(&v);
        if (!v.skipped)
            check_coverage(&v);
    }
    if (!rc && !v.faults && unseen.code) {
        *err = unseen;
        rc = (int)unseen.code;
    }
    ckpt_dir_close(&v.dir);
    return rc;
}
