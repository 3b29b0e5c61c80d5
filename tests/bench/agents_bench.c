/* A cluster's worth of agents in one process: real connections, registrations and heartbeats, nothing behind them.
 *
 *   agents_bench SOCKET N               over boostd's Unix socket
 *   agents_bench HOST:PORT N CERTS      by TCP with TLS: two connections each, the second one for heartbeats. CERTS: a
 *                                       directory of deploy/make-certs.sh with its CA's key
 *
 * Prints a line when all N are registered and beat once a second, then goes on until its standard input ends, and
 * prints a second one: beats, answers, and the slowest answer. Beats are spread over the second, as chance does. */
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "proto/address.h"
#include "proto/agent.pb-c.h"
#include "proto/base/clock.h"
#include "proto/frame.h"
#include "proto/reflect.h"
#include "proto/tls.h"
#include "tests/bench/support/node_certs.h"

enum { MAX_AGENTS = 100000, ANSWER_MS = 30000, BEAT_MS = 1000, CHUNK = 16 << 10, EVENTS = 256 };

struct agent;
struct conn {
    struct agent *agent;
    int fd;
    struct tls *tls; /* NULL: a Unix socket */
    struct buffer in;
    bool greeted;
};

struct agent {
    char name[32];
    struct conn main, heart; /* over a Unix socket the first one beats too */
    bool registered, beating;
    uint64_t token, seq;
    int64_t sent_ns, due_ns;
};

static struct {
    const char *socket;
    struct address address;
    const char *certs; /* NULL: Unix */
    struct agent *agents;
    int n, epoll;
    uint64_t beats, answers;
    int64_t slowest_ns;
} world;

/* ---- bytes ------------------------------------------------------------------------------------------------------ */

static int write_all(int fd, const uint8_t *data, size_t len, struct error *err)
{
    while (len) {
        ssize_t n = send(fd, data, len, MSG_NOSIGNAL);
        if (n < 0 && errno == EAGAIN) {
            struct pollfd p = {.fd = fd, .events = POLLOUT};
            poll(&p, 1, ANSWER_MS);
            continue;
        }
        if (n < 0)
            return error_errno(err, errno, "send");
        data += n;
        len -= (size_t)n;
    }
    return ERR_OK;
}

static int flush(struct conn *c, struct error *err)
{
    struct buffer *out = tls_out(c->tls);
    int rc = write_all(c->fd, out->data, out->len, err);
    buffer_clear(out);
    return rc;
}

static int send_frame(struct conn *c, const ProtobufCMessage *m, struct error *err)
{
    struct buffer b;
    buffer_init(&b, LIMIT_FRAME + FRAME_HEADER);
    int rc = frame_append(&b, m, err);
    if (!rc && c->tls)
        rc = tls_send(c->tls, b.data, b.len, err);
    if (!rc)
        rc = c->tls ? flush(c, err) : write_all(c->fd, b.data, b.len, err);
    buffer_free(&b);
    return rc;
}

static int take_message(struct conn *c, const Boost__ControllerMessage *m, struct error *err)
{
    struct agent *a = c->agent;
    switch (m->body_case) {
    case BOOST__CONTROLLER_MESSAGE__BODY_REGISTERED:
        a->registered = true;
        a->token = m->registered->heart_token;
        return ERR_OK;
    case BOOST__CONTROLLER_MESSAGE__BODY_HEARTBEAT_ACK: {
        a->beating = true;
        int64_t took = m->heartbeat_ack->seq ? clock_mono_ns() - a->sent_ns : 0;
        world.answers += m->heartbeat_ack->seq != 0;
        world.slowest_ns = took > world.slowest_ns ? took : world.slowest_ns;
        return ERR_OK;
    }
    case BOOST__CONTROLLER_MESSAGE__BODY_REFUSED:
        return error_set(err, ERR_REFUSED, "%s: %s", a->name, m->refused->message ? m->refused->message : "refused");
    default:
        return ERR_OK; /* what a node without jobs need not do */
    }
}

static int take_frame(struct conn *c, const uint8_t *payload, size_t len, struct error *err)
{
    struct arena arena;
    arena_init(&arena, 1 << 20);
    int rc = ERR_OK;
    const ProtobufCMessage *m = reflect_unpack(
        c->greeted ? &boost__controller_message__descriptor : &boost__hello__descriptor, payload, len, &arena, err);
    if (!m)
        rc = err->code;
    else if (c->greeted)
        rc = take_message(c, (const Boost__ControllerMessage *)m, err);
    else if (((const Boost__Hello *)m)->refused)
        rc = error_set(err, ERR_REFUSED, "%s: %s", c->agent->name, ((const Boost__Hello *)m)->refused->message);
    c->greeted = true;
    arena_free(&arena);
    return rc;
}

/* All that has come. */
static int receive(struct conn *c, struct error *err)
{
    uint8_t chunk[CHUNK];
    ssize_t n;
    while ((n = recv(c->fd, chunk, sizeof chunk, MSG_DONTWAIT)) > 0) {
        int rc = c->tls ? tls_receive(c->tls, chunk, (size_t)n, &c->in, err) : buffer_append(&c->in, chunk, (size_t)n);
        if (!rc && c->tls)
            rc = flush(c, err);
        const uint8_t *payload;
        size_t len, used = 1;
        while (!rc && used) {
            rc = frame_next(c->in.data, c->in.len, &payload, &len, &used, err);
            if (!rc && used)
                rc = take_frame(c, payload, len, err);
            buffer_consume(&c->in, used);
        }
        if (rc)
            return rc;
    }
    if (n == 0)
        return error_set(err, ERR_UNREACHABLE, "boostd has closed a connection of %s", c->agent->name);
    return errno == EAGAIN ? ERR_OK : error_errno(err, errno, "recv");
}

/* ---- beats ------------------------------------------------------------------------------------------------------ */

static int beat(struct agent *a, int64_t now, struct error *err)
{
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    Boost__Heartbeat body = BOOST__HEARTBEAT__INIT;
    body.has_seq = true;
    body.seq = ++a->seq;
    m.body_case = BOOST__AGENT_MESSAGE__BODY_HEARTBEAT;
    m.heartbeat = &body;
    a->sent_ns = now;
    a->due_ns += BEAT_MS * NS_PER_MS;
    if (a->due_ns < now) /* the machine was away */
        a->due_ns = now + BEAT_MS * NS_PER_MS;
    world.beats++;
    return send_frame(world.certs ? &a->heart : &a->main, &m.base, err);
}

/* The beats that are due; when the next one is. */
static int beat_all(int64_t *next, struct error *err)
{
    int64_t now = clock_mono_ns();
    *next = now + BEAT_MS * NS_PER_MS;
    for (int i = 0; i < world.n; i++) {
        struct agent *a = &world.agents[i];
        if (!a->due_ns)
            continue;
        int rc = now >= a->due_ns ? beat(a, now, err) : ERR_OK;
        if (rc)
            return rc;
        *next = a->due_ns < *next ? a->due_ns : *next;
    }
    return ERR_OK;
}

/* Beats, and takes what comes, until `done` or for `ms`. */
static int serve(const bool *done, int64_t ms, bool *input_over, struct error *err)
{
    int64_t end = clock_mono_ns() + ms * NS_PER_MS, next;
    while (!(done && *done) && !*input_over) {
        int rc = beat_all(&next, err);
        int64_t now = clock_mono_ns();
        if (rc || now >= end)
            return rc ? rc : done ? error_set(err, ERR_UNREACHABLE, "no answer of boostd") : ERR_OK;
        next = next < end ? next : end;
        struct epoll_event events[EVENTS];
        int n = epoll_wait(world.epoll, events, EVENTS, next > now ? (int)((next - now) / NS_PER_MS) + 1 : 0);
        for (int i = 0; !rc && i < n; i++) {
            if (events[i].data.ptr)
                rc = receive(events[i].data.ptr, err);
            else
                *input_over = true;
        }
        if (rc)
            return rc;
    }
    return ERR_OK;
}

/* ---- making ----------------------------------------------------------------------------------------------------- */

static int connect_unix(struct conn *c, struct error *err)
{
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    snprintf(to.sun_path, sizeof to.sun_path, "%s", world.socket);
    c->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    return c->fd < 0 || connect(c->fd, (struct sockaddr *)&to, sizeof to) < 0 ? error_errno(err, errno, "connect")
                                                                              : ERR_OK;
}

static int connect_tls(struct conn *c, struct error *err)
{
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST};
    struct addrinfo *to;
    int gai = getaddrinfo(world.address.host, world.address.port, &hints, &to);
    if (gai)
        return address_lookup_error(&world.address, gai, err);
    c->fd = socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int rc = c->fd < 0 || connect(c->fd, to->ai_addr, to->ai_addrlen) < 0 ? error_errno(err, errno, "connect") : ERR_OK;
    freeaddrinfo(to);
    int on = 1;
    if (!rc && setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) < 0)
        rc = error_errno(err, errno, "TCP_NODELAY");
    struct tls_context *context = NULL;
    if (!rc)
        rc = node_context(world.certs, c->agent->name, &context, err);
    if (!rc)
        rc = tls_create(context, world.address.host, &c->tls, err);
    tls_context_free(context);
    while (!rc && !tls_ready(c->tls)) {
        struct pollfd p = {.fd = c->fd, .events = POLLIN};
        rc = flush(c, err);
        if (!rc && poll(&p, 1, ANSWER_MS) <= 0)
            rc = error_set(err, ERR_UNREACHABLE, "no answer of boostd to a TLS handshake");
        if (!rc)
            rc = receive(c, err);
    }
    return rc;
}

static int open_conn(struct agent *a, struct conn *c, struct error *err)
{
    c->agent = a;
    buffer_init(&c->in, 2 * LIMIT_FRAME);
    int rc = world.certs ? connect_tls(c, err) : connect_unix(c, err);
    if (rc)
        return rc;
    Boost__Hello hello = BOOST__HELLO__INIT;
    hello.has_protocol = hello.has_protocol_min = hello.has_component = true;
    hello.protocol = FRAME_PROTOCOL_VERSION;
    hello.protocol_min = FRAME_PROTOCOL_MIN;
    hello.component = BOOST__COMPONENT__VALUE__AGENT;
    hello.node = a->name;
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    rc = send_frame(c, &hello.base, err);
    if (!rc && epoll_ctl(world.epoll, EPOLL_CTL_ADD, c->fd, &event) < 0)
        rc = error_errno(err, errno, "epoll_ctl");
    return rc;
}

static int send_register(struct agent *a, struct error *err)
{
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    Boost__Register body = BOOST__REGISTER__INIT;
    char address[] = "127.0.0.1", version[] = "bench", boot[] = "boot";
    body.node = body.instance = a->name;
    body.boot_id = boot;
    body.has_cpu_slots = body.has_cores = body.has_memory_mib = body.has_uid = true;
    body.cpu_slots = body.cores = 8;
    body.memory_mib = 1 << 16;
    body.uid = geteuid();
    body.data_address = address;
    body.version = version;
    m.body_case = BOOST__AGENT_MESSAGE__BODY_REGISTER;
    m.register_ = &body;
    return send_frame(&a->main, &m.base, err);
}

static int send_heart(struct agent *a, struct error *err)
{
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    Boost__Heart body = BOOST__HEART__INIT;
    body.instance = a->name;
    body.has_token = true;
    body.token = a->token;
    m.body_case = BOOST__AGENT_MESSAGE__BODY_HEART;
    m.heart = &body;
    return send_frame(&a->heart, &m.base, err);
}

static int start_agent(struct agent *a, bool *input_over, struct error *err)
{
    int rc = open_conn(a, &a->main, err);
    if (!rc)
        rc = send_register(a, err);
    if (!rc)
        rc = serve(&a->registered, ANSWER_MS, input_over, err);
    if (!rc && world.certs) {
        rc = open_conn(a, &a->heart, err);
        if (!rc)
            rc = send_heart(a, err);
        if (!rc)
            rc = serve(&a->beating, ANSWER_MS, input_over, err);
    }
    a->due_ns = clock_mono_ns() + (int64_t)(a - world.agents) * BEAT_MS * NS_PER_MS / world.n;
    return rc;
}

static int run(struct error *err)
{
    bool input_over = false;
    struct epoll_event input = {.events = EPOLLIN | EPOLLHUP};
    world.epoll = epoll_create1(EPOLL_CLOEXEC);
    world.agents = calloc((size_t)world.n, sizeof *world.agents);
    if (world.epoll < 0 || !world.agents || epoll_ctl(world.epoll, EPOLL_CTL_ADD, STDIN_FILENO, &input) < 0)
        return error_errno(err, errno, "set-up");
    int64_t begin = clock_mono_ns();
    for (int i = 0; i < world.n; i++) {
        struct agent *a = &world.agents[i];
        snprintf(a->name, sizeof a->name, "sim%05d", i);
        int rc = start_agent(a, &input_over, err);
        if (rc)
            return rc;
    }
    int rc = serve(NULL, 2 * BEAT_MS, &input_over, err); /* the crowd of the beginning is over */
    printf("{\"agents\":%d,\"start_s\":%.2f}\n", world.n, (double)(clock_mono_ns() - begin) / NS_PER_S);
    fflush(stdout);
    world.beats = world.answers = 0;
    world.slowest_ns = 0;
    if (!rc)
        rc = serve(NULL, INT64_C(86400000), &input_over, err);
    printf("{\"beats\":%llu,\"answers\":%llu,\"slowest_ms\":%.2f}\n", (unsigned long long)world.beats,
           (unsigned long long)world.answers, (double)world.slowest_ns / NS_PER_MS);
    return rc;
}

int main(int argc, char **argv)
{
    struct error err;
    char *end = NULL;
    long n = argc >= 3 ? strtol(argv[2], &end, 10) : 0;
    if (argc < 3 || argc > 4 || *end || n < 1 || n > MAX_AGENTS) {
        fprintf(stderr, "usage: agents_bench SOCKET N\n       agents_bench HOST:PORT N CERTS\n");
        return 2;
    }
    world.n = (int)n;
    world.socket = argv[1];
    world.certs = argc == 4 ? argv[3] : NULL;
    int rc = world.certs ? address_parse(argv[1], false, "HOST:PORT", &world.address, &err) : ERR_OK;
    if (!rc && world.certs)
        rc = node_certs_open(world.certs, &err);
    if (!rc)
        rc = run(&err);
    if (rc)
        fprintf(stderr, "agents_bench: %s\n", err.message);
    return rc ? 1 : 0;
}
