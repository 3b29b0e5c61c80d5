/* Nodes taken out of use and back: by their operators (cordon, drain, resume), and by the
 * controller for what on them cannot be ended. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"

enum { REASON_MAX = 1000 };

static void set_admin(struct core *c, struct node *n, Boost__NodeAdmin__Value to, const char *reason, const char *by)
{
    n->admin = to;
    text_set(&n->admin_reason, reason);
    text_set(&n->admin_by, by);
    n->admin_ns = now_wall(c);
    n->drain_due = 0;
    c->schedule = true;
    mark_node(c, n);
}

/* ---- the controller's own --------------------------------------------------------------- */

void node_undrain(struct core *c, struct node *n)
{
    for (int i = 0; i < n->n_holdings; i++)
        if (n->holdings[i].overdue)
            return;
    if (n->admin == ADMIN(NONE) || !n->admin_by || strcmp(n->admin_by, "controller") != 0)
        return;
    set_admin(c, n, ADMIN(NONE), "", "");
    add_event(c, NULL, 0, n->name, "controller", "node-resumed",
              "%s takes work again: what it was drained for is confirmed gone", n->name);
    node_health_settle(c, n);
}

void node_drain(struct core *c, struct node *n, const char *reason)
{
    bool theirs = n->admin != ADMIN(NONE) && n->admin_by && strcmp(n->admin_by, "controller") != 0 &&
                  strcmp(n->admin_by, "health") != 0;
    if (theirs) /* out of use already, and taken back by whoever took it out */
        add_event(c, NULL, 0, n->name, "controller", "kill-overdue", "%s: %s", n->name, reason);
    if (theirs || n->admin == ADMIN(DRAINING))
        return;
    set_admin(c, n, ADMIN(DRAINING), reason, "controller");
    node_cancel_starts(c, n);
    add_event(c, NULL, 0, n->name, "controller", "node-drained", "%s takes no new work: %s", n->name, reason);
}

/* ---- what a drain does ------------------------------------------------------------------- */

static bool has_part_on(const struct job *job, const char *node)
{
    const struct attempt *a = job_live_attempt(job);
    for (int p = 0; a && p < a->n_parts; p++)
        if (strcmp(a->parts[p].node, node) == 0 && !a->parts[p].gone && !a->parts[p].lost)
            return true;
    return false;
}

void node_cancel_starts(struct core *c, struct node *n)
{
    for (struct job *job = c->busy.head, *next; job; job = next) {
        next = job->busy.next;
        for (int i = 0; job->starting && i < job->starting->n_nodes; i++)
            if (job->starting->nodes[i] == n)
                start_cancel(c, job);
    }
}

/* Devices that are reserved or spare, and not begun with, are given back. */
static void give_back(struct core *c, struct node *n)
{
    node_cancel_starts(c, n);
    spares_lost(c, n, "it is taken out of use");
}

void node_emptied(struct core *c, struct node *n)
{
    if (n->admin != ADMIN(DRAINING) || n->n_holdings || (n->admin_by && strcmp(n->admin_by, "controller") == 0))
        return;
    n->admin = ADMIN(DRAINED);
    n->drain_due = 0;
    mark_node(c, n);
    add_event(c, NULL, 0, n->name, "controller", "node-drain-over", "%s is drained: nothing runs there any more (%s)",
              n->name, n->admin_reason ? n->admin_reason : "");
}

void node_drain_over(struct core *c, struct node *n)
{
    n->drain_due = 0;
    mark_node(c, n);
    for (struct job *job = c->busy.head, *next; job; job = next) {
        next = job->busy.next;
        if (!has_part_on(job, n->name) || !job_step(job->state, job->stop_target, EV_REQUEUE).legal)
            continue;
        job_reason(job, REASON(Preempted), "%s is drained (%s)", n->name, n->admin_reason ? n->admin_reason : "");
        add_event(c, job, job->n_attempts, n->name, "controller", "drained",
                  "%s; checkpoints at step %" PRId64 " and is queued again", job->reason_text,
                  job->step < 0 ? 0 : job->step);
        job_fire(c, job, EV_REQUEUE);
    }
}

/* ---- operators ----------------------------------------------------------------------------- */

static int jobs_on(struct core *c, const struct node *n)
{
    int count = 0;
    for (const struct job *job = c->busy.head; job; job = job->busy.next)
        count += has_part_on(job, n->name);
    return count;
}

static void cordon(struct core *c, struct node *n, const char *reason, const char *actor, struct answer *x)
{
    set_admin(c, n, ADMIN(CORDONED), reason, actor);
    give_back(c, n);
    add_event(c, NULL, 0, n->name, actor, "node-cordoned", "%s takes no new work: %s", n->name, reason);
    int jobs = jobs_on(c, n);
    snprintf(x->text, sizeof x->text, "takes no new work; %d job%s there go%s on", jobs, jobs == 1 ? "" : "s",
             jobs == 1 ? "es" : "");
}

static void drain(struct core *c, struct node *n, const char *reason, double deadline_s, const char *actor,
                  struct answer *x)
{
    char when[96] = "its jobs end by themselves";
    set_admin(c, n, ADMIN(DRAINING), reason, actor);
    give_back(c, n);
    if (deadline_s >= 0) {
        n->drain_due = now_mono(c) + (int64_t)(deadline_s * (double)NS_PER_S);
        n->drain_due += n->drain_due == 0; /* 0 is none */
        due_at(c, n->drain_due);
        snprintf(when, sizeof when, "in %.0f s its jobs checkpoint and are queued again", deadline_s);
    }
    add_event(c, NULL, 0, n->name, actor, "node-draining", "%s takes no new work, %s: %s", n->name, when, reason);
    int jobs = jobs_on(c, n);
    node_emptied(c, n);
    if (n->admin == ADMIN(DRAINED))
        snprintf(x->text, sizeof x->text, "is drained: nothing ran there");
    else
        snprintf(x->text, sizeof x->text, "takes no new work; %d job%s there, %s", jobs, jobs == 1 ? "" : "s", when);
}

static int resume(struct core *c, struct node *n, const char *actor, struct answer *x, struct error *err)
{
    if (n->admin == ADMIN(NONE)) {
        error_set(err, ERR_REFUSED, "node %s is neither cordoned nor drained", n->name);
        return error_hint(err, "boostctl node show %s tells what it is", n->name);
    }
    for (int i = 0; i < n->n_holdings; i++)
        if (n->holdings[i].overdue) {
            error_set(err, ERR_REFUSED, "node %s: attempt %d of job %" PRId64 " is not confirmed dead there", n->name,
                      n->holdings[i].attempt, n->holdings[i].job);
            return error_hint(err, "end its processes on the node, or restart the node: it then comes back by itself");
        }
    if (n->admin_by && strcmp(n->admin_by, "health") == 0) {
        bool asked = node_check_health(c, n, true);
        snprintf(x->text, sizeof x->text, "%s",
                 asked ? "is checked now, and takes work again when that passes"
                       : "is checked when it is heard of; takes work when that passes");
        return ERR_OK;
    }
    char was[256];
    snprintf(was, sizeof was, "%.200s", n->admin_reason ? n->admin_reason : "");
    set_admin(c, n, ADMIN(NONE), "", "");
    add_event(c, NULL, 0, n->name, actor, "node-resumed", "%s takes work again (was out of use: %s)", n->name, was);
    /* What it was taken out for may have changed it: work waits for a new check, where its agent makes any. */
    bool checks = node_recheck(c, n, true);
    if (!checks)
        node_health_settle(c, n);
    snprintf(x->text, sizeof x->text, "takes work again%s",
             checks           ? " when its health check has passed"
             : node_usable(n) ? ""
                              : " as soon as it is heard of: it is not UP now");
    return ERR_OK;
}

static int check(struct core *c, Boost__NodeControlRequest__Verb verb, const char *name, const char *reason,
                 double deadline_s, const struct core_user *user, struct error *err)
{
    if (!user->admin && user->uid != 0 && user->uid != c->ops.uid) {
        error_set(err, ERR_REFUSED, "uid %u may not take nodes out of use or back", user->uid);
        return error_hint(err, "only root, an admin and the user of boostd may do that");
    }
    if (!node_find(c, name)) {
        error_set(err, ERR_NOT_FOUND, "no node is named \"%.64s\"", name);
        return error_hint(err, "boostctl node ls lists them");
    }
    if (verb != BOOST__NODE_CONTROL_REQUEST__VERB__RESUME && (!reason || !*reason)) {
        error_set(err, ERR_INVALID, "no reason is given for node %s", name);
        return error_hint(err, "say why with --reason: it is what others see in node ls");
    }
    if (reason && strlen(reason) > REASON_MAX) {
        error_set(err, ERR_INVALID, "the reason has %zu bytes, the limit is %d", strlen(reason), REASON_MAX);
        return error_hint(err, "it stands in every list of nodes: keep it short");
    }
    if (isnan(deadline_s) || deadline_s > 1e9) {
        error_set(err, ERR_INVALID, "the deadline is not 0 to 1e9 seconds");
        return error_hint(err, "for instance --deadline 10m");
    }
    return ERR_OK;
}

void core_node_control(struct core *c, Boost__NodeControlRequest__Verb verb, const char *name, const char *reason,
                       double deadline_s, const struct core_user *user, core_text_reply_fn reply, void *arg)
{
    struct error err;
    char actor[128];
    struct answer *x = answer_new(reply, arg);
    int rc = x ? check(c, verb, name, reason, deadline_s, user, &err) : error_set(&err, ERR_NOMEM, "out of memory");
    struct node *n = rc ? NULL : node_find(c, name);
    snprintf(actor, sizeof actor, "uid %u (%s)", user->uid, user->name ? user->name : "?");
    if (n) {
        switch (verb) {
        case BOOST__NODE_CONTROL_REQUEST__VERB__CORDON:
            cordon(c, n, reason, actor, x);
            break;
        case BOOST__NODE_CONTROL_REQUEST__VERB__DRAIN:
            drain(c, n, reason, deadline_s, actor, x);
            break;
        case BOOST__NODE_CONTROL_REQUEST__VERB__RESUME:
            rc = resume(c, n, actor, x, &err);
            break;
        default:
            rc = error_set(&err, ERR_UNSUPPORTED, "unknown verb %d", (int)verb);
            break;
        }
    }
    if (rc) {
        reply(arg, rc, &err, "");
        free(x);
    } else {
        answer_when_durable(c, x);
    }
    change_commit(c);
}
