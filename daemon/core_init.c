/* Where a job starts from when it has no checkpoint of its own: another job's, which is found
 * and compared when the job is submitted, kept while the job needs it, and verified before an
 * attempt starts from it. */
#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"
#include "proto/base/buffer.h"
#include "proto/jobfile.h"
#include "worker/plan/plan.h"

const char *init_path(const Boost__JobSpec *resolved)
{
    const Boost__InitFrom *from = resolved->checkpoint ? resolved->checkpoint->init_from : NULL;
    return from && from->path && *from->path ? from->path : NULL;
}

const char *init_url(const Boost__JobSpec *resolved)
{
    const char *path = init_path(resolved);
    return jobfile_is_url(path) ? path : NULL;
}

bool init_is_verified(const Boost__JobSpec *resolved)
{
    int64_t step;
    int attempt;
    const char *path = init_path(resolved);
    return path && !init_url(resolved) && init_parse(path, &step, &attempt);
}

bool init_weights_only(const Boost__JobSpec *resolved)
{
    return init_path(resolved) && resolved->checkpoint->init_from->weights_only;
}

bool init_parse(const char *path, int64_t *step, int *attempt)
{
    const char *name = strrchr(path, '/');
    char *end;
    if (!name || strncmp(name, "/step-", 6) != 0 || !isdigit((unsigned char)name[6]))
        return false;
    *step = strtoll(name + 6, &end, 10);
    if (end == name + 6 || strncmp(end, ".a", 2) != 0)
        return false;
    const char *digits = end + 2;
    *attempt = (int)strtol(digits, &end, 10);
    return end != digits && !*end;
}

int64_t init_step(const Boost__JobSpec *resolved)
{
    int64_t step;
    int attempt;
    const char *path = init_path(resolved);
    return path && !init_weights_only(resolved) && init_parse(path, &step, &attempt) ? step : 0;
}

/* ---- finding ----------------------------------------------------------------------------- */

static void list_steps(const struct job *job, struct buffer *out)
{
    for (int i = 0; i < job->n_checkpoints; i++) {
        const struct checkpoint *k = job->checkpoints[i];
        if (k->state == CKPT(COMMITTED) && k->durable.state == CKPT(COMMITTED) && !k->damaged)
            buffer_printf(out, "%s%" PRId64, out->len ? ", " : "", k->step);
    }
}

int checkpoint_choose(const struct job *job, int64_t step, struct checkpoint **out, struct error *err)
{
    struct buffer steps;
    *out = NULL;
    for (int i = 0; i < job->n_checkpoints; i++) {
        struct checkpoint *k = job->checkpoints[i];
        bool fits = step >= 0 ? k->step == step : !k->aside;
        if (fits && k->state == CKPT(COMMITTED) && !k->damaged)
            *out = k; /* the newest of those */
    }
    if (*out)
        return ERR_OK;
    buffer_init(&steps, 400);
    list_steps(job, &steps);
    if (step >= 0)
        error_set(err, ERR_NOT_FOUND, "job %" PRId64 " has no committed checkpoint of step %" PRId64, job->id, step);
    else
        error_set(err, ERR_NOT_FOUND, "job %" PRId64 " has no committed checkpoint", job->id);
    if (steps.len)
        error_hint(err, "it has those of step %s", (const char *)steps.data);
    buffer_free(&steps);
    return ERR_NOT_FOUND;
}

/* "17", "17@8000", "name@8000" */
static int find(struct core *c, const char *ref, struct job **job, struct checkpoint **k, struct error *err)
{
    char name[128];
    const char *at = strrchr(ref, '@');
    size_t len = at ? (size_t)(at - ref) : strlen(ref);
    int64_t step = -1;
    if (at) {
        char *end;
        step = strtoll(at + 1, &end, 10);
        if (end == at + 1 || *end || step < 0) {
            error_set(err, ERR_INVALID, "\"job:%.100s\": \"%.40s\" is no step", ref, at + 1);
            return error_hint(err, "write job:17 or job:17@8000");
        }
    }
    if (len == 0 || len >= sizeof name) {
        error_set(err, ERR_INVALID, "\"job:%.100s\" names no job", ref);
        return error_hint(err, "write job:17 or job:17@8000");
    }
    snprintf(name, sizeof name, "%.*s", (int)len, ref);
    int rc = core_find_job(c, name, job, err);
    return rc ? rc : checkpoint_choose(*job, step, k, err);
}

int init_resolve(struct core *c, Boost__JobSpec *resolved, struct error *err)
{
    const char *path = init_path(resolved);
    struct job *job;
    struct checkpoint *k;
    int64_t step;
    int attempt, rc = ERR_OK;
    if (!path)
        return ERR_OK;
    if (strncmp(path, "job:", 4) == 0) {
        rc = find(c, path + 4, &job, &k, err);
        if (!rc)
            rc = plan_continues(job->resolved, resolved, init_weights_only(resolved), err);
        char *found = rc ? NULL : strdup(k->path);
        if (!rc && !found)
            rc = error_set(err, ERR_NOMEM, "out of memory");
        if (!rc) {
            free(resolved->checkpoint->init_from->path);
            resolved->checkpoint->init_from->path = found;
        }
    } else {
        char *end = resolved->checkpoint->init_from->path + strlen(path);
        while (end > path + 1 && end[-1] == '/')
            *--end = '\0';
        bool named = init_parse(path, &step, &attempt);
        if (!named && init_url(resolved) && !init_weights_only(resolved)) {
            error_set(err, ERR_INVALID, "%.300s: what is no checkpoint directory (step-<n>.a<k>) holds weights alone",
                      path);
            rc = error_hint(err, "set checkpoint.init_from.weights_only: true");
        } else if (!named && !init_weights_only(resolved)) {
            error_set(err, ERR_INVALID, "%.300s is not a checkpoint directory (step-<n>.a<k>)", path);
            rc = error_hint(err, "boostctl ckpt ls JOB shows the directories of a job's checkpoints; of a Hugging Face "
                                 "directory the weights can be taken (weights_only: true)");
        }
    }
    if (!rc && init_step(resolved) >= resolved->run->steps) {
        error_set(err, ERR_INVALID, "run.steps = %" PRId64 ": the checkpoint is of step %" PRId64 " already",
                  resolved->run->steps, init_step(resolved));
        rc = error_hint(err, "raise run.steps, or set checkpoint.init_from.weights_only: true to begin at step 0");
    }
    if (rc && err->code != ERR_NOMEM)
        err->code = rc = ERR_INVALID;
    return rc ? error_context(err, "checkpoint.init_from") : ERR_OK;
}

/* Is this the URL of the checkpoint's copy? That goes with it. */
static bool is_copy(const char *url, const struct checkpoint *k)
{
    char *copy = mirror_copy_url(k);
    bool same = copy && !strcmp(copy, url);
    free(copy);
    return same;
}

const struct checkpoint *init_known(struct core *c, const Boost__JobSpec *resolved, uint32_t uid)
{
    const char *path = init_path(resolved);
    for (int i = 0; path && i < c->n_jobs; i++)
        for (int n = 0; c->jobs[i]->uid == uid && n < c->jobs[i]->n_checkpoints; n++) {
            const struct checkpoint *k = c->jobs[i]->checkpoints[n];
            if (k->state == CKPT(COMMITTED) && k->path && !strcmp(k->path, path))
                return k;
        }
    return NULL;
}

/* Until one of the job's own is durable: a crash would leave it with this one alone. */
bool init_in_use(struct core *c, const struct checkpoint *k)
{
    for (const struct job *job = c->active.head; job; job = job->active.next) {
        const char *path = init_path(job->resolved);
        if (path && k->path && (strcmp(path, k->path) == 0 || is_copy(path, k)) && checkpoints_durable_step(job) < 0)
            return true;
    }
    return false;
}

int init_still_there(struct core *c, const Boost__JobSpec *resolved, struct error *err)
{
    const char *path = init_path(resolved);
    for (int i = 0; path && i < c->n_jobs; i++)
        for (int n = 0; n < c->jobs[i]->n_checkpoints; n++) {
            const struct checkpoint *k = c->jobs[i]->checkpoints[n];
            if (k->state == CKPT(COMMITTED) || !k->path || strcmp(k->path, path) != 0)
                continue;
            error_set(err, ERR_INVALID,
                      "checkpoint.init_from: the checkpoint of step %" PRId64 " of job %" PRId64
                      " has been deleted meanwhile",
                      k->step, c->jobs[i]->id);
            return error_hint(err, "submit again: a newer one is there");
        }
    return ERR_OK;
}

void init_hint_copy(struct core *c, const Boost__JobSpec *resolved, uint32_t uid, struct error *err)
{
    const struct checkpoint *k = init_known(c, resolved, uid);
    bool copied = k && k->durable.mirror == BOOST__MIRROR_STATE__VALUE__MIRRORED;
    char *url = copied && (err->code == ERR_NOT_FOUND || err->code == ERR_CORRUPT) ? mirror_copy_url(k) : NULL;
    if (url)
        error_hint(err,
                   "there is a copy: boostctl submit FILE --set checkpoint.init_from.path=%s --set data.cache_dir=DIR",
                   url);
    free(url);
}
