/* Who waits, in which order they are looked at, and the scheduling pass: the scheduler's picture of the nodes is made
 * anew (core_picture.c), the jobs go through it in order, and those that are placed begin. The picture stays until the
 * next pass, for the question why a job waits. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_picture.h"

static const char out_of_memory[] = "the controller is out of memory";

/* ---- the queue --------------------------------------------------------------------------- */

void queue_add(struct core *c, struct job *job)
{
    if (job->pending.in)
        return;
    int p = job->priority < 0 ? 0 : job->priority >= PRIORITIES ? PRIORITIES - 1 : job->priority;
    job->queued_priority = p;
    list_add(&job->share->queue[p], job, link_pending);
    job->share->some[p / 64] |= UINT64_C(1) << (p % 64);
    c->n_pending[spec_pool(job->resolved)]++;
    if (job->resolved->n_after && !job->started_ns)
        list_add(&c->dependent, job, link_dependent);
}

void queue_remove(struct core *c, struct job *job)
{
    if (!job->pending.in)
        return;
    int p = job->queued_priority;
    list_remove(&job->share->queue[p], job, link_pending);
    if (!job->share->queue[p].head)
        job->share->some[p / 64] &= ~(UINT64_C(1) << (p % 64));
    c->n_pending[spec_pool(job->resolved)]--;
    list_remove(&c->dependent, job, link_dependent);
}

/* The first job of the user in a queue below `priority`, or NULL. */
static struct job *first_below(const struct share *s, int priority)
{
    for (int w = 1; w >= 0; w--) {
        int upto = priority - w * 64;
        uint64_t bits = upto <= 0 ? 0 : upto < 64 ? s->some[w] & ((UINT64_C(1) << upto) - 1) : s->some[w];
        if (bits)
            return s->queue[w * 64 + 63 - __builtin_clzll(bits)].head;
    }
    return NULL;
}

/* Users by their next job: a heap. What is given to one counts at once, a second of it, so that equals take turns. */
struct turn {
    struct share *share;
    struct job *job;
    double key;
};
struct turns {
    struct turn *heap;
    int n;
};

/* Priority, then who has used less, then who came first. */
static bool goes_before(const struct turn *x, const struct turn *y)
{
    if (x->job->queued_priority != y->job->queued_priority)
        return x->job->queued_priority > y->job->queued_priority;
    if (x->key < y->key || x->key > y->key)
        return x->key < y->key;
    return x->job->id < y->job->id;
}

static void sift_down(struct turns *t, int i)
{
    for (;;) {
        int least = i;
        for (int k = 2 * i + 1; k <= 2 * i + 2 && k < t->n; k++)
            if (goes_before(&t->heap[k], &t->heap[least]))
                least = k;
        if (least == i)
            return;
        struct turn other = t->heap[i];
        t->heap[i] = t->heap[least];
        t->heap[least] = other;
        i = least;
    }
}

static bool turns_init(struct core *c, struct turns *t)
{
    *t = (struct turns){.heap = malloc((size_t)(c->n_shares + 1) * sizeof *t->heap)};
    for (int i = 0; t->heap && i < c->n_shares; i++) {
        struct job *job = first_below(c->shares[i], PRIORITIES);
        if (job)
            t->heap[t->n++] = (struct turn){c->shares[i], job, share_key(c, c->shares[i])};
    }
    for (int i = t->n / 2; i >= 0; i--)
        sift_down(t, i);
    return t->heap != NULL;
}

/* The job whose turn it is, NULL when all had theirs. The turn stays its user's until turns_next(). */
static struct job *turns_job(const struct turns *t)
{
    return t->n ? t->heap[0].job : NULL;
}

/* `after`: the one that follows in its queue, looked up before the job could leave it. */
static void turns_next(const struct core *c, struct turns *t, int priority, struct job *after, int given)
{
    struct turn *top = &t->heap[0];
    top->job = after ? after : first_below(top->share, priority);
    top->key += c->half_life_ns ? given : 0;
    if (!top->job)
        *top = t->heap[--t->n];
    sift_down(t, 0);
}

/* ---- requests ---------------------------------------------------------------------------- */

static struct sched_request request_of(const Boost__JobSpec *spec, uint32_t uid)
{
    const Boost__Resources *r = spec->resources;
    return (struct sched_request){.pool = spec_pool(spec),
                                  .nodes = spec_nodes(spec),
                                  .devices_per_node = spec_devices(spec),
                                  .tp = spec->parallel ? spec->parallel->tp : 1,
                                  .mib_per_rank = r ? r->memory_mib : 0,
                                  .exclusive = r && r->exclusive,
                                  .uid = uid,
                                  .constraint = r ? r->constraint : NULL,
                                  .nodelist = r ? r->nodelist : NULL,
                                  .exclude = r ? r->exclude : NULL,
                                  .runs_ns = spec->time_limit_s > 0 ? spec->time_limit_s * NS_PER_S : SCHED_ENDLESS};
}

static struct sched_request request_of_job(struct core *c, const struct picture *p, const struct job *job)
{
    struct sched_request r = request_of(job->resolved, job->uid);
    r.id = job->id;
    r.runs_ns = job_left_ns(c, job);
    if (!c->backfill)
        r.runs_ns = SCHED_ENDLESS;
    for (int i = 0; job->picture == c->pictures && i < p->n_avoided; i++)
        /* They come by node, and once each: scratch has room for no more, whatever an agent lists. */
        if (p->avoided[i].job == job->id && (!r.n_avoid || p->scratch[r.n_avoid - 1] != p->avoided[i].node))
            p->scratch[r.n_avoid++] = p->avoided[i].node;
    r.avoid = p->scratch;
    return r;
}

/* ---- the pass ---------------------------------------------------------------------------- */

static void kept(struct sched_answer *out, Boost__Reason__Value reason)
{
    if (out)
        *out = (struct sched_answer){.verdict = SCHED_WAIT, .reason = reason};
}

/* What went wrong with its last start, and when the next one is due. */
static void start_waits(struct core *c, const struct job *job, char *text, size_t cap)
{
    char told[SCHED_TEXT];
    double in = (double)(job->start_retry_due - now_mono(c)) / (double)NS_PER_S;
    fetch_told(c, job, told, sizeof told);
    if (job->start_trouble && *job->start_trouble)
        snprintf(text, cap, "%s", job->start_trouble);
    else if (*told)
        snprintf(text, cap, "fetches its files in %.0fs%.480s", ceil(in), told);
    else
        snprintf(text, cap, "tried again soon");
}

/* What keeps a job from being looked at at all, apart from devices; *out gets it in words when not NULL. */
static bool is_kept(struct core *c, const struct job *job, struct sched_answer *out)
{
    struct sched_answer answer;
    char *text = out ? answer.text : NULL;
    if (job->start_retry_due > now_mono(c)) {
        due_at(c, job->start_retry_due);
        kept(out, REASON(Backoff));
        if (out)
            start_waits(c, job, out->text, sizeof out->text);
        return true;
    }
    if (job_depends(c, job, text, sizeof answer.text) != DEPEND_MET)
        kept(out, REASON(Dependency));
    else if (array_keeps(c, job, text, sizeof answer.text) || limit_keeps(c, job, text, sizeof answer.text))
        kept(out, REASON(UserLimit));
    else
        return false;
    if (out)
        memcpy(out->text, answer.text, sizeof out->text);
    return true;
}

/* Asks those to go that have to, so that the head finds its devices. */
static void preempt_for(struct core *c, struct picture *p, const struct sched_request *r, const struct job *job)
{
    int *victims = calloc((size_t)p->n_runners + 1, sizeof *victims);
    int n = victims ? sched_preempt(p->sched, r, job->priority, c->preempt_gap, victims) : 0;
    for (int i = 0; i < n; i++) {
        struct job *victim = p->running[victims[i]];
        if (!core_preempt(c, victim, job))
            core_log_line(c, CORE_LOG_WARN, "job %" PRId64 " cannot be preempted in state %s", victim->id,
                          job_state_name(victim->state));
    }
    free(victims);
}

/* Without the nodes that have refused the job of late. False: there are none of these, or no memory. */
static bool without_refusals(struct core *c, const struct picture *p, const struct job *job, struct sched_request *r)
{
    int before = r->n_avoid;
    for (int i = 0; i < p->n && job->n_refusals; i++)
        for (int k = 0; k < job->n_refusals; k++) {
            bool known = false;
            for (int a = 0; a < before; a++)
                known = known || p->scratch[a] == i;
            if (!known && job->refusals[k].until > now_mono(c) && strcmp(job->refusals[k].node, p->nodes[i].name) == 0)
                p->scratch[r->n_avoid++] = i;
        }
    return r->n_avoid > before;
}

/* Elsewhere first than where the job was refused. */
static enum sched_verdict place(struct core *c, const struct picture *p, const struct job *job,
                                const struct sched_request *r, int *index)
{
    struct sched_request elsewhere = *r;
    enum sched_verdict v = SCHED_WAIT;
    if (without_refusals(c, p, job, &elsewhere))
        v = sched_place(p->sched, &elsewhere, index);
    return v == SCHED_PLACED ? v : sched_place(p->sched, r, index);
}

/* Places one job or makes it wait; what it was given in devices. */
static int try_job(struct core *c, struct picture *p, struct job *job)
{
    struct sched_request r = request_of_job(c, p, job);
    int64_t when;
    int n = elastic_most(job), given = 0;
    int *index = calloc((size_t)n, sizeof *index);
    struct node **nodes = index ? calloc((size_t)n, sizeof(struct node *)) : NULL;
    enum sched_verdict v = SCHED_WAIT, whole = SCHED_WAIT;
    int asked = n; /* the fewest that are all of its nodes */
    while (nodes && n > 0) {
        r.nodes = n;
        v = place(c, p, job, &r, index);
        if (n >= job_nodes(job)) {
            whole = v;
            asked = n;
        }
        n = v == SCHED_PLACED ? 0 : elastic_fewer(c, job, n, v);
    }
    r.nodes = v == SCHED_PLACED ? r.nodes : asked;
    if (!nodes) {
        start_later(c, job, out_of_memory);
    } else if (v == SCHED_PLACED) {
        for (int i = 0; i < r.nodes; i++)
            nodes[i] = p->of[index[i]];
        given = r.nodes * r.devices_per_node;
        job->share->devices += given;
        job->share->running++;
        array_runs(c, job);
        start_begin(c, job, nodes, r.nodes);
        nodes = NULL;
    } else if (whole == SCHED_WAIT && sched_failed(p->sched)) {
        start_later(c, job, out_of_memory);
    } else if (whole == SCHED_WAIT && sched_head(p->sched, r.pool, &when) < 0) {
        sched_reserve(p->sched, &r);
        if (c->preempt && !job->fetch_tries) /* nobody goes for a job whose files could not be had */
            preempt_for(c, p, &r, job);
    }
    free(nodes);
    free(index);
    return given;
}

/* ---- spares, and jobs on fewer nodes (core_elastic.c) ------------------------------------------ */

/* Jobs that are to go on and hold spare nodes: these are free for them, and nobody comes before them. NULL-ended;
 * NULL: none. */
static struct job **free_spares(struct core *c)
{
    int n = 0;
    struct job **list = NULL;
    for (struct job *job = c->spares_used ? c->active.head : NULL; job; job = job->active.next) {
        /* One that was queued again holds none any more, though its last attempt lists them. */
        if (job->state != STATE(RECOVERING) || !job->pending.in || job->starting || job->unsettled ||
            !job_has_spares(job))
            continue;
        if (job->start_retry_due > now_mono(c))
            continue;
        struct job **more = realloc(list, (size_t)(n + 2) * sizeof(struct job *));
        if (!more)
            break;
        list = more;
        list[n++] = job;
        list[n] = NULL;
        spares_release(c, job);
    }
    return list;
}

/* So many more nodes for a job that runs, beside those that it has. */
static bool place_more(struct core *c, struct picture *p, struct job *job, int nodes, int *index)
{
    struct sched_request r = request_of_job(c, p, job);
    r.nodes = nodes;
    r.n_avoid = 0;
    for (int i = 0; i < p->n; i++) {
        bool own = false;
        for (int k = 0; k < p->of[i]->n_holdings; k++)
            own = own || p->of[i]->holdings[k].job == job->id;
        if (own)
            p->scratch[r.n_avoid++] = i;
    }
    r.avoid = p->scratch;
    return sched_place(p->sched, &r, index) == SCHED_PLACED;
}

static void grow(struct core *c, struct picture *p, struct job *job, int *index)
{
    int has = job_live_attempt(job)->n_parts;
    for (int n = job_nodes(job); (n = elastic_more(job, has, n)) > 0; n--)
        if (place_more(c, p, job, n - has, index)) {
            elastic_grow(c, job, n);
            return;
        }
}

static void add_spares(struct core *c, struct picture *p, struct job *job, int *index)
{
    struct attempt *a = job_live_attempt(job);
    while (a->n_spares < job_spares(job) && !c->n_pending[spec_pool(job->resolved)] &&
           place_more(c, p, job, 1, index) && spare_add(c, job, p->of[*index]))
        ;
}

static void elastic_pass(struct core *c, struct picture *p)
{
    int *index = c->elastic ? calloc((size_t)p->n + 1, sizeof *index) : NULL;
    c->elastic = c->elastic && !index;
    for (struct job *job = index ? c->active.head : NULL, *next; job; job = next) {
        next = job->active.next;
        struct attempt *a = job_live_attempt(job);
        bool runs = a && !a->kill && (job->state == STATE(STARTING) || job->state == STATE(RUNNING));
        if (!runs)
            continue;
        if (job->may_grow)
            grow(c, p, job, index);
        else
            add_spares(c, p, job, index);
        job->may_grow = false;
        elastic_wanted(c, job);
    }
    free(index);
}

static bool any_open(const struct picture *p)
{
    for (int i = 0; i < p->n; i++)
        if (p->nodes[i].up && p->nodes[i].open)
            return true;
    return false;
}

/* Whether nobody can get a device of the pool any more, and somebody has been promised the next ones. */
static bool pool_done(const struct core *c, const struct picture *p, enum sched_pool pool)
{
    int64_t when;
    return !c->n_pending[pool] || (sched_full(p->sched, pool) && sched_head(p->sched, pool, &when) >= 0);
}

void schedule_pass(struct core *c)
{
    if (core_settling(c))
        return;
    struct job **first = free_spares(c);
    struct picture *p = picture_make(c);
    struct turns t = {0};
    for (int i = 0; p && first && first[i]; i++)
        if (!is_kept(c, first[i], NULL))
            (void)try_job(c, p, first[i]);
    free(first);
    if (!p || !turns_init(c, &t)) {
        core_log_line(c, CORE_LOG_ERROR, "out of memory: no job is placed now");
        c->schedule_due = now_mono(c) + CORE_RETRY_NS;
        due_at(c, c->schedule_due);
    }
    struct job *job = p && any_open(p) ? turns_job(&t) : NULL;
    while (job && !(pool_done(c, p, SCHED_CPU) && pool_done(c, p, SCHED_GPU))) {
        struct job *after = job->pending.next;
        int priority = job->queued_priority, given = 0;
        /* One that is not durable yet asks again when it is. */
        bool durable = job->acknowledged && !job->unsettled;
        if (!job->starting && durable && !pool_done(c, p, spec_pool(job->resolved)) && !is_kept(c, job, NULL))
            given = try_job(c, p, job);
        turns_next(c, &t, priority, after, given);
        job = turns_job(&t);
    }
    if (p)
        elastic_pass(c, p);
    free(t.heap);
}

void queue_settled(struct core *c, struct job *job)
{
    int64_t when;
    struct picture *p = c->picture;
    enum sched_pool pool = spec_pool(job->resolved);
    int64_t head = p ? sched_head(p->sched, pool, &when) : -1;
    const struct job *first = head > 0 ? core_job(c, head) : NULL;
    /* What an elastic job can have, the picture does not tell by itself: fewer nodes, and its own spares. */
    if (c->schedule || !first || !first->pending.in || job_is_elastic(job)) {
        c->schedule = true;
        return;
    }
    if (is_kept(c, job, NULL))
        return;
    struct turn a = {first->share, (struct job *)(uintptr_t)first, share_key(c, first->share)};
    struct turn b = {job->share, job, share_key(c, job->share)};
    struct sched_answer answer;
    struct sched_request r = request_of_job(c, p, job);
    if (goes_before(&b, &a)) {
        c->schedule = true;
        return;
    }
    sched_explain(p->sched, &r, &answer);
    c->schedule = answer.verdict == SCHED_PLACED || sched_failed(p->sched);
}

/* ---- why ----------------------------------------------------------------------------------- */

void job_pending_reason(struct core *c, const struct job *job, struct sched_answer *out)
{
    struct picture *p = c->picture ? c->picture : picture_make(c);
    if (is_kept(c, job, out))
        return;
    if (core_settling(c)) {
        *out = (struct sched_answer){.verdict = SCHED_WAIT, .reason = REASON(NodesDown)};
        snprintf(out->text, sizeof out->text, "waits until every node has registered with the adopted controller");
        return;
    }
    if (!p) {
        *out = (struct sched_answer){.verdict = SCHED_WAIT, .reason = REASON(NoDevices)};
        snprintf(out->text, sizeof out->text, "%s", out_of_memory);
        return;
    }
    struct sched_request r = request_of_job(c, p, job);
    sched_explain(p->sched, &r, out);
}

void spec_pending_reason(struct core *c, const Boost__JobSpec *resolved, uint32_t uid, struct sched_answer *out)
{
    struct picture *p = c->picture ? c->picture : picture_make(c);
    struct sched_request r = request_of(resolved, uid);
    int64_t when, head = p ? sched_head(p->sched, r.pool, &when) : -1;
    const struct job *first = head > 0 ? core_job(c, head) : NULL;
    if (!p) {
        *out = (struct sched_answer){.verdict = SCHED_WAIT, .reason = REASON(NoDevices)};
        snprintf(out->text, sizeof out->text, "%s", out_of_memory);
        return;
    }
    if (first && first->priority < resolved->priority)
        r.runs_ns = 0; /* it would go before the one that waits */
    sched_explain(p->sched, &r, out);
}
