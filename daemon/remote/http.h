/* One HTTP request at a time, by libcurl. Blocking: never on an event loop. A client belongs to one thread at a
 * time. */
#ifndef BOOST_DAEMON_REMOTE_HTTP_H
#define BOOST_DAEMON_REMOTE_HTTP_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/buffer.h"
#include "proto/base/error.h"

/* How far the files of some work have come: written by the thread that does it, read by any. */
struct http_progress {
    atomic_llong done, total; /* bytes; total 0: not known                  */
    int64_t before;           /* of the files before this one; the thread's */
};
void http_progress_total(struct http_progress *p, int64_t bytes); /* `p` NULL: nobody looks; here and below */
void http_progress_passed(struct http_progress *p, int64_t bytes); /* the file of so many bytes is where it belongs */

struct http_options {
    const atomic_bool *stop; /* once true, a request ends soon with ERR_CANCELLED; NULL: never */
    int stall_ms;            /* without a byte either way, or a file with less than 1 KiB a second: ERR_TIMEOUT */
    int connect_ms;
    const char *ca_file;     /* PEM; NULL or "": the system's */
    int tries;               /* of one request; 0: HTTP_TRIES */
    struct http_progress *progress; /* NULL: nobody looks */
};

struct http_call {
    const char *method;         /* GET, HEAD, PUT, POST, DELETE           */
    const char *url;
    const char *const *headers; /* "name: value"                          */
    size_t n_headers;
    const void *body;           /* of PUT and POST                        */
    size_t body_len;
    bool counts;                /* the body is a piece of a file, */
    int64_t body_at;            /* from this byte on              */
    bool redirects;             /* follows some, to http and https only   */
    /* What a reply of status 200 or 206 brings: into the file, else into `text`, as everything else. More than there
     * is room for is ERR_CORRUPT. */
    int fd;                     /* -1: none                               */
    int64_t at;                 /* the file has so many bytes, the next are asked for; moved on by what came, and set
                                 * back to 0 with the file by a server that sends all of it again */
    int64_t most;               /* the file's size at most                */
    const char *only_etag;      /* what is gone on with has it, else ERR_BUSY; NULL or "": any */
    struct buffer *text;

    /* the answer */
    int status;
    int64_t length;        /* Content-Length, -1: not told              */
    int64_t total;         /* of the whole file, of Content-Range; -1   */
    int64_t from;          /* first byte, of Content-Range; -1          */
    int64_t retry_after_s; /* -1: not told                              */
    int64_t date_s;        /* of the server's clock, Unix; -1            */
    char region[64];       /* x-amz-bucket-region; ""                   */
    char etag[128];        /* as it stands there, with its quotes; ""   */
    char crc32c[16];       /* x-amz-meta-boost-crc32c; ""               */
};

struct http;
MUST_USE int http_open(const struct http_options *options, struct http **out, struct error *err);
void http_close(struct http *h);
/* ERR_OK: there is an answer, of whatever status. ERR_UNREACHABLE, ERR_TIMEOUT: trying again may help; ERR_CANCELLED;
 * ERR_INVALID: the URL is none, or its certificate is not trusted; ERR_IO, ERR_NOSPACE: of the file. Credentials in
 * headers are never part of a message. */
MUST_USE int http_do(struct http *h, struct http_call *call, struct error *err);
void http_progress_at(const struct http *h, int64_t at); /* so many bytes of the file are where they belong */
int http_tries(const struct http *h);
bool http_stopped(const struct http *h);
/* Sleeps, unless it is stopped; false: it is. */
bool http_pause(const struct http *h, int64_t ms);

/* A failure or a status after which the same request may succeed. */
bool http_transient(int rc, int status);
/* How long to wait before try number `tries` (from 1): doubled from 200 ms up to 20 s, half of it at random; what the
 * server asked for (60 s at most) where that is more. */
int64_t http_backoff_ms(int tries, int64_t retry_after_s);
enum { HTTP_TRIES = 8, HTTP_CAME_ON = 64 << 10 }; /* a try that brought so many bytes is as good as none */

#endif
