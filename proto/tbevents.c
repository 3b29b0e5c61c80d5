/* tbevents.h */
#include "proto/tbevents.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#include "proto/base/buffer.h"
#include "proto/base/clock.h"
#include "proto/base/crc32c.h"
#include "proto/base/fs.h"

enum { EVENT_MAX = 16 << 10, HEAD = 12, FOOT = 4 };
/* Fields of event.proto and summary.proto, with their wire types. */
enum {
    EVENT_WALL_TIME = 1 << 3 | 1,
    EVENT_STEP = 2 << 3,
    EVENT_FILE_VERSION = 3 << 3 | 2,
    EVENT_SUMMARY = 5 << 3 | 2,
    EVENT_SESSION_LOG = 7 << 3 | 2,
    SUMMARY_VALUE = 1 << 3 | 2,
    VALUE_TAG = 1 << 3 | 2,
    VALUE_SIMPLE = 2 << 3 | 5,
    SESSION_STATUS = 1 << 3,
    SESSION_START = 1,
};

static void put_varint(struct buffer *b, uint64_t v)
{
    uint8_t bytes[10];
    size_t n = 0;
    do {
        bytes[n++] = (uint8_t)((v & 0x7F) | (v > 0x7F ? 0x80 : 0));
        v >>= 7;
    } while (v);
    buffer_append(b, bytes, n);
}

static void put_little(struct buffer *b, uint64_t v, int bytes)
{
    for (int i = 0; i < bytes; i++) {
        uint8_t byte = (uint8_t)(v >> (8 * i));
        buffer_append(b, &byte, 1);
    }
}

static void put_double(struct buffer *b, double v)
{
    uint64_t bits;
    memcpy(&bits, &v, sizeof bits);
    put_little(b, bits, 8);
}

static void put_bytes(struct buffer *b, const void *data, size_t len)
{
    put_varint(b, len);
    buffer_append(b, data, len);
}

static void put_value(struct buffer *b, const char *name, double value)
{
    struct buffer v;
    float single = (float)value;
    uint32_t bits;
    memcpy(&bits, &single, sizeof bits);
    buffer_init(&v, EVENT_MAX);
    put_varint(&v, VALUE_TAG);
    put_bytes(&v, name, strlen(name));
    put_varint(&v, VALUE_SIMPLE);
    put_little(&v, bits, 4);
    put_varint(b, SUMMARY_VALUE);
    put_bytes(b, v.data, v.len);
    b->failed = b->failed || v.failed;
    buffer_free(&v);
}

/* Rotated and offset, as TensorFlow stores a checksum of what may hold checksums. */
static uint32_t masked(const void *data, size_t len)
{
    uint32_t crc = crc32c(0, data, len);
    return ((crc >> 15) | (crc << 17)) + 0xA282EAD8U;
}

/* Frames and writes an event; cuts the file back when only a part of it went out. */
static int write_event(struct tbevents *t, const struct buffer *event, struct error *err)
{
    struct buffer record;
    buffer_init(&record, EVENT_MAX + HEAD + FOOT);
    put_little(&record, event->len, 8);
    put_little(&record, record.data ? masked(record.data, 8) : 0, 4);
    buffer_append(&record, event->data, event->len);
    put_little(&record, masked(event->data, event->len), 4);
    off_t end = lseek(t->fd, 0, SEEK_END);
    int rc = record.failed || event->failed ? error_set(err, ERR_NOMEM, "no memory for an event")
             : end < 0                      ? error_errno(err, errno, "cannot seek an event file")
                                            : fs_write_all(t->fd, record.data, record.len, err);
    if (rc && end >= 0 && ftruncate(t->fd, end) < 0)
        tbevents_close(t); /* nothing that follows could be read */
    buffer_free(&record);
    return rc;
}

static void begin_event(struct buffer *b, int64_t step, int64_t wall_ns)
{
    buffer_init(b, EVENT_MAX);
    put_varint(b, EVENT_WALL_TIME);
    put_double(b, (double)wall_ns / (double)NS_PER_S);
    put_varint(b, EVENT_STEP);
    put_varint(b, (uint64_t)step);
}

static int write_version(struct tbevents *t, int64_t wall_ns, struct error *err)
{
    static const char version[] = "brain.Event:2";
    struct buffer b;
    begin_event(&b, 0, wall_ns);
    put_varint(&b, EVENT_FILE_VERSION);
    put_bytes(&b, version, sizeof version - 1);
    int rc = write_event(t, &b, err);
    buffer_free(&b);
    return rc;
}

int tbevents_open(struct tbevents *t, const char *dir, int64_t job, const char *suffix, const char *name,
                  int64_t wall_ns, struct error *err)
{
    char folder[PATH_MAX], path[PATH_MAX];
    t->fd = -1;
    int used = snprintf(folder, sizeof folder, "%s/job-%" PRId64 "%s", dir, job, suffix);
    if (used < 0 || (size_t)used >= sizeof folder)
        return error_set(err, ERR_INVALID, "path too long: %s", dir);
    used = snprintf(path, sizeof path, "%s/events.out.tfevents.%010" PRId64 ".%s", folder,
                    (int64_t)(wall_ns / NS_PER_S), name);
    if (used < 0 || (size_t)used >= sizeof path)
        return error_set(err, ERR_INVALID, "path too long: %s", folder);
    int rc = fs_make_dirs(folder, 0755, err);
    if (rc)
        return rc;
    t->fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (t->fd < 0)
        return error_errno(err, errno, "cannot open %s", path);
    rc = write_version(t, wall_ns, err);
    if (rc)
        tbevents_close(t);
    return rc ? error_context(err, "%s", path) : ERR_OK;
}

int tbevents_restart(struct tbevents *t, int64_t step, int64_t wall_ns, struct error *err)
{
    struct buffer b;
    begin_event(&b, step, wall_ns);
    put_varint(&b, EVENT_SESSION_LOG);
    put_varint(&b, 2);
    put_varint(&b, SESSION_STATUS);
    put_varint(&b, SESSION_START);
    int rc = t->fd < 0 ? error_set(err, ERR_IO, "the event file is closed") : write_event(t, &b, err);
    buffer_free(&b);
    return rc;
}

int tbevents_scalars(struct tbevents *t, int64_t step, int64_t wall_ns, const char *const *names, const double *values,
                     size_t n, struct error *err)
{
    struct buffer b, summary;
    begin_event(&b, step, wall_ns);
    buffer_init(&summary, EVENT_MAX);
    for (size_t i = 0; i < n && i < TBEVENTS_VALUES; i++)
        put_value(&summary, names[i], values[i]);
    put_varint(&b, EVENT_SUMMARY);
    put_bytes(&b, summary.data, summary.len);
    b.failed = b.failed || summary.failed;
    int rc = t->fd < 0 ? error_set(err, ERR_IO, "the event file is closed") : write_event(t, &b, err);
    buffer_free(&summary);
    buffer_free(&b);
    return rc;
}

void tbevents_close(struct tbevents *t)
{
    if (t->fd >= 0)
        close(t->fd);
    t->fd = -1;
}
