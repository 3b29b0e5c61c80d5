/* Stacks of a live attempt: asked of its nodes' agents, some ranks at a time, passed on as they come. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"

enum {
    TASK_RANKS = 8, /* of one Task: their answer fits a frame */
    NODES_AT_ONCE = 8,
};
#define STACKS_NS (20 * NS_PER_S) /* for TASK_RANKS ranks of which none answers */

typedef bool (*page_fn)(void *arg, int rc, const struct error *err, const struct core_stacks *stacks);

/* Ranks of one node that are wanted. */
struct part_ask {
    int *ranks;
    int n, next; /* from `next` on they are still to be asked for */
    int asked;   /* of the Task under way, from `next` */
};

struct stacks_call {
    page_fn page;
    void *arg;
    int64_t job;
    int attempt;
    struct part_ask *parts;
    int n_parts;
    int open; /* Tasks under way */
    int refs; /* Tasks, and who works on it now */
    bool over; /* nobody wants more */
};

static void unref(void *arg)
{
    struct stacks_call *s = arg;
    if (--s->refs > 0)
        return;
    for (int p = 0; p < s->n_parts; p++)
        free(s->parts[p].ranks);
    free(s->parts);
    free(s);
}

static struct attempt *attempt_of(struct core *c, const struct stacks_call *s, struct job **job)
{
    *job = core_job(c, s->job);
    return *job ? job_attempt(*job, s->attempt) : NULL;
}

static void pass_on(struct core *c, struct stacks_call *s, Boost__RankStacks **ranks, size_t n, bool last)
{
    struct core_stacks page = {
        .job = core_job(c, s->job), .attempt = s->attempt, .ranks = ranks, .n_ranks = n, .last = last};
    if (!s->over && page.job)
        s->over = !s->page(s->arg, ERR_OK, NULL, &page) || last;
}

/* A page of ranks of which nothing is known but why. */
static void pass_note(struct core *c, struct stacks_call *s, struct part_ask *p, int n, const char *node,
                      const char *note)
{
    Boost__RankStacks ranks[TASK_RANKS], *list[TASK_RANKS];
    for (int i = 0; i < n; i++) {
        boost__rank_stacks__init(&ranks[i]);
        ranks[i].has_rank = true;
        ranks[i].rank = p->ranks[p->next + i];
        ranks[i].node = (char *)(uintptr_t)node;
        ranks[i].note = (char *)(uintptr_t)note;
        list[i] = &ranks[i];
    }
    pass_on(c, s, list, (size_t)n, false);
}

static void ask_more(struct core *c, struct stacks_call *s);

/* Each rank that was asked for comes once, whatever the agent says. */
static void pass_answer(struct core *c, struct stacks_call *s, const struct part_ask *p, const char *node,
                        const Boost__TaskReply *reply)
{
    Boost__RankStacks ranks[TASK_RANKS], *list[TASK_RANKS];
    for (int k = 0; k < p->asked; k++) {
        const Boost__RankStacks *said = NULL;
        for (size_t i = 0; i < reply->n_stacks && !said; i++)
            if (reply->stacks[i]->has_rank && reply->stacks[i]->rank == p->ranks[p->next + k])
                said = reply->stacks[i];
        boost__rank_stacks__init(&ranks[k]);
        if (said)
            ranks[k] = *said;
        else
            ranks[k].note = (char *)(uintptr_t) "its node's agent knows nothing of it";
        ranks[k].has_rank = true;
        ranks[k].rank = p->ranks[p->next + k];
        ranks[k].node = (char *)(uintptr_t)node;
        list[k] = &ranks[k];
    }
    pass_on(c, s, list, (size_t)p->asked, false);
}

static void collected(struct core *c, struct task *t, int rc, const struct error *err, const Boost__TaskReply *reply)
{
    struct stacks_call *s = t->arg;
    struct part_ask *p = &s->parts[t->step];
    s->open--;
    if (rc)
        pass_note(c, s, p, p->asked, t->node->name, err->message);
    else
        pass_answer(c, s, p, t->node->name, reply);
    p->next += p->asked;
    p->asked = 0;
    ask_more(c, s);
}

static bool ask_part(struct core *c, struct stacks_call *s, struct job *job, const struct attempt *a, int part)
{
    struct part_ask *p = &s->parts[part];
    struct node *n = node_find(c, a->parts[part].node);
    Boost__CollectStacks body = BOOST__COLLECT_STACKS__INIT;
    Boost__Task task = BOOST__TASK__INIT;
    struct task *t = NULL;
    int count = p->n - p->next < TASK_RANKS ? p->n - p->next : TASK_RANKS;
    body.has_attempt = true;
    body.attempt = s->attempt;
    body.n_ranks = (size_t)count;
    body.ranks = p->ranks + p->next;
    task.body_case = BOOST__TASK__BODY_COLLECT_STACKS;
    task.collect_stacks = &body;
    if (n && task_send(c, n, job, job->uid, job->gid, &task, STACKS_NS, collected, &t)) {
        t->arg = s;
        t->drop = unref;
        t->step = part;
        p->asked = count;
        s->open++;
        s->refs++;
        return true;
    }
    char note[256];
    snprintf(note, sizeof note, "node %s cannot be reached", a->parts[part].node);
    pass_note(c, s, p, count, a->parts[part].node, note);
    p->next += count;
    return false;
}

static void ask_more(struct core *c, struct stacks_call *s)
{
    struct job *job;
    const struct attempt *a = attempt_of(c, s, &job);
    for (int p = 0; a && p < s->n_parts && s->open < NODES_AT_ONCE; p++)
        while (!s->over && !s->parts[p].asked && s->parts[p].next < s->parts[p].n && !ask_part(c, s, job, a, p))
            ;
    if (s->open == 0)
        pass_on(c, s, NULL, 0, true);
}

static bool wanted(const Boost__StacksRequest *r, int rank)
{
    for (size_t i = 0; i < r->n_ranks; i++)
        if (r->ranks[i] == rank)
            return true;
    return r->n_ranks == 0;
}

static struct stacks_call *make(const struct job *job, const struct attempt *a, const Boost__StacksRequest *request)
{
    struct stacks_call *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    *s = (struct stacks_call){.job = job->id, .attempt = a->number, .n_parts = a->n_parts, .refs = 1};
    s->parts = calloc((size_t)a->n_parts + 1, sizeof *s->parts);
    bool ok = s->parts != NULL;
    s->n_parts = ok ? a->n_parts : 0;
    for (int p = 0; p < a->n_parts && ok; p++) {
        const struct attempt_part *part = &a->parts[p];
        s->parts[p].ranks = malloc(((size_t)part->n_ranks + 1) * sizeof(int));
        ok = s->parts[p].ranks != NULL;
        for (int i = 0; i < part->n_ranks && ok; i++)
            if (wanted(request, part->ranks[i]))
                s->parts[p].ranks[s->parts[p].n++] = part->ranks[i];
    }
    if (!ok) {
        unref(s);
        return NULL;
    }
    return s;
}

static int check(const struct core *c, const struct job *job, const Boost__StacksRequest *r,
                 const struct core_user *user, const struct attempt **out, struct error *err)
{
    const struct attempt *a = *out = job_live_attempt(job);
    int rc = job_may_change(c, job, user, err);
    if (rc)
        return rc;
    if (r->has_attempt && (r->attempt < 1 || r->attempt > job->n_attempts))
        return error_set(err, ERR_NOT_FOUND, "job %" PRId64 " has no attempt %d (the newest is %d)", job->id,
                         r->attempt, job->n_attempts);
    if (!a || (r->has_attempt && r->attempt != a->number)) {
        error_set(err, ERR_REFUSED, "job %" PRId64 " is %s: no rank of %s runs", job->id, job_state_name(job->state),
                  r->has_attempt ? "that attempt" : "it");
        return error_hint(err, "boostctl logs %" PRId64 " shows what its ranks printed", job->id);
    }
    for (size_t i = 0; i < r->n_ranks; i++)
        if (r->ranks[i] < 0 || r->ranks[i] >= a->world)
            return error_set(err, ERR_NOT_FOUND, "attempt %d of job %" PRId64 " has ranks 0 to %d, not %d", a->number,
                             job->id, a->world - 1, r->ranks[i]);
    return ERR_OK;
}

void core_collect_stacks(struct core *c, const struct job *job, const Boost__StacksRequest *request,
                         const struct core_user *user, page_fn page, void *arg)
{
    struct error err;
    const struct attempt *a;
    int rc = check(c, job, request, user, &a, &err);
    struct stacks_call *s = rc ? NULL : make(job, a, request);
    if (!rc && !s)
        rc = error_set(&err, ERR_NOMEM, "out of memory");
    if (rc) {
        page(arg, rc, &err, NULL);
        return;
    }
    s->page = page;
    s->arg = arg;
    ask_more(c, s);
    unref(s);
}
