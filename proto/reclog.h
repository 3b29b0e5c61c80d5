/* Append-only record files: how a rank tells its agent things that must not be
 * lost while agent or controller are away (metrics, shard-done records).
 *
 * A record is: u32 length, u32 CRC-32C of the payload (both little-endian),
 * payload. One write() a record; a torn tail (a crash in the middle) is
 * recognised and never returned; the writer cuts it off when it opens the file. */
#ifndef BOOST_PROTO_RECLOG_H
#define BOOST_PROTO_RECLOG_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/buffer.h"
#include "proto/base/error.h"

enum {
    RECLOG_MAX_RECORD = 1 << 20,
    RECLOG_ROOM = 256 << 10, /* bytes of disk kept ahead of a writer, where the file system can */
};

struct reclog_writer {
    int fd;
    uint64_t room; /* the file has disk up to here */
};
/* Opens for append, creates, truncates a torn tail. One writer a file. Takes disk ahead of the records, so that a disk
 * that others fill does not silence the writer at once; reclog_close gives back what is left of it. */
MUST_USE int reclog_open(struct reclog_writer *w, const char *path, struct error *err);
/* `durable` adds fdatasync. */
MUST_USE int reclog_append(struct reclog_writer *w, const void *payload, size_t len, bool durable, struct error *err);
void reclog_close(struct reclog_writer *w);

/* Reads the record at *offset into `out` (cleared first) and moves *offset past it.
 * *got false: no whole record there yet (end of file or a tail being written).
 * ERR_CORRUPT: a whole record whose checksum fails. A missing file reads as empty. */
MUST_USE int reclog_read(const char *path, uint64_t *offset, struct buffer *out, bool *got, struct error *err);

#endif
