/* A growable byte buffer with a hard maximum, so that no peer and no file can
 * make a process grow without bound. Not thread-safe; owned by one caller. */
#ifndef BOOST_PROTO_BASE_BUFFER_H
#define BOOST_PROTO_BASE_BUFFER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/error.h"

/* Hard maxima of everything that grows, in one place. */
enum {
    LIMIT_FRAME = 4 << 20,    /* a wire frame without its length prefix, bytes */
    LIMIT_JOB_FILE = 1 << 20, /* a job file in any format, bytes               */
    LIMIT_LOG_LINE = 64 << 10,
    LIMIT_JOB_NAME = 64,
    LIMIT_KV_VALUE = 64 << 10, /* a rendezvous value, bytes                    */
};

struct buffer {
    uint8_t *data; /* NUL-terminated one past `len`, so text can be read in place */
    size_t len;
    size_t cap;
    size_t max; /* growth beyond this is ERR_NOMEM */
    bool failed; /* sticky: a failed append leaves the content as it was */
};

void buffer_init(struct buffer *b, size_t max);
void buffer_free(struct buffer *b);
void buffer_clear(struct buffer *b); /* keeps the memory */
/* Room for `extra` more bytes; NULL when over the maximum or out of memory. */
MUST_USE uint8_t *buffer_reserve(struct buffer *b, size_t extra);
/* Appenders return ERR_OK or ERR_NOMEM and set `failed`; a caller may ignore
 * the return of a sequence and check `failed` once at its end. */
int buffer_append(struct buffer *b, const void *data, size_t len);
int buffer_append_str(struct buffer *b, const char *s);
int buffer_printf(struct buffer *b, const char *fmt, ...) PRINTF_LIKE(2, 3);
/* Drops the first n bytes. */
void buffer_consume(struct buffer *b, size_t n);

#endif
