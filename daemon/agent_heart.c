/* agent_heart.h */
#include "daemon/agent_heart.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/log.h"
#include "proto/agent.pb-c.h"
#include "proto/base/clock.h"
#include "proto/frame.h"
#include "proto/reflect.h"
#include "proto/version.h"

enum { SILENCE_MS = 3000, CONNECT_MS = 5000, PAUSE_MIN_MS = 100, PAUSE_MAX_MS = 3200, HEART_ARENA = 64 << 10 };

enum heart_state { HEART_OFF, HEART_WAITING, HEART_CONNECTING, HEART_HELLO, HEART_UP };

struct heart {
    uv_loop_t *loop;
    const char *node;
    const struct dial_target *target;
    uv_timer_t timer; /* WAITING: next try; CONNECTING, HELLO: deadline; UP: the next beat */
    struct dial *dial;
    enum heart_state state;
    char instance[33];
    uint64_t token, seq;
    int every_ms, pause_ms;
    int64_t answered_ns;
    bool said; /* the trouble is in the log */
};

static void connect_again(uv_timer_t *timer);

static void again(struct heart *h, const char *why)
{
    if (!h->said)
        log_line(LOG_INFO, "the heartbeat connection is made anew: %s", why);
    h->said = true;
    dial_close(h->dial);
    h->dial = NULL;
    h->state = HEART_WAITING;
    uint8_t random = 0;
    uv_random(NULL, NULL, &random, 1, 0, NULL);
    uv_timer_start(&h->timer, connect_again, (uint64_t)(h->pause_ms / 2 + h->pause_ms * random / 512), 0);
    h->pause_ms = h->pause_ms * 2 < PAUSE_MAX_MS ? h->pause_ms * 2 : PAUSE_MAX_MS;
}

static void too_late(uv_timer_t *timer)
{
    again(timer->data, "no answer in time");
}

static void send_message(struct heart *h, const ProtobufCMessage *message)
{
    struct error err;
    if (dial_send(h->dial, message, &err) == ERR_INVALID)
        log_error(LOG_ERROR, &err, "a heartbeat is not sent");
    /* Any other failure is told by `broken`. */
}

static void beat(uv_timer_t *timer)
{
    struct heart *h = timer->data;
    int64_t limit = SILENCE_MS > 3 * h->every_ms ? SILENCE_MS : 3 * h->every_ms;
    if (clock_mono_ns() - h->answered_ns > limit * NS_PER_MS) {
        again(h, "no answer to heartbeats");
        return;
    }
    Boost__AgentMessage message = BOOST__AGENT_MESSAGE__INIT;
    Boost__Heartbeat heartbeat = BOOST__HEARTBEAT__INIT;
    heartbeat.has_seq = true;
    heartbeat.seq = ++h->seq;
    message.body_case = BOOST__AGENT_MESSAGE__BODY_HEARTBEAT;
    message.heartbeat = &heartbeat;
    send_message(h, &message.base);
}

static void on_connected(void *arg, struct dial *d)
{
    struct heart *h = arg;
    (void)d;
    Boost__Hello hello = BOOST__HELLO__INIT;
    hello.has_protocol = hello.has_protocol_min = hello.has_component = true;
    hello.protocol = FRAME_PROTOCOL_VERSION;
    hello.protocol_min = FRAME_PROTOCOL_MIN;
    hello.component = BOOST__COMPONENT__VALUE__AGENT;
    hello.build_id = (char *)(uintptr_t)boost_build_id();
    hello.version = (char *)(uintptr_t)boost_version();
    hello.node = (char *)(uintptr_t)h->node;
    send_message(h, &hello.base);
    /* The answer to the hello is not waited for: each way to and fro costs time where packets are lost. */
    Boost__AgentMessage message = BOOST__AGENT_MESSAGE__INIT;
    Boost__Heart heart = BOOST__HEART__INIT;
    heart.instance = h->instance;
    heart.has_token = true;
    heart.token = h->token;
    message.body_case = BOOST__AGENT_MESSAGE__BODY_HEART;
    message.heart = &heart;
    send_message(h, &message.base);
    h->state = HEART_HELLO;
}

static void take_hello(struct heart *h, const Boost__Hello *hello)
{
    if (hello->refused)
        again(h, hello->refused->message ? hello->refused->message : "refused");
    else
        h->state = HEART_UP;
}

static void take_answer(struct heart *h, const Boost__ControllerMessage *m)
{
    if (m->body_case == BOOST__CONTROLLER_MESSAGE__BODY_REFUSED) {
        again(h, m->refused->message ? m->refused->message : "refused");
    } else if (m->body_case == BOOST__CONTROLLER_MESSAGE__BODY_HEARTBEAT_ACK) {
        h->answered_ns = clock_mono_ns();
        h->said = false;
        h->pause_ms = PAUSE_MIN_MS;
        if (!uv_timer_get_repeat(&h->timer))
            uv_timer_start(&h->timer, beat, (uint64_t)h->every_ms, (uint64_t)h->every_ms);
    }
}

static void on_frame(void *arg, struct dial *d, const uint8_t *payload, size_t len)
{
    struct heart *h = arg;
    struct arena a;
    struct error err;
    (void)d;
    arena_init(&a, HEART_ARENA);
    bool hello = h->state == HEART_HELLO;
    ProtobufCMessage *m = reflect_unpack(hello ? &boost__hello__descriptor : &boost__controller_message__descriptor,
                                         payload, len, &a, &err);
    if (!m)
        again(h, err.message);
    else if (hello)
        take_hello(h, (const Boost__Hello *)m);
    else
        take_answer(h, (const Boost__ControllerMessage *)m);
    arena_free(&a);
}

static void on_broken(void *arg, struct dial *d, const struct error *why)
{
    (void)d;
    again(arg, why->message);
}

static void connect_again(uv_timer_t *timer)
{
    struct heart *h = timer->data;
    const struct dial_ops ops = {.arg = h, .connected = on_connected, .frame = on_frame, .broken = on_broken};
    struct dial_target target = *h->target;
    struct error err;
    target.timeout_ms = SILENCE_MS;
    if (dial_open(h->loop, &target, &ops, &h->dial, &err)) {
        again(h, err.message);
        return;
    }
    h->state = HEART_CONNECTING;
    uv_timer_start(&h->timer, too_late, CONNECT_MS, 0);
}

void heart_start(struct heart *h, const char *instance, uint64_t token, int every_ms)
{
    if (h->state != HEART_OFF && h->token == token && strcmp(h->instance, instance) == 0 && h->every_ms == every_ms)
        return; /* the other connection was made anew, this one is as good as before */
    heart_stop(h);
    h->pause_ms = PAUSE_MIN_MS;
    snprintf(h->instance, sizeof h->instance, "%s", instance);
    h->token = token;
    h->every_ms = every_ms;
    h->answered_ns = 0;
    h->state = HEART_WAITING;
    uv_timer_start(&h->timer, connect_again, 0, 0);
}

void heart_stop(struct heart *h)
{
    uv_timer_stop(&h->timer);
    dial_close(h->dial);
    h->dial = NULL;
    h->state = HEART_OFF;
    h->said = false;
}

bool heart_up(const struct heart *h)
{
    return h->state == HEART_UP && uv_timer_get_repeat(&h->timer) != 0;
}

int64_t heart_answered_ns(const struct heart *h)
{
    return h->answered_ns;
}

int heart_create(uv_loop_t *loop, const char *node, const struct dial_target *target, struct heart **out,
                 struct error *err)
{
    struct heart *h = calloc(1, sizeof *h);
    *out = h;
    if (!h)
        return error_set(err, ERR_NOMEM, "no memory for the heartbeat connection");
    *h = (struct heart){.loop = loop, .node = node, .target = target};
    uv_timer_init(loop, &h->timer);
    h->timer.data = h;
    return ERR_OK;
}

static void timer_closed(uv_handle_t *handle)
{
    free(handle->data);
}

void heart_close(struct heart *h)
{
    if (!h)
        return;
    heart_stop(h);
    uv_close((uv_handle_t *)&h->timer, timer_closed);
}
