/* spike.h */
#include "worker/spike.h"

#include <math.h>
#include <stdbool.h>

void spike_init(struct spike *s, double fade)
{
    *s = (struct spike){.fade = fade};
}

/* Its square must be finite too. */
static bool usable(double loss)
{
    static const double largest = 1e100;
    return fabs(loss) <= largest;
}

double spike_variance(const struct spike *s)
{
    return s->count < 2 ? 0 : s->deviations / (s->weight - s->squares / s->weight);
}

static double deviation(const struct spike *s)
{
    return fmax(sqrt(spike_variance(s)), SPIKE_FLOOR * fabs(s->mean));
}

double spike_z(const struct spike *s, double loss)
{
    if (!isfinite(loss) || s->count < SPIKE_AFTER)
        return NAN;
    double off = loss - s->mean, unit = deviation(s);
    return unit > 0 ? off / unit : off == 0 ? 0 : NAN;
}

void spike_add(struct spike *s, double loss)
{
    if (!usable(loss))
        return;
    double off = loss - s->mean, most = SPIKE_BOUND * deviation(s);
    if (s->count >= SPIKE_AFTER)
        off = fmax(-most, fmin(most, off));
    /* Moving the mean by off/W' turns sum w (x - mean)^2 of the old into that of all: West, CACM 22, 1979. */
    double keep = 1 - s->fade, kept = keep * s->weight, weight = kept + 1;
    s->deviations = keep * s->deviations + kept / weight * off * off;
    s->squares = keep * keep * s->squares + 1;
    s->mean += off / weight;
    s->weight = weight;
    s->count++;
}
