/* Token files by URL, and a checkpoint to start from: before an attempt begins every one of its nodes fetches what it
 * does not have yet. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"
#include "proto/jobfile.h"

enum { FIRST_TRIES = 3 }; /* of a request, at first: the long waits are those without devices */
#define FRESH_NS (300 * NS_PER_S) /* below what agents let files be that nobody uses: YOUNG_S of agent_cache.c */

static bool any_url(Boost__TokenFile *const *files, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (jobfile_is_url(files[i]->path))
            return true;
    return false;
}

static bool has_urls(const struct job *job)
{
    const Boost__Data *d = job->resolved->data;
    return d && (any_url(d->train, d->n_train) || any_url(d->eval, d->n_eval));
}

/* Says something about the files or the job, so that trying again would not help. */
static bool is_definite(int rc)
{
    return rc == ERR_NOT_FOUND || rc == ERR_REFUSED || rc == ERR_INVALID || rc == ERR_CORRUPT || rc == ERR_UNSUPPORTED;
}

/* Neither the files nor the way to them are to blame. */
static bool is_of_the_node(int rc, const Boost__TaskReply *reply)
{
    return !reply || rc == ERR_NOSPACE || rc == ERR_NOMEM || rc == ERR_CANCELLED;
}

/* Whether two failures differ in no more than measures, numbers with a word behind: "after 12 ms", but "status 500". */
static bool same_failure(const char *a, const char *b)
{
    for (;; a++, b++) {
        size_t n = strspn(a, "0123456789"), m = strspn(b, "0123456789");
        bool measure = n && m && a[n] == ' ' && a[n + 1] >= 'a' && a[n + 1] <= 'z';
        a += measure ? n : 0;
        b += measure ? m : 0;
        if (*a != *b || !*a)
            return *a == *b;
    }
}

void fetch_told(const struct core *c, const struct job *job, char *out, size_t cap)
{
    char of[16] = "";
    const char *last = job->fetch_trouble && *job->fetch_trouble ? job->fetch_trouble : NULL;
    if (c->fetch_tries)
        snprintf(of, sizeof of, " of %d", c->fetch_tries);
    if (last && job->fetch_tries)
        snprintf(out, cap, ", try %d%s; last: %s", job->fetch_tries + 1, of, last);
    else
        snprintf(out, cap, "%s%s", last ? "; last: " : "", last ? last : "");
}

static void cannot_be_had(struct core *c, struct job *job, const struct task *t, const char *why)
{
    char tries[64] = "";
    if (job->fetch_tries > 1)
        snprintf(tries, sizeof tries, " in %d tries, for %.0f s", job->fetch_tries,
                 (double)(now_mono(c) - job->fetch_since) / (double)NS_PER_S);
    start_cancel(c, job);
    job_reason(job, REASON(DataError), "%s cannot fetch its files%s: %s; release with: boostctl release %" PRId64,
               t->node->name, tries, why, job->id);
    job_fire(c, job, EV_HOLD);
    attempt_say_end(c, job, job->n_attempts);
}

static void fetch_failed(struct core *c, struct job *job, const struct task *t, int rc, const struct error *err,
                         const Boost__TaskReply *reply)
{
    char why[700], tries[32] = "";
    int64_t ns = CORE_RETRY_NS;
    bool given_up = false;
    snprintf(why, sizeof why, "%.400s%s%.200s%s", err->message, *err->hint ? " (" : "", err->hint,
             *err->hint ? ")" : "");
    if (!is_of_the_node(rc, reply)) {
        job->fetch_since = job->fetch_tries ? job->fetch_since : t->since;
        ns = backoff_ns(c, job->fetch_tries++);
        given_up = is_definite(rc) || (c->fetch_tries && job->fetch_tries >= c->fetch_tries);
        snprintf(tries, sizeof tries, " (try %d)", job->fetch_tries);
    }
    if (given_up) {
        cannot_be_had(c, job, t, why);
        return;
    }
    if (!job->fetch_trouble || !same_failure(job->fetch_trouble, why))
        add_event(c, job, job->n_attempts + 1, t->node->name, "controller", "fetch-failed",
                  "its files cannot be fetched yet%s: %s", tries, why);
    text_set(&job->fetch_trouble, why);
    start_later_in(c, job, "", ns);
}

static void fetched(struct core *c, struct task *t, int rc, const struct error *err, const Boost__TaskReply *reply)
{
    struct job *job = core_job(c, t->job);
    struct core_start *s = job ? job->starting : NULL;
    int at = 0;
    while (s && s->fetches && at < s->n_nodes && s->fetches[at] != t->id)
        at++;
    if (!s || !s->fetches || at == s->n_nodes)
        return;
    s->fetches[at] = 0;
    s->fetching--;
    if (rc) {
        fetch_failed(c, job, t, rc, err, reply);
    } else {
        if (reply->moved > 0)
            add_event(c, job, job->n_attempts + 1, t->node->name, "controller", "data-fetched",
                      "%.1f MiB of its files fetched in %.1f s", (double)reply->moved / (1 << 20),
                      (double)(now_mono(c) - t->since) / (double)NS_PER_S);
        /* The first ones may have waited for long, and what waits can be thrown out by others. */
        if (!s->fetching && now_mono(c) - s->fetched_from > FRESH_NS)
            start_fetch(c, job);
        else if (!s->fetching)
            start_commit(c, job);
    }
}

void start_fetch(struct core *c, struct job *job)
{
    struct core_start *s = job->starting;
    bool init = !s->candidate && init_url(job->resolved);
    if (!init && !has_urls(job)) {
        start_commit(c, job);
        return;
    }
    Boost__FetchData body = BOOST__FETCH_DATA__INIT;
    Boost__Task task = BOOST__TASK__INIT;
    body.spec = job->resolved;
    body.has_init = true;
    body.init = init;
    body.has_tries = true;
    body.tries = job->fetch_tries ? 1 : FIRST_TRIES;
    task.body_case = BOOST__TASK__BODY_FETCH_DATA;
    task.fetch_data = &body;
    free(s->fetches);
    s->fetches = calloc((size_t)s->n_nodes, sizeof *s->fetches);
    s->fetching = 0;
    s->fetched_from = now_mono(c);
    for (int i = 0; s->fetches && i < s->n_nodes; i++) {
        s->fetches[i] = task_send(c, s->nodes[i], job, job->uid, job->gid, &task, CORE_FETCH_NS, fetched, NULL);
        s->fetching += s->fetches[i] != 0;
    }
    if (s->fetching < s->n_nodes)
        start_later(c, job, "its nodes cannot be reached to fetch its files");
    else
        progress_changed(c, job);
}
