/* safetensors.h */
#include "worker/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/base/fs.h"

/* ---- writing ----------------------------------------------------------------- */

static bool plain(const char *s)
{
    for (; *s; s++)
        if (*s < ' ' || *s > '~' || *s == '"' || *s == '\\')
            return false;
    return true;
}

/* As a JSON string; false for what is not ASCII. */
static bool put_text(struct buffer *out, const char *s)
{
    buffer_append_str(out, "\"");
    for (const char *end = s; *s; s = end) {
        while (*end && *end != '"' && *end != '\\' && *end >= ' ' && *end <= '~')
            end++;
        buffer_append(out, s, (size_t)(end - s));
        if (!*end)
            break;
        if ((unsigned char)*end > '~')
            return false;
        buffer_printf(out, "\\u%04x", (unsigned)*end++);
    }
    buffer_append_str(out, "\"");
    return true;
}

static void put_u64(uint8_t *p, uint64_t v)
{
    for (int i = 0; i < 8; i++)
        p[i] = (uint8_t)(v >> 8 * i);
}

static uint64_t get_u64(const uint8_t *p)
{
    uint64_t v = 0;
    for (int i = 7; i >= 0; i--)
        v = v << 8 | p[i];
    return v;
}

static void put_entry(struct buffer *out, const struct safetensors_entry *e)
{
    buffer_printf(out, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", e->name, dtype_name(e->dtype));
    for (int i = 0; i < e->dims; i++)
        buffer_printf(out, "%s%" PRId64, i ? "," : "", e->shape[i]);
    buffer_printf(out, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", e->begin, e->end);
}

int safetensors_header(struct buffer *out, const struct safetensors_entry *entries, size_t n,
                       const struct safetensors_meta *meta, size_t n_meta, size_t min_bytes, struct error *err)
{
    size_t start = out->len;
    uint8_t length[8] = {0};
    buffer_append(out, length, sizeof length);
    buffer_append_str(out, "{\"__metadata__\":{");
    for (size_t i = 0; i < n_meta; i++) {
        if (!plain(meta[i].key))
            return error_set(err, ERR_INVALID, "safetensors metadata '%s' is not plain text", meta[i].key);
        buffer_printf(out, "%s\"%s\":", i ? "," : "", meta[i].key);
        if (!put_text(out, meta[i].value))
            return error_set(err, ERR_INVALID, "safetensors metadata '%s' is not ASCII", meta[i].key);
    }
    buffer_append_str(out, "}");
    for (size_t i = 0; i < n; i++) {
        if (!plain(entries[i].name))
            return error_set(err, ERR_INVALID, "tensor name '%s' is not plain text", entries[i].name);
        put_entry(out, &entries[i]);
    }
    buffer_append_str(out, "}");
    while (!out->failed && (out->len - start < min_bytes || (out->len - start) % SAFETENSORS_ALIGN))
        buffer_append_str(out, " ");
    if (out->failed)
        return error_set(err, ERR_NOMEM, "no room for a safetensors header of %zu tensors", n);
    put_u64(out->data + start, out->len - start - sizeof length);
    return ERR_OK;
}

/* ---- reading ----------------------------------------------------------------- */

static int damaged_at(const char *path, struct error *err, const char *what, const char *name)
{
    error_set(err, ERR_CORRUPT, "%s: %s%s%s", path, what, *name ? " at tensor " : "", name);
    return error_hint(err, "the file is damaged or not a safetensors file; resume from another checkpoint");
}

static int damaged(const struct safetensors_file *f, struct error *err, const char *what, const char *name)
{
    return damaged_at(f->path, err, what, name);
}

int safetensors_read_at(int fd, const char *path, uint64_t offset, uint64_t bytes, void *out, struct error *err)
{
    uint64_t done = 0;
    while (done < bytes) {
        ssize_t n = pread(fd, (char *)out + done, bytes - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return error_errno(err, errno, "cannot read %s", path);
        if (n == 0)
            return damaged_at(path, err, "the file ends early", "");
        done += (uint64_t)n;
    }
    return ERR_OK;
}

static bool dtype_by_name(const char *name, enum dtype *out)
{
    for (int t = 0; t < DTYPE_IN_FILES; t++)
        if (!strcmp(name, dtype_name((enum dtype)t))) {
            *out = (enum dtype)t;
            return true;
        }
    return false;
}

/* A JSON integer that is an unsigned 63-bit number. */
static bool get_size(const json_t *j, uint64_t *out)
{
    if (!json_is_integer(j) || json_integer_value(j) < 0)
        return false;
    *out = (uint64_t)json_integer_value(j);
    return true;
}

static bool read_entry(struct safetensors_entry *e, const char *name, const json_t *j)
{
    const json_t *shape = json_object_get(j, "shape"), *offsets = json_object_get(j, "data_offsets");
    const char *dtype = json_string_value(json_object_get(j, "dtype"));
    e->name = name;
    if (!dtype || !dtype_by_name(dtype, &e->dtype) || !json_is_array(shape) ||
        json_array_size(shape) > SAFETENSORS_MAX_DIMS || json_array_size(offsets) != 2)
        return false;
    uint64_t bytes = dtype_size(e->dtype);
    e->dims = (int)json_array_size(shape);
    for (int i = 0; i < e->dims; i++) {
        uint64_t size;
        if (!get_size(json_array_get(shape, (size_t)i), &size) || __builtin_mul_overflow(bytes, size, &bytes))
            return false;
        e->shape[i] = (int64_t)size;
    }
    return get_size(json_array_get(offsets, 0), &e->begin) && get_size(json_array_get(offsets, 1), &e->end) &&
           e->begin <= e->end && e->end - e->begin == bytes;
}

static int by_offset(const void *a, const void *b)
{
    const struct safetensors_entry *x = a, *y = b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

/* Entries and metadata of the parsed header. */
static int read_entries(struct safetensors_file *f, uint64_t data_bytes, struct error *err)
{
    json_t *meta = json_object_get(f->json, "__metadata__"), *value;
    const char *key;
    f->entries = calloc(json_object_size(f->json) + 1, sizeof *f->entries);
    f->meta = calloc(json_object_size(meta) + 1, sizeof *f->meta);
    if (!f->entries || !f->meta)
        return error_set(err, ERR_NOMEM, "%s: no memory for its header", f->path);
    json_object_foreach(meta, key, value)
    {
        if (!json_is_string(value))
            return damaged(f, err, "metadata that is not text", "");
        f->meta[f->n_meta++] = (struct safetensors_meta){key, json_string_value(value)};
    }
    json_object_foreach(f->json, key, value)
    {
        if (value == meta)
            continue;
        const char *dtype = json_string_value(json_object_get(value, "dtype"));
        enum dtype known;
        if (dtype && !dtype_by_name(dtype, &known))
            return error_set(err, ERR_CORRUPT, "%s: tensor %s is of type %.40s, which is not read here", f->path, key,
                             dtype);
        if (!read_entry(&f->entries[f->n++], key, value))
            return damaged(f, err, "dtype, shape and data_offsets do not agree", key);
    }
    qsort(f->entries, f->n, sizeof *f->entries, by_offset);
    uint64_t at = 0;
    for (size_t i = 0; i < f->n; i++) {
        if (f->entries[i].begin != at)
            return damaged(f, err, "a hole or an overlap in the data", f->entries[i].name);
        at = f->entries[i].end;
    }
    return at == data_bytes ? ERR_OK : damaged(f, err, "the size of the data is not that of the tensors", "");
}

int safetensors_open(struct safetensors_file *f, const char *path, struct error *err)
{
    *f = (struct safetensors_file){.fd = -1};
    char *text = NULL;
    struct stat st;
    uint8_t length[8];
    int rc = ERR_OK;
    f->path = strdup(path);
    if (!f->path)
        rc = error_set(err, ERR_NOMEM, "out of memory");
    if (!rc)
        rc = fs_open_linked(path, &f->fd, err);
    if (!rc && fstat(f->fd, &st) < 0)
        rc = error_errno(err, errno, "cannot look at %s", path);
    if (!rc)
        rc = safetensors_read_at(f->fd, path, 0, sizeof length, length, err);
    if (rc)
        goto out;
    uint64_t bytes = get_u64(length);
    if (bytes < 2 || bytes > SAFETENSORS_MAX_HEADER || bytes > (uint64_t)st.st_size - sizeof length) {
        rc = damaged(f, err, "the header's length is impossible", "");
        goto out;
    }
    f->data_at = sizeof length + bytes;
    text = malloc(bytes);
    rc = text ? safetensors_read_at(f->fd, path, sizeof length, bytes, text, err)
              : error_set(err, ERR_NOMEM, "out of memory");
    if (rc)
        goto out;
    json_error_t where;
    f->json = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &where);
    rc = json_is_object(f->json) ? read_entries(f, (uint64_t)st.st_size - f->data_at, err)
                                 : damaged(f, err, "the header is not a JSON object", "");
out:
    free(text);
    if (rc)
        safetensors_close(f);
    return rc;
}

void safetensors_close(struct safetensors_file *f)
{
    if (f->fd >= 0)
        close(f->fd);
    json_decref(f->json);
    free(f->entries);
    free(f->meta);
    free(f->path);
    *f = (struct safetensors_file){.fd = -1};
}

const struct safetensors_entry *safetensors_find(const struct safetensors_file *f, const char *name)
{
    for (size_t i = 0; i < f->n; i++)
        if (!strcmp(f->entries[i].name, name))
            return &f->entries[i];
    return NULL;
}

const char *safetensors_meta(const struct safetensors_file *f, const char *key)
{
    for (size_t i = 0; i < f->n_meta; i++)
        if (!strcmp(f->meta[i].key, key))
            return f->meta[i].value;
    return NULL;
}

int safetensors_read(const struct safetensors_file *f, const struct safetensors_entry *e, void *out, struct error *err)
{
    int rc = safetensors_read_at(f->fd, f->path, f->data_at + e->begin, e->end - e->begin, out, err);
    if (rc)
        error_context(err, "tensor %s", e->name);
    return rc;
}
