/* tensor_file.h */
#include "worker/tensor_file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/base/bf16.h"
#include "proto/base/crc32c.h"
#include "proto/base/fs.h"

enum { BLOCK_ELEMENTS = 4 << 20 };

struct output {
    int fd;
    struct tensor_written sum;
};

static int put(struct output *o, const void *data, size_t len, struct error *err)
{
    o->sum.crc32c = crc32c(o->sum.crc32c, data, len);
    o->sum.bytes += (int64_t)len;
    return fs_write_all(o->fd, data, len, err);
}

static int put_item(struct output *o, const struct tensor_item *t, enum dtype dtype, tensor_rows_fn rows, void *arg,
                    struct error *err)
{
    int64_t at_once = BLOCK_ELEMENTS / t->cols > 0 ? BLOCK_ELEMENTS / t->cols : 1;
    if (at_once > t->rows)
        at_once = t->rows;
    float *block = malloc((size_t)(at_once * t->cols) * sizeof *block);
    int rc = block ? ERR_OK : error_set(err, ERR_NOMEM, "no memory for rows of %s", t->name);
    for (int64_t row = 0; row < t->rows && !rc; row += at_once) {
        int64_t n = t->rows - row < at_once ? t->rows - row : at_once;
        rc = rows(arg, t, row, n, block, err);
        for (int64_t i = 0; i < n * t->cols && !rc && dtype == DTYPE_BF16; i++) {
            uint16_t x = to_bf16(block[i]);
            memcpy((char *)block + sizeof x * (size_t)i, &x, sizeof x); /* behind what is still to be read */
        }
        if (!rc)
            rc = put(o, block, (size_t)(n * t->cols) * dtype_size(dtype), err);
    }
    free(block);
    return rc ? error_context(err, "tensor %s", t->name) : ERR_OK;
}

static int put_header(struct output *o, const struct tensor_item *items, size_t n, enum dtype dtype,
                      const struct safetensors_meta *meta, size_t n_meta, struct error *err)
{
    struct buffer header;
    struct safetensors_entry *entries = calloc(n + 1, sizeof *entries);
    uint64_t at = 0;
    buffer_init(&header, SAFETENSORS_MAX_HEADER);
    int rc = entries ? ERR_OK : error_set(err, ERR_NOMEM, "no memory for a list of %zu tensors", n);
    for (size_t i = 0; i < n && !rc; i++) {
        const struct tensor_item *t = &items[i];
        uint64_t bytes = (uint64_t)(t->rows * t->cols) * dtype_size(dtype);
        entries[i] = (struct safetensors_entry){.name = t->name,
                                                .dtype = dtype,
                                                .dims = t->dims,
                                                .shape = {t->dims == 1 ? t->cols : t->rows, t->cols},
                                                .begin = at,
                                                .end = at + bytes};
        at += bytes;
    }
    if (!rc)
        rc = safetensors_header(&header, entries, n, meta, n_meta, 0, err);
    if (!rc)
        rc = put(o, header.data, header.len, err);
    buffer_free(&header);
    free(entries);
    return rc;
}

int tensor_file_write(const char *path, const struct tensor_item *items, size_t n, enum dtype dtype,
                      const struct safetensors_meta *meta, size_t n_meta, tensor_rows_fn rows, void *arg,
                      struct tensor_written *out, struct error *err)
{
    char temp[PATH_MAX], parent[PATH_MAX];
    struct output o = {.fd = -1};
    int used = snprintf(temp, sizeof temp, "%s.tmp", path);
    if (used < 0 || (size_t)used >= sizeof temp)
        return error_set(err, ERR_INVALID, "path too long: %s", path);
    fs_parent(parent, path);
    o.fd = open(temp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (o.fd < 0)
        return error_errno(err, errno, "cannot create %s", temp);
    int rc = put_header(&o, items, n, dtype, meta, n_meta, err);
    for (size_t i = 0; i < n && !rc; i++)
        rc = put_item(&o, &items[i], dtype, rows, arg, err);
    if (!rc && fsync(o.fd) < 0)
        rc = error_errno(err, errno, "fsync");
    if (close(o.fd) < 0 && !rc)
        rc = error_errno(err, errno, "close");
    if (!rc && rename(temp, path) < 0)
        rc = error_errno(err, errno, "rename");
    if (!rc)
        rc = fs_sync_dir(parent, err);
    if (rc) {
        unlink(temp);
        return error_context(err, "cannot write %s", path);
    }
    *out = o.sum;
    return ERR_OK;
}
