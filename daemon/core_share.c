/* Users as the scheduler sees them: what each has used of late. Device-seconds that are t old count 2^(-t / half life).
 * While the controller runs they are summed up by the monotonic clock from the devices held; at its start they come
 * from how long the attempts lasted. */
#include <math.h>
#include <stdio.h>
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
        int64_t ago = a->end_ns && a->end_ns < now ? now - a->end_ns : 0; /* none ended in the future */
        job->share->used += attempt_devices(a) * decayed_s(c, ago + attempt_lasted(c, a), ago);
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

/* ---- usage --------------------------------------------------------------------------------- */

/* Seconds of the attempt behind `since`. */
static double seconds_since(struct core *c, const struct attempt *a, int64_t since, int64_t now)
{
    int64_t to = a->end_ns && a->end_ns < now ? a->end_ns : now, from = to - attempt_lasted(c, a);
    from = from > since ? from : since;
    return to > from ? (double)(to - from) / (double)NS_PER_S : 0;
}

static void add_job(struct core *c, Boost__UsageRow *row, const struct job *job, int64_t since, int64_t now)
{
    double sum = 0;
    for (int i = 0; i < job->n_attempts; i++)
        sum += attempt_devices(job->attempts[i]) * seconds_since(c, job->attempts[i], since, now);
    row->jobs += sum > 0;
    row->device_seconds += sum;
    row->gpu_seconds += spec_pool(job->resolved) == SCHED_GPU ? sum : 0;
    const struct attempt *live = job_live_attempt(job);
    row->devices += live ? (int)attempt_devices(live) : 0;
    row->running += live != NULL;
}

static bool is_meant(const Boost__UsageRow *row, const char *user)
{
    char number[16];
    snprintf(number, sizeof number, "%u", (unsigned)row->uid);
    return !user || !*user || strcmp(user, number) == 0 || (row->user && strcmp(user, row->user) == 0);
}

static int most_first(const void *x, const void *y)
{
    const Boost__UsageRow *a = *(Boost__UsageRow *const *)x, *b = *(Boost__UsageRow *const *)y;
    if (a->device_seconds > b->device_seconds || a->device_seconds < b->device_seconds)
        return a->device_seconds > b->device_seconds ? -1 : 1;
    return (a->uid > b->uid) - (a->uid < b->uid);
}

Boost__UsageReply *core_usage(struct core *c, const char *user, int64_t since_wall_ns, struct arena *arena)
{
    size_t n = (size_t)c->n_shares;
    int64_t now = now_wall(c);
    Boost__UsageReply *r = arena_alloc(arena, sizeof *r);
    Boost__UsageRow *rows = arena_alloc(arena, (n + 1) * sizeof *rows);
    if (!r || !rows)
        return NULL;
    boost__usage_reply__init(r);
    r->rows = arena_alloc(arena, (n + 1) * sizeof *r->rows);
    if (!r->rows)
        return NULL;
    shares_advance(c);
    for (size_t i = 0; i < n; i++) {
        boost__usage_row__init(&rows[i]);
        rows[i].has_uid = rows[i].has_jobs = rows[i].has_device_seconds = rows[i].has_gpu_seconds = 1;
        rows[i].has_devices = rows[i].has_running = rows[i].has_queued = 1;
        rows[i].uid = c->shares[i]->uid;
        rows[i].queued = c->shares[i]->waiting;
        rows[i].has_recent = c->half_life_ns > 0;
        rows[i].recent = c->shares[i]->used;
    }
    for (int i = 0; i < c->n_jobs; i++) {
        const struct job *job = c->jobs[i];
        Boost__UsageRow *row = &rows[place_of(c, job->uid)];
        row->user = job->user; /* as it was called last */
        add_job(c, row, job, since_wall_ns, now);
    }
    for (size_t i = 0; i < n; i++)
        if (is_meant(&rows[i], user) && (rows[i].jobs || rows[i].queued))
            r->rows[r->n_rows++] = &rows[i];
    qsort(r->rows, r->n_rows, sizeof *r->rows, most_first);
    return r;
}
