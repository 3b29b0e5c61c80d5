/* agent_rendezvous.h */
#include "daemon/agent_rendezvous.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/agent_node.h"
#include "daemon/frame_out.h"
#include "daemon/log.h"
#include "proto/base/crc32c.h"
#include "proto/base/fs.h"
#include "proto/frame.h"
#include "proto/reflect.h"

enum {
    BACKLOG = 512,
    READ_CHUNK = 16 << 10,
    REQUEST_ARENA = 1 << 20,
    MAX_PENDING = 4096,  /* of one rank */
    KEPT_MAX = 64 << 20, /* bytes of all kept sets */
};

struct client {
    uv_pipe_t pipe;
    struct rendezvous_server *server;
    struct client *next;
    struct buffer in;
    uid_t uid;
    int pending;
};

/* A request that the controller has not answered. */
struct pending {
    struct pending *next;
    struct client *client;
    uint64_t id;      /* ours, to the controller */
    uint64_t rank_id; /* the rank's */
    uint8_t *packed;  /* KvForward */
    size_t len;
};

/* What a rank has set, for a controller that forgot it: the exchange lives in boostd's
 * memory, and one that restarts while an attempt meets would leave its ranks waiting. */
struct kept_set {
    struct kept_set *next;
    int64_t job;
    int attempt;
    uint8_t *packed; /* KvForward */
    size_t len;
};

struct rendezvous_server {
    struct agent *agent;
    uv_pipe_t pipe;
    struct client *clients;
    struct pending *pending;
    struct kept_set *kept;
    size_t kept_bytes;
    uint64_t next_id;
    char own_dir[SOCKET_PATH_MAX]; /* to be removed with the socket; "" = none */
};

/* ---- answers ---- */

static void reply(struct client *c, uint64_t rank_id, Boost__KvResult *result)
{
    Boost__RankReply r = BOOST__RANK_REPLY__INIT;
    struct error err;
    r.has_id = true;
    r.id = rank_id;
    r.result = result;
    /* A client that is gone is met by its read. */
    if (frame_out((uv_stream_t *)&c->pipe, &r.base, NULL, &err))
        log_error(LOG_WARN, &err, "an answer to a rank");
}

static void reply_error(struct client *c, uint64_t rank_id, const char *text)
{
    Boost__KvResult result = BOOST__KV_RESULT__INIT;
    result.has_ok = true;
    result.error = (char *)(uintptr_t)text;
    reply(c, rank_id, &result);
}

static void free_pending(struct pending *p)
{
    free(p->packed);
    free(p);
}

void rendezvous_answer(struct rendezvous_server *server, const Boost__KvAnswer *answer)
{
    for (struct pending **at = &server->pending; *at; at = &(*at)->next) {
        struct pending *p = *at;
        if (p->id != answer->id)
            continue;
        *at = p->next;
        p->client->pending--;
        reply(p->client, p->rank_id, answer->result);
        free_pending(p);
        return;
    }
}

/* ---- requests ---- */

static void forward(struct rendezvous_server *server, const uint8_t *packed, size_t len)
{
    Boost__KvForward *f = boost__kv_forward__unpack(NULL, len, packed);
    if (!f)
        return;
    agent_send(server->agent, BOOST__AGENT_MESSAGE__BODY_KV, &f->base);
    boost__kv_forward__free_unpacked(f, NULL);
}

static void drop_kept(struct rendezvous_server *server, struct kept_set **at)
{
    struct kept_set *k = *at;
    *at = k->next;
    server->kept_bytes -= k->len;
    free(k->packed);
    free(k);
}

/* Sets of attempts that are over are of no use to anybody. */
static void drop_stale(struct rendezvous_server *server)
{
    for (struct kept_set **at = &server->kept; *at;) {
        struct agent_attempt *a = attempts_find(server->agent, (*at)->job, (*at)->attempt);
        if (a && attempt_alive(a))
            at = &(*at)->next;
        else
            drop_kept(server, at);
    }
}

/* Copies a SET; its answer went to the rank long ago when it is sent again. Without memory
 * for it a restart of boostd at the wrong moment costs this attempt its rendezvous, no more. */
static void keep_set(struct rendezvous_server *server, const Boost__KvForward *f, const uint8_t *packed, size_t len)
{
    if (f->op->kind != BOOST__KV_OP__KIND__SET)
        return;
    drop_stale(server);
    struct kept_set *k = server->kept_bytes + len <= KEPT_MAX ? calloc(1, sizeof *k) : NULL;
    uint8_t *copy = k ? malloc(len) : NULL;
    if (!copy) {
        free(k);
        return;
    }
    memcpy(copy, packed, len);
    *k = (struct kept_set){server->kept, f->job, f->attempt, copy, len};
    server->kept = k;
    server->kept_bytes += len;
}

void rendezvous_resend(struct rendezvous_server *server)
{
    drop_stale(server);
    for (const struct kept_set *k = server->kept; k; k = k->next)
        forward(server, k->packed, k->len);
    for (const struct pending *p = server->pending; p; p = p->next)
        forward(server, p->packed, p->len);
}

static const char *refuse_request(struct client *c, const Boost__RankRequest *r)
{
    if (!r->op || !r->op->group || !r->op->key)
        return "the request has no operation, group or key";
    if (r->op->value.len > LIMIT_KV_VALUE)
        return "the value is over 64 KiB";
    struct agent_attempt *a = attempts_find(c->server->agent, r->job, r->attempt);
    if (!a || !attempt_alive(a) || !attempt_rank(a, r->rank))
        return "this rank does not run on this node";
    if (c->uid != a->uid && c->uid != 0 && c->uid != geteuid())
        return "this rank is another user's";
    return c->pending >= MAX_PENDING ? "too many requests are open" : NULL;
}

static void take_request(struct client *c, const Boost__RankRequest *r)
{
    struct rendezvous_server *server = c->server;
    const char *why = refuse_request(c, r);
    if (why) {
        reply_error(c, r->id, why);
        return;
    }
    Boost__KvForward f = BOOST__KV_FORWARD__INIT;
    f.has_id = f.has_job = f.has_attempt = f.has_rank = true;
    f.id = ++server->next_id;
    f.job = r->job;
    f.attempt = r->attempt;
    f.rank = r->rank;
    f.op = r->op;
    struct pending *p = calloc(1, sizeof *p);
    uint8_t *packed = malloc(boost__kv_forward__get_packed_size(&f));
    if (!p || !packed) {
        free(p);
        free(packed);
        reply_error(c, r->id, "the agent is out of memory");
        return;
    }
    *p = (struct pending){.next = server->pending, .client = c, .id = f.id, .rank_id = r->id, .packed = packed};
    p->len = boost__kv_forward__pack(&f, packed);
    server->pending = p;
    c->pending++;
    keep_set(server, &f, packed, p->len);
    forward(server, packed, p->len);
}

/* ---- clients ---- */

static void client_closed(uv_handle_t *handle)
{
    struct client *c = handle->data;
    buffer_free(&c->in);
    free(c);
}

static void drop_client(struct client *c)
{
    struct rendezvous_server *server = c->server;
    for (struct client **at = &server->clients; *at; at = &(*at)->next) {
        if (*at == c) {
            *at = c->next;
            break;
        }
    }
    for (struct pending **at = &server->pending; *at;) {
        struct pending *p = *at;
        if (p->client != c) {
            at = &p->next;
            continue;
        }
        *at = p->next;
        free_pending(p);
    }
    uv_close((uv_handle_t *)&c->pipe, client_closed);
}

static void give_room(uv_handle_t *handle, size_t suggested, uv_buf_t *out)
{
    (void)suggested;
    struct client *c = handle->data;
    uint8_t *at = buffer_reserve(&c->in, READ_CHUNK);
    *out = uv_buf_init((char *)at, at ? READ_CHUNK : 0);
}

/* One frame; false when it cannot be understood. */
static bool take_payload(struct client *c, const uint8_t *payload, size_t len, struct error *err)
{
    struct arena a;
    arena_init(&a, REQUEST_ARENA);
    const Boost__RankRequest *r =
        (const Boost__RankRequest *)reflect_unpack(&boost__rank_request__descriptor, payload, len, &a, err);
    if (r)
        take_request(c, r);
    arena_free(&a);
    return r != NULL;
}

static void received(uv_stream_t *stream, ssize_t n, const uv_buf_t *unused)
{
    (void)unused;
    struct client *c = stream->data;
    struct error err;
    size_t done = 0;
    if (n < 0) {
        drop_client(c);
        return;
    }
    c->in.len += (size_t)n;
    for (;;) {
        const uint8_t *payload;
        size_t len, used;
        if (frame_next(c->in.data + done, c->in.len - done, &payload, &len, &used, &err) ||
            (used && !take_payload(c, payload, len, &err))) {
            log_error(LOG_WARN, &err, "a rank's request cannot be read");
            drop_client(c);
            return;
        }
        if (!used)
            break;
        done += used;
    }
    buffer_consume(&c->in, done);
}

static void accepted(uv_stream_t *listener, int status)
{
    struct rendezvous_server *server = listener->data;
    struct client *c = status < 0 ? NULL : calloc(1, sizeof *c);
    if (!c)
        return;
    buffer_init(&c->in, LIMIT_FRAME + FRAME_HEADER + READ_CHUNK);
    uv_pipe_init(server->agent->loop, &c->pipe, 0);
    c->pipe.data = c;
    c->server = server;
    c->next = server->clients;
    server->clients = c;
    struct ucred peer = {.uid = (uid_t)-1};
    socklen_t size = sizeof peer;
    uv_os_fd_t fd;
    if (uv_accept(listener, (uv_stream_t *)&c->pipe) < 0 || uv_fileno((uv_handle_t *)&c->pipe, &fd) < 0 ||
        getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) < 0 ||
        uv_read_start((uv_stream_t *)&c->pipe, give_room, received) < 0) {
        drop_client(c);
        return;
    }
    c->uid = peer.uid;
}

/* ---- listening ---- */

/* A directory of ours below /tmp, for a state directory whose path is too long. */
static int short_path(struct rendezvous_server *server, char out[SOCKET_PATH_MAX], struct error *err)
{
    const char *state_dir = server->agent->state_dir;
    struct stat st;
    snprintf(server->own_dir, sizeof server->own_dir, "/tmp/boost-agent-%u-%08x", (unsigned)geteuid(),
             crc32c(0, state_dir, strlen(state_dir)));
    if (mkdir(server->own_dir, 0711) < 0 && errno != EEXIST)
        return error_errno(err, errno, "cannot make %s", server->own_dir);
    if (lstat(server->own_dir, &st) < 0 || !S_ISDIR(st.st_mode) || st.st_uid != geteuid() || (st.st_mode & 022)) {
        error_set(err, ERR_IO, "%s is not a directory of this agent's", server->own_dir);
        server->own_dir[0] = '\0';
        return error_hint(err, "give the agent a state directory with a shorter path");
    }
    snprintf(out, SOCKET_PATH_MAX, "%s/rendezvous.sock", server->own_dir);
    return ERR_OK;
}

int rendezvous_listen(struct agent *agent, struct rendezvous_server **out, struct error *err)
{
    struct rendezvous_server *server = calloc(1, sizeof *server);
    if (!server)
        return error_set(err, ERR_NOMEM, "no memory for the rendezvous");
    server->agent = agent;
    int rc = fs_join(agent->rendezvous_path, sizeof agent->rendezvous_path, err, agent->state_dir, "rendezvous.sock");
    if (rc)
        rc = short_path(server, agent->rendezvous_path, err);
    if (rc) {
        free(server);
        return rc;
    }
    unlink(agent->rendezvous_path); /* of an agent before us: we hold the lock of the state directory */
    uv_pipe_init(agent->loop, &server->pipe, 0);
    server->pipe.data = server;
    mode_t mask = umask(0111); /* ranks of any user; who asks is checked by credentials */
    int uv = uv_pipe_bind(&server->pipe, agent->rendezvous_path);
    umask(mask);
    if (!uv)
        uv = uv_listen((uv_stream_t *)&server->pipe, BACKLOG, accepted);
    *out = server; /* also on failure: the handle has to be closed */
    if (uv)
        return error_set(err, ERR_IO, "cannot listen at %s: %s", agent->rendezvous_path, uv_strerror(uv));
    return ERR_OK;
}

static void server_closed(uv_handle_t *handle)
{
    struct rendezvous_server *server = handle->data;
    if (server->own_dir[0])
        rmdir(server->own_dir);
    free(server);
}

void rendezvous_close(struct rendezvous_server *server)
{
    if (!server)
        return;
    while (server->clients)
        drop_client(server->clients);
    while (server->kept)
        drop_kept(server, &server->kept);
    unlink(server->agent->rendezvous_path);
    uv_close((uv_handle_t *)&server->pipe, server_closed);
}
