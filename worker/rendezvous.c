/* rendezvous.h: one request at a time over frames on the agent's Unix socket. */
#include "worker/rendezvous.h"

#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "proto/base/clock.h"
#include "proto/frame.h"
#include "proto/worker.pb-c.h"

enum { RETRY_MS = 50, AGENT_MARGIN_MS = 5000 };

int rendezvous_open(struct rendezvous_client *c, const char *socket_path, int64_t job, int32_t attempt, int32_t rank,
                    int timeout_ms, struct error *err)
{
    *c = (struct rendezvous_client){.socket_path = socket_path,
                                    .job = job,
                                    .attempt = attempt,
                                    .rank = rank,
                                    .timeout_ms = timeout_ms,
                                    .fd = -1,
                                    .next_id = 1};
    buffer_init(&c->in, LIMIT_FRAME + FRAME_HEADER);
    buffer_init(&c->out, LIMIT_FRAME + FRAME_HEADER);
    struct sockaddr_un address;
    if (strlen(socket_path) >= sizeof address.sun_path) {
        error_set(err, ERR_INVALID, "rendezvous socket path is longer than %zu bytes: %s", sizeof address.sun_path - 1,
                  socket_path);
        return error_hint(err, "give the agent a shorter state directory");
    }
    return ERR_OK;
}

static void disconnect(struct rendezvous_client *c)
{
    if (c->fd >= 0)
        close(c->fd);
    c->fd = -1;
    buffer_clear(&c->in);
}

void rendezvous_close(struct rendezvous_client *c)
{
    disconnect(c);
    buffer_free(&c->in);
    buffer_free(&c->out);
}

static int connect_agent(struct rendezvous_client *c, struct error *err)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, c->socket_path, strlen(c->socket_path) + 1);
    c->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (c->fd < 0)
        return error_errno(err, errno, "cannot make a socket");
    if (connect(c->fd, (struct sockaddr *)&address, sizeof address) < 0) {
        error_errno(err, errno, "cannot reach the agent at %s", c->socket_path);
        disconnect(c);
        return ERR_UNREACHABLE;
    }
    return ERR_OK;
}

/* Waits for `events` on the connection; ERR_TIMEOUT or ERR_UNREACHABLE. */
static int wait_ready(struct rendezvous_client *c, short events, int64_t deadline_ns, struct error *err)
{
    for (;;) {
        struct pollfd p = {.fd = c->fd, .events = events};
        int n = poll(&p, 1, clock_left_ms(deadline_ns));
        if (n > 0)
            return ERR_OK;
        if (n == 0)
            return error_set(err, ERR_TIMEOUT, "no answer from the agent");
        if (errno != EINTR)
            return error_errno(err, errno, "poll");
    }
}

static int send_request(struct rendezvous_client *c, int64_t deadline_ns, struct error *err)
{
    size_t done = 0;
    while (done < c->out.len) {
        ssize_t n = send(c->fd, c->out.data + done, c->out.len - done, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n >= 0) {
            done += (size_t)n;
        } else if (errno == EAGAIN) {
            int rc = wait_ready(c, POLLOUT, deadline_ns, err);
            if (rc)
                return rc;
        } else if (errno != EINTR) {
            error_errno(err, errno, "lost the agent at %s", c->socket_path);
            return ERR_UNREACHABLE;
        }
    }
    return ERR_OK;
}

/* Reads until a whole reply is there; the caller frees it. */
static int receive_reply(struct rendezvous_client *c, int64_t deadline_ns, Boost__RankReply **out, struct error *err)
{
    for (;;) {
        const uint8_t *payload;
        size_t len, used;
        int rc = frame_next(c->in.data, c->in.len, &payload, &len, &used, err);
        if (rc)
            return rc;
        if (used) {
            *out = boost__rank_reply__unpack(NULL, len, payload);
            buffer_consume(&c->in, used);
            return *out ? ERR_OK : error_set(err, ERR_PROTOCOL, "the agent's reply cannot be read");
        }
        rc = wait_ready(c, POLLIN, deadline_ns, err);
        if (rc)
            return rc;
        uint8_t *at = buffer_reserve(&c->in, 4096);
        if (!at)
            return error_set(err, ERR_NOMEM, "no room for the agent's reply");
        ssize_t n = recv(c->fd, at, 4096, MSG_DONTWAIT);
        if (n > 0)
            c->in.len += (size_t)n;
        else if (n == 0 || (errno != EAGAIN && errno != EINTR))
            return error_set(err, ERR_UNREACHABLE, "lost the agent at %s", c->socket_path);
    }
}

/* One exchange on a connection that is there or is made; a reply to an older request (sent
 * before a reconnect) is passed over. */
static int exchange(struct rendezvous_client *c, uint64_t id, int64_t deadline_ns, Boost__RankReply **out,
                    struct error *err)
{
    int rc = c->fd < 0 ? connect_agent(c, err) : ERR_OK;
    if (!rc)
        rc = send_request(c, deadline_ns, err);
    while (!rc) {
        rc = receive_reply(c, deadline_ns, out, err);
        if (!rc && (*out)->id == id)
            return ERR_OK;
        if (!rc) {
            boost__rank_reply__free_unpacked(*out, NULL);
            *out = NULL;
        }
    }
    disconnect(c);
    return rc;
}

static void pause_ms(int ms)
{
    struct timespec t = {.tv_nsec = ms * NS_PER_MS};
    nanosleep(&t, NULL);
}

/* Sends `op` until it is answered or the deadline is over; the caller frees the reply. */
static int call(struct rendezvous_client *c, Boost__KvOp *op, int64_t deadline_ns, Boost__RankReply **out,
                struct error *err)
{
    Boost__RankRequest request = BOOST__RANK_REQUEST__INIT;
    request.has_id = request.has_job = request.has_attempt = request.has_rank = true;
    request.id = c->next_id++;
    request.job = c->job;
    request.attempt = c->attempt;
    request.rank = c->rank;
    request.op = op;
    buffer_clear(&c->out);
    int rc = frame_append(&c->out, &request.base, err);
    if (rc)
        return rc;
    for (;;) {
        rc = exchange(c, request.id, deadline_ns, out, err);
        if (rc != ERR_UNREACHABLE || clock_left_ms(deadline_ns) == 0)
            return rc;
        pause_ms(RETRY_MS);
    }
}

int rendezvous_set(struct rendezvous_client *c, const char *group, const char *key, const void *value, size_t len,
                   struct error *err)
{
    if (len > LIMIT_KV_VALUE)
        return error_set(err, ERR_INVALID, "rendezvous value %s/%s is %zu bytes, the limit is %d", group, key, len,
                         (int)LIMIT_KV_VALUE);
    Boost__KvOp op = BOOST__KV_OP__INIT;
    op.has_kind = op.has_value = true;
    op.kind = BOOST__KV_OP__KIND__SET;
    op.group = (char *)(uintptr_t)group;
    op.key = (char *)(uintptr_t)key;
    op.value.data = (uint8_t *)(uintptr_t)value;
    op.value.len = len;
    Boost__RankReply *reply = NULL;
    int rc = call(c, &op, clock_mono_ns() + (int64_t)c->timeout_ms * NS_PER_MS, &reply, err);
    if (!rc && !(reply->result && reply->result->ok))
        rc = error_set(err, ERR_REFUSED, "%s",
                       reply->result && reply->result->error ? reply->result->error : "refused without a reason");
    if (reply)
        boost__rank_reply__free_unpacked(reply, NULL);
    if (rc)
        error_context(err, "rendezvous: set %s/%s", group, key);
    return rc;
}

int rendezvous_get(struct rendezvous_client *c, const char *group, const char *key, int timeout_ms,
                   struct buffer *value, struct error *err)
{
    Boost__KvOp op = BOOST__KV_OP__INIT;
    op.has_kind = op.has_timeout_ms = true;
    op.kind = BOOST__KV_OP__KIND__GET;
    op.group = (char *)(uintptr_t)group;
    op.key = (char *)(uintptr_t)key;
    op.timeout_ms = timeout_ms;
    /* The controller ends the wait and names the key; the margin is for its answer to arrive. */
    int64_t deadline = clock_mono_ns() + ((int64_t)timeout_ms + AGENT_MARGIN_MS) * NS_PER_MS;
    Boost__RankReply *reply = NULL;
    int rc = call(c, &op, deadline, &reply, err);
    if (!rc && !(reply->result && reply->result->ok))
        rc = error_set(err, ERR_TIMEOUT, "%s",
                       reply->result && reply->result->error ? reply->result->error : "the key did not come");
    else if (!rc && buffer_append(value, reply->result->value.data, reply->result->value.len))
        rc = error_set(err, ERR_PROTOCOL, "a value of %zu bytes is over the limit", reply->result->value.len);
    if (reply)
        boost__rank_reply__free_unpacked(reply, NULL);
    if (rc)
        error_context(err, "rendezvous: get %s/%s", group, key);
    return rc;
}

static int table_set(void *arg, const char *group, const char *key, const void *value, size_t len, struct error *err)
{
    return rendezvous_set(arg, group, key, value, len, err);
}

static int table_get(void *arg, const char *group, const char *key, int timeout_ms, struct buffer *out,
                     struct error *err)
{
    return rendezvous_get(arg, group, key, timeout_ms, out, err);
}

struct rendezvous rendezvous_table(struct rendezvous_client *c)
{
    return (struct rendezvous){.set = table_set, .get = table_get, .arg = c};
}
