/* agent_link.h */
#include "daemon/agent_link.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "daemon/log.h"
#include "proto/agent.pb-c.h"
#include "proto/base/clock.h"
#include "proto/reflect.h"
#include "proto/validate.h"

enum { AGENT_ARENA = 96 << 20, HEART_ARENA = 64 << 10 };

struct agent_node {
    struct agent_node *next;
    char name[SESSION_NODE_MAX + 1];
    char instance[64];
    uint64_t token;
    struct session *main;  /* session->user points here: it speaks for the node */
    struct session *heart; /* likewise: its heartbeats                          */
};

static struct agent_node **bucket(struct agent_link *link, const char *name)
{
    uint32_t hash = 2166136261u;
    for (const char *c = name; *c; c++)
        hash = (hash ^ (unsigned char)*c) * 16777619u;
    return &link->buckets[hash % AGENT_LINK_BUCKETS];
}

static struct agent_node *find(struct agent_link *link, const char *name)
{
    for (struct agent_node *n = *bucket(link, name); n; n = n->next) {
        if (!strcmp(n->name, name))
            return n;
    }
    return NULL;
}

static struct agent_node *find_or_add(struct agent_link *link, const char *name)
{
    struct agent_node *n = find(link, name), **at = bucket(link, name);
    if (n || !(n = calloc(1, sizeof *n)))
        return n;
    snprintf(n->name, sizeof n->name, "%s", name);
    n->next = *at;
    *at = n;
    return n;
}

void agent_link_free(struct agent_link *link)
{
    for (size_t i = 0; i < AGENT_LINK_BUCKETS; i++) {
        while (link->buckets[i]) {
            struct agent_node *n = link->buckets[i];
            link->buckets[i] = n->next;
            free(n);
        }
    }
}

static bool is_main(const struct session *s)
{
    const struct agent_node *n = s->user;
    return n && n->main == s;
}

static bool is_heart(const struct session *s)
{
    const struct agent_node *n = s->user;
    return n && n->heart == s;
}

bool agent_link_send(struct agent_link *link, const char *node, const Boost__ControllerMessage *message)
{
    struct agent_node *n = find(link, node);
    struct session *s = n ? n->main : NULL;
    if (!s)
        return false;
    Boost__ControllerMessage copy = *message;
    Boost__Registered registered;
    if (message->body_case == BOOST__CONTROLLER_MESSAGE__BODY_REGISTERED && session_peer(s)) {
        registered = *message->registered;
        registered.has_heart_token = true;
        registered.heart_token = n->token;
        copy.registered = &registered;
    }
    struct error err;
    if (!session_send(s, &copy.base, &err))
        return true;
    log_error(LOG_WARN, &err, "message to the agent of %s", node);
    return false;
}

int agent_link_opened(struct agent_link *link, struct session *s, struct error *err)
{
    (void)link;
    if (!validate_name(s->node)) {
        error_set(err, ERR_INVALID, "node name \"%s\" is not 1 to 64 bytes of [A-Za-z0-9._-]", s->node);
        return error_hint(err, "set `node` in the agent's configuration");
    }
    const struct tls_peer *peer = session_peer(s);
    if (peer && peer->role == TLS_NODE && strcmp(peer->name, s->node) == 0)
        return ERR_OK;
    if (peer) {
        error_set(err, ERR_REFUSED, "the agent of node %s shows the certificate of %s %s", s->node,
                  tls_role_name(peer->role), peer->name);
        return error_hint(err, "give it its own: deploy/make-certs.sh DIR node %s", s->node);
    }
    if (s->uid == 0 || s->uid == geteuid())
        return ERR_OK;
    error_set(err, ERR_REFUSED, "an agent of uid %u may not join: boostd runs as uid %u", (unsigned)s->uid,
              (unsigned)geteuid());
    return error_hint(err, "run boost-agent as root or as the user of boostd");
}

static void refuse(struct session *s, const struct error *err)
{
    Boost__Failure failure = BOOST__FAILURE__INIT;
    Boost__ControllerMessage message = BOOST__CONTROLLER_MESSAGE__INIT;
    failure.has_code = 1;
    failure.code = (int)err->code;
    failure.message = (char *)err->message;
    failure.hint = (char *)err->hint;
    message.body_case = BOOST__CONTROLLER_MESSAGE__BODY_REFUSED;
    message.refused = &failure;
    struct error ignored;
    if (session_send(s, &message.base, &ignored))
        session_close(s);
    else
        session_end(s);
}

/* The session no longer speaks for its node. */
static void detach(struct session *s)
{
    struct agent_node *n = s->user;
    if (n && n->main == s)
        n->main = NULL;
    if (n && n->heart == s)
        n->heart = NULL;
    s->user = NULL;
}

static int check_register(const struct session *s, const Boost__Register *msg, struct error *err)
{
    if (!msg->node || strcmp(msg->node, s->node))
        return error_set(err, ERR_PROTOCOL, "the agent's hello says node \"%s\", its registration \"%s\"", s->node,
                         msg->node ? msg->node : "");
    if (!session_peer(s) && msg->uid != s->uid)
        return error_set(err, ERR_PROTOCOL, "the agent of %s says uid %u, the kernel says %u", s->node, msg->uid,
                         (unsigned)s->uid);
    if (msg->instance && strlen(msg->instance) >= sizeof((struct agent_node *)0)->instance)
        return error_set(err, ERR_PROTOCOL, "the agent of %s names an instance of %zu bytes", s->node,
                         strlen(msg->instance));
    return ERR_OK;
}

/* Another run of the agent: its heartbeats are not those of the one before. */
static void new_instance(struct agent_node *n, const char *instance)
{
    snprintf(n->instance, sizeof n->instance, "%s", instance);
    n->heart = NULL;
    if (getrandom(&n->token, sizeof n->token, 0) != (ssize_t)sizeof n->token || !n->token)
        n->token = (uint64_t)clock_mono_ns() | 1; /* the certificate is what protects, the token tells runs apart */
}

/* The core answers through agent_link_send, so the new session speaks for the node while it decides. */
static int take_register(struct agent_link *link, struct session *s, const Boost__Register *msg, struct error *err)
{
    int rc = check_register(s, msg, err);
    struct agent_node *n = rc ? NULL : find_or_add(link, s->node);
    if (rc || !n)
        return rc ? rc : error_set(err, ERR_NOMEM, "out of memory");
    struct agent_node was = *n;
    struct session *before = n->main;
    n->main = s;
    s->user = n;
    const char *instance = msg->instance ? msg->instance : "";
    if (!n->token || strcmp(n->instance, instance))
        new_instance(n, instance);
    rc = core_agent_register(link->core, msg, err);
    if (rc) {
        s->user = before == s ? n : NULL; /* it may speak for the node since an earlier Register */
        n->main = before;
        n->heart = was.heart;
        n->token = was.token;
        memcpy(n->instance, was.instance, sizeof n->instance);
        return rc;
    }
    if (was.heart && was.heart != n->heart) {
        was.heart->user = NULL;
        session_close(was.heart);
    }
    if (before && before != s) {
        before->user = NULL;
        session_close(before);
    }
    return ERR_OK;
}

static void acknowledge(struct session *s, uint64_t seq)
{
    Boost__HeartbeatAck body = BOOST__HEARTBEAT_ACK__INIT;
    Boost__ControllerMessage m = BOOST__CONTROLLER_MESSAGE__INIT;
    struct error err; /* a session that cannot be written to is closed by then */
    body.has_seq = true;
    body.seq = seq;
    m.body_case = BOOST__CONTROLLER_MESSAGE__BODY_HEARTBEAT_ACK;
    m.heartbeat_ack = &body;
    if (session_send(s, &m.base, &err))
        log_error(LOG_DEBUG, &err, "heartbeat of %s", s->node);
}

static int take_heart(struct agent_link *link, struct session *s, const Boost__Heart *msg, struct error *err)
{
    struct agent_node *n = find(link, s->node);
    if (!session_peer(s) || s->user)
        return error_set(err, ERR_PROTOCOL, "this connection of the agent of %s is not for heartbeats", s->node);
    if (!n || !n->token || msg->token != n->token || !msg->instance || strcmp(msg->instance, n->instance) != 0) {
        error_set(err, ERR_REFUSED, "heartbeats of an agent of %s that is not the one registered", s->node);
        return error_hint(err, "they are taken once it has registered; a second agent needs another node name");
    }
    struct session *before = n->heart;
    n->heart = s;
    s->user = n;
    if (before) {
        before->user = NULL;
        session_close(before);
    }
    core_agent_alive(link->core, s->node, n->instance);
    acknowledge(s, 0);
    return ERR_OK;
}

static int heart_frame(struct agent_link *link, struct session *s, const Boost__AgentMessage *m, struct error *err)
{
    const struct agent_node *n = s->user;
    if (m->body_case != BOOST__AGENT_MESSAGE__BODY_HEARTBEAT)
        return error_set(err, ERR_PROTOCOL, "only heartbeats go over this connection of the agent of %s", s->node);
    core_agent_alive(link->core, s->node, n->instance);
    acknowledge(s, m->heartbeat->seq);
    return ERR_OK;
}

/* Refusals are told to the agent; they are no fault of the protocol. */
static void taken_or_refused(struct session *s, int rc, const struct error *err)
{
    if (!rc)
        return;
    log_error(LOG_WARN, err, "agent of %s (%s) is not taken", s->node, s->who);
    refuse(s, err);
}

int agent_link_frame(struct agent_link *link, struct session *s, const uint8_t *payload, size_t len, struct error *err)
{
    struct arena a;
    arena_init(&a, is_heart(s) ? HEART_ARENA : AGENT_ARENA);
    const Boost__AgentMessage *m =
        (const Boost__AgentMessage *)reflect_unpack(&boost__agent_message__descriptor, payload, len, &a, err);
    int rc = ERR_OK;
    if (!m) {
        rc = error_context(err, "message of the agent of %s", s->node);
    } else if (is_heart(s)) {
        rc = heart_frame(link, s, m, err);
    } else if (m->body_case == BOOST__AGENT_MESSAGE__BODY_REGISTER) {
        taken_or_refused(s, take_register(link, s, m->register_, err), err);
    } else if (m->body_case == BOOST__AGENT_MESSAGE__BODY_HEART) {
        taken_or_refused(s, take_heart(link, s, m->heart, err), err);
    } else if (!is_main(s)) {
        rc = error_set(err, ERR_PROTOCOL, "the agent of %s speaks before it has registered", s->node);
    } else if (m->body_case == BOOST__AGENT_MESSAGE__BODY__NOT_SET) {
        /* A kind of message that only a newer agent knows. */
        log_line(LOG_DEBUG, "unknown message of the agent of %s", s->node);
    } else {
        core_agent_message(link->core, s->node, m);
    }
    arena_free(&a);
    return rc;
}

void agent_link_closed(struct agent_link *link, struct session *s)
{
    bool spoke = is_main(s);
    detach(s);
    if (!spoke)
        return;
    log_line(LOG_INFO, "agent of %s is gone (%s)", s->node, s->who);
    core_agent_disconnected(link->core, s->node);
}
