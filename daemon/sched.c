/* First fit, all or nothing, with the reason when it does not. */
#include "daemon/sched.h"

#include <stdio.h>

static const char *plural(int n)
{
    return n == 1 ? "" : "s";
}

static const char *const things[SCHED_POOLS] = {[SCHED_CPU] = "device", [SCHED_GPU] = "GPU"};

static bool takes(const struct sched_node *n, uint32_t uid)
{
    return n->uid == 0 || n->uid == uid;
}

/* What the nodes have to offer one request. */
struct supply {
    int up, open, ours;               /* nodes: UP; of them taking work; of them taking this user's */
    int big, fit;                     /* of ours: large enough when empty; with enough free now */
    int largest;                      /* slots of the largest of ours */
    int best_free, best_slots;        /* of the one with the most free */
    const struct sched_node *foreign; /* an UP node of another user */
};

static struct supply count(const struct sched_node *nodes, int n_nodes, const struct sched_request *request,
                           int *chosen)
{
    struct supply s = {.best_free = -1};
    for (int i = 0; i < n_nodes; i++) {
        const struct sched_node *n = &nodes[i];
        if (!n->up)
            continue;
        s.up++;
        if (!n->open)
            continue;
        s.open++;
        if (!takes(n, request->uid)) {
            s.foreign = n;
            continue;
        }
        s.ours++;
        int slots = n->slots[request->pool], unused = n->free[request->pool];
        if (slots > s.largest)
            s.largest = slots;
        if (slots >= request->devices_per_node)
            s.big++;
        if (unused > s.best_free) {
            s.best_free = unused;
            s.best_slots = slots;
        }
        if (unused >= request->devices_per_node && s.fit < request->nodes)
            chosen[s.fit++] = i;
    }
    return s;
}

void sched_place(const struct sched_node *nodes, int n_nodes, const struct sched_request *request, int *chosen,
                 struct sched_answer *out)
{
    struct supply s = count(nodes, n_nodes, request, chosen);
    int d = request->devices_per_node;
    const char *thing = things[request->pool];
    *out = (struct sched_answer){.verdict = SCHED_PLACED, .reason = BOOST__REASON__VALUE__NONE};
    if (s.fit == request->nodes)
        return;
    out->verdict = SCHED_NEVER;
    out->reason = BOOST__REASON__VALUE__NodesDown;
    if (s.up == 0) {
        snprintf(out->text, sizeof out->text, "no node is up");
    } else if (s.open == 0) {
        snprintf(out->text, sizeof out->text, "no node takes new work: %d up, all cordoned or draining", s.up);
    } else if (s.ours == 0) {
        snprintf(out->text, sizeof out->text, "node %s takes only jobs of uid %u (its agent does not run as root)",
                 s.foreign->name, s.foreign->uid);
    } else if (s.ours < request->nodes) {
        snprintf(out->text, sizeof out->text, "needs %d node%s, %d up", request->nodes, plural(request->nodes), s.ours);
    } else if (s.big < request->nodes) {
        out->reason = BOOST__REASON__VALUE__NoDevices;
        if (s.largest == 0)
            snprintf(out->text, sizeof out->text, "needs %d %s%s; no node that is up has any%s", d, thing, plural(d),
                     request->pool == SCHED_GPU ? " that works" : "");
        else if (request->nodes == 1)
            snprintf(out->text, sizeof out->text, "needs %d %s%s on a node; the largest has %d", d, thing, plural(d),
                     s.largest);
        else
            snprintf(out->text, sizeof out->text, "needs %d nodes of %d %s%s; nodes that large: %d", request->nodes, d,
                     thing, plural(d), s.big);
    } else {
        out->verdict = SCHED_WAIT;
        out->reason = BOOST__REASON__VALUE__NoDevices;
        if (request->nodes == 1)
            snprintf(out->text, sizeof out->text, "needs %d %s%s, %d of %d free", d, thing, plural(d), s.best_free,
                     s.best_slots);
        else
            snprintf(out->text, sizeof out->text, "needs %d nodes of %d %s%s; nodes with them free: %d", request->nodes,
                     d, thing, plural(d), s.fit);
    }
}
