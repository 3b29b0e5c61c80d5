/* pace.h */
#include "worker/pace.h"

#include <math.h>

double pace_seconds(double cost_s, double mean_failure_s)
{
    double part = cost_s / (2 * mean_failure_s);
    double seconds = part < 1 ? sqrt(2 * cost_s * mean_failure_s) * (1 + sqrt(part) / 3 + part / 9) - cost_s
                              : mean_failure_s;
    return seconds > PACE_MIN_S ? seconds : PACE_MIN_S;
}
