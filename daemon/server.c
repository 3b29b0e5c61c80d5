/* server.h */
#include "daemon/server.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "daemon/agent_link.h"
#include "daemon/core.h"
#include "daemon/kept_logs.h"
#include "daemon/listener.h"
#include "daemon/listener_tcp.h"
#include "daemon/log.h"
#include "daemon/own_clock.h"
#include "daemon/procid.h"
#include "daemon/rpc.h"
#include "daemon/session.h"
#include "daemon/standby.h"
#include "daemon/users.h"
#include "proto/base/clock.h"

enum { MAX_SESSIONS = 32768, STOP_MS = 3000 };

struct server {
    uv_loop_t *loop;
    struct store *store;
    struct core *core;
    struct own_clock clock; /* the core's */
    struct rpc *rpc;
    struct users users;
    struct kept_logs kept;
    struct agent_link agents;
    struct session_set sessions;
    struct listener listener;
    struct tcp_listeners tcp;
    struct standby standby;
    struct tls_files tls_files; /* of the configuration */
    struct tls_context *tls;    /* NULL: no TCP */
    uv_pipe_t pipe;             /* listening */
    uv_prepare_t settle; /* before every sleep */
    uv_timer_t due;
    uv_poll_t store_poll;
    uv_signal_t signals[3];
    size_t handles; /* of those above, that are open */
    int error;      /* of the set-up, libuv's */
};

/* ---- what the core needs ------------------------------------------------------- */

static int64_t mono_ns(void *arg)
{
    struct server *server = arg;
    return own_clock_ns(&server->clock, clock_mono_ns());
}

static int64_t boot_ns(void *arg)
{
    (void)arg;
    return clock_boot_ns();
}

static int64_t wall_ns(void *arg)
{
    (void)arg;
    return clock_wall_ns();
}

static uint64_t random_bits(void *arg)
{
    (void)arg;
    uint64_t bits = 0;
    if (getrandom(&bits, sizeof bits, 0) != (ssize_t)sizeof bits)
        bits = (uint64_t)clock_mono_ns() * UINT64_C(0x9E3779B97F4A7C15);
    return bits;
}

static bool send_to_agent(void *arg, const char *node, const Boost__ControllerMessage *message)
{
    struct server *server = arg;
    return agent_link_send(&server->agents, node, message);
}

static void changed(void *arg, int64_t job)
{
    rpc_changed(((struct server *)arg)->rpc, job);
}

static void keep_logs(void *arg, int64_t job, int attempt, const void *packed, size_t len)
{
    struct server *server = arg;
    kept_logs_put(&server->kept, job, attempt, packed, len);
}

static void read_kept_logs(void *arg, int64_t job, int attempt, void (*done)(void *, const void *, size_t),
                           void *done_arg)
{
    struct server *server = arg;
    kept_logs_get(&server->kept, job, attempt, done, done_arg);
}

static void core_log(void *arg, enum core_log_level level, const char *text)
{
    (void)arg;
    static const enum log_level levels[] = {LOG_DEBUG, LOG_INFO, LOG_WARN, LOG_ERROR};
    log_line(levels[level], "%s", text);
}

/* ---- sessions ------------------------------------------------------------------ */

static bool is_agent(const struct session *s)
{
    return s->component == BOOST__COMPONENT__VALUE__AGENT;
}

static int on_opened(void *arg, struct session *s, struct error *err)
{
    struct server *server = arg;
    return is_agent(s) ? agent_link_opened(&server->agents, s, err) : rpc_opened(s, err);
}

static int on_frame(void *arg, struct session *s, const uint8_t *payload, size_t len, struct error *err)
{
    struct server *server = arg;
    return is_agent(s) ? agent_link_frame(&server->agents, s, payload, len, err)
                       : rpc_frame(server->rpc, s, payload, len, err);
}

static void on_drained(void *arg, struct session *s)
{
    if (!is_agent(s))
        rpc_drained(((struct server *)arg)->rpc, s);
}

static void on_closed(void *arg, struct session *s)
{
    struct server *server = arg;
    if (is_agent(s))
        agent_link_closed(&server->agents, s);
    else
        rpc_closed(server->rpc, s);
}

static void on_connection(uv_stream_t *listener, int status)
{
    struct server *server = listener->data;
    struct error err;
    if (status < 0) {
        log_line(LOG_WARN, "cannot accept a connection: %s", uv_strerror(status));
        return;
    }
    int rc = listener == (uv_stream_t *)&server->pipe
                 ? session_accept(&server->sessions, listener, &err)
                 : session_accept_tls(&server->sessions, listener, server->tls, &err);
    if (rc) {
        log_error(LOG_WARN, &err, "a connection was dropped");
    } else if (server->sessions.count > MAX_SESSIONS) {
        log_line(LOG_WARN, "over %d connections: one (%s) was dropped", MAX_SESSIONS, server->sessions.first->who);
        session_close(server->sessions.first);
    }
}

/* ---- TLS ----------------------------------------------------------------------- */

/* Connections that are there keep what they began with. */
static int load_tls(struct server *server, struct error *err)
{
    struct tls_context *fresh;
    struct tls_peer own;
    int rc = tls_context_create(true, &server->tls_files, &own, &fresh, err);
    if (rc)
        return rc;
    if (own.role != TLS_CONTROLLER) {
        tls_context_free(fresh);
        error_set(err, ERR_REFUSED, "the certificate %s is of %s %s, not of a controller",
                  server->tls_files.certificate, tls_role_name(own.role), own.name);
        return error_hint(err, "deploy/make-certs.sh DIR controller NAME --san HOST makes one for boostd");
    }
    if (own.days_left < TLS_DAYS_WARN)
        log_line(LOG_WARN, "the certificate %s ends in %d days", server->tls_files.certificate, own.days_left);
    tls_context_free(server->tls);
    server->tls = fresh;
    return ERR_OK;
}

static void reload_tls(struct server *server)
{
    struct error err;
    if (load_tls(server, &err))
        log_error(LOG_ERROR, &err, "SIGHUP: the certificates in use stay");
    else
        log_line(LOG_INFO, "SIGHUP: certificates are read again; the rest of the configuration needs a restart");
}

static int listen_tcp(struct server *server, const Boost__BoostdConfig *config, struct error *err)
{
    if (!config->n_listen)
        return ERR_OK;
    server->tls_files = (struct tls_files){
        .certificate = config->tls_certificate, .key = config->tls_key, .ca = config->tls_ca};
    int rc = load_tls(server, err);
    return rc ? rc : tcp_listeners_open(server->loop, config->listen, config->n_listen, on_connection, server,
                                        &server->tcp, err);
}

const char *server_address(const struct server *server, size_t i)
{
    return i < server->tcp.n ? server->tcp.list[i]->text : NULL;
}

/* ---- the loop ------------------------------------------------------------------ */

static void on_due(uv_timer_t *timer)
{
    (void)timer; /* it only wakes the loop; on_settle does the work */
}

static void on_settle(uv_prepare_t *prepare)
{
    struct server *server = prepare->data;
    int64_t next = core_run(server->core);
    if (next != INT64_MAX)
        next += server->clock.behind_ns;
    int64_t other = rpc_settle(server->rpc, clock_mono_ns());
    if (other < next)
        next = other;
    own_clock_sleep(&server->clock, next);
    if (next == INT64_MAX) {
        uv_timer_stop(&server->due);
        return;
    }
    int64_t left = next - clock_mono_ns();
    uv_update_time(server->loop);
    uv_timer_start(&server->due, on_due, left <= 0 ? 0 : (uint64_t)((left + NS_PER_MS - 1) / NS_PER_MS), 0);
}

static void on_store(uv_poll_t *poll, int status, int events)
{
    struct server *server = poll->data;
    (void)status;
    (void)events;
    store_dispatch(server->store);
}

static void on_signal(uv_signal_t *handle, int number)
{
    struct server *server = handle->data;
    if (number == SIGHUP && server->tls) {
        reload_tls(server);
        return;
    }
    if (number == SIGHUP) {
        log_line(LOG_WARN, "SIGHUP: boostd does not reload its configuration; restart it, ranks keep running");
        return;
    }
    log_line(LOG_INFO, "%s: stopping; ranks keep running", number == SIGTERM ? "SIGTERM" : "SIGINT");
    uv_stop(server->loop);
}

void server_run(struct server *server)
{
    uv_run(server->loop, UV_RUN_DEFAULT);
}

/* ---- making and ending ----------------------------------------------------------- */

/* Counts a handle that was made, so that server_stop() closes exactly those. */
static void note(struct server *server, int rc, void *handle)
{
    if (rc < 0) {
        server->error = server->error ? server->error : rc;
        return;
    }
    ((uv_handle_t *)handle)->data = server;
    server->handles++;
}

static void start(struct server *server, int rc)
{
    if (rc < 0 && !server->error)
        server->error = rc;
}

static uv_handle_t *handle_at(struct server *server, size_t i)
{
    uv_handle_t *const all[] = {
        (uv_handle_t *)&server->settle,     (uv_handle_t *)&server->due,        (uv_handle_t *)&server->signals[0],
        (uv_handle_t *)&server->signals[1], (uv_handle_t *)&server->signals[2], (uv_handle_t *)&server->store_poll,
        (uv_handle_t *)&server->pipe,
    };
    return all[i];
}

static int make_handles(struct server *server, struct error *err)
{
    static const int numbers[] = {SIGTERM, SIGINT, SIGHUP};
    note(server, uv_prepare_init(server->loop, &server->settle), &server->settle);
    note(server, uv_timer_init(server->loop, &server->due), &server->due);
    for (int i = 0; i < 3; i++)
        note(server, uv_signal_init(server->loop, &server->signals[i]), &server->signals[i]);
    if (!server->error)
        note(server, uv_poll_init(server->loop, &server->store_poll, store_fd(server->store)), &server->store_poll);
    if (!server->error)
        note(server, uv_pipe_init(server->loop, &server->pipe, 0), &server->pipe);
    if (!server->error)
        start(server, uv_pipe_open(&server->pipe, server->listener.fd));
    if (!server->error)
        server->listener.fd = -1; /* the pipe's now */
    if (!server->error)
        start(server, uv_listen((uv_stream_t *)&server->pipe, 1024, on_connection));
    if (!server->error)
        start(server, uv_prepare_start(&server->settle, on_settle));
    if (!server->error)
        start(server, uv_poll_start(&server->store_poll, UV_READABLE, on_store));
    for (int i = 0; !server->error && i < 3; i++)
        start(server, uv_signal_start(&server->signals[i], on_signal, numbers[i]));
    return server->error ? error_errno(err, -server->error, "cannot set up the event loop") : ERR_OK;
}

int server_create(uv_loop_t *loop, const Boost__BoostdConfig *config, struct store *store, const char *socket_path,
                  bool adopted, struct server **out, struct error *err)
{
    *out = NULL;
    struct server *server = calloc(1, sizeof *server);
    if (!server)
        return error_set(err, ERR_NOMEM, "no memory for the server");
    server->loop = loop;
    server->store = store;
    server->listener.fd = server->listener.file = -1;
    users_init(&server->users, loop);
    const struct session_handler handler = {
        .arg = server, .opened = on_opened, .frame = on_frame, .drained = on_drained, .closed = on_closed};
    session_set_init(&server->sessions, loop, &handler);
    server->sessions.store_id = store_id(store);
    server->sessions.epoch = store_epoch(store);
    kept_logs_init(&server->kept, loop, config->state_dir);
    const struct core_ops ops = {
        .arg = server,
        .keep_logs = keep_logs,
        .kept_logs = read_kept_logs,
        .mono_ns = mono_ns,
        .wall_ns = wall_ns,
        .boot_ns = boot_ns,
        .boot_id = procid_boot_id(),
        .random = random_bits,
        .send = send_to_agent,
        .changed = changed,
        .log = core_log,
        .uid = geteuid(),
    };
    const struct core_store table = core_store_sqlite(store);
    int rc = rpc_create(store, &server->users, &server->rpc, err);
    if (!rc)
        rc = core_create(config, &table, &ops, &server->core, err);
    if (!rc) {
        rpc_set_core(server->rpc, server->core);
        if (store_epoch(store) >> 32 > 1)
            core_adopted(server->core, adopted);
        server->agents.core = server->core;
        rc = listener_open(&server->listener, socket_path, err);
    }
    if (!rc)
        rc = make_handles(server, err);
    if (!rc)
        rc = listen_tcp(server, config, err);
    if (!rc)
        rc = standby_start(&server->standby, loop, store, config->backup_dir, config->backup_every_s, err);
    *out = server;
    return rc;
}

bool server_stop(struct server *server)
{
    /* The pipe closes the descriptor, the listener removes the file. */
    listener_close(&server->listener);
    tcp_listeners_close(&server->tcp);
    standby_stop(&server->standby);
    session_set_close(&server->sessions);
    for (size_t i = 0; i < server->handles; i++)
        uv_close(handle_at(server, i), NULL);
    server->handles = 0;
    int64_t deadline = clock_mono_ns() + STOP_MS * NS_PER_MS;
    while (uv_run(server->loop, UV_RUN_NOWAIT)) {
        if (clock_mono_ns() >= deadline)
            return false;
        poll(NULL, 0, 1);
    }
    return true;
}

void server_destroy(struct server *server)
{
    if (!server)
        return;
    if (server->core)
        core_destroy(server->core);
    rpc_destroy(server->rpc);
    agent_link_free(&server->agents);
    tcp_listeners_free(&server->tcp);
    tls_context_free(server->tls);
    users_free(&server->users);
    free(server);
}
