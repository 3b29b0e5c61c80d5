/* reclog.h */
#include "proto/reclog.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "proto/base/crc32c.h"
#include "proto/base/fs.h"

enum { HEADER = 8 };

static void put_u32(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++)
        p[i] = (uint8_t)(v >> 8 * i);
}

static uint32_t get_u32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* Reads up to len bytes at offset; the count read, or -1 with errno. */
static ssize_t read_at(int fd, void *data, size_t len, uint64_t offset)
{
    size_t done = 0;
    while (done < len) {
        ssize_t n = pread(fd, (uint8_t *)data + done, len - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -1;
        if (n == 0)
            break;
        done += (size_t)n;
    }
    return (ssize_t)done;
}

static int read_record(int fd, const char *path, uint64_t *offset, struct buffer *out, bool *got, struct error *err)
{
    *got = false;
    buffer_clear(out);
    uint8_t header[HEADER];
    ssize_t n = read_at(fd, header, sizeof header, *offset);
    if (n < 0)
        return error_errno(err, errno, "cannot read %s", path);
    if (n < HEADER)
        return ERR_OK;
    uint32_t len = get_u32(header);
    if (len > RECLOG_MAX_RECORD)
        return error_set(err, ERR_CORRUPT, "%s: record of %u bytes at offset %llu is over the limit", path, len,
                         (unsigned long long)*offset);
    uint8_t *at = buffer_reserve(out, len);
    if (!at)
        return error_set(err, ERR_NOMEM, "%s: no room for a record of %u bytes", path, len);
    n = read_at(fd, at, len, *offset + HEADER);
    if (n < 0)
        return error_errno(err, errno, "cannot read %s", path);
    if ((uint32_t)n < len)
        return ERR_OK;
    if (crc32c(0, at, len) != get_u32(header + 4))
        return error_set(err, ERR_CORRUPT, "%s: checksum of the record at offset %llu does not hold", path,
                         (unsigned long long)*offset);
    out->len = len;
    at[len] = '\0';
    *offset += HEADER + len;
    *got = true;
    return ERR_OK;
}

int reclog_read(const char *path, uint64_t *offset, struct buffer *out, bool *got, struct error *err)
{
    *got = false;
    /* A name in a user's directory, read perhaps by root. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0)
        return errno == ENOENT ? ERR_OK : error_errno(err, errno, "cannot open %s", path);
    int rc = read_record(fd, path, offset, out, got, err);
    close(fd);
    return rc;
}

/* Best effort: without it a record needs free disk when it is written, as anywhere. */
static void make_room(struct reclog_writer *w, uint64_t end)
{
    if (end + RECLOG_ROOM / 2 <= w->room)
        return;
    if (fallocate(w->fd, FALLOC_FL_KEEP_SIZE, (off_t)end, RECLOG_ROOM) == 0 || errno == EOPNOTSUPP)
        w->room = end + RECLOG_ROOM;
}

int reclog_open(struct reclog_writer *w, const char *path, struct error *err)
{
    w->room = 0;
    w->fd = open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (w->fd < 0)
        return error_errno(err, errno, "cannot open %s", path);
    struct buffer record;
    buffer_init(&record, RECLOG_MAX_RECORD);
    uint64_t end = 0;
    bool got = true;
    while (got) {
        if (read_record(w->fd, path, &end, &record, &got, NULL))
            got = false; /* a damaged tail is cut like a torn one */
    }
    buffer_free(&record);
    if (ftruncate(w->fd, (off_t)end) < 0) {
        int rc = error_errno(err, errno, "cannot cut the torn tail of %s", path);
        reclog_close(w);
        return rc;
    }
    make_room(w, end);
    return ERR_OK;
}

int reclog_append(struct reclog_writer *w, const void *payload, size_t len, bool durable, struct error *err)
{
    if (len > RECLOG_MAX_RECORD)
        return error_set(err, ERR_INTERNAL, "record of %zu bytes is over the limit", len);
    off_t start = lseek(w->fd, 0, SEEK_END);
    if (start >= 0)
        make_room(w, (uint64_t)start + HEADER + len);
    uint8_t header[HEADER];
    put_u32(header, (uint32_t)len);
    put_u32(header + 4, crc32c(0, payload, len));
    struct iovec parts[2] = {{header, HEADER}, {(void *)(uintptr_t)payload, len}};
    ssize_t n;
    do
        n = writev(w->fd, parts, 2);
    while (n < 0 && errno == EINTR);
    if (n != (ssize_t)(HEADER + len)) {
        int errnum = n < 0 ? errno : ENOSPC;
        /* A short record would hide all later ones: take it back. */
        if (n > 0 && ftruncate(w->fd, start) < 0)
            errnum = errno;
        return error_errno(err, errnum, "cannot append a record");
    }
    if (durable && fdatasync(w->fd) < 0)
        return error_errno(err, errno, "fdatasync of a record file");
    return ERR_OK;
}

void reclog_close(struct reclog_writer *w)
{
    if (w->fd >= 0) {
        off_t end = lseek(w->fd, 0, SEEK_END);
        if (w->room && end >= 0 && ftruncate(w->fd, end) < 0)
            w->room = 0; /* it stays a little larger on the disk */
        close(w->fd);
    }
    w->fd = -1;
}
