/* Checkpoints that an adopted store does not know of: made after its copy, while those that it knows may be deleted by
 * now. Before such a job starts again, an agent looks at what manifests there are. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"

/* Every rank's shard once, and nothing else. The directory is the user's: a number in it may be anything. */
static bool sound(const struct job *job, const Boost__FoundCheckpoint *x)
{
    if (x->step < 0 || x->attempt < 1 || x->attempt > job->n_attempts + CORE_ADOPTED_GAP || x->world < 1 ||
        x->n_shards != (size_t)x->world)
        return false;
    for (size_t i = 0; i < x->n_shards; i++)
        if (x->shards[i]->rank != (int32_t)i || !x->shards[i]->file)
            return false;
    return true;
}

static struct checkpoint *add(struct core *c, struct job *job, const Boost__FoundCheckpoint *x)
{
    char *dir = checkpoint_dir_of(c, job), *path = NULL;
    struct checkpoint *k = NULL;
    if (!dir || asprintf(&path, "%s/step-%" PRId64 ".a%d", dir, x->step, x->attempt) < 0)
        path = NULL; /* whatever a call that failed has left in it */
    if (path)
        k = job_add_checkpoint(job, x->step, x->attempt, x->world);
    if (k) {
        k->state = CKPT(COMMITTED);
        text_set(&k->path, path);
        text_set(&k->note, "found: committed after the copy was made that this controller was adopted from");
        k->changed_ns = now_wall(c);
        mark_checkpoint(c, job, k);
    }
    for (int r = 0; k && r < x->world; r++) {
        struct checkpoint_shard *s = &k->shards[r];
        s->have = true;
        text_set(&s->file, x->shards[r]->file);
        s->bytes = x->shards[r]->bytes;
        s->crc32c = x->shards[r]->crc32c;
        k->n_shards++;
        put_shard(c, job, k, r);
    }
    free(path);
    free(dir);
    return k;
}

static void found(struct core *c, struct task *t, int rc, const struct error *err, const Boost__TaskReply *reply)
{
    struct job *job = core_job(c, t->job);
    if (!job || !job->starting || job->starting->task != t->id)
        return;
    job->starting->task = 0;
    if (rc == ERR_UNREACHABLE || rc == ERR_TIMEOUT || rc == ERR_NOMEM) {
        char why[512];
        snprintf(why, sizeof why, "it cannot be seen yet which checkpoints there are: %.300s", err->message);
        start_later(c, job, why);
        return;
    }
    int n = 0;
    for (size_t i = 0; reply && i < reply->n_found; i++) {
        const Boost__FoundCheckpoint *x = reply->found[i];
        if (!sound(job, x) || job_checkpoint(job, x->step, x->attempt))
            continue;
        struct checkpoint *k = add(c, job, x);
        if (!k)
            break;
        n++;
        /* Its attempt's number is taken, though no agent may tell of it any more. */
        if (x->attempt > job->attempt_floor)
            job->attempt_floor = x->attempt;
        add_event(c, job, x->attempt, t->node->name, "controller", "checkpoint-found",
                  "checkpoint of step %" PRId64 " found: it was committed after the copy was made that this controller "
                  "was adopted from",
                  x->step);
    }
    if (n)
        checkpoints_renew(job);
    job->searched = true;
    if (job->attempt_floor > job->n_attempts)
        start_cancel(c, job); /* its devices are held under a number that is taken: again, under another */
    else
        start_searched(c, job);
}

void found_search(struct core *c, struct job *job)
{
    struct core_start *s = job->starting;
    if (!c->adopted || job->searched) {
        start_searched(c, job);
        return;
    }
    Boost__FindCheckpoints find = BOOST__FIND_CHECKPOINTS__INIT;
    Boost__Task body = BOOST__TASK__INIT;
    find.dir = checkpoint_dir_of(c, job);
    body.body_case = BOOST__TASK__BODY_FIND_CHECKPOINTS;
    body.find_checkpoints = &find;
    s->task = find.dir ? task_send(c, s->nodes[0], job, job->uid, job->gid, &body, CORE_SHARED_NS, found, NULL) : 0;
    free(find.dir);
    if (!s->task)
        start_later(c, job, "its node cannot be reached to see which checkpoints there are");
    else
        progress_changed(c, job);
}
