/* session.h */
#include "daemon/session.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "daemon/log.h"
#include "daemon/tcp_tune.h"
#include "proto/address.h"
#include "proto/base/arena.h"
#include "proto/frame.h"
#include "proto/reflect.h"
#include "proto/version.h"

enum { HELLO_ARENA = 64 << 10, KEEP_BUFFER = 64 << 10, SWEEP_MS = 1000, TCP_TIMEOUT_MS = 30000, CROWD_LOG_MS = 10000 };

static void process(struct session *s);

/* ---- closing ----------------------------------------------------------------- */

static bool half_open(const struct session *s)
{
    return s->io.handle.type == UV_TCP && !s->greeted;
}

static void on_closed(uv_handle_t *handle)
{
    struct session *s = handle->data;
    struct session_set *set = s->set;
    set->handler.closed(set->handler.arg, s);
    if (half_open(s))
        set->half_open--;
    if (s->prev)
        s->prev->next = s->next;
    else
        set->first = s->next;
    if (s->next)
        s->next->prev = s->prev;
    set->count--;
    buffer_free(&s->in);
    buffer_free(&s->out);
    buffer_free(&s->in_flight);
    tls_free(s->tls);
    free(s);
}

void session_close(struct session *s)
{
    if (s->closing)
        return;
    s->closing = true;
    uv_close(&s->io.handle, on_closed);
}

static void sweep(uv_timer_t *timer)
{
    struct session_set *set = timer->data;
    int64_t now = (int64_t)uv_now(set->loop);
    bool more = false;
    for (struct session *s = set->first; s; s = s->next) {
        if (!s->deadline_ms || s->closing)
            continue;
        if (s->deadline_ms > now) {
            more = true;
            continue;
        }
        log_line(LOG_INFO, "connection %" PRIu64 " (%s): %s; closed", s->serial, s->who,
                 s->greeted                     ? "its peer does not read"
                 : s->tls && !tls_ready(s->tls) ? "the TLS handshake did not end in time"
                                                : "no hello came");
        session_close(s);
    }
    set->timing = more;
    if (!more)
        uv_timer_stop(timer);
}

static void set_deadline(struct session *s)
{
    struct session_set *set = s->set;
    s->deadline_ms = (int64_t)uv_now(set->loop) + SESSION_GRACE_MS;
    if (!set->timing && !uv_timer_start(&set->timer, sweep, SWEEP_MS, SWEEP_MS))
        set->timing = true;
}

/* ---- writing ----------------------------------------------------------------- */

static void flush(struct session *s);

static void resume(struct session *s)
{
    if (!s->closing && !s->ending && !s->processing)
        process(s);
}

static void on_written(uv_write_t *write, int status)
{
    struct session *s = write->data;
    bool was_full = session_full(s);
    buffer_clear(&s->in_flight);
    if (s->in_flight.cap > KEEP_BUFFER)
        buffer_free(&s->in_flight);
    if (s->closing)
        return;
    if (status < 0) {
        session_close(s);
        return;
    }
    flush(s);
    if (s->closing || s->ending || !was_full || session_full(s))
        return;
    if (s->greeted)
        s->set->handler.drained(s->set->handler.arg, s);
    resume(s);
}

/* What is ready for the wire; NULL when the session had to be closed. */
static struct buffer *wire_bytes(struct session *s)
{
    struct error err;
    if (!s->tls)
        return &s->out;
    if (s->out.len && tls_ready(s->tls)) {
        if (tls_send(s->tls, s->out.data, s->out.len, &err)) {
            log_error(LOG_WARN, &err, "connection %" PRIu64 " (%s) dropped", s->serial, s->who);
            session_close(s);
            return NULL;
        }
        buffer_clear(&s->out);
        if (s->out.cap > KEEP_BUFFER)
            buffer_free(&s->out);
    }
    return tls_out(s->tls);
}

/* One write at a time: while it is under way, frames gather in `out`. */
static void flush(struct session *s)
{
    if (s->closing || s->in_flight.len)
        return;
    struct buffer *ready = wire_bytes(s);
    if (!ready || !ready->len) {
        if (ready && s->ending)
            session_close(s);
        return;
    }
    struct buffer swap = s->in_flight;
    s->in_flight = *ready;
    *ready = swap;
    uv_buf_t buf = uv_buf_init((char *)s->in_flight.data, (unsigned)s->in_flight.len);
    s->write.data = s;
    if (uv_write(&s->write, &s->io.stream, &buf, 1, on_written) < 0) {
        buffer_clear(&s->in_flight);
        session_close(s);
    }
}

bool session_full(const struct session *s)
{
    return s->out.len + s->in_flight.len > SESSION_HIGH_WATER;
}

int session_send(struct session *s, const ProtobufCMessage *message, struct error *err)
{
    if (s->closing || s->ending)
        return error_set(err, ERR_CANCELLED, "the connection is closing");
    int rc = s->out.len + s->in_flight.len > SESSION_MAX_OUT
                 ? error_set(err, ERR_NOMEM, "the peer does not read: %d MiB are waiting", SESSION_MAX_OUT >> 20)
                 : frame_append(&s->out, message, err);
    if (rc == ERR_INVALID)
        return rc;
    if (rc) {
        log_error(LOG_WARN, err, "connection %" PRIu64 " (%s) dropped", s->serial, s->who);
        session_close(s);
        return rc;
    }
    /* Written by the loop after the current input: the answers of a batch leave in one write. */
    if (!s->processing)
        flush(s);
    return ERR_OK;
}

void session_end(struct session *s)
{
    if (s->closing || s->ending)
        return;
    s->ending = true;
    uv_read_stop(&s->io.stream);
    s->reading = false;
    set_deadline(s);
    if (!s->processing)
        flush(s);
}

/* ---- hello ------------------------------------------------------------------- */

static void put_failure(Boost__Failure *failure, const struct error *err)
{
    failure->has_code = 1;
    failure->code = (int)err->code;
    failure->message = (char *)err->message;
    failure->hint = (char *)err->hint;
}

static int answer_hello(struct session *s, const struct error *refused)
{
    Boost__Hello hello = BOOST__HELLO__INIT;
    Boost__Failure failure = BOOST__FAILURE__INIT;
    hello.has_protocol = hello.has_protocol_min = hello.has_component = 1;
    hello.protocol = FRAME_PROTOCOL_VERSION;
    hello.protocol_min = FRAME_PROTOCOL_MIN;
    hello.component = BOOST__COMPONENT__VALUE__CONTROLLER;
    hello.version = (char *)boost_version();
    hello.build_id = (char *)boost_build_id();
    hello.store_id = (char *)(uintptr_t)s->set->store_id;
    hello.has_epoch = s->set->store_id != NULL;
    hello.epoch = s->set->epoch;
    if (refused) {
        put_failure(&failure, refused);
        hello.refused = &failure;
    }
    struct error err;
    return session_send(s, &hello.base, &err);
}

/* An agent, which is known by its certificate, has obeyed a later boostd of this store: this one was replaced. */
static int check_epoch(struct session *s, const Boost__Hello *hello, struct error *err)
{
    struct session_set *set = s->set;
    if (s->component != BOOST__COMPONENT__VALUE__AGENT || !set->store_id || !hello->store_id ||
        strcmp(hello->store_id, set->store_id) != 0 || hello->epoch <= set->epoch)
        return ERR_OK;
    bool known = *set->replaced;
    snprintf(set->replaced, sizeof set->replaced,
             "node %s obeys a later boostd of store %s (adoption %u, this one is %u)", s->node, set->store_id,
             (unsigned)(hello->epoch >> 32), (unsigned)(set->epoch >> 32));
    error_set(err, ERR_REFUSED, "this boostd was replaced: %s", set->replaced);
    error_hint(err, "stop it; if it is to be the one all the same, start it with --adopt");
    if (!known)
        log_error(LOG_ERROR, err, "nothing is submitted or changed here any more");
    return ERR_REFUSED;
}

static int check_hello(struct session *s, const Boost__Hello *hello, struct error *err)
{
    if (!hello->has_protocol || !hello->has_protocol_min || !hello->has_component)
        return error_set(err, ERR_PROTOCOL, "the first frame is not a hello of BOOST");
    if (hello->protocol_min > FRAME_PROTOCOL_VERSION || hello->protocol < FRAME_PROTOCOL_MIN) {
        error_set(err, ERR_PROTOCOL, "boostd %s speaks protocol %d to %d, the peer (version %s) %d to %d",
                  boost_version(), FRAME_PROTOCOL_MIN, FRAME_PROTOCOL_VERSION, hello->version ? hello->version : "?",
                  hello->protocol_min, hello->protocol);
        return error_hint(err, "install the same version of BOOST on both sides");
    }
    if (hello->component != BOOST__COMPONENT__VALUE__CTL && hello->component != BOOST__COMPONENT__VALUE__AGENT)
        return error_set(err, ERR_PROTOCOL, "a hello of component %d is not expected here", (int)hello->component);
    s->component = hello->component;
    const char *node = hello->node ? hello->node : "";
    if (strlen(node) > SESSION_NODE_MAX)
        return error_set(err, ERR_INVALID, "node name has %zu bytes, the limit is %d", strlen(node), SESSION_NODE_MAX);
    memcpy(s->node, node, strlen(node) + 1);
    int rc = s->set->handler.opened(s->set->handler.arg, s, err);
    return rc ? rc : check_epoch(s, hello, err);
}

static int greet(struct session *s, const uint8_t *payload, size_t len, struct error *err)
{
    struct arena a;
    arena_init(&a, HELLO_ARENA);
    ProtobufCMessage *m = reflect_unpack(&boost__hello__descriptor, payload, len, &a, err);
    int rc = m ? check_hello(s, (const Boost__Hello *)m, err)
               : error_set(err, ERR_PROTOCOL, "the first frame is not a hello of BOOST");
    arena_free(&a);
    if (rc)
        return rc;
    s->deadline_ms = 0;
    if (half_open(s))
        s->set->half_open--;
    s->greeted = true;
    return answer_hello(s, NULL);
}

/* The peer broke the contract: tell it, then close. */
static void fail(struct session *s, const struct error *err)
{
    /* Agents that obey a later controller come again and again: the first was an error in the log. */
    bool again = !s->greeted && *s->set->replaced && err->code == ERR_REFUSED;
    log_error(again ? LOG_DEBUG : LOG_INFO, err, "connection %" PRIu64 " (%s) closed", s->serial, s->who);
    if (s->closing)
        return;
    struct error ignored;
    int rc = ERR_OK;
    if (!s->greeted) {
        rc = answer_hello(s, err);
    } else if (s->component == BOOST__COMPONENT__VALUE__CTL) {
        Boost__Reply reply = BOOST__REPLY__INIT;
        Boost__Failure failure = BOOST__FAILURE__INIT;
        put_failure(&failure, err);
        reply.body_case = BOOST__REPLY__BODY_FAILURE;
        reply.failure = &failure;
        rc = session_send(s, &reply.base, &ignored);
    }
    if (!rc)
        session_end(s);
    else
        session_close(s);
}

/* ---- reading ----------------------------------------------------------------- */

static bool paused(const struct session *s)
{
    return s->pending >= SESSION_MAX_PENDING || session_full(s);
}

static void allocate(uv_handle_t *handle, size_t size, uv_buf_t *buf)
{
    (void)size;
    struct session *s = handle->data;
    *buf = uv_buf_init((char *)s->set->scratch, sizeof s->set->scratch);
}

/* The handshake or a record was not good. Somebody who speaks frames without TLS can be told so. */
static void tls_failed(struct session *s, const struct error *err, bool plain)
{
    log_error(LOG_WARN, err, "connection %" PRIu64 " (%s) closed", s->serial, s->who);
    if (!plain) {
        session_end(s); /* with the alert that TLS has left */
        return;
    }
    tls_free(s->tls);
    s->tls = NULL;
    struct error told;
    error_set(&told, ERR_PROTOCOL, "this port of boostd speaks TLS only");
    error_hint(&told, "connect with boostctl --host or controller_address");
    if (answer_hello(s, &told))
        session_close(s);
    else
        session_end(s);
}

/* Bytes of the wire into `in`; *over: the peer has said that nothing more comes. Non-zero when the session ends. */
static int decrypt(struct session *s, const char *data, size_t len, bool *over)
{
    struct error err;
    bool was_ready = tls_ready(s->tls);
    bool plain = !was_ready && !tls_out(s->tls)->len && !s->in_flight.len && data[0] == 0;
    int rc = tls_receive(s->tls, data, len, &s->in, &err);
    if (rc) {
        tls_failed(s, &err, plain);
        return rc;
    }
    *over = tls_closed(s->tls);
    if (!was_ready && tls_ready(s->tls)) {
        const struct tls_peer *peer = tls_peer(s->tls);
        size_t used = strlen(s->who);
        snprintf(s->who + used, sizeof s->who - used, ", %s %s", tls_role_name(peer->role), peer->name);
        if (peer->days_left < TLS_DAYS_WARN)
            log_line(LOG_WARN, "the certificate of %s %s ends in %d days", tls_role_name(peer->role), peer->name,
                     peer->days_left);
    }
    return ERR_OK;
}

static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *buf)
{
    struct session *s = stream->data;
    if (n == 0 || s->closing)
        return;
    if (n < 0) { /* end of file or a broken connection: nobody is left to answer */
        session_close(s);
        return;
    }
    bool over = false;
    if (s->tls ? decrypt(s, buf->base, (size_t)n, &over) : buffer_append(&s->in, buf->base, (size_t)n)) {
        if (!s->tls)
            session_close(s);
        return;
    }
    process(s);
    if (over)
        session_close(s);
}

static void read_on_or_pause(struct session *s)
{
    if (s->closing || s->ending)
        return;
    bool want = !paused(s);
    if (want == s->reading)
        return;
    if (!want) {
        uv_read_stop(&s->io.stream);
    } else if (uv_read_start(&s->io.stream, allocate, on_read) < 0) {
        session_close(s);
        return;
    }
    s->reading = want;
}

/* Hands out whole frames until none is left or the session has to pause. */
static void process(struct session *s)
{
    s->processing = true;
    size_t done = 0;
    while (!s->closing && !s->ending && !paused(s)) {
        const uint8_t *payload;
        size_t len, used;
        struct error err;
        int rc = frame_next(s->in.data + done, s->in.len - done, &payload, &len, &used, &err);
        if (!rc && !used)
            break;
        if (rc && !s->tls && !s->greeted && tls_looks_like(s->in.data[done])) {
            error_set(&err, ERR_PROTOCOL, "TLS on boostd's Unix socket, which speaks without");
            error_hint(&err, "connect to the port that `listen` of boostd's configuration names");
        }
        if (!rc)
            rc = s->greeted ? s->set->handler.frame(s->set->handler.arg, s, payload, len, &err)
                            : greet(s, payload, len, &err);
        if (rc)
            fail(s, &err);
        done += used;
    }
    s->processing = false;
    if (done)
        buffer_consume(&s->in, done);
    if (!s->in.len && s->in.cap > KEEP_BUFFER)
        buffer_free(&s->in);
    flush(s);
    read_on_or_pause(s);
}

void session_request_begin(struct session *s)
{
    s->pending++;
}

void session_request_end(struct session *s)
{
    assert(s->pending > 0);
    bool was_paused = paused(s);
    s->pending--;
    if (was_paused && !paused(s))
        resume(s);
}

/* ---- accepting --------------------------------------------------------------- */

void session_set_init(struct session_set *set, uv_loop_t *loop, const struct session_handler *handler)
{
    memset(set, 0, sizeof *set);
    set->loop = loop;
    set->handler = *handler;
    uv_timer_init(loop, &set->timer);
    set->timer.data = set;
}

void session_set_close(struct session_set *set)
{
    for (struct session *s = set->first; s; s = s->next)
        session_close(s);
    uv_close((uv_handle_t *)&set->timer, NULL);
}

static int identify(struct session *s, struct error *err)
{
    uv_os_fd_t fd;
    int rc = uv_fileno(&s->io.handle, &fd);
    if (rc < 0)
        return error_errno(err, -rc, "descriptor of a connection");
    struct ucred peer;
    socklen_t len = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) < 0)
        return error_errno(err, errno, "credentials of a connection");
    s->uid = peer.uid;
    s->gid = peer.gid;
    s->uid_known = true;
    snprintf(s->who, sizeof s->who, "uid %u, pid %d", (unsigned)peer.uid, (int)peer.pid);
    return ERR_OK;
}

static int tls_begin(struct session *s, struct tls_context *context, struct error *err)
{
    struct sockaddr_storage from;
    int len = sizeof from;
    char text[ADDRESS_TEXT_MAX] = "?";
    if (uv_tcp_getpeername(&s->io.tcp, (struct sockaddr *)&from, &len) == 0)
        address_of((struct sockaddr *)&from, text);
    snprintf(s->who, sizeof s->who, "%.100s", text);
    s->uid = (uid_t)-1; /* nobody's, until the certificate's user is looked up */
    s->gid = (gid_t)-1;
    tcp_tune(&s->io.tcp, TCP_TIMEOUT_MS);
    return tls_create(context, NULL, &s->tls, err);
}

/* One connection in the set, not accepted yet. */
static struct session *new_session(struct session_set *set, bool tcp, struct error *err)
{
    struct session *s = calloc(1, sizeof *s);
    if (!s) {
        error_set(err, ERR_NOMEM, "no memory for a connection");
        return NULL;
    }
    int rc = tcp ? uv_tcp_init(set->loop, &s->io.tcp) : uv_pipe_init(set->loop, &s->io.pipe, 0);
    if (rc < 0) {
        free(s);
        error_errno(err, -rc, "cannot make a connection");
        return NULL;
    }
    s->set = set;
    s->io.handle.data = s;
    s->serial = ++set->accepted;
    s->next = set->first;
    if (s->next)
        s->next->prev = s;
    set->first = s;
    set->count++;
    set->half_open += tcp;
    buffer_init(&s->in, FRAME_HEADER + LIMIT_FRAME + sizeof set->scratch + (tcp ? 4 * TLS_RECORD_MAX : 0));
    buffer_init(&s->out, SESSION_MAX_OUT + FRAME_HEADER + LIMIT_FRAME);
    buffer_init(&s->in_flight, tcp ? TLS_OUT_MAX : SESSION_MAX_OUT + FRAME_HEADER + LIMIT_FRAME);
    return s;
}

static void drop_oldest_half_open(struct session_set *set)
{
    struct session *oldest = NULL;
    for (struct session *s = set->first; s; s = s->next) {
        if (half_open(s) && !s->closing)
            oldest = s;
    }
    if (!oldest)
        return;
    int64_t now = (int64_t)uv_now(set->loop);
    if (!set->crowd_said_ms || now - set->crowd_said_ms > CROWD_LOG_MS) {
        log_line(LOG_WARN, "over %d connections without a hello: the oldest (%s) is dropped for each new one",
                 SESSION_MAX_HALF_OPEN, oldest->who);
        set->crowd_said_ms = now;
    }
    session_close(oldest);
}

static int accept_on(struct session_set *set, uv_stream_t *listener, struct tls_context *context, struct error *err)
{
    struct session *s = new_session(set, context != NULL, err);
    if (!s)
        return err->code;
    int rc = uv_accept(listener, &s->io.stream);
    if (rc < 0)
        rc = error_errno(err, -rc, "accept");
    else
        rc = context ? tls_begin(s, context, err) : identify(s, err);
    if (rc) {
        session_close(s);
        return rc;
    }
    set_deadline(s);
    read_on_or_pause(s);
    return ERR_OK;
}

int session_accept(struct session_set *set, uv_stream_t *listener, struct error *err)
{
    return accept_on(set, listener, NULL, err);
}

int session_accept_tls(struct session_set *set, uv_stream_t *listener, struct tls_context *context, struct error *err)
{
    if (set->half_open >= SESSION_MAX_HALF_OPEN)
        drop_oldest_half_open(set);
    return accept_on(set, listener, context, err);
}

const struct tls_peer *session_peer(const struct session *s)
{
    return s->tls ? tls_peer(s->tls) : NULL;
}
