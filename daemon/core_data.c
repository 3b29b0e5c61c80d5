/* Token files by URL, and a checkpoint to start from: before an attempt begins every one of its nodes fetches what it
 * does not have yet. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"
#include "proto/jobfile.h"

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

static void cannot_be_had(struct core *c, struct job *job, const struct task *t, const struct error *err)
{
    start_cancel(c, job);
    job_reason(job, REASON(DataError),
               "%s cannot fetch its files: %.400s%s%.200s%s; release with: boostctl release %" PRId64, t->node->name,
               err->message, *err->hint ? " (" : "", err->hint, *err->hint ? ")" : "", job->id);
    job_fire(c, job, EV_HOLD);
    attempt_say_end(c, job, job->n_attempts);
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
    if (rc && is_definite(rc)) {
        cannot_be_had(c, job, t, err);
    } else if (rc) {
        char why[700];
        snprintf(why, sizeof why, "%s cannot fetch its files yet: %.400s%s%.200s%s", t->node->name, err->message,
                 *err->hint ? " (" : "", err->hint, *err->hint ? ")" : "");
        start_later(c, job, why);
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
