/* agent_link_up.h */
#include "daemon/agent_link_up.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "daemon/agent_heart.h"
#include "daemon/agent_obeys.h"
#include "daemon/agent_probe.h"
#include "daemon/dial.h"
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
    ANSWER_MS = 3000,      /* Unix: without any HeartbeatAck, or without an answer to hello or Register: dead */
    FAR_CONNECT_MS = 5000, /* by TCP: until the handshake is through                                          */
    FAR_ANSWER_MS = 10000, /* until hello and Register are answered; of silence everywhere, once up           */
    FAR_PROBE_MS = 3000,   /* a heartbeat here too, so that the kernel has something to miss                  */
    FAR_TIMEOUT_MS = 15000, /* TCP_USER_TIMEOUT */
    QUIET_LOG_MS = 60000,  /* the same trouble again is logged this often */
    PROBE_EVERY_MS = 10000, /* how often the other addresses are looked at */
    MESSAGE_ARENA = 64 << 20,
    MAX_ADDRESSES = 8,
};

enum link_state { LINK_WAITING, LINK_CONNECTING, LINK_HELLO, LINK_REGISTERING, LINK_UP, LINK_CLOSED };

struct link_up {
    uv_loop_t *loop;
    const struct link_up_ops *ops;
    struct link_up_way way;
    char path[SOCKET_PATH_MAX];
    struct address addresses[MAX_ADDRESSES];
    size_t at; /* the address in use */
    struct tls_context *tls;
    struct timespec read[3]; /* when the three files were last changed, as they were read */
    char *node;
    uv_timer_t timer; /* WAITING: next try; CONNECTING to REGISTERING: deadline; UP: heartbeat */
    struct dial_target target;
    struct dial *dial;
    struct heart *heart;
    struct obeys obeys;
    struct probe probe;
    bool probes;      /* `probe` is there: several addresses */
    size_t probed;    /* the address looked at last          */
    int64_t probe_ns; /* and when                            */
    char store[17];   /* of the controller at hand, and its epoch, as its hello says */
    uint64_t epoch;
    enum link_state state;
    char instance[33];
    int heartbeat_ms;
    int backoff_ms;
    uint64_t heartbeat_seq;
    int64_t last_answer_ns, last_beat_ns;
    char last_trouble[256];
    int64_t last_trouble_ns;
};

static void try_connect(uv_timer_t *timer);
static void wait_and_retry(struct link_up *link);

static bool far(const struct link_up *link)
{
    return !link->way.socket_path;
}

const char *link_up_where(const struct link_up *link)
{
    return far(link) ? link->addresses[link->at].text : link->path;
}

/* ---- connection ---- */

static void drop_connection(struct link_up *link)
{
    dial_close(link->dial);
    link->dial = NULL;
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
        log_line(LOG_WARN, "%s the controller at %s: %s; the ranks go on", how, link_up_where(link), trouble);
        snprintf(link->last_trouble, sizeof link->last_trouble, "%s", trouble);
        link->last_trouble_ns = now;
    }
    drop_connection(link);
    /* Once down, what was there is tried first: a controller that restarts is soon back. */
    if (!was_up && link->way.n_addresses)
        link->at = (link->at + 1) % link->way.n_addresses;
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

static bool send_frame(struct link_up *link, const ProtobufCMessage *message)
{
    struct error err;
    int rc = dial_send(link->dial, message, &err);
    if (rc == ERR_INVALID)
        log_error(LOG_ERROR, &err, "a message for the controller is not sent");
    return !rc; /* any other failure is told by on_broken() */
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
    return link && link->dial ? dial_queued(link->dial) : 0;
}

static void no_answer(uv_timer_t *timer)
{
    struct link_up *link = timer->data;
    fail(link, far(link) ? "no answer in time" : "no answer within 3 s", NULL);
}

static void expect_answer(struct link_up *link)
{
    uv_timer_start(&link->timer, no_answer, far(link) ? FAR_ANSWER_MS : ANSWER_MS, 0);
}

static void make_hello(const struct link_up *link, Boost__Hello *hello, const char *store)
{
    hello->has_protocol = hello->has_protocol_min = hello->has_component = true;
    hello->protocol = FRAME_PROTOCOL_VERSION;
    hello->protocol_min = FRAME_PROTOCOL_MIN;
    hello->component = BOOST__COMPONENT__VALUE__AGENT;
    hello->build_id = (char *)(uintptr_t)boost_build_id();
    hello->version = (char *)(uintptr_t)boost_version();
    hello->node = link->node;
    hello->store_id = (char *)(uintptr_t)store;
    hello->has_epoch = store && *store;
    hello->epoch = hello->has_epoch ? obeys_epoch(&link->obeys, store) : 0;
}

/* Somebody answers at another address: is it who has taken this controller's place? */
static void probed(void *arg, const Boost__Hello *answer)
{
    struct link_up *link = arg;
    if (link->state != LINK_UP || !answer->store_id || strcmp(answer->store_id, link->store) != 0 ||
        answer->epoch <= link->epoch)
        return;
    char text[200];
    snprintf(text, sizeof text, "a later one (adoption %u) is at %s", (unsigned)(answer->epoch >> 32),
             link->addresses[link->probed].text);
    fail(link, text, NULL);
    link->at = link->probed;
}

static void probe_others(struct link_up *link, int64_t now)
{
    if (!link->probes || now - link->probe_ns < PROBE_EVERY_MS * NS_PER_MS)
        return;
    link->probe_ns = now;
    link->probed = (link->probed + 1) % link->way.n_addresses;
    if (link->probed == link->at)
        link->probed = (link->probed + 1) % link->way.n_addresses;
    struct dial_target target = link->target;
    target.address = &link->addresses[link->probed];
    Boost__Hello hello = BOOST__HELLO__INIT;
    make_hello(link, &hello, link->store);
    probe_start(&link->probe, &target, &hello);
}

static void beat(uv_timer_t *timer)
{
    struct link_up *link = timer->data;
    int64_t now = clock_mono_ns(), answered = link->last_answer_ns;
    int64_t limit = far(link) ? FAR_ANSWER_MS : ANSWER_MS;
    if (far(link) && heart_answered_ns(link->heart) > answered)
        answered = heart_answered_ns(link->heart);
    if (limit < 3 * link->heartbeat_ms)
        limit = 3 * link->heartbeat_ms;
    if (now - answered > limit * NS_PER_MS) {
        fail(link, "no answer to heartbeats", NULL);
        return;
    }
    probe_others(link, now);
    /* Here too now and then, and at once where the other connection is slow to answer: two are rarely stuck at once. */
    bool well = far(link) && heart_up(link->heart) &&
                now - heart_answered_ns(link->heart) < 2 * link->heartbeat_ms * NS_PER_MS;
    if (well && now - link->last_beat_ns < FAR_PROBE_MS * NS_PER_MS)
        return;
    Boost__AgentMessage message = BOOST__AGENT_MESSAGE__INIT;
    Boost__Heartbeat heartbeat = BOOST__HEARTBEAT__INIT;
    heartbeat.has_seq = true;
    heartbeat.seq = ++link->heartbeat_seq;
    message.body_case = BOOST__AGENT_MESSAGE__BODY_HEARTBEAT;
    message.heartbeat = &heartbeat;
    link->last_beat_ns = now;
    send_frame(link, &message.base);
}

/* ---- receiving ---- */

static void send_register(struct link_up *link)
{
    Boost__AgentMessage message = BOOST__AGENT_MESSAGE__INIT;
    message.body_case = BOOST__AGENT_MESSAGE__BODY_REGISTER;
    message.register_ = (Boost__Register *)(uintptr_t)link->ops->registration(link->ops->arg);
    link->state = LINK_REGISTERING;
    if (!message.register_ || !send_frame(link, &message.base)) {
        fail(link, "cannot send the registration", NULL);
        return;
    }
    const char *instance = message.register_->instance;
    snprintf(link->instance, sizeof link->instance, "%s", instance ? instance : "");
    expect_answer(link);
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
    } else if (hello->store_id && hello->epoch < obeys_epoch(&link->obeys, hello->store_id)) {
        snprintf(text, sizeof text, "it is an earlier boostd of store %.16s (adoption %u), this agent obeys %u",
                 hello->store_id, (unsigned)(hello->epoch >> 32),
                 (unsigned)(obeys_epoch(&link->obeys, hello->store_id) >> 32));
        fail_as(link, "does not obey", text, "stop that one, or start it with --adopt");
    } else {
        snprintf(link->store, sizeof link->store, "%s", hello->store_id ? hello->store_id : "");
        link->epoch = hello->has_epoch ? hello->epoch : 0;
        send_register(link);
    }
}

static void take_registered(struct link_up *link, const Boost__Registered *answer)
{
    struct error err;
    if (*link->store && link->epoch && obeys_set(&link->obeys, link->store, link->epoch, &err))
        log_error(LOG_ERROR, &err, "which controller is obeyed is not on disk");
    link->state = LINK_UP;
    link->backoff_ms = BACKOFF_MIN_MS;
    link->last_trouble[0] = '\0';
    link->last_answer_ns = clock_mono_ns();
    link->last_beat_ns = link->probe_ns = 0; /* one that was replaced hears of it at once */
    link->heartbeat_ms = answer->has_heartbeat_ms && answer->heartbeat_ms >= 10 ? answer->heartbeat_ms : 1000;
    if (far(link) && answer->has_heart_token)
        heart_start(link->heart, link->instance, answer->heart_token, link->heartbeat_ms);
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

static void on_frame(void *arg, struct dial *d, const uint8_t *payload, size_t len)
{
    struct link_up *link = arg;
    struct arena a;
    struct error err;
    (void)d;
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

static void on_broken(void *arg, struct dial *d, const struct error *why)
{
    struct link_up *link = arg;
    (void)d;
    if (why->code == ERR_REFUSED)
        fail_as(link, link->state == LINK_UP ? "lost" : "not taken by", why->message, why->hint);
    else
        fail(link, why->message, why->hint);
}

/* ---- connecting ---- */

static void on_connected(void *arg, struct dial *d)
{
    struct link_up *link = arg;
    (void)d;
    Boost__Hello hello = BOOST__HELLO__INIT;
    const struct obeys *o = &link->obeys;
    make_hello(link, &hello, o->n ? o->list[o->n - 1].store : NULL);
    link->state = LINK_HELLO;
    expect_answer(link);
    if (!send_frame(link, &hello.base))
        fail(link, "cannot talk on the connection", NULL);
}

/* Whose certificate it is, and when its files were last changed. */
static int load_tls(struct link_up *link, struct error *err)
{
    const char *const files[] = {link->way.tls.certificate, link->way.tls.key, link->way.tls.ca};
    struct timespec now[3] = {0};
    bool changed = !link->tls;
    for (int i = 0; i < 3; i++) {
        struct stat st;
        if (stat(files[i], &st) == 0)
            now[i] = st.st_mtim;
        changed = changed || now[i].tv_sec != link->read[i].tv_sec || now[i].tv_nsec != link->read[i].tv_nsec;
    }
    if (!changed)
        return ERR_OK;
    struct tls_context *fresh;
    struct tls_peer own;
    int rc = tls_context_create(false, &link->way.tls, &own, &fresh, err);
    if (rc)
        return rc;
    if (own.role != TLS_NODE || strcmp(own.name, link->node) != 0) {
        tls_context_free(fresh);
        error_set(err, ERR_REFUSED, "the certificate %s is of %s %s, this is node %s", files[0],
                  tls_role_name(own.role), own.name, link->node);
        return error_hint(err, "make its own: deploy/make-certs.sh DIR node %s; or set --node", link->node);
    }
    if (own.days_left < TLS_DAYS_WARN)
        log_line(LOG_WARN, "the certificate %s ends in %d days", files[0], own.days_left);
    if (link->tls)
        log_line(LOG_INFO, "certificates have changed and are read again");
    tls_context_free(link->tls);
    link->tls = link->target.tls = fresh;
    memcpy(link->read, now, sizeof now);
    return ERR_OK;
}

static void try_connect(uv_timer_t *timer)
{
    struct link_up *link = timer->data;
    const struct dial_ops ops = {.arg = link, .connected = on_connected, .frame = on_frame, .broken = on_broken};
    struct error err;
    if (far(link) && load_tls(link, &err))
        log_error(LOG_WARN, &err, "certificates have changed and cannot be used: those read before stay");
    link->target.address = far(link) ? &link->addresses[link->at] : NULL;
    link->state = LINK_CONNECTING;
    if (dial_open(link->loop, &link->target, &ops, &link->dial, &err))
        fail(link, err.message, err.hint);
    else
        uv_timer_start(&link->timer, no_answer, far(link) ? FAR_CONNECT_MS : ANSWER_MS, 0);
}

/* ---- making and ending ---- */

static int set_way(struct link_up *link, const struct link_up_way *way, struct error *err)
{
    link->way = *way;
    link->target.timeout_ms = FAR_TIMEOUT_MS;
    if (way->socket_path) {
        if (strlen(way->socket_path) >= SOCKET_PATH_MAX)
            return error_set(err, ERR_INVALID, "socket path is longer than %d bytes: %s", SOCKET_PATH_MAX - 1,
                             way->socket_path);
        snprintf(link->path, sizeof link->path, "%s", way->socket_path);
        link->way.socket_path = link->target.path = link->path;
        return ERR_OK;
    }
    if (way->n_addresses > MAX_ADDRESSES)
        return error_set(err, ERR_INVALID, "controller_address: %zu addresses, the limit is %d", way->n_addresses,
                         MAX_ADDRESSES);
    int rc = ERR_OK;
    for (size_t i = 0; !rc && i < way->n_addresses; i++)
        rc = address_parse(way->addresses[i], false, "controller_address", &link->addresses[i], err);
    return rc ? rc : load_tls(link, err);
}

static void free_link(struct link_up *link)
{
    tls_context_free(link->tls);
    free(link->node);
    free(link);
}

int link_up_create(uv_loop_t *loop, const struct link_up_way *way, const char *node, const struct link_up_ops *ops,
                   struct link_up **out, struct error *err)
{
    struct link_up *link = calloc(1, sizeof *link);
    char *name = strdup(node);
    if (!link || !name) {
        free(link);
        free(name);
        return error_set(err, ERR_NOMEM, "no memory for the connection to the controller");
    }
    *link = (struct link_up){.loop = loop, .ops = ops, .node = name, .backoff_ms = BACKOFF_MIN_MS};
    int rc = set_way(link, way, err);
    if (!rc && obeys_load(&link->obeys, way->obeys_path ? way->obeys_path : "", err))
        log_error(LOG_ERROR, err, "controllers obeyed before");
    if (!rc && far(link))
        rc = heart_create(loop, link->node, &link->target, &link->heart, err);
    if (rc) {
        free_link(link);
        return rc;
    }
    uv_timer_init(loop, &link->timer);
    link->timer.data = link;
    uv_timer_start(&link->timer, try_connect, 0, 0);
    link->probes = far(link) && way->n_addresses > 1;
    if (link->probes)
        probe_init(&link->probe, loop, probed, link);
    *out = link;
    return ERR_OK;
}

static void timer_closed(uv_handle_t *handle)
{
    free_link(handle->data);
}

static void probe_closed(uv_handle_t *handle)
{
    struct link_up *link = ((struct probe *)handle->data)->arg;
    uv_close((uv_handle_t *)&link->timer, timer_closed);
}

void link_up_close(struct link_up *link)
{
    if (!link)
        return;
    link->state = LINK_CLOSED;
    drop_connection(link);
    heart_close(link->heart);
    uv_timer_stop(&link->timer);
    if (link->probes)
        probe_close(&link->probe, probe_closed);
    else
        uv_close((uv_handle_t *)&link->timer, timer_closed);
}
