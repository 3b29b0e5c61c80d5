/* Connections: one stream each way, in order, that stalls while its way is cut and
 * breaks when its agent has had no answer for too long. What a stream cannot do, lose
 * or repeat a message, happens between connections; a lossy time brings it about
 * within one too, as far as the protocol promises to bear it: repeats both ways, and
 * overtaking on the way to the controller. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/sim/sim.h"

enum { UP = 0, DOWN = 1 };

/* When what is sent now arrives. */
static int64_t arrival(struct sim *s, struct sim_node *n, int way, bool may_overtake)
{
    int64_t t = s->now + between(s, 100 * US, 3 * MS);
    if (s->now < n->slow_until)
        t += between(s, 0, n->slow_ns);
    if (t < n->cut_until[way])
        t = n->cut_until[way] + between(s, MS, 400 * MS);
    if (may_overtake && s->now < n->lossy_until && one_in(s, 4))
        return t + between(s, 0, 500 * MS);
    if (t <= n->last_at[way])
        t = n->last_at[way] + US;
    n->last_at[way] = t;
    return t;
}

/* ---- to the controller ---- */

static bool sick(const Boost__HealthReport *r)
{
    return r->n_failed || r->pending;
}

static void arrive_up(struct sim *s, struct event *e)
{
    struct sim_node *n = &s->nodes[e->node];
    struct error err;
    if (!s->core || (uint64_t)e->b != s->life)
        return;
    Boost__AgentMessage *m = boost__agent_message__unpack(NULL, e->len, e->data);
    if (!m)
        abort();
    if (m->body_case == BOOST__AGENT_MESSAGE__BODY_REGISTER) {
        uint64_t before = n->core_conn;
        n->core_conn = e->guard;
        int64_t heard = n->heard;
        n->heard = s->now;
        if (core_agent_register(s->core, m->register_, &err)) {
            trace(s, "%s is not taken: %s", n->name, err.message);
            n->core_conn = before;
            n->heard = heard;
            if (n->conn == e->guard) { /* told so, and closed */
                link_close(s, n, false);
                link_retry(s, n);
            }
        } else {
            n->core_sick = m->register_->health && sick(m->register_->health);
            n->core_instance = strtoull(m->register_->instance, NULL, 10);
        }
    } else if (n->core_conn == e->guard) {
        n->heard = s->now;
        if (m->body_case == BOOST__AGENT_MESSAGE__BODY_HEALTH)
            n->core_sick = sick(m->health);
        core_agent_message(s->core, n->name, m);
    }
    boost__agent_message__free_unpacked(m, NULL);
    controller_poke(s);
}

void link_up(struct sim *s, struct sim_node *n, const Boost__AgentMessage *m)
{
    if (!n->conn)
        return;
    bool register_it = m->body_case == BOOST__AGENT_MESSAGE__BODY_REGISTER;
    int copies = !register_it && s->now < n->lossy_until && one_in(s, 4) ? 2 : 1;
    for (int i = 0; i < copies; i++) {
        size_t len = boost__agent_message__get_packed_size(m);
        uint8_t *bytes = malloc(len + 1);
        if (!bytes)
            abort();
        boost__agent_message__pack(m, bytes);
        /* A picture is replaced by the next one: in their order. */
        bool overtakes = !register_it && m->body_case != BOOST__AGENT_MESSAGE__BODY_DEVICES &&
                         m->body_case != BOOST__AGENT_MESSAGE__BODY_HEALTH;
        struct event *e = at(s, arrival(s, n, UP, overtakes), arrive_up, "to the controller");
        e->node = n->index;
        e->guard = n->conn;
        e->b = (int64_t)s->life;
        e->data = bytes;
        e->len = len;
    }
}

static void heart_arrives(struct sim *s, struct event *e)
{
    struct sim_node *n = &s->nodes[e->node];
    char instance[32];
    if (!s->core || (uint64_t)e->b != s->life)
        return;
    snprintf(instance, sizeof instance, "%llu", (unsigned long long)e->guard);
    /* Alone it counts for a while only: what the core makes of it then is its own affair. */
    if (n->core_conn && n->core_instance == e->guard)
        n->heard = s->now;
    core_agent_alive(s->core, n->name, instance);
    if (n->instance == e->guard && s->now >= n->cut_until[DOWN])
        n->last_answer = s->now;
    controller_poke(s);
}

void link_heart(struct sim *s, struct sim_node *n)
{
    if (n->heart != s->life || !s->core)
        return;
    int64_t t = s->now + between(s, 100 * US, 3 * MS);
    if (t < n->cut_until[UP])
        t = n->cut_until[UP] + between(s, MS, 400 * MS);
    if (t <= n->heart_at)
        t = n->heart_at + US;
    n->heart_at = t;
    struct event *e = at(s, t, heart_arrives, "heartbeat");
    e->node = n->index;
    e->guard = n->instance;
    e->b = (int64_t)s->life;
}

/* ---- from the controller ---- */

static void arrive_down(struct sim *s, struct event *e)
{
    struct sim_node *n = &s->nodes[e->node];
    if (n->conn != e->guard || !n->agent_up)
        return;
    if (agent_stopped(s, n)) { /* it waits in the socket */
        postpone(s, e, agent_wakes(n));
        return;
    }
    Boost__ControllerMessage *m = boost__controller_message__unpack(NULL, e->len, e->data);
    if (!m)
        abort();
    agent_order(s, n, m);
    boost__controller_message__free_unpacked(m, NULL);
}

bool link_down(struct sim *s, struct sim_node *n, const Boost__ControllerMessage *m)
{
    int copies =
        s->now < n->lossy_until && m->body_case != BOOST__CONTROLLER_MESSAGE__BODY_REGISTERED && one_in(s, 4) ? 2 : 1;
    for (int i = 0; i < copies; i++) {
        size_t len = boost__controller_message__get_packed_size(m);
        uint8_t *bytes = malloc(len + 1);
        if (!bytes)
            abort();
        boost__controller_message__pack(m, bytes);
        struct event *e = at(s, arrival(s, n, DOWN, false), arrive_down, "from the controller");
        e->node = n->index;
        e->guard = n->core_conn;
        e->data = bytes;
        e->len = len;
    }
    return true;
}

/* ---- making and breaking ---- */

static void closed(struct sim *s, struct event *e)
{
    struct sim_node *n = &s->nodes[e->node];
    if (!s->core || n->core_conn != e->guard || (uint64_t)e->b != s->life)
        return;
    n->core_conn = 0;
    trace(s, "%s: its connection has ended", n->name);
    core_agent_disconnected(s->core, n->name);
    controller_poke(s);
}

void link_close(struct sim *s, struct sim_node *n, bool told)
{
    if (n->conn && told) {
        struct event *e = at(s, arrival(s, n, UP, false), closed, "connection ends");
        e->node = n->index;
        e->guard = n->conn;
        e->b = (int64_t)s->life;
    }
    n->conn = 0;
    n->registered = false;
}

static void connect_now(struct sim *s, struct event *e)
{
    struct sim_node *n = &s->nodes[e->node];
    if (!n->agent_up || e->guard != n->instance || n->conn)
        return;
    if (agent_stopped(s, n)) {
        postpone(s, e, agent_wakes(n));
        return;
    }
    if (!s->core || s->now < n->cut_until[UP] || s->now < n->cut_until[DOWN]) {
        link_retry(s, n);
        return;
    }
    link_connect(s, n);
}

void link_retry(struct sim *s, struct sim_node *n)
{
    n->retry_ms = n->retry_ms ? n->retry_ms * 2 : 100;
    if (n->retry_ms > 3000)
        n->retry_ms = 3000;
    struct event *e = at(s, s->now + between(s, n->retry_ms / 2, n->retry_ms) * MS, connect_now, "connects");
    e->node = n->index;
    e->guard = n->instance;
}

void link_connect(struct sim *s, struct sim_node *n)
{
    n->conn = ++s->next_id;
    n->conn_life = s->life;
    n->registered = false;
    n->last_answer = s->now;
    report_register(s, n);
}
