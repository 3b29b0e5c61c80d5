/* Users as the scheduler sees them: what each has used of late. Device-seconds that are t old count 2^(-t / half life).
 * While the controller runs they are summed up by the monotonic clock from the devices held; at its start they come
 * from the attempts' own times. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"

/* Index of the first share with that uid or a higher one. */
static int place_of(const struct core *c, uint32_t uid)
{
    int lo = 0, hi = c->n_shares;
    while (lo < hi) {
        int mid = lo + (hi - lo) / 2;
        if (c->shares[mid]->uid < uid)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

struct share *share_of(struct core *c, uint32_t uid)
{
    int at = place_of(c, uid);
    if (at < c->n_shares && c->shares[at]->uid == uid)
        return c->shares[at];
    struct share **list = realloc(c->shares, (size_t)(c->n_shares + 1) * sizeof *list);
    if (!list)
        return NULL;
    c->shares = list;
    struct share *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    memmove(&list[at + 1], &list[at], (size_t)(c->n_shares - at) * sizeof(struct share *));
    list[at] = s;
    c->n_shares++;
    s->uid = uid;
    s->used_at = now_mono(c);
    return s;
}

void shares_free(struct core *c)
{
    for (int i = 0; i < c->n_shares; i++)
        free(c->shares[i]);
    free(c->shares);
    c->shares = NULL;
    c->n_shares = 0;
}

/* 2^(-age / half life) */
static double decay(const struct core *c, int64_t age_ns)
{
    return exp2(-(double)(age_ns > 0 ? age_ns : 0) / (double)c->half_life_ns);
}

/* What one device that was held from `from` to `to` ago counts now: the integral of the decay between. */
static double decayed_s(const struct core *c, int64_t from_ago, int64_t to_ago)
{
    return (double)c->half_life_ns / (double)NS_PER_S / M_LN2 * (decay(c, to_ago) - decay(c, from_ago));
}

void share_add_past(struct core *c, struct job *job)
{
    int64_t now = now_wall(c);
    for (int i = 0; c->half_life_ns && i < job->n_attempts; i++) {
        const struct attempt *a = job->attempts[i];
        int64_t end = a->end_ns && a->end_ns < now ? a->end_ns : now;
        if (a->start_ns < end)
            job->share->used += a->world * decayed_s(c, now - a->start_ns, now - end);
    }
}

void shares_advance(struct core *c)
{
    int64_t now = now_mono(c);
    for (int i = 0; i < c->n_shares; i++) {
        struct share *s = c->shares[i];
        int64_t age = now - s->used_at;
        if (c->half_life_ns && age > 0)
            s->used = s->used * decay(c, age) + s->devices * decayed_s(c, age, 0);
        s->used_at = now;
    }
}

double share_key(const struct core *c, const struct share *s)
{
    return c->half_life_ns ? floor(s->used) : 0;
}
