/* pace.h */
#include "ctl/pace.h"

#include "proto/base/clock.h"

double pace_left_s(struct pace *pace, int attempt, int64_t step, int64_t steps, int64_t now_ns)
{
    if (pace->attempt != attempt || step < pace->from_step)
        *pace = (struct pace){.attempt = attempt, .from_step = step, .from_ns = now_ns};
    int64_t took = now_ns - pace->from_ns;
    /* Under a second is too little to tell from. */
    if (step <= pace->from_step || took < NS_PER_S)
        return -1;
    return (double)(steps - step) * ((double)took / (double)NS_PER_S) / (double)(step - pace->from_step);
}
