/* dial.h */
#include "daemon/dial.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/tcp_tune.h"
#include "proto/frame.h"

enum { READ_CHUNK = 64 << 10, OUT_MAX = 64 << 20, KEEP = 64 << 10 };

struct dial {
    uv_loop_t *loop;
    struct dial_ops ops;
    union {
        uv_handle_t handle;
        uv_stream_t stream;
        uv_pipe_t pipe;
        uv_tcp_t tcp;
    } io;
    bool open;   /* io is a handle of the loop                            */
    bool closed; /* dial_close() was called: nobody is to hear of it      */
    bool failed; /* `broken` is due or was called                         */
    bool taking; /* frames are handed out: writing and freeing comes after */
    int pending; /* callbacks of the loop that hold this                  */
    uv_getaddrinfo_t lookup;
    struct addrinfo *found, *next;
    uv_connect_t connect;
    uv_write_t write;
    uv_timer_t soon; /* a failure found inside a call of the caller is told from here */
    struct error why;
    bool remote;
    struct address address;
    struct tls *tls;
    unsigned timeout_ms;
    struct buffer in, out, in_flight;
    uint8_t *scratch;
};

static void try_next(struct dial *d);

/* ---- ending ---- */

static void free_when_done(struct dial *d)
{
    if (!d->closed || d->open || d->pending || d->taking)
        return;
    if (d->found)
        uv_freeaddrinfo(d->found);
    tls_free(d->tls);
    buffer_free(&d->in);
    buffer_free(&d->out);
    buffer_free(&d->in_flight);
    free(d->scratch);
    free(d);
}

static void io_closed(uv_handle_t *handle)
{
    struct dial *d = handle->data;
    d->open = false;
    if (d->closed)
        free_when_done(d);
    else if (!d->failed)
        try_next(d);
}

static void timer_closed(uv_handle_t *handle)
{
    struct dial *d = handle->data;
    d->pending--;
    free_when_done(d);
}

void dial_close(struct dial *d)
{
    if (!d || d->closed)
        return;
    d->closed = true;
    if (d->open && !uv_is_closing(&d->io.handle))
        uv_close(&d->io.handle, io_closed);
    if (d->lookup.loop)
        uv_cancel((uv_req_t *)&d->lookup);
    uv_close((uv_handle_t *)&d->soon, timer_closed);
}

static void tell(struct dial *d)
{
    if (!d->closed)
        d->ops.broken(d->ops.arg, d, &d->why);
}

static void tell_soon(uv_timer_t *timer)
{
    tell(timer->data);
}

/* Told from the loop, so that no caller has its connection taken away inside a call of its own. */
static void fail(struct dial *d)
{
    if (d->failed || d->closed)
        return;
    d->failed = true;
    uv_timer_start(&d->soon, tell_soon, 0, 0);
}

static void fail_uv(struct dial *d, int uv)
{
    if (uv == UV_EOF)
        error_set(&d->why, ERR_UNREACHABLE, "it closed the connection");
    else
        error_set(&d->why, ERR_UNREACHABLE, "%s", uv_strerror(uv));
    fail(d);
}

/* ---- writing ---- */

static void flush(struct dial *d);

static void written(uv_write_t *write, int status)
{
    struct dial *d = write->data;
    d->pending--;
    buffer_clear(&d->in_flight);
    if (d->in_flight.cap > KEEP)
        buffer_free(&d->in_flight);
    if (d->closed)
        free_when_done(d);
    else if (status < 0)
        fail_uv(d, status);
    else
        flush(d);
}

/* One write at a time; frames gather in `out` meanwhile. */
static void flush(struct dial *d)
{
    if (d->closed || d->failed || d->in_flight.len || d->taking)
        return;
    struct buffer *ready = &d->out;
    if (d->tls) {
        if (d->out.len && tls_ready(d->tls)) {
            if (tls_send(d->tls, d->out.data, d->out.len, &d->why)) {
                fail(d);
                return;
            }
            buffer_clear(&d->out);
            if (d->out.cap > KEEP)
                buffer_free(&d->out);
        }
        ready = tls_out(d->tls);
    }
    if (!ready->len)
        return;
    struct buffer swap = d->in_flight;
    d->in_flight = *ready;
    *ready = swap;
    uv_buf_t buf = uv_buf_init((char *)d->in_flight.data, (unsigned)d->in_flight.len);
    d->write.data = d;
    int uv = uv_write(&d->write, &d->io.stream, &buf, 1, written);
    if (uv < 0)
        fail_uv(d, uv);
    else
        d->pending++;
}

int dial_send(struct dial *d, const ProtobufCMessage *message, struct error *err)
{
    if (d->failed || d->closed)
        return error_set(err, ERR_CANCELLED, "the connection is closing");
    int rc = frame_append(&d->out, message, err);
    if (rc && rc != ERR_INVALID) {
        d->why = *err;
        fail(d);
    }
    if (!rc)
        flush(d);
    return rc;
}

size_t dial_queued(const struct dial *d)
{
    return d->out.len + d->in_flight.len;
}

/* ---- reading ---- */

static void give_room(uv_handle_t *handle, size_t suggested, uv_buf_t *out)
{
    (void)suggested;
    struct dial *d = handle->data;
    *out = uv_buf_init((char *)d->scratch, READ_CHUNK);
}

/* Hands out whole frames; the caller may close or send meanwhile. */
static void take_frames(struct dial *d)
{
    size_t done = 0;
    d->taking = true;
    while (!d->closed && !d->failed) {
        const uint8_t *payload;
        size_t len, used;
        if (frame_next(d->in.data + done, d->in.len - done, &payload, &len, &used, &d->why)) {
            fail(d);
            break;
        }
        if (!used)
            break;
        done += used;
        d->ops.frame(d->ops.arg, d, payload, len);
    }
    d->taking = false;
    if (d->closed) {
        free_when_done(d);
        return;
    }
    buffer_consume(&d->in, done);
    flush(d);
}

/* Bytes of TLS; false when the connection is over. */
static bool decrypt(struct dial *d, size_t n)
{
    bool was_ready = tls_ready(d->tls);
    if (tls_receive(d->tls, d->scratch, n, &d->in, &d->why)) {
        if (tls_out(d->tls)->len && !d->in_flight.len)
            flush(d); /* the alert that tells the peer why */
        fail(d);
        return false;
    }
    flush(d);
    if (!was_ready && tls_ready(d->tls)) {
        d->taking = true;
        d->ops.connected(d->ops.arg, d);
        d->taking = false;
        if (d->closed) {
            free_when_done(d);
            return false;
        }
        flush(d);
    }
    return true;
}

static void received(uv_stream_t *stream, ssize_t n, const uv_buf_t *unused)
{
    (void)unused;
    struct dial *d = stream->data;
    if (d->closed || d->failed || n == 0)
        return;
    if (n < 0) {
        fail_uv(d, (int)n);
        return;
    }
    if (d->tls) {
        if (!decrypt(d, (size_t)n))
            return;
    } else if (buffer_append(&d->in, d->scratch, (size_t)n)) {
        error_set(&d->why, ERR_NOMEM, "no memory for a message");
        fail(d);
        return;
    }
    take_frames(d);
    /* take_frames may have freed it: not touched behind it. */
}

/* ---- connecting ---- */

static void opened(uv_connect_t *request, int status)
{
    struct dial *d = request->data;
    d->pending--;
    if (d->closed) {
        free_when_done(d);
        return;
    }
    if (status < 0 && d->remote && d->next) {
        error_set(&d->why, ERR_UNREACHABLE, "%s", uv_strerror(status));
        uv_close(&d->io.handle, io_closed); /* then the next address */
        return;
    }
    if (status < 0 || uv_read_start(&d->io.stream, give_room, received) < 0) {
        fail_uv(d, status < 0 ? status : UV_EIO);
        return;
    }
    if (d->remote) {
        tcp_tune(&d->io.tcp, d->timeout_ms);
        flush(d); /* the client's hello of TLS */
        return;
    }
    d->taking = true;
    d->ops.connected(d->ops.arg, d);
    d->taking = false;
    if (d->closed)
        free_when_done(d);
    else
        flush(d);
}

/* Connects to the next address that the name has. */
static void try_next(struct dial *d)
{
    const struct addrinfo *to = d->next;
    if (!to) {
        fail(d);
        return;
    }
    d->next = to->ai_next;
    int uv = uv_tcp_init(d->loop, &d->io.tcp);
    d->io.handle.data = d;
    if (!uv) {
        d->open = true;
        uv = uv_tcp_connect(&d->connect, &d->io.tcp, to->ai_addr, opened);
    }
    if (uv < 0)
        fail_uv(d, uv);
    else
        d->pending++;
}

static void looked_up(uv_getaddrinfo_t *request, int status, struct addrinfo *found)
{
    struct dial *d = request->data;
    d->pending--;
    d->lookup.loop = NULL;
    d->found = d->next = found;
    if (d->closed) {
        free_when_done(d);
        return;
    }
    if (status < 0) {
        error_set(&d->why, ERR_UNREACHABLE, "cannot find the address of %s: %s", d->address.host, uv_strerror(status));
        error_hint(&d->why, "see whether the name is right and DNS or /etc/hosts knows it, or give a number");
        fail(d);
        return;
    }
    try_next(d);
}

static int begin(struct dial *d, const struct dial_target *target, struct error *err)
{
    int uv;
    if (target->path) {
        uv = uv_pipe_init(d->loop, &d->io.pipe, 0);
        if (uv < 0)
            return error_errno(err, -uv, "cannot make a connection");
        d->io.handle.data = d;
        d->open = true;
        d->pending++;
        uv_pipe_connect(&d->connect, &d->io.pipe, target->path, opened);
        return ERR_OK;
    }
    d->remote = true;
    d->address = *target->address;
    int rc = tls_create(target->tls, d->address.host, &d->tls, err);
    if (rc)
        return rc;
    /* A number needs no thread: those of the agent may all wait for a file system that is dead. */
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV | AI_NUMERICHOST};
    if (getaddrinfo(d->address.host, d->address.port, &hints, &d->found) == 0) {
        d->next = d->found;
        try_next(d);
        return ERR_OK;
    }
    hints.ai_flags = AI_NUMERICSERV;
    d->lookup.data = d;
    uv = uv_getaddrinfo(d->loop, &d->lookup, looked_up, d->address.host, d->address.port, &hints);
    if (uv < 0) {
        d->lookup.loop = NULL;
        return error_errno(err, -uv, "cannot look up %s", d->address.host);
    }
    d->pending++;
    return ERR_OK;
}

int dial_open(uv_loop_t *loop, const struct dial_target *target, const struct dial_ops *ops, struct dial **out,
              struct error *err)
{
    *out = NULL;
    struct dial *d = calloc(1, sizeof *d);
    if (d)
        d->scratch = malloc(READ_CHUNK);
    if (!d || !d->scratch) {
        free(d);
        return error_set(err, ERR_NOMEM, "no memory for a connection");
    }
    d->loop = loop;
    d->ops = *ops;
    d->timeout_ms = target->timeout_ms;
    d->connect.data = d;
    buffer_init(&d->in, LIMIT_FRAME + FRAME_HEADER + READ_CHUNK + 4 * TLS_RECORD_MAX);
    buffer_init(&d->out, OUT_MAX);
    buffer_init(&d->in_flight, OUT_MAX);
    uv_timer_init(loop, &d->soon);
    d->soon.data = d;
    d->pending = 1; /* the timer */
    error_set(&d->why, ERR_UNREACHABLE, "it has no address");
    int rc = begin(d, target, err);
    if (rc)
        dial_close(d);
    else
        *out = d;
    return rc;
}
