/* agent_probe.h */
#include "daemon/agent_probe.h"

#include "proto/base/arena.h"
#include "proto/reflect.h"

enum { PROBE_MS = 5000, PROBE_ARENA = 64 << 10 };

static void end(struct probe *p)
{
    uv_timer_stop(&p->deadline);
    dial_close(p->dial);
    p->dial = NULL;
}

static void too_late(uv_timer_t *timer)
{
    end(timer->data);
}

static void on_connected(void *arg, struct dial *d)
{
    struct probe *p = arg;
    struct error err;
    if (dial_send(d, &p->hello.base, &err))
        end(p);
}

static void on_frame(void *arg, struct dial *d, const uint8_t *payload, size_t len)
{
    struct probe *p = arg;
    struct arena a;
    struct error err;
    (void)d;
    arena_init(&a, PROBE_ARENA);
    ProtobufCMessage *m = reflect_unpack(&boost__hello__descriptor, payload, len, &a, &err);
    end(p);
    if (m)
        p->found(p->arg, (const Boost__Hello *)m);
    arena_free(&a);
}

static void on_broken(void *arg, struct dial *d, const struct error *why)
{
    (void)d;
    (void)why; /* nobody there is what is usual */
    end(arg);
}

void probe_init(struct probe *p, uv_loop_t *loop, void (*found)(void *arg, const Boost__Hello *answer), void *arg)
{
    *p = (struct probe){.loop = loop, .found = found, .arg = arg};
    uv_timer_init(loop, &p->deadline);
    p->deadline.data = p;
}

void probe_start(struct probe *p, const struct dial_target *target, const Boost__Hello *hello)
{
    const struct dial_ops ops = {.arg = p, .connected = on_connected, .frame = on_frame, .broken = on_broken};
    struct error err;
    if (p->dial)
        return;
    p->hello = *hello;
    if (dial_open(p->loop, target, &ops, &p->dial, &err))
        return;
    uv_timer_start(&p->deadline, too_late, PROBE_MS, 0);
}

void probe_close(struct probe *p, uv_close_cb closed)
{
    end(p);
    uv_close((uv_handle_t *)&p->deadline, closed);
}
