/* keeper_log.h: the reading side. The two files of a log are one stream; .log.pos
 * says by inode where each begins in it. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/keeper_log.h"
#include "proto/base/fs.h"
#include "proto/rankfiles.h"

enum { POS_MAX = 512, PLACE_TRIES = 8, SCAN_BLOCK = 64 << 10 };

struct segment {
    int fd; /* -1 = none */
    uint64_t inode;
    int64_t begin, end; /* in the stream */
};

static int open_segment(struct segment *s, const char *run_dir, int rank, const char *suffix, struct error *err)
{
    char path[PATH_MAX];
    struct stat st;
    *s = (struct segment){.fd = -1};
    int rc = rank_file_path(path, sizeof path, run_dir, rank, suffix, err);
    if (rc)
        return rc;
    s->fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (s->fd < 0)
        return errno == ENOENT ? ERR_OK : error_errno(err, errno, "cannot open %s", path);
    if (fstat(s->fd, &st) < 0 || !S_ISREG(st.st_mode))
        return error_set(err, ERR_CORRUPT, "%s is not a regular file", path);
    s->inode = st.st_ino;
    s->end = st.st_size;
    return ERR_OK;
}

static void close_segment(struct segment *s)
{
    if (s->fd >= 0)
        close(s->fd);
    s->fd = -1;
}

/* Moves the segment to its place; false when the position file does not know it. */
static bool place_segment(struct segment *s, const char *positions)
{
    for (const char *at = positions; *at;) {
        char *end;
        uint64_t inode = strtoull(at, &end, 10);
        int64_t begin = strtoll(end, &end, 10);
        if (inode == s->inode) {
            s->begin += begin;
            s->end += begin;
            return true;
        }
        at = strchr(end, '\n');
        if (!at++)
            break;
    }
    return false;
}

/* Opens both files, older one first in `s`; a rotation in between makes it look again. */
static int open_stream(struct segment s[2], const char *run_dir, int rank, struct error *err)
{
    char path[PATH_MAX];
    struct buffer positions;
    buffer_init(&positions, POS_MAX);
    int rc = rank_file_path(path, sizeof path, run_dir, rank, "log.pos", err);
    s[0] = s[1] = (struct segment){.fd = -1};
    for (int i = 0; i < PLACE_TRIES && !rc; i++) {
        close_segment(&s[0]);
        close_segment(&s[1]);
        buffer_clear(&positions);
        rc = open_segment(&s[1], run_dir, rank, "log", err);
        if (!rc)
            rc = open_segment(&s[0], run_dir, rank, "log.1", err);
        if (!rc && fs_read_regular(path, &positions, NULL) && positions.len)
            rc = error_set(err, ERR_CORRUPT, "%s is damaged", path);
        if (rc)
            break;
        const char *text = positions.data ? (const char *)positions.data : "";
        bool placed = s[1].fd < 0 || place_segment(&s[1], text);
        if (s[0].fd >= 0 && (!place_segment(&s[0], text) || s[0].end > s[1].begin))
            close_segment(&s[0]);
        if (placed && s[1].fd >= 0)
            break;
    }
    buffer_free(&positions);
    if (rc) {
        close_segment(&s[0]);
        close_segment(&s[1]);
    }
    return rc;
}

static int read_segment(const struct segment *s, int64_t from, size_t len, struct buffer *out, struct error *err)
{
    uint8_t *at = buffer_reserve(out, len);
    if (!at)
        return error_set(err, ERR_NOMEM, "no memory for %zu bytes of log", len);
    while (len) {
        ssize_t n = pread(s->fd, at, len, (off_t)(from - s->begin));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return error_errno(err, errno, "cannot read a log");
        if (n == 0)
            break;
        out->len += (size_t)n;
        at += n;
        from += n;
        len -= (size_t)n;
    }
    if (out->data)
        out->data[out->len] = '\0';
    return ERR_OK;
}

/* Where the last `lines` lines begin; the final line end belongs to the last line. */
static int tail_offset(const struct segment s[2], int64_t lines, int64_t oldest, int64_t *out, struct error *err)
{
    struct buffer block;
    buffer_init(&block, SCAN_BLOCK);
    int rc = ERR_OK;
    int64_t left = lines;
    bool at_end = true;
    *out = lines ? oldest : s[1].end;
    if (!lines)
        goto out;
    for (int i = 1; i >= 0 && !rc; i--) {
        if (s[i].fd < 0)
            continue;
        for (int64_t end = s[i].end; end > s[i].begin;) {
            int64_t begin = end - SCAN_BLOCK > s[i].begin ? end - SCAN_BLOCK : s[i].begin;
            buffer_clear(&block);
            rc = read_segment(&s[i], begin, (size_t)(end - begin), &block, err);
            if (rc)
                break;
            for (size_t k = block.len; k > 0; k--) {
                if (block.data[k - 1] == '\n' && !at_end && --left == 0) {
                    *out = begin + (int64_t)k;
                    goto out;
                }
                at_end = false;
            }
            end = begin;
        }
    }
out:
    buffer_free(&block);
    return rc;
}

int keeper_log_read(const char *run_dir, int rank, int64_t *offset, int64_t tail_lines, size_t max_bytes,
                    struct buffer *out, struct error *err)
{
    struct segment s[2];
    int rc = open_stream(s, run_dir, rank, err);
    if (rc)
        return rc;
    int64_t oldest = s[0].fd >= 0 ? s[0].begin : s[1].begin;
    if (*offset < 0 && tail_lines >= 0)
        rc = tail_offset(s, tail_lines, oldest, offset, err);
    if (*offset < oldest)
        *offset = oldest;
    int64_t at = *offset;
    for (int i = 0; i < 2 && !rc && max_bytes; i++) {
        if (s[i].fd < 0 || at < s[i].begin || at >= s[i].end)
            continue;
        size_t part = (size_t)(s[i].end - at) < max_bytes ? (size_t)(s[i].end - at) : max_bytes;
        rc = read_segment(&s[i], at, part, out, err);
        at += (int64_t)part;
        max_bytes -= part;
    }
    close_segment(&s[0]);
    close_segment(&s[1]);
    return rc;
}

int keeper_log_end(const char *run_dir, int rank, int64_t *end, struct error *err)
{
    struct segment s[2];
    int rc = open_stream(s, run_dir, rank, err);
    if (rc)
        return rc;
    *end = s[1].end;
    close_segment(&s[0]);
    close_segment(&s[1]);
    return ERR_OK;
}

/* The file belongs to the job's user: what does not make sense is no mark. */
int64_t keeper_log_since(const char *run_dir, int rank, int64_t wall_ns)
{
    char path[PATH_MAX];
    struct buffer b;
    struct keeper_log_mark m;
    int64_t found = -1;
    bool any = false;
    buffer_init(&b, (KEEPER_LOG_MARKS + 1) * sizeof m);
    if (!rank_file_path(path, sizeof path, run_dir, rank, "log.times", NULL) && !fs_read_regular(path, &b, NULL))
        for (size_t i = 0; i + sizeof m <= b.len; i += sizeof m) {
            memcpy(&m, b.data + i, sizeof m);
            any = true;
            if (found < 0 && m.pos >= 0 && m.interval_ns >= 0 && m.wall_ns > wall_ns - m.interval_ns)
                found = m.pos;
        }
    buffer_free(&b);
    return any ? found : 0;
}
