/* agreement.h */
#include "worker/agreement.h"

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
        .stop = facts->stop, .checkpoint = a->due || a->seen != a->served, .busy = facts->busy || begins};
}

struct agreement_actions agreement_settle(struct agreement *a, int64_t n, const struct agreement_votes *joined)
{
    /* The first step has no vote before it; that its checkpoint is due is known to all. */
    bool at_first = n == a->start + 1 && a->every_steps && n % a->every_steps == 0;
    struct agreement_actions actions = {.stop = a->stop,
                                        .checkpoint = a->checkpoint || at_first,
                                        .postponed = joined->checkpoint && joined->busy && !a->waiting};
    a->waiting = joined->checkpoint && joined->busy;
    a->stop = joined->stop;
    a->checkpoint = joined->checkpoint && !joined->busy;
    if (a->checkpoint) {
        a->due = false;
        a->served = a->seen;
        a->last_ns = a->now_ns;
        actions.skipped = a->skipped;
        a->skipped = 0;
    }
    return actions;
}
