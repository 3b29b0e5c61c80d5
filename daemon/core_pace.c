/* Slow ranks of the live attempt, from the timings that all ranks report: told, never acted on. Learnt anew after a
 * restart of the controller. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"
#include "daemon/straggler.h"

enum {
    FIRST_STEPS = 2, /* of an attempt: caches fill, libraries choose */
    NEWS = 8,        /* of one look */
    SHOWN = 64,
    EVENTS = 6, /* of an attempt, in EVENTS_NS */
};
#define EVENTS_NS (600 * NS_PER_S)

void pace_free(struct attempt *a)
{
    stragglers_free(a->stragglers);
    a->stragglers = NULL;
}

/* NaN: the rank cannot tell its time in collectives (on a GPU), or this is no step. */
static double outside_ms(const Boost__MetricRecord *record)
{
    double step = (double)NAN, comm = (double)NAN;
    for (size_t i = 0; i < record->n_values; i++) {
        const Boost__Metric *m = record->values[i];
        if (m->name && !strcmp(m->name, "step_ms"))
            step = m->value;
        else if (m->name && !strcmp(m->name, "comm_ms"))
            comm = m->value;
    }
    return step - comm;
}

static const char *node_of(const struct attempt *a, int rank)
{
    return a->parts[a->ranks[rank].part].node;
}

static void tell(struct core *c, struct job *job, struct attempt *a, const struct straggler *x)
{
    int64_t now = now_mono(c);
    if (!a->pace_events || now - a->pace_from >= EVENTS_NS) {
        a->pace_from = now;
        a->pace_events = 0;
    }
    if (++a->pace_events > EVENTS)
        return;
    const char *last = a->pace_events == EVENTS ? "; more of this kind are not told for some minutes" : "";
    const char *node = node_of(a, x->rank);
    if (!x->slow)
        add_event(c, job, a->number, node, "controller", "straggler-over",
                  "rank %d on %s keeps up again: %.1f ms a step outside collectives%s", x->rank, node, x->outside_ms,
                  last);
    else if (x->itself)
        add_event(c, job, a->number, node, "controller", "straggler",
                  "rank %d on %s is slow: %.1f ms a step outside collectives, %.1f times its own best (%.1f ms)%s",
                  x->rank, node, x->outside_ms, x->factor, x->best_ms, last);
    else
        add_event(c, job, a->number, node, "controller", "straggler",
                  "rank %d on %s is slow: %.1f ms a step outside collectives, %.1f times as long as rank %d on %s "
                  "(%.1f ms)%s",
                  x->rank, node, x->outside_ms, x->factor, x->fastest_rank, node_of(a, x->fastest_rank), x->fastest_ms,
                  last);
}

void pace_add(struct core *c, struct job *job, struct attempt *a, int rank, const Boost__MetricRecord *record)
{
    double ms = outside_ms(record);
    struct straggler news[NEWS];
    if (isnan(ms) || a->failing || a->end_ns || record->step <= a->from_step + FIRST_STEPS)
        return;
    if (!a->stragglers) {
        const Boost__JobSpec *spec = core_attempt_spec(job, a); /* on fewer nodes a stage has fewer ranks */
        const Boost__Parallel *p = spec ? spec->parallel : NULL;
        a->stragglers = stragglers_new(a->world, p ? p->tp * p->dp : a->world);
    }
    if (!a->stragglers)
        return; /* at a later step */
    stragglers_add(a->stragglers, rank, ms);
    int n = stragglers_look(a->stragglers, now_mono(c), news, NEWS);
    for (int i = 0; i < n; i++)
        tell(c, job, a, &news[i]);
    if (n)
        progress_changed(c, job);
}

char *pace_line(const struct job *job, struct arena *mem)
{
    const struct attempt *a = job_live_attempt(job);
    struct straggler slow[SHOWN];
    int n = a && a->stragglers ? stragglers_slow(a->stragglers, slow, SHOWN) : 0, worst = 0;
    for (int i = 1; i < n && i < SHOWN; i++)
        worst = slow[i].factor > slow[worst].factor ? i : worst;
    if (!n)
        return NULL;
    if (n == 1)
        return arena_printf(mem, "rank %d on %s is slow (%.1fx)", slow[0].rank, node_of(a, slow[0].rank),
                            slow[0].factor);
    return arena_printf(mem, "%d ranks are slow (rank %d on %s %.1fx)", n, slow[worst].rank,
                        node_of(a, slow[worst].rank), slow[worst].factor);
}

bool pace_show(const struct job *job, struct arena *mem, Boost__ShowReply *show)
{
    const struct attempt *a = job_live_attempt(job);
    struct straggler slow[SHOWN];
    int n = a && a->stragglers ? stragglers_slow(a->stragglers, slow, SHOWN) : 0;
    n = n < SHOWN ? n : SHOWN;
    if (!n)
        return true;
    show->stragglers = arena_alloc(mem, (size_t)n * sizeof *show->stragglers);
    for (int i = 0; show->stragglers && i < n; i++) {
        Boost__StragglerInfo *x = arena_alloc(mem, sizeof *x);
        if (!x)
            return false;
        boost__straggler_info__init(x);
        x->has_rank = x->has_outside_ms = x->has_fastest_ms = x->has_fastest_rank = true;
        x->has_best_ms = x->has_factor = true;
        x->rank = slow[i].rank;
        x->node = arena_strdup(mem, node_of(a, slow[i].rank));
        x->outside_ms = slow[i].outside_ms;
        x->fastest_ms = slow[i].fastest_ms;
        x->fastest_rank = slow[i].fastest_rank;
        x->best_ms = slow[i].best_ms;
        x->factor = slow[i].factor;
        x->has_itself = true;
        x->itself = slow[i].itself;
        show->stragglers[show->n_stragglers++] = x;
        if (!x->node)
            return false;
    }
    return show->stragglers != NULL;
}
