/* Why a request is not placed, in words that name what is missing. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "daemon/sched_internal.h"

static const char *plural(int n)
{
    return n == 1 ? "" : "s";
}

static const char *const things[SCHED_POOLS] = {[SCHED_CPU] = "device", [SCHED_GPU] = "GPU"};

/* What the nodes have to offer one request. */
struct supply {
    int up, open, ours;               /* nodes: UP; of them taking work; of them taking this user's */
    int meant;                        /* of ours: as labels and lists say */
    int big, roomy, fit, idle;        /* of those: large enough; with the memory; with enough free now; empty */
    int largest;                      /* slots of the largest of those */
    int best_free, best_slots;        /* of the one with the most free */
    int64_t most_mib, free_mib;       /* memory of the one with the most, and with the most free */
    const struct sched_node *foreign; /* an UP node of another user */
};

static struct supply count(const struct sched *s, const struct sched_request *r, const struct filter *f)
{
    struct supply x = {.best_free = -1};
    const struct view *unused = &s->free[r->pool];
    for (int i = 0; i < s->n; i++) {
        const struct sched_node *n = &s->nodes[i];
        x.up += n->up;
        if (!n->up || !n->open)
            continue;
        x.open++;
        if (n->uid != 0 && n->uid != r->uid) {
            x.foreign = n;
            continue;
        }
        x.ours++;
        if (!bit_get(f->bits, i))
            continue;
        x.meant++;
        int slots = n->slots[r->pool], free = unused->avail[i];
        bool memory = r->mib_per_rank > 0 && n->memory_mib > 0, big = slots >= r->devices_per_node;
        for (int k = 0; k < r->n_avoid; k++)
            free = r->avoid[k] == i ? 0 : free;
        x.largest = slots > x.largest ? slots : x.largest;
        x.most_mib = n->memory_mib > x.most_mib ? n->memory_mib : x.most_mib;
        x.big += big;
        if (!big || (memory && request_mib(n, r) > n->memory_mib))
            continue;
        x.roomy++;
        if (free > x.best_free) {
            x.best_free = free;
            x.best_slots = slots;
        }
        bool enough = !((s->counts_memory || memory) && n->memory_mib > 0) || request_mib(n, r) <= s->free_mib[i];
        x.free_mib = free >= r->devices_per_node && s->free_mib[i] > x.free_mib ? s->free_mib[i] : x.free_mib;
        x.fit += free >= r->devices_per_node && enough;
        x.idle += bit_get(s->idle, i);
    }
    return x;
}

/* " with gpu=h200 of gpu[01-04]" */
static const char *meant(const struct filter *f, char *out, size_t cap)
{
    snprintf(out, cap, "%s%.60s%s%.60s%s%.60s", *f->constraint ? " with " : "", f->constraint,
             *f->nodelist ? " of " : "", f->nodelist, *f->exclude ? " other than " : "", f->exclude);
    return out;
}

static void say_never(const struct sched_request *r, const struct filter *f, const struct supply *x,
                      struct sched_answer *out)
{
    char who[224];
    int d = r->devices_per_node, n = r->nodes;
    const char *thing = things[r->pool];
    size_t cap = sizeof out->text;
    meant(f, who, sizeof who);
    out->reason = BOOST__REASON__VALUE__NodesDown;
    if (x->up == 0) {
        snprintf(out->text, cap, "no node is up");
    } else if (x->open == 0) {
        snprintf(out->text, cap, "no node takes new work: %d up, all cordoned or draining", x->up);
    } else if (x->ours == 0) {
        snprintf(out->text, cap, "node %s takes only jobs of uid %u (its agent does not run as root)", x->foreign->name,
                 x->foreign->uid);
    } else if (x->meant < n) {
        snprintf(out->text, cap, "needs %d node%s%s, %d up", n, plural(n), who, x->meant);
    } else if (x->big < n) {
        out->reason = BOOST__REASON__VALUE__NoDevices;
        if (x->largest == 0)
            snprintf(out->text, cap, "needs %d %s%s; no node%s that is up has any%s", d, thing, plural(d), who,
                     r->pool == SCHED_GPU ? " that works" : "");
        else if (n == 1)
            snprintf(out->text, cap, "needs %d %s%s on a node%s; the largest has %d", d, thing, plural(d), who,
                     x->largest);
        else
            snprintf(out->text, cap, "needs %d nodes%s of %d %s%s; nodes that large: %d", n, who, d, thing, plural(d),
                     x->big);
    } else {
        out->reason = BOOST__REASON__VALUE__NoDevices;
        snprintf(out->text, cap, "needs %" PRId64 " MiB of memory on each of %d node%s%s; nodes with so much: %d",
                 r->mib_per_rank * d, n, plural(n), who, x->roomy);
    }
}

static void say_wait(const struct sched_request *r, const struct filter *f, const struct supply *x,
                     struct sched_answer *out)
{
    char who[224];
    int d = r->devices_per_node, n = r->nodes;
    const char *thing = things[r->pool];
    size_t cap = sizeof out->text;
    meant(f, who, sizeof who);
    out->reason = BOOST__REASON__VALUE__NoDevices;
    if (r->exclusive)
        snprintf(out->text, cap, "needs %d whole node%s%s, %d of %d empty", n, plural(n), who, x->idle, x->roomy);
    else if (n == 1 && x->best_free >= d)
        snprintf(out->text, cap, "needs %" PRId64 " MiB of memory on a node%s, %" PRId64 " free",
                 r->mib_per_rank > 0 ? r->mib_per_rank * d : x->most_mib * d / (x->best_slots ? x->best_slots : 1), who,
                 x->free_mib);
    else if (n == 1)
        snprintf(out->text, cap, "needs %d %s%s%s, %d of %d free", d, thing, plural(d), who, x->best_free,
                 x->best_slots);
    else
        snprintf(out->text, cap, "needs %d nodes%s of %d %s%s; nodes with them free: %d", n, who, d, thing, plural(d),
                 x->fit);
}

static void say_behind(struct sched *s, const struct sched_request *r, struct sched_answer *out)
{
    struct head *h = &s->heads[r->pool];
    if (!request_late(s, r, r->pool)) /* it wants whole nodes or memory, and the other pool's head some of them */
        h = &s->heads[r->pool == SCHED_CPU ? SCHED_GPU : SCHED_CPU];
    if (!h->explained) { /* once: everybody behind it says so */
        struct supply x = count(s, &h->request, h->filter);
        say_wait(&h->request, h->filter, &x, &h->answer);
        h->explained = true;
    }
    *out = (struct sched_answer){.verdict = SCHED_BEHIND, .reason = h->answer.reason};
    snprintf(out->text, sizeof out->text, "waits for priority: job %" PRId64 " is ahead and %.180s", h->request.id,
             h->answer.text);
}

void sched_explain(struct sched *s, const struct sched_request *r, struct sched_answer *out)
{
    struct shape *shape = shape_of(s, r);
    if (!shape) {
        s->failed = true;
        *out = (struct sched_answer){.verdict = SCHED_WAIT, .reason = BOOST__REASON__VALUE__NoDevices};
        snprintf(out->text, sizeof out->text, "the controller is out of memory");
        return;
    }
    enum sched_verdict v = sched_judge(s, r, shape);
    if (v == SCHED_PLACED) {
        *out = (struct sched_answer){.verdict = v, .reason = BOOST__REASON__VALUE__NONE};
    } else if (v == SCHED_BEHIND) {
        say_behind(s, r, out);
    } else if (shape->explained && !r->n_avoid) {
        *out = shape->answer;
    } else {
        struct supply x = count(s, r, shape->filter);
        *out = (struct sched_answer){.verdict = v};
        if (v == SCHED_NEVER)
            say_never(r, shape->filter, &x, out);
        else
            say_wait(r, shape->filter, &x, out);
        shape->answer = *out;
        shape->explained = !r->n_avoid;
    }
}
