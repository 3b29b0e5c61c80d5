/* What a node says of itself: its labels, switch and environment, and whether it is sound. A node that is not, or
 * whose agent has not yet found out, is cordoned by "health"; only a check that passes ends that, and it ends no
 * other cordon. */
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"
#include "proto/base/buffer.h"
#include "proto/reflect.h"

#define HEALTH "health" /* who cordons */

enum { REASON_MAX = 1000 };

void node_told(struct node *n, const Boost__Register *m)
{
    /* A view without what is kept elsewhere, for the copy to be small. */
    Boost__Register view = *m;
    view.n_attempts = 0;
    view.devices = NULL;
    view.health = NULL;
    Boost__Register *copy = (Boost__Register *)reflect_clone(&view.base);
    if (!copy)
        return; /* until the agent comes again it is what it was */
    if (n->told)
        boost__register__free_unpacked(n->told, NULL);
    n->told = copy;
    n->switch_id = 0;
}

const char *node_label(const struct node *n, const char *key)
{
    for (size_t i = 0; n->told && i < n->told->n_label; i++) {
        const Boost__KeyValue *kv = n->told->label[i];
        if (kv->key && strcmp(kv->key, key) == 0)
            return kv->value ? kv->value : "";
    }
    return NULL;
}

const char *node_switch(const struct node *n)
{
    return n->told && n->told->switch_ ? n->told->switch_ : "";
}

/* ---- health ---- */

static bool failing(const Boost__HealthReport *r)
{
    return r && r->n_failed > 0;
}

static bool cordoned_by_health(const struct node *n)
{
    return n->admin == ADMIN(CORDONED) && n->admin_by && strcmp(n->admin_by, HEALTH) == 0;
}

/* "memory: 12 MiB available, ...; script: ..." */
static void describe(const Boost__HealthReport *r, struct buffer *out)
{
    for (size_t i = 0; i < r->n_failed; i++) {
        const Boost__FailedCheck *f = r->failed[i];
        buffer_printf(out, "%s%s: %.300s", i ? "; " : "", f->check && *f->check ? f->check : "check",
                      f->text && *f->text ? f->text : "failed without a word");
    }
}

static void cordon(struct core *c, struct node *n, const char *reason, bool tell)
{
    bool news = !cordoned_by_health(n) || !same_but_numbers(n->admin_reason ? n->admin_reason : "", reason);
    bool was = cordoned_by_health(n);
    if (was && n->admin_reason && strcmp(n->admin_reason, reason) == 0)
        return;
    n->admin = ADMIN(CORDONED);
    text_set(&n->admin_reason, reason);
    text_set(&n->admin_by, HEALTH);
    if (!was)
        n->admin_ns = now_wall(c);
    mark_node(c, n);
    node_cancel_starts(c, n);
    if (news && tell)
        add_event(c, NULL, 0, n->name, HEALTH, "node-cordoned", "%s takes no new work: %s", n->name, reason);
}

static void uncordon(struct core *c, struct node *n, bool tell)
{
    n->admin = ADMIN(NONE);
    text_set(&n->admin_reason, "");
    text_set(&n->admin_by, "");
    n->admin_ns = now_wall(c);
    mark_node(c, n);
    c->schedule = true;
    if (tell)
        add_event(c, NULL, 0, n->name, HEALTH, "node-resumed", "%s takes work again: its health check passes", n->name);
}

void node_health_settle(struct core *c, struct node *n)
{
    bool pending = n->health && n->health->pending;
    if (n->admin != ADMIN(NONE) && !cordoned_by_health(n))
        return; /* an operator's word, or a drain; asked again when that ends */
    if (failing(n->health)) {
        struct buffer why;
        buffer_init(&why, REASON_MAX);
        describe(n->health, &why);
        cordon(c, n, why.len ? (const char *)why.data : "its health check fails", true);
        buffer_free(&why);
    } else if (pending && !cordoned_by_health(n)) { /* one that failed before goes on to count */
        cordon(c, n, "its health check has not ended", false);
        n->health_silent = true;
    } else if (!pending && cordoned_by_health(n)) {
        uncordon(c, n, !n->health_silent);
    }
    if (!pending)
        n->health_silent = false;
}

void node_health(struct core *c, struct node *n, const Boost__HealthReport *report)
{
    Boost__HealthReport *copy = report ? (Boost__HealthReport *)reflect_clone(&report->base) : NULL;
    if (report && !copy)
        return; /* the next check tells it again */
    if (n->health)
        boost__health_report__free_unpacked(n->health, NULL);
    n->health = copy;
    node_health_settle(c, n);
}

bool node_check_health(struct core *c, struct node *n, bool mended)
{
    Boost__CheckHealth body = BOOST__CHECK_HEALTH__INIT;
    Boost__ControllerMessage m = BOOST__CONTROLLER_MESSAGE__INIT;
    body.has_mended = true;
    body.mended = mended;
    m.body_case = BOOST__CONTROLLER_MESSAGE__BODY_CHECK_HEALTH;
    m.check_health = &body;
    return send_to(c, n, &m);
}

bool node_recheck(struct core *c, struct node *n, bool mended)
{
    if (!n->health || n->health->pending || !node_check_health(c, n, mended))
        return false;
    n->health->has_pending = n->health->pending = true;
    node_health_settle(c, n);
    return true;
}
