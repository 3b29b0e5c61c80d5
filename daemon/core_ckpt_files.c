/* The files of checkpoints, which agents write and delete as the job's user: a manifest when all shards are there, and
 * none of what is not needed or never got whole. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "daemon/core_internal.h"

/* What a note says last while a deletion waits. */
static const char waits_mark[] = "not deleted yet: ";

enum { COPY_TRIES = 24 }; /* to delete a copy: half a day */
#define LATE_RETRY_MAX_NS (3600 * NS_PER_S)

/* ---- what there is to do -------------------------------------------------------------- */

static bool is_last_of_attempt(const struct job *job, const struct checkpoint *k)
{
    for (int i = 0; i < job->n_checkpoints; i++)
        if (job->checkpoints[i]->attempt == k->attempt && job->checkpoints[i]->step > k->step &&
            checkpoint_whole(job->checkpoints[i]))
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
    return mirror_wanted(k) || (k->state == CKPT(WRITING) && checkpoint_whole(k)) || k->state == CKPT(DELETING) ||
           (k->state == CKPT(ABANDONED) && k->path && k->path[0]);
}

bool checkpoint_file_work(const struct job *job)
{
    for (int i = job->n_checkpoints - 1; i >= 0; i--)
        if (has_work(job->checkpoints[i]))
            return true;
    return false;
}

/* ---- tasks --------------------------------------------------------------------------- */

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

/* ---- manifests ----------------------------------------------------------------------- */

static void manifest_done(struct core *c, struct task *t, int rc, const struct error *err,
                          const Boost__TaskReply *reply)
{
    struct job *job;
    struct checkpoint *k = task_checkpoint(c, t, &job);
    (void)reply;
    if (!k || k->state != CKPT(WRITING))
        return;
    if (rc == ERR_OK) {
        checkpoint_commit(c, job, k, t->node->name);
    } else if (is_definite(rc) || ++k->tries >= CORE_TASK_TRIES) {
        char note[512];
        snprintf(note, sizeof note, "its manifest could not be written: %.400s", err->message);
        checkpoint_failed(c, job, k, t->node->name, note);
    } else {
        try_again(c, k);
    }
    attempt_try_close(c, job);
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

/* ---- deletions ----------------------------------------------------------------------- */

/* Tried again after a pause that grows with the tries, up to an hour. */
static void try_later(struct core *c, struct checkpoint *k)
{
    int64_t ns = CORE_RETRY_NS;
    for (int i = 1; i < k->tries && ns < LATE_RETRY_MAX_NS; i++)
        ns *= 2;
    k->retry_due = now_mono(c) + (ns < LATE_RETRY_MAX_NS ? ns : LATE_RETRY_MAX_NS);
    c->work = true;
}

/* Of a note: behind what it says already. */
static void add_wait(char **note, const struct error *err)
{
    char text[1400];
    const char *was = *note ? *note : "";
    snprintf(text, sizeof text, "%.600s%s%s%.400s%s%.200s%s", was, *was ? "; " : "", waits_mark, err->message,
             *err->hint ? " (" : "", err->hint, *err->hint ? ")" : "");
    text_set(note, text);
}

/* Off again. False: there was none. */
static bool drop_wait(char *note)
{
    char *at = note ? strstr(note, waits_mark) : NULL;
    if (!at)
        return false;
    *(at - note >= 2 ? at - 2 : at) = '\0'; /* "; " before it */
    return true;
}

/* An outage of its store is not to leave it there for good. The files here go first, and may be what stays. */
static void copy_stays(struct core *c, struct job *job, struct checkpoint *k, const struct error *err)
{
    text_set(&k->mirror_note, "");
    add_wait(&k->mirror_note, err);
    mark_checkpoint(c, job, k);
    try_later(c, k);
}

/* They are where no file system is mounted just now, and go when it is back; until then they are not gone. */
static void files_stay(struct core *c, struct job *job, struct checkpoint *k, const char *node, const struct error *err)
{
    k->tries++;
    k->away = true;
    if (k->state == CKPT(DELETING) && !(k->note && strstr(k->note, waits_mark))) {
        add_wait(&k->note, err);
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
    if (reply && k->away) /* the file system is back */
        k->tries = 0;
    k->away = k->away && !reply;
    if (reply && drop_wait(k->note))
        mark_checkpoint(c, job, k);
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

/* ---- when they are due --------------------------------------------------------------- */

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

void checkpoint_hurry(struct core *c, struct checkpoint *k)
{
    if (k->away)
        k->retry_due = 0;
    c->work = c->work || k->away;
}

void checkpoints_hurry(struct core *c)
{
    for (struct job *job = c->working.head; job; job = job->working.next)
        for (int i = 0; i < job->n_checkpoints; i++)
            checkpoint_hurry(c, job->checkpoints[i]);
}

void checkpoints_run(struct core *c)
{
    for (struct job *job = c->working.head, *next; job; job = next) {
        next = job->working.next;
        checkpoints_work(c, job);
    }
}
