/* Copies of committed checkpoints in an object store: which are to be made, by whom, and what became of them. An agent
 * makes them, as the job's user; the copy of a checkpoint goes when the checkpoint goes. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"

#define MIRROR(s) BOOST__MIRROR_STATE__VALUE__##s
/* So many in a row, then it is FAILED and only tried now and then. */
enum { TRIES = 10, DEFINITE_TRIES = 3 };
#define RETRY_MAX_NS (300 * NS_PER_S)
#define FAILED_RETRY_NS (300 * NS_PER_S)
#define FAILED_RETRY_MAX_NS (3600 * NS_PER_S)

bool mirror_wanted(const struct checkpoint *k)
{
    return k->state == CKPT(COMMITTED) && !k->damaged &&
           (k->mirror == MIRROR(PENDING) || k->mirror == MIRROR(FAILED));
}

void mirror_want(const struct job *job, struct checkpoint *k)
{
    const Boost__Checkpoint *spec = job->resolved->checkpoint;
    if (!spec || !spec->mirror || !*spec->mirror)
        return;
    text_set(&k->mirror_url, spec->mirror); /* a restart may change the job's */
    k->mirror = k->mirror_url ? MIRROR(PENDING) : MIRROR(NONE);
}

char *mirror_copy_url(const struct checkpoint *k)
{
    const char *mirror = k->mirror_url && k->path ? k->mirror_url : "";
    const char *tail = k->path ? k->path + strlen(k->path) : "";
    char *out = NULL;
    int len = (int)strlen(mirror);
    for (int parts = 2; len && tail > k->path && parts; parts -= *tail == '/')
        tail--;
    while (len && mirror[len - 1] == '/')
        len--;
    return len && asprintf(&out, "%.*s%s", len, mirror, tail) >= 0 ? out : NULL;
}

/* Nothing is won by a few more tries. */
static bool is_definite(int rc)
{
    return rc == ERR_CORRUPT || rc == ERR_NOT_FOUND || rc == ERR_INVALID || rc == ERR_REFUSED || rc == ERR_UNSUPPORTED;
}

static void wait_for(struct core *c, struct checkpoint *k)
{
    bool given_up = k->mirror == MIRROR(FAILED);
    int64_t ns = given_up ? FAILED_RETRY_NS : CORE_RETRY_NS, most = given_up ? FAILED_RETRY_MAX_NS : RETRY_MAX_NS;
    for (int i = 1; i < k->mirror_tries && ns < most; i++)
        ns *= 2;
    k->mirror_due = now_mono(c) + (ns < most ? ns : most);
    due_at(c, k->mirror_due);
}

static void failed(struct core *c, struct job *job, struct checkpoint *k, const struct task *t, int rc,
                   const struct error *err)
{
    char note[900];
    k->mirror_tries++;
    bool known = k->mirror == MIRROR(FAILED);
    bool again = !known && k->mirror_tries < (is_definite(rc) ? DEFINITE_TRIES : TRIES);
    snprintf(note, sizeof note, "%s: %.500s%s%.300s%s", again ? "no copy yet" : "no copy", err->message,
             *err->hint ? " (" : "", err->hint, *err->hint ? ")" : "");
    text_set(&k->mirror_note, note);
    mark_checkpoint(c, job, k);
    if (again || known) {
        wait_for(c, k);
        return;
    }
    int tries = k->mirror_tries;
    k->mirror = MIRROR(FAILED);
    k->mirror_tries = 1;
    wait_for(c, k);
    add_event(c, job, k->attempt, t->node->name, "controller", "checkpoint-not-mirrored",
              "checkpoint of step %" PRId64 " has no copy in %s after %d tries: %s%s%s%s; it is tried again now and then, and "
              "by: boostctl ckpt mirror %" PRId64 "@%" PRId64, k->step, k->mirror_url, tries, err->message,
              *err->hint ? " (" : "", err->hint, *err->hint ? ")" : "", job->id, k->step);
}

static void mirrored(struct core *c, struct task *t, int rc, const struct error *err, const Boost__TaskReply *reply)
{
    struct job *job = core_job(c, t->job);
    struct checkpoint *k = job ? job_checkpoint(job, t->step, t->attempt) : NULL;
    if (!k || k->mirror_task != t->id)
        return;
    k->mirror_task = 0;
    c->work = true;
    if (rc == ERR_OK) {
        k->mirror = MIRROR(MIRRORED);
        char *url = mirror_copy_url(k);
        text_set(&k->mirror_note, "");
        mark_checkpoint(c, job, k);
        add_event(c, job, k->attempt, t->node->name, "controller", "checkpoint-mirrored",
                  "checkpoint of step %" PRId64 " copied to %s: %.1f MiB sent in %.1f s", k->step,
                  url ? url : k->mirror_url, (double)reply->moved / (1 << 20),
                  (double)(now_mono(c) - t->since) / (double)NS_PER_S);
        free(url);
    } else if (!reply || rc == ERR_BUSY || rc == ERR_CANCELLED) {
        wait_for(c, k); /* the agent is gone, is going, or still at it */
    } else {
        failed(c, job, k, t, rc, err);
    }
    checkpoints_retain(c, job);
}

static bool send_mirror(struct core *c, struct job *job, struct checkpoint *k, struct node *n)
{
    struct arena mem;
    struct task *t = NULL;
    Boost__MirrorCheckpoint body = BOOST__MIRROR_CHECKPOINT__INIT;
    Boost__Task task = BOOST__TASK__INIT;
    arena_init(&mem, 64 << 20);
    body.dir = k->path;
    body.has_step = body.has_attempt = true;
    body.step = k->step;
    body.attempt = k->attempt;
    body.mirror = k->mirror_url;
    body.n_shards = (size_t)k->world;
    task.body_case = BOOST__TASK__BODY_MIRROR_CHECKPOINT;
    task.mirror_checkpoint = &body;
    if (checkpoint_shard_records(k, &mem, &body.shards) == ERR_OK)
        k->mirror_task = task_send(c, n, job, job->uid, job->gid, &task, CORE_MIRROR_NS, mirrored, &t);
    if (k->mirror_task) {
        t->step = k->step;
        t->attempt = k->attempt;
    }
    arena_free(&mem);
    return k->mirror_task != 0;
}

int mirror_ask(struct core *c, struct job *job, struct checkpoint *k, struct error *err)
{
    if (k->mirror == MIRROR(NONE))
        mirror_want(job, k);
    if (k->mirror == MIRROR(NONE)) {
        error_set(err, ERR_REFUSED, "job %" PRId64 " has no checkpoint.mirror", job->id);
        return error_hint(err, "boostctl restart %" PRId64 " --set checkpoint.mirror=s3://bucket/prefix", job->id);
    }
    if (k->damaged)
        return error_set(err, ERR_REFUSED, "the checkpoint of step %" PRId64 " is damaged: there is nothing to copy",
                         k->step);
    int64_t since = k->changed_ns;
    k->mirror = MIRROR(PENDING);
    k->mirror_tries = 0;
    k->mirror_due = 0;
    text_set(&k->mirror_note, "");
    mark_checkpoint(c, job, k);
    k->changed_ns = since; /* its state is as old as before */
    c->work = true;
    return ERR_OK;
}

void mirrors_hurry(struct core *c)
{
    for (struct job *job = c->working.head; job; job = job->working.next)
        for (int i = 0; i < job->n_checkpoints; i++) {
            struct checkpoint *k = job->checkpoints[i];
            if (!mirror_wanted(k))
                continue;
            k->mirror_due = 0;
            if (k->mirror == MIRROR(FAILED))
                k->mirror_tries = 0;
        }
    c->work = true;
}

void mirror_work(struct core *c, struct job *job)
{
    for (int i = 0; i < job->n_checkpoints; i++)
        if (job->checkpoints[i]->mirror_task)
            return;
    for (int i = job->n_checkpoints - 1; i >= 0; i--) {
        struct checkpoint *k = job->checkpoints[i];
        if (!mirror_wanted(k))
            continue;
        if (k->mirror_due > now_mono(c)) {
            due_at(c, k->mirror_due);
            continue;
        }
        struct node *n = task_node(c, job, job->uid, SCHED_CPU);
        if (n && !send_mirror(c, job, k, n))
            wait_for(c, k);
        return;
    }
}
