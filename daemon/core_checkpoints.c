/* The registry of checkpoints: shards come in, a manifest is written, a transaction
 * says COMMITTED; what is not needed or never got whole is deleted. Files are only
 * ever touched by agents, as the job's user. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"

/* What a note begins with is how a restarted controller knows it again. */
static const char damaged_mark[] = "damaged: ";
static const char aside_mark[] = "set aside: ";
/* What a note says last while a deletion waits. */
static const char waits_mark[] = "not deleted yet: ";

enum { COPY_TRIES = 24 }; /* to delete a copy: half a day */
#define LATE_RETRY_MAX_NS (3600 * NS_PER_S)

/* ---- looking ------------------------------------------------------------------------- */

static bool whole(const struct checkpoint *k)
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

static bool is_last_of_attempt(const struct job *job, const struct checkpoint *k)
{
    for (int i = 0; i < job->n_checkpoints; i++)
        if (job->checkpoints[i]->attempt == k->attempt && job->checkpoints[i]->step > k->step &&
            whole(job->checkpoints[i]))
            return false;
    return true;
}

/* Nobody writes into its directory any more. */
static bool may_delete(const struct job *job, const struct checkpoint *k)
{
    const struct attempt *live = job_live_attempt(job);
    if (!live || live->number != k->attempt || !is_last_of_attempt(job, k))
        return true;
    for (int r = 0; r < k->world; r++)
        if (!k->shards[r].have && !k->shards[r].failed)
            return false;
    return true;
}

static bool has_work(const struct checkpoint *k)
{
    return mirror_wanted(k) || (k->state == CKPT(WRITING) && whole(k)) || k->state == CKPT(DELETING) ||
           (k->state == CKPT(ABANDONED) && k->path && k->path[0]);
}

bool checkpoint_file_work(const struct job *job)
{
    for (int i = job->n_checkpoints - 1; i >= 0; i--)
        if (has_work(job->checkpoints[i]))
            return true;
    return false;
}

int checkpoints_open(const struct job *job, const struct attempt *a)
{
    int open = 0;
    bool last_known = a->to_step <= a->from_step;
    for (int i = 0; i < job->n_checkpoints; i++) {
        const struct checkpoint *k = job->checkpoints[i];
        if (k->attempt != a->number)
            continue;
        if (k->state == CKPT(WRITING) && whole(k))
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

static void newest_step(struct job *job)
{
    const struct checkpoint *k = checkpoints_newest(job, NULL);
    job->checkpoint_step = k ? k->step : -1;
}

void checkpoints_renew(struct job *job)
{
    newest_step(job);
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

void checkpoints_abandon_open(struct core *c, struct job *job, const struct attempt *a, const char *why)
{
    for (int i = 0; i < job->n_checkpoints; i++) {
        struct checkpoint *k = job->checkpoints[i];
        if (k->attempt != a->number || k->state != CKPT(WRITING))
            continue;
        char note[256];
        if (whole(k))
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
    newest_step(job);
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
    newest_step(job);
    const struct checkpoint *before = checkpoints_newest(job, k);
    char instead[64];
    if (before)
        snprintf(instead, sizeof instead, "the one of step %" PRId64 " is tried", before->step);
    else
        snprintf(instead, sizeof instead, "no older one is left");
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
    newest_step(job);
}

static void commit(struct core *c, struct job *job, struct checkpoint *k, const char *node)
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
    newest_step(job);
    if (job->state == STATE(RUNNING) && (job->reason == REASON(DiskFull) || job->reason == REASON(NONE)))
        job_reason(job, REASON(NONE), "%s", ""); /* what say_missing() said */
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

/* A job that trains on without its checkpoint says why. */
static void say_missing(struct job *job, const struct checkpoint *k, const char *note)
{
    if (job->state == STATE(RUNNING))
        job_reason(job, is_disk_full(note) ? REASON(DiskFull) : REASON(NONE), "no checkpoint of step %" PRId64 ": %s",
                   k->step, note);
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
    abandon(c, job, k, node, note);
    say_missing(job, k, note);
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

/* ---- tasks --------------------------------------------------------------------------------- */

/* Says something about the files, so that trying again would not help. */
static bool is_definite(int rc)
{
    return rc == ERR_NOSPACE || rc == ERR_CORRUPT || rc == ERR_NOT_FOUND || rc == ERR_INVALID || rc == ERR_IO ||
           rc == ERR_REFUSED;
}

static struct checkpoint *task_checkpoint(struct core *c, const struct task *t, struct job **job)
{
    *job = core_job(c, t->job);
    struct checkpoint *k = *job ? job_checkpoint(*job, t->step, t->attempt) : NULL;
    if (!k || k->task != t->id)
        return NULL;
    k->task = 0;
    return k;
}

static void try_again(struct core *c, struct checkpoint *k)
{
    k->retry_due = now_mono(c) + CORE_RETRY_NS;
    c->work = true;
}

static void manifest_done(struct core *c, struct task *t, int rc, const struct error *err,
                          const Boost__TaskReply *reply)
{
    struct job *job;
    struct checkpoint *k = task_checkpoint(c, t, &job);
    (void)reply;
    if (!k || k->state != CKPT(WRITING))
        return;
    if (rc == ERR_OK) {
        commit(c, job, k, t->node->name);
    } else if (is_definite(rc) || ++k->tries >= CORE_TASK_TRIES) {
        char note[512];
        snprintf(note, sizeof note, "its manifest could not be written: %.400s", err->message);
        abandon(c, job, k, t->node->name, note);
        say_missing(job, k, note);
    } else {
        try_again(c, k);
    }
    attempt_try_close(c, job);
}

/* Again after a pause that grows with the tries, up to an hour. */
static void try_later(struct core *c, struct checkpoint *k)
{
    int64_t ns = CORE_RETRY_NS;
    for (int i = 1; i < k->tries && ns < LATE_RETRY_MAX_NS; i++)
        ns *= 2;
    k->retry_due = now_mono(c) + (ns < LATE_RETRY_MAX_NS ? ns : LATE_RETRY_MAX_NS);
    c->work = true;
}

/* An outage of its store is not to leave it there for good. The files here go first, and may be what stays. */
static void copy_stays(struct core *c, struct job *job, struct checkpoint *k, const struct error *err)
{
    char note[700];
    snprintf(note, sizeof note, "%s%.400s%s%.200s%s", waits_mark, err->message, *err->hint ? " (" : "", err->hint,
             *err->hint ? ")" : "");
    text_set(&k->mirror_note, note);
    mark_checkpoint(c, job, k);
    try_later(c, k);
}

/* The note without what files_stay() has added. */
static bool note_came_back(struct checkpoint *k)
{
    char *at = k->note ? strstr(k->note, waits_mark) : NULL;
    if (!at)
        return false;
    *(at - k->note >= 2 ? at - 2 : at) = '\0'; /* "; " before it */
    return true;
}

/* They are where no file system is mounted just now, and go when it is back; until then they are not gone. */
static void files_stay(struct core *c, struct job *job, struct checkpoint *k, const char *node, const struct error *err)
{
    char note[1400];
    k->tries++;
    if (k->state == CKPT(DELETING) && !(k->note && strstr(k->note, waits_mark))) {
        const char *was = k->note ? k->note : "";
        snprintf(note, sizeof note, "%.600s%s%s%.400s (%.200s)", was, *was ? "; " : "", waits_mark, err->message,
                 err->hint);
        text_set(&k->note, note);
        mark_checkpoint(c, job, k);
        add_event(c, job, k->attempt, node, "controller", "checkpoint-not-deleted",
                  "checkpoint of step %" PRId64 " is not deleted yet: %s", k->step, err->message);
    }
    try_later(c, k);
}

static void delete_done(struct core *c, struct task *t, int rc, const struct error *err, const Boost__TaskReply *reply)
{
    struct job *job;
    struct checkpoint *k = task_checkpoint(c, t, &job);
    if (!k)
        return;
    if (rc == ERR_BUSY) {
        files_stay(c, job, k, t->node->name, err);
        return;
    }
    if (reply && note_came_back(k))
        k->tries = 0;
    /* Of a copy it also counts that its store cannot be reached: the agent has tried for a while. */
    bool copy = reply && k->mirror && rc != ERR_CANCELLED;
    bool done = rc == ERR_OK || rc == ERR_NOT_FOUND;
    if (!done && !((copy || is_definite(rc)) && ++k->tries >= (copy ? COPY_TRIES : CORE_TASK_TRIES))) {
        if (copy)
            copy_stays(c, job, k, err);
        else
            try_again(c, k);
        return;
    }
    if (copy)
        text_set(&k->mirror_note, "");
    if (!done) {
        char note[512];
        snprintf(note, sizeof note, "%.200s%sits files could not be deleted: %.250s", k->note ? k->note : "",
                 k->note && k->note[0] ? "; " : "", err->message);
        text_set(&k->note, note);
        add_event(c, job, k->attempt, t->node->name, "controller", "checkpoint-not-deleted",
                  "checkpoint of step %" PRId64 ": %s; remove %s%s%s by hand", k->step, err->message, k->path,
                  copy ? " and its copy in " : "", copy ? k->mirror_url : "");
    }
    if (k->state == CKPT(DELETING))
        k->state = CKPT(DELETED);
    else
        text_set(&k->path, "");
    mark_checkpoint(c, job, k);
}

static bool send_manifest(struct core *c, struct job *job, struct checkpoint *k, struct node *n)
{
    struct arena mem;
    struct task *t = NULL;
    Boost__WriteManifest body = BOOST__WRITE_MANIFEST__INIT;
    Boost__Task task = BOOST__TASK__INIT;
    char store_id[16];
    arena_init(&mem, 64 << 20);
    snprintf(store_id, sizeof store_id, "%s", core_store_id(c));
    body.dir = k->path;
    body.has_step = body.has_attempt = body.has_world = true;
    body.step = k->step;
    body.attempt = k->attempt;
    body.world = k->world;
    struct attempt *a = job_attempt(job, k->attempt);
    body.spec = a ? (Boost__JobSpec *)(uintptr_t)core_attempt_spec(job, a) : job->resolved;
    body.store_id = store_id;
    body.n_shards = (size_t)k->world;
    task.body_case = BOOST__TASK__BODY_WRITE_MANIFEST;
    task.write_manifest = &body;
    if (checkpoint_shard_records(k, &mem, &body.shards) == ERR_OK)
        k->task = task_send(c, n, job, job->uid, job->gid, &task, CORE_MANIFEST_NS, manifest_done, &t);
    if (k->task) {
        t->step = k->step;
        t->attempt = k->attempt;
    }
    arena_free(&mem);
    return k->task != 0;
}

static bool send_delete(struct core *c, struct job *job, struct checkpoint *k, struct node *n)
{
    struct task *t = NULL;
    Boost__DeleteCheckpoint body = BOOST__DELETE_CHECKPOINT__INIT;
    Boost__Task task = BOOST__TASK__INIT;
    body.dir = k->path;
    body.mirror = k->mirror ? k->mirror_url : NULL;
    task.body_case = BOOST__TASK__BODY_DELETE_CHECKPOINT;
    task.delete_checkpoint = &body;
    k->task = task_send(c, n, job, job->uid, job->gid, &task, CORE_DELETE_NS, delete_done, &t);
    if (k->task) {
        t->step = k->step;
        t->attempt = k->attempt;
    }
    return k->task != 0;
}

void checkpoints_work(struct core *c, struct job *job)
{
    if (job->unsettled || job->dirty)
        return; /* rows first, those of the open change too */
    for (int i = 0; i < job->n_checkpoints; i++) {
        struct checkpoint *k = job->checkpoints[i];
        if (!has_work(k) || k->task || k->state == CKPT(COMMITTED))
            continue;
        if (k->retry_due > now_mono(c)) {
            due_at(c, k->retry_due);
            continue;
        }
        if (k->state == CKPT(ABANDONED) && !may_delete(job, k))
            continue;
        struct node *n = task_node(c, job, job->uid, SCHED_CPU);
        k->retry_due = 0;
        /* Without a node: looked at again when one registers. */
        if (n && !(k->state == CKPT(WRITING) ? send_manifest(c, job, k, n) : send_delete(c, job, k, n)))
            try_again(c, k);
    }
    mirror_work(c, job);
}

void checkpoints_run(struct core *c)
{
    for (struct job *job = c->working.head, *next; job; job = next) {
        next = job->working.next;
        checkpoints_work(c, job);
    }
}
