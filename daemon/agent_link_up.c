/* agent_link_up.h */
#include "daemon/agent_link_up.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/frame_out.h"
#include "daemon/log.h"
#include "proto/base/clock.h"
#include "proto/frame.h"
#include "proto/reflect.h"
#include "proto/rpc.pb-c.h"
#include "proto/socket_path.h"
#include "proto/version.h"

enum {
    BACKOFF_MIN_MS = 100,
    BACKOFF_MAX_MS = 3000,
    ANSWER_MS = 3000,     /* without any HeartbeatAck, or without an answer to hello or Register: dead */
    QUIET_LOG_MS = 60000, /* the same trouble again is logged this often */
    READ_CHUNK = 64 << 10,
    MESSAGE_ARENA = 64 << 20,
};

enum link_state { LINK_WAITING, LINK_CONNECTING, LINK_HELLO, LINK_REGISTERING, LINK_UP, LINK_CLOSED };

/* One try; given up by clearing `link`, freed when its pipe has closed. */
struct connection {
    uv_pipe_t pipe;
    uv_connect_t connect;
    struct link_up *link;
    struct buffer in;
};

struct link_up {
    uv_loop_t *loop;
    const struct link_up_ops *ops;
    char path[SOCKET_PATH_MAX];
    char *node;
    uv_timer_t timer; /* WAITING: next try; CONNECTING to REGISTERING: deadline; UP: heartbeat */
    struct connection *connection;
    enum link_state state;
    int heartbeat_ms;
    int backoff_ms;
    uint64_t heartbeat_seq;
    int64_t last_answer_ns;
    char last_trouble[256];
    int64_t last_trouble_ns;
};

static void try_connect(uv_timer_t *timer);
static void wait_and_retry(struct link_up *link);

/* ---- connection ---- */

static void connection_closed(uv_handle_t *handle)
{
    struct connection *c = handle->data;
    buffer_free(&c->in);
    free(c);
}

static void drop_connection(struct link_up *link)
{
    struct connection *c = link->connection;
    link->connection = NULL;
    if (c) {
        c->link = NULL;
        uv_close((uv_handle_t *)&c->pipe, connection_closed);
    }
}

/* The link has broken or never came up: says so once ("refused by" the controller ...), waits, tries again. */
static void fail_as(struct link_up *link, const char *how, const char *why, const char *hint)
{
    bool was_up = link->state == LINK_UP;
    int64_t now = clock_mono_ns();
    char trouble[sizeof link->last_trouble];
    snprintf(trouble, sizeof trouble, "%s%s%s%s", why, hint && *hint ? " (" : "", hint ? hint : "",
             hint && *hint ? ")" : "");
    if (was_up || strcmp(trouble, link->last_trouble) || now - link->last_trouble_ns > QUIET_LOG_MS * NS_PER_MS) {
        log_line(LOG_WARN, "%s the controller at %s: %s; the ranks go on", how, link->path, trouble);
        snprintf(link->last_trouble, sizeof link->last_trouble, "%s", trouble);
        link->last_trouble_ns = now;
    }
    drop_connection(link);
    wait_and_retry(link);
    if (was_up)
        link->ops->lost(link->ops->arg);
}

static void fail(struct link_up *link, const char *why, const char *hint)
{
    fail_as(link, link->state == LINK_UP ? "lost" : "cannot reach", why, hint);
}

static void refused(struct link_up *link, const Boost__Failure *f)
{
    fail_as(link, "refused by", f->message ? f->message : "no reason is given", f->hint);
}

void link_up_again(struct link_up *link, const char *why)
{
    if (link_up_ready(link))
        fail(link, why, NULL);
}

static void wait_and_retry(struct link_up *link)
{
    link->state = LINK_WAITING;
    uint8_t random = 0;
    uv_random(NULL, NULL, &random, 1, 0, NULL);
    int wait = link->backoff_ms / 2 + link->backoff_ms * random / 512;
    link->backoff_ms = link->backoff_ms * 2 < BACKOFF_MAX_MS ? link->backoff_ms * 2 : BACKOFF_MAX_MS;
    uv_timer_start(&link->timer, try_connect, (uint64_t)wait, 0);
}

/* ---- sending ---- */

static void sent(uv_stream_t *stream, int status)
{
    struct connection *c = stream->data;
    if (status < 0 && status != UV_ECANCELED && c->link)
        fail(c->link, uv_strerror(status), NULL);
}

static bool send_frame(struct link_up *link, const ProtobufCMessage *message)
{
    struct error err;
    if (!frame_out((uv_stream_t *)&link->connection->pipe, message, sent, &err))
        return true;
    log_error(LOG_ERROR, &err, "a message for the controller is not sent");
    return false;
}

bool link_up_send(struct link_up *link, const Boost__AgentMessage *message)
{
    return link->state == LINK_UP && send_frame(link, &message->base);
}

bool link_up_ready(const struct link_up *link)
{
    return link && link->state == LINK_UP;
}

size_t link_up_queued(const struct link_up *link)
{
    return link && link->connection ? uv_stream_get_write_queue_size((const uv_stream_t *)&link->connection->pipe) : 0;
}

static void no_answer(uv_timer_t *timer)
{
    fail(timer->data, "no answer within 3 s", NULL);
}

static void beat(uv_timer_t *timer)
{
    struct link_up *link = timer->data;
    int64_t limit = ANSWER_MS > 3 * link->heartbeat_ms ? ANSWER_MS : 3 * link->heartbeat_ms;
    if (clock_mono_ns() - link->last_answer_ns > limit * NS_PER_MS) {
        fail(link, "no answer to heartbeats", NULL);
        return;
    }
    Boost__AgentMessage message = BOOST__AGENT_MESSAGE__INIT;
    Boost__Heartbeat heartbeat = BOOST__HEARTBEAT__INIT;
    heartbeat.has_seq = true;
    heartbeat.seq = ++link->heartbeat_seq;
    message.body_case = BOOST__AGENT_MESSAGE__BODY_HEARTBEAT;
    message.heartbeat = &heartbeat;
    send_frame(link, &message.base);
}

/* ---- receiving ---- */

static void send_register(struct link_up *link)
{
    Boost__AgentMessage message = BOOST__AGENT_MESSAGE__INIT;
    message.body_case = BOOST__AGENT_MESSAGE__BODY_REGISTER;
    message.register_ = (Boost__Register *)(uintptr_t)link->ops->registration(link->ops->arg);
    link->state = LINK_REGISTERING;
    if (!message.register_ || !send_frame(link, &message.base))
        fail(link, "cannot send the registration", NULL);
    else
        uv_timer_start(&link->timer, no_answer, ANSWER_MS, 0);
}

static void take_hello(struct link_up *link, const Boost__Hello *hello)
{
    char text[160];
    if (hello->refused) {
        refused(link, hello->refused);
    } else if (hello->protocol_min > FRAME_PROTOCOL_VERSION || hello->protocol < FRAME_PROTOCOL_MIN) {
        snprintf(text, sizeof text, "it speaks protocol %d to %d, this agent %d to %d", hello->protocol_min,
                 hello->protocol, FRAME_PROTOCOL_MIN, FRAME_PROTOCOL_VERSION);
        fail(link, text, "install the same version of boostd and boost-agent");
    } else {
        send_register(link);
    }
}

static void take_registered(struct link_up *link, const Boost__Registered *answer)
{
    link->state = LINK_UP;
    link->backoff_ms = BACKOFF_MIN_MS;
    link->last_trouble[0] = '\0';
    link->last_answer_ns = clock_mono_ns();
    link->heartbeat_ms = answer->has_heartbeat_ms && answer->heartbeat_ms >= 10 ? answer->heartbeat_ms : 1000;
    uv_timer_start(&link->timer, beat, 0, (uint64_t)link->heartbeat_ms);
    link->ops->registered(link->ops->arg, answer);
}

static void take_message(struct link_up *link, const Boost__ControllerMessage *m)
{
    if (m->body_case == BOOST__CONTROLLER_MESSAGE__BODY_REFUSED) {
        refused(link, m->refused);
    } else if (m->body_case == BOOST__CONTROLLER_MESSAGE__BODY_REGISTERED) {
        if (link->state == LINK_REGISTERING)
            take_registered(link, m->registered);
    } else if (link->state == LINK_UP) {
        link->last_answer_ns = clock_mono_ns();
        if (m->body_case != BOOST__CONTROLLER_MESSAGE__BODY_HEARTBEAT_ACK)
            link->ops->message(link->ops->arg, m);
    }
}

static void take_payload(struct link_up *link, const uint8_t *payload, size_t len)
{
    struct arena a;
    struct error err;
    arena_init(&a, MESSAGE_ARENA);
    bool hello = link->state == LINK_HELLO;
    ProtobufCMessage *m = reflect_unpack(hello ? &boost__hello__descriptor : &boost__controller_message__descriptor,
                                         payload, len, &a, &err);
    if (!m)
        fail(link, err.message, NULL);
    else if (hello)
        take_hello(link, (const Boost__Hello *)m);
    else
        take_message(link, (const Boost__ControllerMessage *)m);
    arena_free(&a);
}

static void give_room(uv_handle_t *handle, size_t suggested, uv_buf_t *out)
{
    (void)suggested;
    struct connection *c = handle->data;
    uint8_t *at = buffer_reserve(&c->in, READ_CHUNK);
    *out = uv_buf_init((char *)at, at ? READ_CHUNK : 0);
}

static void received(uv_stream_t *stream, ssize_t n, const uv_buf_t *unused)
{
    (void)unused;
    struct connection *c = stream->data;
    if (!c->link || n == 0)
        return;
    if (n < 0) {
        fail(c->link, n == UV_EOF ? "it closed the connection" : uv_strerror((int)n), NULL);
        return;
    }
    c->in.len += (size_t)n;
    size_t done = 0;
    while (c->link) { /* a message may end the connection */
        const uint8_t *payload;
        size_t len, used;
        struct error err;
        if (frame_next(c->in.data + done, c->in.len - done, &payload, &len, &used, &err)) {
            fail(c->link, err.message, NULL);
            return;
        }
        if (!used)
            break;
        done += used;
        take_payload(c->link, payload, len);
    }
    if (c->link)
        buffer_consume(&c->in, done);
}

/* ---- connecting ---- */

static void connected(uv_connect_t *request, int status)
{
    struct connection *c = request->handle->data;
    struct link_up *link = c->link;
    if (!link)
        return;
    if (status < 0) {
        fail(link, uv_strerror(status), NULL);
        return;
    }
    Boost__Hello hello = BOOST__HELLO__INIT;
    hello.has_protocol = hello.has_protocol_min = hello.has_component = true;
    hello.protocol = FRAME_PROTOCOL_VERSION;
    hello.protocol_min = FRAME_PROTOCOL_MIN;
    hello.component = BOOST__COMPONENT__VALUE__AGENT;
    hello.build_id = (char *)(uintptr_t)boost_build_id();
    hello.version = (char *)(uintptr_t)boost_version();
    hello.node = link->node;
    link->state = LINK_HELLO;
    if (!send_frame(link, &hello.base) || uv_read_start((uv_stream_t *)&c->pipe, give_room, received) < 0)
        fail(link, "cannot talk on the connection", NULL);
}

static void try_connect(uv_timer_t *timer)
{
    struct link_up *link = timer->data;
    struct connection *c = calloc(1, sizeof *c);
    if (!c || uv_pipe_init(link->loop, &c->pipe, 0) < 0) {
        free(c);
        wait_and_retry(link);
        return;
    }
    buffer_init(&c->in, LIMIT_FRAME + FRAME_HEADER + READ_CHUNK);
    c->pipe.data = c;
    c->link = link;
    link->connection = c;
    link->state = LINK_CONNECTING;
    uv_timer_start(&link->timer, no_answer, ANSWER_MS, 0);
    uv_pipe_connect(&c->connect, &c->pipe, link->path, connected);
}

int link_up_create(uv_loop_t *loop, const char *socket_path, const char *node, const struct link_up_ops *ops,
                   struct link_up **out, struct error *err)
{
    if (strlen(socket_path) >= SOCKET_PATH_MAX)
        return error_set(err, ERR_INVALID, "socket path is longer than %d bytes: %s", SOCKET_PATH_MAX - 1, socket_path);
    struct link_up *link = calloc(1, sizeof *link);
    char *name = strdup(node);
    if (!link || !name) {
        free(link);
        free(name);
        return error_set(err, ERR_NOMEM, "no memory for the connection to the controller");
    }
    *link = (struct link_up){.loop = loop, .ops = ops, .node = name, .backoff_ms = BACKOFF_MIN_MS};
    snprintf(link->path, sizeof link->path, "%s", socket_path);
    uv_timer_init(loop, &link->timer);
    link->timer.data = link;
    uv_timer_start(&link->timer, try_connect, 0, 0);
    *out = link;
    return ERR_OK;
}

static void timer_closed(uv_handle_t *handle)
{
    struct link_up *link = handle->data;
    free(link->node);
    free(link);
}

void link_up_close(struct link_up *link)
{
    if (!link)
        return;
    link->state = LINK_CLOSED;
    drop_connection(link);
    uv_close((uv_handle_t *)&link->timer, timer_closed);
}
