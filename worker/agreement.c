/* agreement.h */
#include "worker/agreement.h"

#include <math.h>

void agreement_init(struct agreement *a, int64_t start, int64_t steps, int64_t every_steps, int64_t every_ns,
                    bool first_rank, int64_t now_ns)
{
    *a = (struct agreement){.start = start,
                            .steps = steps,
                            .every_steps = every_steps,
                            .every_ns = every_ns,
                            .first_rank = first_rank,
                            .last_ns = now_ns};
}

/* ---- how many were asked for, of what the quickest rank has seen ---- */

/* Ranks add their votes up. A vote is one digit of a number to a base that no count of ranks reaches: its place is how
 * many requests this rank has seen that are not served, so the sum's highest place is what the quickest has. */
enum { DIGIT_BITS = 17, PLACES = 3 };

static double digit_of(const struct agreement *a)
{
    int32_t more = (int32_t)(a->seen - a->served); /* the counter may wrap */
    int place = more < PLACES ? more : PLACES;
    return place > 0 ? ldexp(1, DIGIT_BITS * (place - 1)) : 0;
}

static uint32_t highest_place(double sum)
{
    uint32_t place = 0;
    for (; sum >= 1; place++)
        sum = ldexp(sum, -DIGIT_BITS);
    return place;
}

/* ---- votes and what follows from them ---- */

struct agreement_votes agreement_vote(struct agreement *a, int64_t n, const struct agreement_facts *facts)
{
    a->now_ns = facts->now_ns;
    a->seen = facts->asked;
    int64_t effect = n + 1; /* the step after which this vote can take effect */
    if (a->first_rank && effect < a->steps) {
        if (a->every_steps && effect % a->every_steps == 0) {
            a->skipped += a->due;
            a->due = true;
        }
        if (a->every_ns && a->now_ns - a->last_ns >= a->every_ns)
            a->due = true;
    }
    /* One that is to begin after this step will be written in the next. Where each step asks for one that is wanted. */
    bool begins = a->checkpoint && a->every_steps != 1;
    return (struct agreement_votes){
        .stop = facts->stop, .checkpoint = a->due, .busy = facts->busy || begins, .asked = digit_of(a)};
}

struct agreement_actions agreement_settle(struct agreement *a, int64_t n, const struct agreement_votes *joined)
{
    bool wanted = joined->checkpoint || joined->asked > 0;
    /* The first step has no vote before it; that its checkpoint is due is known to all. */
    bool at_first = n == a->start + 1 && a->every_steps && n % a->every_steps == 0;
    struct agreement_actions actions = {.stop = a->stop,
                                        .checkpoint = a->checkpoint || at_first,
                                        .postponed = wanted && joined->busy && !a->waiting};
    a->waiting = wanted && joined->busy;
    a->stop = joined->stop;
    a->checkpoint = wanted && !joined->busy;
    if (a->checkpoint) {
        a->due = false;
        a->served += highest_place(joined->asked);
        a->last_ns = a->now_ns;
        actions.skipped = a->skipped;
        a->skipped = 0;
    }
    return actions;
}
