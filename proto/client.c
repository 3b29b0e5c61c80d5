/* client.h */
#include "proto/client.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "proto/base/clock.h"
#include "proto/frame.h"
#include "proto/reflect.h"
#include "proto/version.h"

enum { CLIENT_HELLO_ARENA = 64 << 10, CLIENT_READ = 64 << 10 };

static int unreachable(const struct client *c, struct error *err, int errnum)
{
    if (errnum)
        error_set(err, ERR_UNREACHABLE, "cannot reach boostd at %s: %s", c->path, strerror(errnum));
    else
        error_set(err, ERR_UNREACHABLE, "boostd at %s closed the connection", c->path);
    if (errnum == EACCES || errnum == EPERM)
        return error_hint(err, "ask for access to the socket's directory, or name another one with --socket");
    if (c->tls || c->remote)
        return error_hint(err, "see that boostd runs there, and that `listen` of its configuration has this address");
    if (errnum == ENOENT || errnum == ECONNREFUSED)
        return error_hint(err, "start it with: boostd, or name its socket with --socket PATH or $BOOST_SOCKET");
    return error_hint(err, "see whether it still runs, and its log; then try again");
}

static int no_answer(const struct client *c, struct error *err)
{
    error_set(err, ERR_UNREACHABLE, "boostd at %s did not answer in time", c->path);
    return error_hint(err, "see whether it is stopped or overloaded, and its log; then try again");
}

static int64_t deadline_of(int timeout_ms)
{
    return timeout_ms < 0 ? INT64_MAX : clock_mono_ns() + timeout_ms * NS_PER_MS;
}

/* Waits for the descriptor; ERR_OK also on errors and hang-ups, which the next call reports. */
static int await(struct client *c, short events, int64_t deadline, struct error *err)
{
    for (;;) {
        int ms = -1;
        if (deadline != INT64_MAX) {
            int64_t left = deadline - clock_mono_ns();
            ms = left <= 0 ? 0 : (int)((left + NS_PER_MS - 1) / NS_PER_MS);
        }
        struct pollfd p = {.fd = c->fd, .events = events};
        int n = poll(&p, 1, ms);
        if (n > 0)
            return ERR_OK;
        if (n == 0)
            return no_answer(c, err);
        if (errno != EINTR)
            return error_errno(err, errno, "poll");
        if (c->interrupted && *c->interrupted)
            return error_set(err, ERR_CANCELLED, "interrupted");
    }
}

static int send_all(struct client *c, const uint8_t *data, size_t len, int64_t deadline, struct error *err)
{
    while (len) {
        ssize_t n = send(c->fd, data, len, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EAGAIN) {
            int rc = await(c, POLLOUT, deadline, err);
            if (rc)
                return rc;
        } else if (n < 0 && errno != EINTR) {
            return unreachable(c, err, errno == EPIPE ? 0 : errno);
        } else if (n > 0) {
            data += n;
            len -= (size_t)n;
        }
    }
    return ERR_OK;
}

/* What the peer may have said before it hung up: an alert tells why. */
static int last_words(struct client *c, struct error *err)
{
    char data[4096];
    struct error said;
    ssize_t n = recv(c->fd, data, sizeof data, MSG_DONTWAIT);
    if (n > 0 && tls_receive(c->tls, data, (size_t)n, &c->in, &said)) {
        error_set(err, said.code, "%s", said.message);
        error_hint(err, "%s", said.hint);
        return error_context(err, "boostd at %s", c->path);
    }
    return err->code;
}

/* What TLS has for the wire. */
static int send_records(struct client *c, int64_t deadline, struct error *err)
{
    struct buffer *out = tls_out(c->tls);
    int rc = send_all(c, out->data, out->len, deadline, err);
    buffer_clear(out);
    return rc == ERR_UNREACHABLE ? last_words(c, err) : rc;
}

static int send_bytes(struct client *c, const struct buffer *out, int64_t deadline, struct error *err)
{
    if (!c->tls)
        return send_all(c, out->data, out->len, deadline, err);
    int rc = tls_send(c->tls, out->data, out->len, err);
    return rc ? error_context(err, "boostd at %s", c->path) : send_records(c, deadline, err);
}

/* Bytes that have come, into `in`. */
static int take_bytes(struct client *c, int64_t deadline, struct error *err)
{
    uint8_t *room = buffer_reserve(c->tls ? &c->wire : &c->in, CLIENT_READ);
    if (!room)
        return error_set(err, ERR_NOMEM, "no memory for a reply of boostd");
    ssize_t n = recv(c->fd, room, CLIENT_READ, MSG_DONTWAIT);
    if (n == 0)
        return unreachable(c, err, 0);
    if (n < 0)
        return errno == EAGAIN || errno == EINTR ? ERR_OK : unreachable(c, err, errno == ECONNRESET ? 0 : errno);
    if (!c->tls) {
        c->in.len += (size_t)n;
        return ERR_OK;
    }
    int rc = tls_receive(c->tls, room, (size_t)n, &c->in, err);
    if (rc) {
        struct error ignored; /* the alert may not reach the peer: it then sees the connection end */
        if (send_records(c, deadline, &ignored) == ERR_NOMEM)
            return error_set(err, ERR_NOMEM, "no memory for a reply of boostd");
        return error_context(err, "boostd at %s", c->path);
    }
    if (tls_closed(c->tls) && !c->in.len)
        return unreachable(c, err, 0);
    return tls_out(c->tls)->len ? send_records(c, deadline, err) : ERR_OK;
}

static int send_message(struct client *c, const ProtobufCMessage *message, int64_t deadline, struct error *err)
{
    struct buffer out;
    buffer_init(&out, LIMIT_FRAME + FRAME_HEADER);
    int rc = frame_append(&out, message, err);
    if (!rc)
        rc = send_bytes(c, &out, deadline, err);
    buffer_free(&out);
    return rc;
}

/* The next frame, unpacked; taken out of `in` before it returns. */
static int receive_message(struct client *c, const ProtobufCMessageDescriptor *type, int64_t deadline, struct arena *a,
                           ProtobufCMessage **out, struct error *err)
{
    for (;;) {
        const uint8_t *payload;
        size_t payload_len, used;
        int rc = frame_next(c->in.data, c->in.len, &payload, &payload_len, &used, err);
        if (rc)
            return error_context(err, "boostd at %s", c->path);
        if (used) {
            *out = reflect_unpack(type, payload, payload_len, a, err);
            buffer_consume(&c->in, used);
            if (!*out && err && err->code != ERR_NOMEM)
                err->code = ERR_PROTOCOL;
            return *out ? ERR_OK : error_context(err, "reply of boostd at %s", c->path);
        }
        rc = await(c, POLLIN, deadline, err);
        if (rc)
            return rc;
        rc = take_bytes(c, deadline, err);
        if (rc)
            return rc;
    }
}

static int connect_socket(struct client *c, int timeout_ms, struct error *err)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, c->path, strlen(c->path) + 1);
    c->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (c->fd < 0)
        return error_errno(err, errno, "cannot make a socket");
    /* A full backlog makes connect() wait; this is the only time-out it knows. */
    struct timeval limit = {.tv_sec = timeout_ms / 1000, .tv_usec = timeout_ms % 1000 * 1000};
    if (timeout_ms >= 0 && setsockopt(c->fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) < 0)
        return error_errno(err, errno, "cannot set the time-out of a socket");
    int rc;
    do
        rc = connect(c->fd, (const struct sockaddr *)&address, sizeof address);
    while (rc < 0 && errno == EINTR && !(c->interrupted && *c->interrupted));
    if (rc < 0)
        return errno == EAGAIN ? no_answer(c, err) : unreachable(c, err, errno);
    return ERR_OK;
}

static int exchange_hellos(struct client *c, Boost__Component__Value component, const char *node, int64_t deadline,
                           struct error *err)
{
    Boost__Hello hello = BOOST__HELLO__INIT;
    hello.has_protocol = hello.has_protocol_min = hello.has_component = 1;
    hello.protocol = FRAME_PROTOCOL_VERSION;
    hello.protocol_min = FRAME_PROTOCOL_MIN;
    hello.component = component;
    hello.version = (char *)boost_version();
    hello.build_id = (char *)boost_build_id();
    hello.node = (char *)node;
    struct arena a;
    arena_init(&a, CLIENT_HELLO_ARENA);
    ProtobufCMessage *m = NULL;
    int rc = send_message(c, &hello.base, deadline, err);
    if (!rc)
        rc = receive_message(c, &boost__hello__descriptor, deadline, &a, &m, err);
    if (!rc) {
        const Boost__Hello *answer = (const Boost__Hello *)m;
        snprintf(c->peer_version, sizeof c->peer_version, "%s", answer->version ? answer->version : "?");
        snprintf(c->peer_build, sizeof c->peer_build, "%s", answer->build_id ? answer->build_id : "?");
        if (answer->refused) {
            rc = client_failure(answer->refused, err);
        } else if (answer->protocol_min > FRAME_PROTOCOL_VERSION || answer->protocol < FRAME_PROTOCOL_MIN) {
            error_set(err, ERR_PROTOCOL, "boostd at %s speaks protocol %d to %d, this program %d to %d", c->path,
                      answer->protocol_min, answer->protocol, FRAME_PROTOCOL_MIN, FRAME_PROTOCOL_VERSION);
            rc = error_hint(err, "boostd is version %s, this is %s: install the same version", c->peer_version,
                            boost_version());
        } else {
            c->protocol = answer->protocol < FRAME_PROTOCOL_VERSION ? answer->protocol : FRAME_PROTOCOL_VERSION;
        }
    }
    arena_free(&a);
    return rc;
}

/* ---- TCP ---------------------------------------------------------------------- */

static int connect_one(struct client *c, const struct addrinfo *to, int64_t deadline, struct error *err)
{
    int on = 1, failed = 0;
    socklen_t len = sizeof failed;
    c->fd = socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (c->fd < 0)
        return error_errno(err, errno, "cannot make a socket");
    int rc = ERR_OK;
    if (connect(c->fd, to->ai_addr, to->ai_addrlen) < 0) {
        failed = errno;
        if (failed == EINPROGRESS) {
            rc = await(c, POLLOUT, deadline, err);
            if (!rc && getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &failed, &len) < 0)
                failed = errno;
        }
        if (!rc && failed)
            rc = unreachable(c, err, failed);
    }
    if (!rc && setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) < 0)
        rc = error_errno(err, errno, "cannot set up a connection");
    if (rc) {
        close(c->fd);
        c->fd = -1;
    }
    return rc;
}

static int connect_host(struct client *c, const struct address *address, int64_t deadline, struct error *err)
{
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
    struct addrinfo *found = NULL;
    int gai = getaddrinfo(address->host, address->port, &hints, &found);
    if (gai)
        return address_lookup_error(address, gai, err);
    int rc = ERR_UNREACHABLE;
    for (const struct addrinfo *to = found; to && rc == ERR_UNREACHABLE; to = to->ai_next)
        rc = connect_one(c, to, deadline, err);
    freeaddrinfo(found);
    return rc;
}

static int handshake(struct client *c, const struct address *address, const struct tls_files *files, int64_t deadline,
                     struct error *err)
{
    struct tls_context *context;
    int rc = tls_context_create(false, files, NULL, &context, err);
    if (rc)
        return rc;
    rc = connect_host(c, address, deadline, err);
    if (!rc)
        rc = tls_create(context, address->host, &c->tls, err);
    tls_context_free(context);
    if (!rc)
        rc = send_records(c, deadline, err);
    while (!rc && !tls_ready(c->tls)) {
        rc = await(c, POLLIN, deadline, err);
        if (!rc)
            rc = take_bytes(c, deadline, err);
    }
    return rc;
}

int client_open_tls(struct client *c, const struct address *address, const struct tls_files *files,
                    Boost__Component__Value component, const char *node, int timeout_ms, struct error *err)
{
    const volatile sig_atomic_t *interrupted = c->interrupted;
    *c = (struct client){.fd = -1, .interrupted = interrupted, .remote = true};
    snprintf(c->path, sizeof c->path, "%s", address->text);
    buffer_init(&c->in, LIMIT_FRAME + FRAME_HEADER + CLIENT_READ + 4 * TLS_RECORD_MAX);
    buffer_init(&c->wire, 2 * CLIENT_READ);
    int64_t deadline = deadline_of(timeout_ms);
    int rc = handshake(c, address, files, deadline, err);
    if (!rc)
        rc = exchange_hellos(c, component, node, deadline, err);
    if (rc)
        client_close(c);
    return rc;
}

int client_open(struct client *c, const char *path, Boost__Component__Value component, const char *node, int timeout_ms,
                struct error *err)
{
    const volatile sig_atomic_t *interrupted = c->interrupted;
    *c = (struct client){.fd = -1, .interrupted = interrupted};
    if (strlen(path) >= SOCKET_PATH_MAX)
        return error_set(err, ERR_INVALID, "socket path has %zu bytes, the system's limit is %d: %s", strlen(path),
                         SOCKET_PATH_MAX - 1, path);
    snprintf(c->path, sizeof c->path, "%s", path);
    buffer_init(&c->in, LIMIT_FRAME + FRAME_HEADER + CLIENT_READ);
    int64_t deadline = deadline_of(timeout_ms);
    int rc = connect_socket(c, timeout_ms, err);
    if (!rc)
        rc = exchange_hellos(c, component, node, deadline, err);
    if (rc)
        client_close(c);
    return rc;
}

void client_close(struct client *c)
{
    if (c->fd >= 0)
        close(c->fd);
    c->fd = -1;
    tls_free(c->tls);
    c->tls = NULL;
    buffer_free(&c->in);
    buffer_free(&c->wire);
}

int client_send(struct client *c, Boost__Request *request, int timeout_ms, struct error *err)
{
    if (c->fd < 0)
        return unreachable(c, err, 0);
    request->has_id = 1;
    request->id = ++c->last_id;
    return send_message(c, &request->base, deadline_of(timeout_ms), err);
}

int client_receive(struct client *c, uint64_t id, int timeout_ms, struct arena *a, Boost__Reply **out,
                   struct error *err)
{
    if (c->fd < 0)
        return unreachable(c, err, 0);
    int64_t deadline = deadline_of(timeout_ms);
    for (;;) {
        ProtobufCMessage *m = NULL;
        int rc = receive_message(c, &boost__reply__descriptor, deadline, a, &m, err);
        if (rc)
            return rc;
        Boost__Reply *reply = (Boost__Reply *)m;
        /* A reply without id answers a frame that the server could not even read. */
        bool failed = reply->body_case == BOOST__REPLY__BODY_FAILURE;
        if (reply->id != id && !(failed && !reply->has_id))
            continue;
        *out = reply;
        return failed ? client_failure(reply->failure, err) : ERR_OK;
    }
}

int client_call(struct client *c, Boost__Request *request, int timeout_ms, struct arena *a, Boost__Reply **out,
                struct error *err)
{
    int rc = client_send(c, request, timeout_ms, err);
    return rc ? rc : client_receive(c, request->id, timeout_ms, a, out, err);
}

int client_failure(const Boost__Failure *failure, struct error *err)
{
    int code = failure->code > 0 && failure->code < ERR_CODE_COUNT ? failure->code : ERR_INTERNAL;
    error_set(err, (enum error_code)code, "%s", failure->message ? failure->message : "refused without a reason");
    return error_hint(err, "%s", failure->hint ? failure->hint : "");
}
