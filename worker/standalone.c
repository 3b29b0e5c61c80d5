/* standalone.h */
#include "worker/standalone.h"

#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/base/fs.h"
#include "proto/jobfile.h"
#include "proto/rankfiles.h"
#include "worker/checkpoint.h"
#include "worker/engine.h"
#include "worker/plan/plan.h"
#include "worker/rank.h"

struct rank_thread {
    pthread_t thread;
    struct rank_orders orders;
    struct error error;
    int exit_code;
};

static void *rank_main(void *arg)
{
    struct rank_thread *r = arg;
    r->exit_code = rank_run(&r->orders, &r->error);
    return NULL;
}

/* A rank that lost a peer is not the cause; the cause is the one to show. */
static int worst(const struct rank_thread *ranks, int world, struct error *err)
{
    int chosen = -1;
    for (int i = 0; i < world; i++)
        if (ranks[i].exit_code && (chosen < 0 || (ranks[chosen].exit_code == RANK_EXIT_PEER &&
                                                  ranks[i].exit_code != RANK_EXIT_PEER)))
            chosen = i;
    if (chosen < 0)
        return 0;
    *err = ranks[chosen].error;
    if (world > 1)
        error_context(err, "rank %d", chosen);
    return ranks[chosen].exit_code;
}

static int run_ranks(const Boost__AttemptStart *start, const struct plan *plan, struct error *err)
{
    struct comm_layout layout = engine_layout(plan);
    int world = start->world, started = 0;
    struct local_world *local = NULL;
    struct rank_thread *ranks = calloc((size_t)world, sizeof *ranks);
    int rc = ranks ? local_world_create(&layout, &local, err) : error_set(err, ERR_NOMEM, "out of memory");
    if (rc) {
        free(ranks);
        return rank_exit_code(err);
    }
    for (int i = 0; i < world; i++) {
        ranks[i].orders = (struct rank_orders){.start = start, .rank = i, .local = local, .log = stdout};
        int errnum = pthread_create(&ranks[i].thread, NULL, rank_main, &ranks[i]);
        if (errnum) {
            rc = error_errno(err, errnum, "cannot start the thread of rank %d", i);
            local_world_abort(local, i);
            break;
        }
        started++;
    }
    for (int i = 0; i < started; i++)
        pthread_join(ranks[i].thread, NULL);
    int code = rc ? rank_exit_code(err) : worst(ranks, world, err);
    local_world_destroy(local);
    free(ranks);
    return code;
}

/* The job file with its overrides and absolute paths, resolved for this machine; the caller's to free. */
static int load_spec(const struct standalone *s, Boost__JobSpec **out, struct error *err)
{
    struct job_file f;
    char cwd[PATH_MAX];
    int rc = jobfile_load(&f, s->job_file, JOB_FORMAT_AUTO, false, err);
    for (size_t i = 0; i < s->n_set && !rc; i++)
        rc = jobfile_set(f.spec, &f.arena, s->set[i], err);
    if (!rc && !getcwd(cwd, sizeof cwd))
        rc = error_set(err, ERR_IO, "cannot tell the working directory");
    if (!rc)
        rc = jobfile_absolute_paths(f.spec, &f.arena, cwd, err);
    if (!rc)
        rc = plan_resolve(f.spec, &(struct plan_machine){0}, out, err);
    jobfile_free(&f);
    return rc;
}

static int threads_of(const Boost__JobSpec *spec, int world)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    if (spec->resources && spec->resources->threads_per_rank > 0)
        return spec->resources->threads_per_rank;
    return cores > world ? (int)(cores / world) : 1;
}

/* --resume, else what the job file says; NULL: neither. */
static const char *starts_from(const struct standalone *s, const Boost__JobSpec *spec, struct error *err)
{
    const Boost__InitFrom *from = spec->checkpoint->init_from;
    if (s->resume || !from || !from->path || !*from->path)
        return s->resume;
    if (strncmp(from->path, "job:", 4) == 0) {
        error_set(err, ERR_UNSUPPORTED, "checkpoint.init_from.path = %s: jobs are known to boostd alone", from->path);
        error_hint(err, "name the directory, which boostctl ckpt ls shows");
        return NULL;
    }
    if (jobfile_is_url(from->path)) {
        error_set(err, ERR_UNSUPPORTED, "checkpoint.init_from.path = %s: agents fetch URLs, nobody else", from->path);
        error_hint(err, "submit the job, or fetch the directory and name it");
        return NULL;
    }
    return from->path;
}

int standalone_run(const struct standalone *s, struct error *err)
{
    Boost__JobSpec *spec = NULL;
    struct plan plan;
    char run_dir[PATH_MAX], resume_dir[PATH_MAX];
    const char *from = NULL;
    error_clear(err);
    int rc = load_spec(s, &spec, err);
    if (!rc && !(from = starts_from(s, spec, err)))
        rc = (int)err->code;
    if (!rc)
        rc = plan_make(spec, &plan, err);
    if (!rc)
        rc = fs_make_dirs(s->run_dir, 0755, err);
    if (!rc && !realpath(s->run_dir, run_dir))
        rc = error_set(err, ERR_IO, "cannot find %s", s->run_dir);
    if (!rc && from && !realpath(from, resume_dir))
        rc = error_set(err, ERR_NOT_FOUND, "no checkpoint directory %s", from);
    int code = rc ? rank_exit_code(err) : 0;
    if (!rc) {
        Boost__AttemptStart start = BOOST__ATTEMPT_START__INIT;
        Boost__CheckpointRef resume = BOOST__CHECKPOINT_REF__INIT;
        resume.path = resume_dir;
        resume.has_weights_only = true;
        resume.weights_only = !s->resume && from && spec->checkpoint->init_from->weights_only;
        start.resume = from ? &resume : NULL;
        start.attempt = from ? checkpoint_attempt_of(resume_dir) + 1 : 1;
        start.spec = spec;
        start.world = plan.world;
        start.run_dir = run_dir;
        start.checkpoint_dir = spec->checkpoint->dir;
        start.threads_per_rank = threads_of(spec, plan.world);
        code = run_ranks(&start, &plan, err);
    }
    if (spec)
        boost__job_spec__free_unpacked(spec, NULL);
    return code;
}
