/* The registry of checkpoints: shards come in, a transaction says COMMITTED behind the manifest, and which are no more
 * to be kept. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"

/* What a note begins with is how a restarted controller knows it again. */
static const char damaged_mark[] = "damaged: ";
static const char aside_mark[] = "set aside: ";
/* ---- looking ------------------------------------------------------------------------- */

bool checkpoint_whole(const struct checkpoint *k)
{
    return k->n_shards == k->world;
}

/* A job may go on from it. */
static bool good(const struct checkpoint *k)
{
    return k->state == CKPT(COMMITTED) && !k->damaged && !k->aside;
}

struct checkpoint *checkpoints_newest(const struct job *job, const struct checkpoint *below)
{
    int i = job->n_checkpoints - 1;
    while (below && i >= 0 && job->checkpoints[i] != below)
        i--;
    for (i -= below != NULL; i >= 0; i--)
        if (good(job->checkpoints[i]))
            return job->checkpoints[i];
    return NULL;
}

int64_t checkpoints_durable_step(const struct job *job)
{
    for (int i = job->n_checkpoints - 1; i >= 0; i--) {
        const struct checkpoint *k = job->checkpoints[i];
        if (k->durable.state == CKPT(COMMITTED) && !k->damaged && !k->aside)
            return k->step;
    }
    return -1;
}

bool checkpoint_has_other(const struct job *job, const struct checkpoint *k)
{
    for (int i = 0; i < job->n_checkpoints; i++)
        if (job->checkpoints[i] != k && good(job->checkpoints[i]) &&
            job->checkpoints[i]->durable.state == CKPT(COMMITTED))
            return true;
    return false;
}

int64_t checkpoints_highest(const struct job *job, int attempt)
{
    for (int i = job->n_checkpoints - 1; i >= 0; i--) {
        const struct checkpoint *k = job->checkpoints[i];
        bool was = k->state == CKPT(COMMITTED) || k->state == CKPT(DELETING) || k->state == CKPT(DELETED);
        if (was && k->attempt <= attempt && !k->aside)
            return k->step;
    }
    return -1;
}

int checkpoints_open(const struct job *job, const struct attempt *a)
{
    int open = 0;
    bool last_known = a->to_step <= a->from_step;
    for (int i = 0; i < job->n_checkpoints; i++) {
        const struct checkpoint *k = job->checkpoints[i];
        if (k->attempt != a->number)
            continue;
        if (k->state == CKPT(WRITING) && checkpoint_whole(k))
            return 1;
        if (k->state == CKPT(WRITING))
            open = 2;
        last_known = last_known || k->step >= a->to_step;
    }
    return last_known ? open : 2;
}

int checkpoint_shard_records(const struct checkpoint *k, struct arena *arena, Boost__ShardRecord ***out)
{
    Boost__ShardRecord **list = arena_alloc(arena, (size_t)k->world * sizeof *list);
    Boost__ShardRecord *records = arena_alloc(arena, (size_t)k->world * sizeof *records);
    if (!list || !records)
        return ERR_NOMEM;
    for (int r = 0; r < k->world; r++) {
        const struct checkpoint_shard *s = &k->shards[r];
        boost__shard_record__init(&records[r]);
        records[r].has_step = records[r].has_rank = records[r].has_bytes = records[r].has_crc32c = true;
        records[r].step = k->step;
        records[r].rank = r;
        records[r].file = s->file;
        records[r].bytes = s->bytes;
        records[r].crc32c = s->crc32c;
        records[r].has_write_ms = true;
        records[r].write_ms = s->write_ms;
        records[r].dir = k->path;
        list[r] = &records[r];
    }
    *out = list;
    return ERR_OK;
}

/* ---- changes of state ------------------------------------------------------------------ */

void checkpoints_renew(struct job *job)
{
    const struct checkpoint *k = checkpoints_newest(job, NULL);
    job->checkpoint_step = k ? k->step : -1;
}

static void abandon(struct core *c, struct job *job, struct checkpoint *k, const char *node, const char *note)
{
    task_cancel(c, k->task);
    k->task = 0;
    k->retry_due = 0;
    k->tries = 0;
    k->state = CKPT(ABANDONED);
    text_set(&k->note, note);
    mark_checkpoint(c, job, k);
    add_event(c, job, k->attempt, node, "controller", "checkpoint-abandoned",
              "checkpoint of step %" PRId64 " is given up: %s", k->step, note);
}

static bool is_disk_full(const char *error)
{
    return strcasestr(error, "no space left") || strcasestr(error, "disk quota") || strcasestr(error, "ENOSPC");
}

const struct checkpoint *checkpoints_disk_full(const struct job *job, const struct attempt *a)
{
    for (int i = job->n_checkpoints - 1; i >= 0; i--) {
        const struct checkpoint *k = job->checkpoints[i];
        if (k->attempt == a->number && k->state == CKPT(ABANDONED) && k->note && is_disk_full(k->note))
            return k;
    }
    return NULL;
}

void checkpoint_failed(struct core *c, struct job *job, struct checkpoint *k, const char *node, const char *why)
{
    abandon(c, job, k, node, why);
    if (job->state == STATE(RUNNING)) /* it trains on without */
        job_reason(job, is_disk_full(why) ? REASON(DiskFull) : REASON(NONE), "no checkpoint of step %" PRId64 ": %s",
                   k->step, why);
}

void checkpoints_abandon_open(struct core *c, struct job *job, const struct attempt *a, const char *why)
{
    for (int i = 0; i < job->n_checkpoints; i++) {
        struct checkpoint *k = job->checkpoints[i];
        if (k->attempt != a->number || k->state != CKPT(WRITING))
            continue;
        char note[256];
        if (checkpoint_whole(k))
            snprintf(note, sizeof note, "%s before its manifest was written", why);
        else
            snprintf(note, sizeof note, "%s with %d of %d shards", why, k->n_shards, k->world);
        abandon(c, job, k, NULL, note);
    }
}

void checkpoint_sound(struct core *c, struct job *job, struct checkpoint *k, const char *node)
{
    k->damaged = false;
    text_set(&k->note, "");
    mark_checkpoint(c, job, k);
    checkpoints_renew(job);
    add_event(c, job, k->attempt, node, "controller", "checkpoint-sound",
              "checkpoint of step %" PRId64 " verifies after all: the job can go on from it", k->step);
}

void checkpoint_damaged(struct core *c, struct job *job, struct checkpoint *k, const char *node, const char *why)
{
    char note[1024];
    snprintf(note, sizeof note, "%s%s (verified on %s)", damaged_mark, why, node);
    k->damaged = true;
    text_set(&k->note, note);
    mark_checkpoint(c, job, k);
    checkpoints_renew(job);
    bool starts = job->starting && job->starting->candidate == k; /* else a user has asked */
    const struct checkpoint *next = checkpoints_newest(job, starts ? k : NULL);
    char instead[64];
    if (next)
        snprintf(instead, sizeof instead, starts ? "the one of step %" PRId64 " is tried"
                                                 : "a resume would take the one of step %" PRId64,
                 next->step);
    else
        snprintf(instead, sizeof instead, starts ? "no older one is left" : "no other one is left");
    add_event(c, job, k->attempt, node, "controller", "checkpoint-damaged",
              "checkpoint of step %" PRId64 " does not verify: %s; %s", k->step, why, instead);
}

void checkpoints_set_aside(struct core *c, struct job *job, int64_t step)
{
    for (int i = 0; i < job->n_checkpoints; i++) {
        struct checkpoint *k = job->checkpoints[i];
        if (k->step <= step || k->aside || (k->state != CKPT(COMMITTED) && k->state != CKPT(DELETED)))
            continue;
        char note[128];
        snprintf(note, sizeof note, "%sthe job went on from step %" PRId64 " in attempt %d", aside_mark, step,
                 job->n_attempts + 1);
        k->aside = true;
        if (!k->damaged)
            text_set(&k->note, note);
        mark_checkpoint(c, job, k);
    }
    checkpoints_renew(job);
}

void checkpoint_commit(struct core *c, struct job *job, struct checkpoint *k, const char *node)
{
    struct attempt *a = job_attempt(job, k->attempt);
    int64_t bytes = 0;
    int64_t highest = checkpoints_highest(job, job->n_attempts);
    k->state = CKPT(COMMITTED);
    text_set(&k->note, "");
    mirror_want(job, k);
    job->checkpoint_ms = 0;
    for (int r = 0; r < k->world; r++) {
        bytes += k->shards[r].bytes;
        if (k->shards[r].write_ms > job->checkpoint_ms)
            job->checkpoint_ms = k->shards[r].write_ms;
    }
    mark_checkpoint(c, job, k);
    /* Progress: the budgets begin anew. A step that was committed before and then found damaged is none. */
    if (k->step > highest) {
        if (a)
            a->advanced = true;
        job->restarts_used = 0;
        job->stuck_attempts = 0;
        job->backoff_count = 0;
    }
    if (a && k->step > a->from_step)
        a->committed = true;
    checkpoints_renew(job);
    if (job->state == STATE(RUNNING) && (job->reason == REASON(DiskFull) || job->reason == REASON(NONE)))
        job_reason(job, REASON(NONE), "%s", ""); /* what checkpoint_failed() said */
    add_event(c, job, k->attempt, node, "controller", "checkpoint",
              "checkpoint of step %" PRId64 " committed: %d shard%s, %.1f MiB", k->step, k->world,
              k->world == 1 ? "" : "s", (double)bytes / (1 << 20));
    checkpoints_retain(c, job);
    elastic_committed(c, job);
}

bool checkpoint_in_use(struct core *c, const struct job *job, const struct checkpoint *k)
{
    const struct attempt *a = job_live_attempt(job);
    if (k->readers > 0)
        return true;
    if (job->starting && job->starting->candidate == k)
        return true;
    if (init_in_use(c, k) || k->mirror_task)
        return true;
    return a && !a->committed && a->from_attempt == k->attempt && a->from_step == k->step;
}

/* An older one gives way to a COMMITTED one whose row is durable, or is in the very transaction that says DELETING of
 * the older: a crash then leaves both rows new or both old, and the files go when they are new (checkpoints_work()).
 * One whose row is on its way in an earlier transaction does not count: should the store refuse that and take this one,
 * nothing would be left. It is looked at again when it is durable. */
void checkpoints_retain(struct core *c, struct job *job)
{
    const Boost__Checkpoint *spec = job->resolved->checkpoint;
    int keep = spec && spec->keep > 0 ? spec->keep : 1;
    int64_t keep_every = spec ? spec->keep_every : 0;
    int kept = 0;
    for (int i = job->n_checkpoints - 1; i >= 0; i--) {
        struct checkpoint *k = job->checkpoints[i];
        if (k->state != CKPT(COMMITTED))
            continue;
        bool excess = kept >= keep;
        if (good(k) && (k->dirty || k->durable.state == CKPT(COMMITTED)))
            kept++;
        if (!excess || k->pinned || checkpoint_in_use(c, job, k) ||
            (!k->damaged && keep_every > 0 && k->step % keep_every == 0))
            continue;
        k->state = CKPT(DELETING);
        mark_checkpoint(c, job, k);
    }
}

/* ---- shards ------------------------------------------------------------------------------ */

struct shard_ack {
    int64_t job, seq;
    int attempt, rank;
    char node[65];
};

static void shards_durable(struct core *c, void *arg, int rc, const struct error *err)
{
    const struct shard_ack *x = arg;
    Boost__Ack ack = BOOST__ACK__INIT;
    (void)err;
    if (rc)
        return; /* the agent sends them again */
    ack.has_job = ack.has_attempt = ack.has_rank = ack.has_shards_seq = true;
    ack.job = x->job;
    ack.attempt = x->attempt;
    ack.rank = x->rank;
    ack.shards_seq = x->seq;
    send_ack(c, x->node, &ack);
}

static void drop_ack(void *arg)
{
    free(arg);
}

static void shard_failed(struct core *c, struct job *job, struct attempt *a, struct checkpoint *k, int rank,
                         const char *error)
{
    const char *node = a->parts[a->ranks[rank].part].node;
    char note[512];
    k->shards[rank].failed = true;
    if (k->state != CKPT(WRITING)) {
        c->work = true; /* it may be the last one that a deletion waits for */
        return;
    }
    snprintf(note, sizeof note, "rank %d on %s could not write its shard: %.400s", rank, node, error);
    checkpoint_failed(c, job, k, node, note);
}

static void shard_stored(struct core *c, struct job *job, struct checkpoint *k, int rank, const Boost__ShardRecord *x)
{
    struct checkpoint_shard *s = &k->shards[rank];
    if (s->have || k->state != CKPT(WRITING))
        return;
    text_set(&s->file, x->file);
    s->have = true;
    s->bytes = x->bytes;
    s->crc32c = x->crc32c;
    s->write_ms = x->write_ms;
    k->n_shards++;
    attempt_reached(job, job_attempt(job, k->attempt), k->step);
    put_shard(c, job, k, rank);
    mark_checkpoint(c, job, k);
}

/* The checkpoint of a record; made when it is the first shard of it. NULL: the record makes no sense. */
static struct checkpoint *checkpoint_of(struct core *c, struct job *job, struct attempt *a, const Boost__ShardRecord *x)
{
    struct checkpoint *k = job_checkpoint(job, x->step, a->number);
    char *dir = NULL, *path = NULL;
    if (k)
        return k;
    dir = checkpoint_dir_of(c, job);
    if (!dir || asprintf(&path, "%s/step-%" PRId64 ".a%d", dir, x->step, a->number) < 0)
        path = NULL;
    free(dir);
    if (!path || x->step < 0 || (x->dir && strcmp(x->dir, path) != 0)) {
        c->stats.protocol_errors++;
        core_log_line(c, CORE_LOG_ERROR, "job %" PRId64 ": a shard in %s, not in %s", job->id, x->dir ? x->dir : "?",
                      path ? path : "?");
    } else {
        k = job_add_checkpoint(job, x->step, a->number, a->world);
        if (k) {
            k->state = CKPT(WRITING);
            text_set(&k->path, path);
            text_set(&k->note, "");
            mark_checkpoint(c, job, k);
        }
    }
    free(path);
    return k;
}

void checkpoints_shards(struct core *c, struct job *job, struct attempt *a, const Boost__ShardBatch *batch)
{
    int64_t seq = 0;
    for (size_t i = 0; i < batch->n_records; i++) {
        const Boost__ShardRecord *x = batch->records[i];
        /* What comes after the attempt's end can no more be committed, and is not needed to know what to delete. */
        struct checkpoint *k = a->end_ns ? NULL : checkpoint_of(c, job, a, x);
        if (k && batch->rank < k->world) {
            if (x->failed)
                shard_failed(c, job, a, k, batch->rank, x->error ? x->error : "no reason given");
            else
                shard_stored(c, job, k, batch->rank, x);
        }
        if (x->seq > seq)
            seq = x->seq;
    }
    struct shard_ack *ack = seq ? calloc(1, sizeof *ack) : NULL;
    if (ack) {
        *ack = (struct shard_ack){.job = job->id, .seq = seq, .attempt = a->number, .rank = batch->rank};
        snprintf(ack->node, sizeof ack->node, "%s", a->parts[a->ranks[batch->rank].part].node);
        after_durable(c, shards_durable, ack, drop_ack);
    }
    attempt_try_close(c, job);
}
