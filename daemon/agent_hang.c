/* agent_hang.h */
#include "daemon/agent_hang.h"

#include <inttypes.h>
#include <stdio.h>

#include "proto/base/clock.h"

enum { BYTES_MS = 60000, FACTOR = 5 };
static const double smoothing = 0.2; /* weight of the newest sample */

const char *phase_name(uint32_t phase)
{
    static const char *const names[] = {"launched", "at the rendezvous", "loading", "training", "evaluating", "saving",
                                        "ended"};
    return phase < sizeof names / sizeof *names ? names[phase] : "in an unknown phase";
}

static bool computes(uint32_t phase)
{
    return phase == BOOST__RANK_UPDATE__PHASE__TRAINING || phase == BOOST__RANK_UPDATE__PHASE__EVALUATING;
}

static bool moves_bytes(uint32_t phase)
{
    return phase == BOOST__RANK_UPDATE__PHASE__LOADING || phase == BOOST__RANK_UPDATE__PHASE__SAVING;
}

int64_t hang_limit_ns(const struct hang_watch *h, int64_t min_ms, int64_t max_ms)
{
    int64_t limit;
    double each = h->training_ns;
    if (h->seen.phase == BOOST__RANK_UPDATE__PHASE__EVALUATING && h->evaluating_ns > 0)
        each = h->evaluating_ns;
    if (moves_bytes(h->seen.phase))
        limit = BYTES_MS * NS_PER_MS;
    else if (!computes(h->seen.phase))
        return 0;
    else if (each <= 0 || FACTOR * each > (double)max_ms * (double)NS_PER_MS)
        limit = max_ms * NS_PER_MS;
    else
        limit = (int64_t)(FACTOR * each);
    limit = limit < min_ms * NS_PER_MS ? min_ms * NS_PER_MS : limit;
    return limit > max_ms * NS_PER_MS ? max_ms * NS_PER_MS : limit;
}

static void time_micro_batches(struct hang_watch *h, const struct rank_status *page, int64_t now_ns)
{
    uint64_t done = page->progress - h->seen.progress;
    double *mean = page->phase == BOOST__RANK_UPDATE__PHASE__EVALUATING ? &h->evaluating_ns : &h->training_ns;
    if (!done)
        return;
    if (h->micro_ns) {
        double each = (double)(now_ns - h->micro_ns) / (double)done;
        *mean += (each - *mean) * (*mean > 0 ? smoothing : 1);
    }
    h->micro_ns = now_ns;
}

bool hang_look(struct hang_watch *h, const struct rank_status *page, int64_t now_ns, int64_t min_ms, int64_t max_ms)
{
    bool moved = !h->running || page->phase != h->seen.phase || page->progress != h->seen.progress ||
                 page->bytes != h->seen.bytes || page->step != h->seen.step;
    if (moved) {
        if (h->running && (page->phase != h->seen.phase || h->reported))
            h->micro_ns = 0; /* what lay between is no micro-batch */
        if (h->running)
            time_micro_batches(h, page, now_ns);
        h->running = true;
        h->reported = false;
        h->changed_ns = now_ns;
    }
    h->seen = *page; /* the texts and the collective too: they say where it stands */
    int64_t limit = hang_limit_ns(h, min_ms, max_ms);
    if (h->reported || !limit || now_ns - h->changed_ns <= limit)
        return false;
    h->reported = true;
    return true;
}

void hang_excuse(struct hang_watch *h, int64_t gap_ns)
{
    h->changed_ns += gap_ns;
    if (h->micro_ns)
        h->micro_ns += gap_ns;
}

void hang_describe(const struct hang_watch *h, int rank, int64_t now_ns, int64_t limit_ns, char *out, size_t cap)
{
    const struct rank_status *s = &h->seen;
    char last[RANK_COLLECTIVE_TEXT];
    rank_collective_text(s, last, sizeof last);
    snprintf(out, cap,
             "rank %d made no progress for %.1f s (limit %.1f s) while %s, %" PRId64 " steps done%s%s%s%.95s", rank,
             (double)(now_ns - h->changed_ns) / (double)NS_PER_S, (double)limit_ns / (double)NS_PER_S,
             phase_name(s->phase), s->step, last[0] ? "; last collective: " : "", last, s->doing[0] ? "; doing: " : "",
             s->doing);
}
