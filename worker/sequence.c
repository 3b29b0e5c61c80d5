/* Captured sequences: what a part of the step enqueues is the same every step (what changes lies in memory that it
 * reads), so a backend that can records it once and launches it from then on. */
#include <string.h>

#include "worker/engine_internal.h"

static void add_counters(struct comm_counters *to, const struct comm_counters *more, int sign)
{
    for (int g = 0; g < GROUP_COUNT; g++)
        for (int kind = 0; kind < COMM_KIND_COUNT; kind++)
            for (int pass = 0; pass < PASS_COUNT; pass++) {
                struct comm_count *x = &to->by[g][kind][pass];
                const struct comm_count *y = &more->by[g][kind][pass];
                x->calls += sign * y->calls;
                x->elements += sign * y->elements;
                x->bytes += sign * y->bytes;
            }
}

/* What the capture counted becomes the sequence's: nothing has travelled yet. */
static int capture(struct engine *e, struct sequence *s, struct error *err)
{
    struct comm_counters before = e->comms->counters;
    struct kgraph *graph = NULL;
    struct error unfit;
    int rc = e->k->capture_begin(e->ks, err);
    if (rc)
        return error_context(err, "capturing %s", s->what);
    e->capturing = true;
    rc = s->body(e, err);
    e->capturing = false;
    int ended = e->k->capture_end(e->ks, &graph, rc ? &unfit : err); /* also behind an error, or the stream stays so */
    if (!rc && ended)
        rc = error_context(err, "capturing %s", s->what);
    s->counters = e->comms->counters;
    add_counters(&s->counters, &before, -1);
    e->comms->counters = before;
    if (!rc)
        s->graph = graph;
    else if (graph)
        e->k->graph_destroy(graph);
    return rc;
}

int sequence_run(struct engine *e, struct sequence *s, struct error *err)
{
    bool first = !s->ran;
    s->ran = true;
    if (!e->captures || first)
        return s->body(e, err);
    int rc = s->graph ? ERR_OK : capture(e, s, err);
    if (rc)
        return rc;
    if (e->watch)
        e->watch(e->watch_arg, s->what);
    engine_range(e, "%s", s->what); /* those of its parts are ranges of the capture only */
    e->k->graph_launch(e->ks, s->graph);
    engine_range_end(e);
    add_counters(&e->comms->counters, &s->counters, 1);
    return ERR_OK;
}

void sequence_destroy(struct engine *e, struct sequence *s)
{
    if (s->graph)
        e->k->graph_destroy(s->graph);
    s->graph = NULL;
}
