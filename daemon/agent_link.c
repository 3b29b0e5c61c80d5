/* agent_link.h */
#include "daemon/agent_link.h"

#include <string.h>
#include <unistd.h>

#include "daemon/log.h"
#include "proto/agent.pb-c.h"
#include "proto/reflect.h"
#include "proto/validate.h"

enum { AGENT_ARENA = 96 << 20 };

/* session->user of the one that speaks for its node; NULL: not registered, or replaced. */
static char registered;

static struct session *find(const struct agent_link *link, const char *node)
{
    for (struct session *s = link->sessions->first; s; s = s->next) {
        if (s->user == &registered && !strcmp(s->node, node))
            return s;
    }
    return NULL;
}

bool agent_link_send(struct agent_link *link, const char *node, const Boost__ControllerMessage *message)
{
    struct session *s = find(link, node);
    if (!s)
        return false;
    struct error err;
    if (!session_send(s, &message->base, &err))
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

/* The core answers through agent_link_send, so the new session speaks for the node while it decides. */
static int take_register(struct agent_link *link, struct session *s, const Boost__Register *msg, struct error *err)
{
    if (!msg->node || strcmp(msg->node, s->node))
        return error_set(err, ERR_PROTOCOL, "the agent's hello says node \"%s\", its registration \"%s\"", s->node,
                         msg->node ? msg->node : "");
    if (msg->uid != s->uid)
        return error_set(err, ERR_PROTOCOL, "the agent of %s says uid %u, the kernel says %u", s->node, msg->uid,
                         (unsigned)s->uid);
    struct session *before = find(link, s->node);
    if (before)
        before->user = NULL;
    s->user = &registered;
    int rc = core_agent_register(link->core, msg, err);
    if (!rc) {
        if (before && before != s)
            session_close(before);
        return ERR_OK;
    }
    s->user = NULL;
    if (before)
        before->user = &registered;
    return rc;
}

int agent_link_frame(struct agent_link *link, struct session *s, const uint8_t *payload, size_t len, struct error *err)
{
    struct arena a;
    arena_init(&a, AGENT_ARENA);
    const Boost__AgentMessage *m =
        (const Boost__AgentMessage *)reflect_unpack(&boost__agent_message__descriptor, payload, len, &a, err);
    int rc = ERR_OK;
    if (!m) {
        rc = error_context(err, "message of the agent of %s", s->node);
    } else if (m->body_case == BOOST__AGENT_MESSAGE__BODY_REGISTER) {
        rc = take_register(link, s, m->register_, err);
        if (rc) {
            log_error(LOG_WARN, err, "agent of %s (pid %d) is not taken", s->node, (int)s->pid);
            refuse(s, err);
            rc = ERR_OK;
        }
    } else if (s->user != &registered) {
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
    if (s->user != &registered)
        return;
    s->user = NULL;
    log_line(LOG_INFO, "agent of %s is gone (pid %d)", s->node, (int)s->pid);
    core_agent_disconnected(link->core, s->node);
}
