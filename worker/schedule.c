/* schedule.h */
#include "worker/schedule.h"

#include <math.h>

double schedule_lr(const Boost__Optimizer *o, int64_t steps, int64_t step)
{
    double peak = o->lr, low = o->lr * o->min_lr_ratio;
    if (step < o->warmup_steps)
        return peak * (double)step / (double)o->warmup_steps;
    int64_t from = o->warmup_steps; /* the last step at the peak */
    if (o->schedule == BOOST__SCHEDULE__VALUE__WSD && steps - o->wsd_decay_steps > from)
        from = steps - o->wsd_decay_steps;
    if (o->schedule == BOOST__SCHEDULE__VALUE__CONSTANT || step <= from || steps <= from)
        return peak;
    double done = (double)(step - from) / (double)(steps - from);
    if (o->schedule == BOOST__SCHEDULE__VALUE__COSINE)
        return low + (peak - low) * 0.5 * (1 + cos(acos(-1.0) * done));
    return peak + (low - peak) * done;
}
