/* straggler.h */
#include "daemon/straggler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/clock.h"

/* Becomes slow beyond the first of each pair, keeps up again below the second. */
static const double than_fastest[2] = {1.3, 1.15}, than_best[2] = {1.5, 1.25};
static const double than_others = 1.25;  /* its factor over its best, over the others': else all have become slower */
static const double least_excess_ms = 5; /* below, a difference is noise */

struct pace {
    float window[STRAGGLER_WINDOW];
    uint8_t n, at;
    uint8_t streak; /* looks in a row that contradict `slow` */
    bool slow, changed;
    float median, best; /* 0: not judged yet */
};

struct stragglers {
    int world, stage;
    int64_t looked_ns;
    bool fresh; /* something was added since */
    float *ratios;
    struct pace ranks[];
};

struct stragglers *stragglers_new(int world, int stage_ranks)
{
    struct stragglers *s = world > 0 ? calloc(1, sizeof *s + (size_t)world * sizeof s->ranks[0]) : NULL;
    if (!s)
        return NULL;
    s->world = world;
    s->stage = stage_ranks > 0 ? stage_ranks : world;
    s->ratios = malloc((size_t)world * sizeof *s->ratios);
    if (!s->ratios) {
        free(s);
        return NULL;
    }
    return s;
}

void stragglers_free(struct stragglers *s)
{
    if (s)
        free(s->ratios);
    free(s);
}

static int by_size(const void *x, const void *y)
{
    const float *a = x, *b = y;
    return (*a > *b) - (*a < *b);
}

static float middle(float *list, int n)
{
    qsort(list, (size_t)n, sizeof *list, by_size);
    return n % 2 ? list[n / 2] : (list[n / 2 - 1] + list[n / 2]) / 2;
}

void stragglers_add(struct stragglers *s, int rank, double outside_ms)
{
    if (rank < 0 || rank >= s->world || !isfinite(outside_ms))
        return;
    struct pace *p = &s->ranks[rank];
    float sorted[STRAGGLER_WINDOW];
    p->window[p->at] = (float)(outside_ms > 0 ? outside_ms : 0);
    p->at = (uint8_t)((p->at + 1) % STRAGGLER_WINDOW);
    p->n += p->n < STRAGGLER_WINDOW;
    s->fresh = true;
    if (p->n < STRAGGLER_LEAST)
        return;
    memcpy(sorted, p->window, sizeof sorted);
    p->median = middle(sorted, p->n);
    if (p->best <= 0 || p->median < p->best)
        p->best = p->median;
}

/* The fastest of the rank's stage; itself where no other is judged. */
static int fastest_of(const struct stragglers *s, int rank)
{
    int first = rank / s->stage * s->stage, best = rank;
    for (int r = first; r < first + s->stage && r < s->world; r++)
        if (s->ranks[r].n >= STRAGGLER_LEAST && s->ranks[r].median < s->ranks[best].median)
            best = r;
    return best;
}

/* How far the ranks are above their own best, in the middle of all; 1 where one alone is judged. */
static double usual_ratio(struct stragglers *s)
{
    int n = 0;
    for (int r = 0; r < s->world; r++)
        if (s->ranks[r].n >= STRAGGLER_LEAST && s->ranks[r].best > 0)
            s->ratios[n++] = s->ranks[r].median / s->ranks[r].best;
    return n > 1 ? (double)middle(s->ratios, n) : 1;
}

static void describe(const struct stragglers *s, int rank, int fastest, struct straggler *out)
{
    const struct pace *p = &s->ranks[rank];
    double other = s->ranks[fastest].median > 0 ? (double)(p->median / s->ranks[fastest].median) : 1;
    double self = p->best > 0 ? (double)(p->median / p->best) : 1;
    *out = (struct straggler){.rank = rank,
                              .slow = p->slow,
                              .outside_ms = p->median,
                              .fastest_ms = s->ranks[fastest].median,
                              .fastest_rank = fastest,
                              .best_ms = p->best,
                              .factor = other >= than_fastest[1] ? other : self,
                              .itself = other < than_fastest[1]};
}

/* bound: 0 to become slow, 1 to stay so. */
static bool is_slow(const struct stragglers *s, int rank, int fastest, double usual, int bound)
{
    const struct pace *p = &s->ranks[rank];
    double fast = s->ranks[fastest].median, self = p->best > 0 ? (double)(p->median / p->best) : 1;
    double excess = bound ? 0 : least_excess_ms;
    if (p->median - fast > excess && p->median > than_fastest[bound] * fast)
        return true;
    return p->median - p->best > excess && self > than_best[bound] && self > than_others * usual;
}

int stragglers_look(struct stragglers *s, int64_t mono_ns, struct straggler *out, int room)
{
    int n = 0;
    if (s->fresh && (!s->looked_ns || mono_ns - s->looked_ns >= NS_PER_S)) {
        double usual = usual_ratio(s);
        s->looked_ns = mono_ns;
        s->fresh = false;
        for (int first = 0; first < s->world; first += s->stage) {
            int fastest = first;
            for (int r = first; r < first + s->stage && r < s->world; r++)
                if (s->ranks[r].n >= STRAGGLER_LEAST &&
                    (s->ranks[fastest].n < STRAGGLER_LEAST || s->ranks[r].median < s->ranks[fastest].median))
                    fastest = r;
            for (int r = first; r < first + s->stage && r < s->world; r++) {
                struct pace *p = &s->ranks[r];
                bool differs = p->n >= STRAGGLER_LEAST && is_slow(s, r, fastest, usual, p->slow) != p->slow;
                p->streak = differs ? (uint8_t)(p->streak + 1) : 0;
                if (p->streak >= STRAGGLER_LOOKS) {
                    p->slow = !p->slow;
                    p->changed = !p->changed;
                    p->streak = 0;
                }
            }
        }
    }
    for (int r = 0; r < s->world && n < room; r++)
        if (s->ranks[r].changed) {
            s->ranks[r].changed = false;
            describe(s, r, fastest_of(s, r), &out[n++]);
        }
    return n;
}

int stragglers_slow(const struct stragglers *s, struct straggler *out, int room)
{
    int n = 0;
    for (int r = 0; r < s->world; r++)
        if (s->ranks[r].slow) {
            if (n < room)
                describe(s, r, fastest_of(s, r), &out[n]);
            n++;
        }
    return n;
}
