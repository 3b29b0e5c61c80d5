/* What users ask of single checkpoints: verify, pin, delete, copy, and to have them read and written in another form,
 * which an agent does that sees the directory, as the user. */
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"
#include "proto/reflect.h"

#define WHAT(w) BOOST__CHECKPOINT_REQUEST__WHAT__##w

struct tool_call {
    core_ckpt_reply_fn reply;
    void *arg;
    int64_t job, step; /* job 0: none */
    int attempt;
    bool reads; /* counts in the checkpoint's readers */
    bool replied;
    Boost__CheckpointRequest__What what;
    char actor[128], text[512];
    Boost__TaskReply *said; /* of VERIFY, while what it changed is not durable; with the node that said it */
    char *node;
};

static struct checkpoint *checkpoint_of_call(struct core *c, const struct tool_call *x, struct job **job)
{
    *job = x->job ? core_job(c, x->job) : NULL;
    return *job ? job_checkpoint(*job, x->step, x->attempt) : NULL;
}

static void answer(struct core *c, struct tool_call *x, int rc, const struct error *err, const Boost__TaskReply *said,
                   const char *node)
{
    struct job *job;
    const struct checkpoint *k = checkpoint_of_call(c, x, &job);
    struct core_ckpt out = {.job = x->job, .step = x->step, .attempt = x->attempt, .node = node, .text = x->text};
    if (k)
        out.path = k->path;
    if (said && said->text)
        out.text = said->text;
    if (said) {
        out.faults = said->faults;
        out.n_faults = said->n_faults;
    }
    if (!x->replied)
        x->reply(x->arg, rc, rc ? err : NULL, &out);
    x->replied = true;
}

/* ---- pin, unpin, rm, mirror: the registry's own ------------------------------------------------------ */

static void changed(struct core *c, void *arg, int rc, const struct error *err)
{
    answer(c, arg, rc, err, NULL, NULL);
}

static void changed_late(struct core *c, void *arg, const struct error *err)
{
    struct error late = answer_late_error(err);
    answer(c, arg, (int)late.code, &late, NULL, NULL);
}

static void drop_call(void *arg)
{
    struct tool_call *x = arg;
    if (x->said)
        protobuf_c_message_free_unpacked(&x->said->base, NULL);
    free(x->node);
    free(x);
}

static int pin(struct core *c, struct job *job, struct checkpoint *k, bool on, struct tool_call *x)
{
    snprintf(x->text, sizeof x->text, "checkpoint of step %" PRId64 " is %s", k->step,
             on ? "pinned: it stays until it is unpinned" : "no longer pinned");
    if (k->pinned == on)
        return ERR_OK;
    int64_t since = k->changed_ns;
    k->pinned = on;
    mark_checkpoint(c, job, k);
    k->changed_ns = since; /* its state is as old as before */
    add_event(c, job, k->attempt, NULL, x->actor, on ? "checkpoint-pinned" : "checkpoint-unpinned",
              "checkpoint of step %" PRId64 " %s", k->step, on ? "stays until it is unpinned" : "may be deleted again");
    if (!on)
        checkpoints_retain(c, job);
    return ERR_OK;
}

static int copy_one(struct core *c, struct job *job, struct checkpoint *k, struct tool_call *x, struct error *err)
{
    int rc = mirror_ask(c, job, k, err);
    snprintf(x->text, sizeof x->text, "checkpoint of step %" PRId64 " is being copied to %.300s", k->step,
             k->mirror_url ? k->mirror_url : "");
    return rc;
}

/* All that have no copy yet. */
static int copy_all(struct core *c, struct job *job, struct tool_call *x, struct error *err)
{
    int asked = 0, rc = ERR_OK;
    for (int i = 0; !rc && i < job->n_checkpoints; i++) {
        struct checkpoint *k = job->checkpoints[i];
        if (k->state != CKPT(COMMITTED) || k->damaged || k->mirror == BOOST__MIRROR_STATE__VALUE__MIRRORED)
            continue;
        rc = mirror_ask(c, job, k, err);
        asked += rc == ERR_OK;
    }
    if (asked)
        snprintf(x->text, sizeof x->text, "%d checkpoint%s of job %" PRId64 " %s being copied", asked,
                 asked == 1 ? "" : "s", job->id, asked == 1 ? "is" : "are");
    else
        snprintf(x->text, sizeof x->text, "job %" PRId64 " has no checkpoint without a copy", job->id);
    return rc;
}

static int delete(struct core *c, struct job *job, struct checkpoint *k, struct tool_call *x, struct error *err)
{
    snprintf(x->text, sizeof x->text, "checkpoint of step %" PRId64 " is being deleted", k->step);
    if (k->state == CKPT(DELETING)) {
        checkpoint_hurry(c, k);
        return ERR_OK;
    }
    if (k->pinned) {
        error_set(err, ERR_REFUSED, "the checkpoint of step %" PRId64 " is pinned", k->step);
        return error_hint(err, "boostctl ckpt unpin %" PRId64 "@%" PRId64, job->id, k->step);
    }
    if (checkpoint_in_use(c, job, k)) {
        error_set(err, ERR_REFUSED, "the checkpoint of step %" PRId64 " is in use: %s", k->step,
                  k->readers       ? "a checkpoint tool reads it"
                  : k->mirror_task ? "it is being copied to the mirror"
                                   : "an attempt starts from it");
        return error_hint(err, "try again when that is over");
    }
    if (!job_state_terminal(job->state) && !k->damaged && !k->aside && !checkpoint_has_other(job, k)) {
        error_set(err, ERR_REFUSED,
                  "the checkpoint of step %" PRId64 " is the only one that job %" PRId64 " can go on from", k->step,
                  job->id);
        return error_hint(err, "boostctl checkpoint %" PRId64 " writes another one; an ended job lets it go", job->id);
    }
    k->state = CKPT(DELETING);
    mark_checkpoint(c, job, k);
    checkpoints_renew(job);
    add_event(c, job, k->attempt, NULL, x->actor, "checkpoint-removed", "checkpoint of step %" PRId64 " is deleted",
              k->step);
    return ERR_OK;
}

/* ---- what agents do -------------------------------------------------------------------------- */

/* Whether that is news. */
static bool note_faults(struct core *c, struct job *job, struct checkpoint *k, const struct task *t,
                        const Boost__TaskReply *said)
{
    if (k->state != CKPT(COMMITTED) || k->damaged == (said->n_faults > 0))
        return false;
    if (said->n_faults)
        checkpoint_damaged(c, job, k, t->node->name, said->faults[0]);
    else /* what was wrong was of a file system for a while, or has been mended */
        checkpoint_sound(c, job, k, t->node->name);
    return true;
}

/* Whatever the store does with the news: what was found was found. */
static void found(struct core *c, void *arg, int rc, const struct error *err)
{
    struct tool_call *x = arg;
    (void)rc;
    (void)err;
    answer(c, x, ERR_OK, NULL, x->said, x->node);
}

static void found_late(struct core *c, void *arg, const struct error *err)
{
    found(c, arg, ERR_OK, err);
}

/* The answer waits for the news that came with it, so that who has it sees them; the call is no longer the task's. */
static bool answer_behind(struct core *c, struct tool_call *x, struct task *t, const Boost__TaskReply *said)
{
    x->said = (Boost__TaskReply *)reflect_clone(&said->base);
    x->node = strdup(t->node->name);
    if (!x->said || !x->node)
        return false;
    t->drop = NULL;
    after_durable_or_late(c, found, found_late, x, drop_call);
    return true;
}

static void tool_done(struct core *c, struct task *t, int rc, const struct error *err, const Boost__TaskReply *said)
{
    struct tool_call *x = t->arg;
    struct job *job;
    struct checkpoint *k = checkpoint_of_call(c, x, &job);
    if (k && x->reads) {
        k->readers--;
        x->reads = false;
        bool news = !rc && x->what == WHAT(VERIFY) && note_faults(c, job, k, t, said);
        checkpoints_retain(c, job);
        if (news && answer_behind(c, x, t, said))
            return;
    }
    answer(c, x, rc, err, rc ? NULL : said, t->node->name);
}

static int send_tool(struct core *c, struct job *job, struct checkpoint *k, const Boost__CheckpointRequest *request,
                     const struct core_user *user, struct tool_call *x, struct error *err)
{
    struct arena mem;
    struct task *t = NULL;
    Boost__CheckpointTool body = BOOST__CHECKPOINT_TOOL__INIT;
    Boost__VerifyCheckpoint verify = BOOST__VERIFY_CHECKPOINT__INIT;
    Boost__CheckpointRequest order = *request;
    Boost__Task task = BOOST__TASK__INIT;
    uint32_t uid = job ? job->uid : user->uid, gid = job ? job->gid : user->gid;
    struct node *n = task_node(c, job, uid, SCHED_CPU);
    int rc = ERR_OK;
    if (!n) {
        error_set(err, ERR_UNREACHABLE, "no node is up that could do it for uid %u", uid);
        return error_hint(err, "boostctl node ls");
    }
    arena_init(&mem, 64 << 20);
    order.job = NULL;
    if (k)
        order.from = k->path;
    body.order = &order;
    if (k && request->what == WHAT(VERIFY)) {
        verify.dir = k->path;
        verify.has_step = verify.has_attempt = true;
        verify.step = k->step;
        verify.attempt = k->attempt;
        verify.n_shards = (size_t)k->world;
        body.verify = &verify;
        rc = checkpoint_shard_records(k, &mem, &verify.shards);
    }
    task.body_case = BOOST__TASK__BODY_CHECKPOINT_TOOL;
    task.checkpoint_tool = &body;
    if (rc)
        rc = error_set(err, ERR_NOMEM, "out of memory");
    else if (!task_send(c, n, job, uid, gid, &task, CORE_TOOL_NS, tool_done, &t))
        rc = error_set(err, ERR_UNREACHABLE, "node %s cannot be reached", n->name);
    arena_free(&mem);
    if (rc)
        return rc;
    t->arg = x;
    t->drop = drop_call;
    if (k)
        k->readers++;
    x->reads = k != NULL;
    return ERR_OK;
}

/* ---- where a tool may write -------------------------------------------------------------- */

/* Without "//", "/./" and "/x/..", and without a '/' at its end; by its text, since links are the node's. */
static void plain_path(const char *path, char out[PATH_MAX])
{
    size_t len = 0;
    for (const char *at = path; *at;) {
        at += strspn(at, "/");
        size_t n = strcspn(at, "/");
        if (n == 2 && !strncmp(at, "..", 2)) {
            while (len && out[--len] != '/')
                ;
        } else if (n && !(n == 1 && *at == '.') && len + n + 2 < PATH_MAX) {
            out[len++] = '/';
            memcpy(out + len, at, n);
            len += n;
        }
        at += n;
    }
    out[len] = '\0';
}

/* The number of the job for which a directory of this name would be: "<store id>-<job>". 0: none. */
static int64_t job_of_name(struct core *c, const char *name, size_t len)
{
    const char *store = core_store_id(c);
    size_t n = strlen(store);
    char *end;
    if (len <= n + 1 || strncmp(name, store, n) != 0 || name[n] != '-' || name[n + 1] < '1' || name[n + 1] > '9')
        return 0;
    int64_t id = strtoll(name + n + 1, &end, 10);
    return end == name + len ? id : 0;
}

static bool keeps_there(struct core *c, const struct job *job, const char *path, size_t len)
{
    char own[PATH_MAX];
    char *dir = checkpoint_dir_of(c, job);
    if (!dir)
        return true; /* no memory to tell */
    plain_path(dir, own);
    free(dir);
    return strlen(own) == len && !strncmp(own, path, len);
}

/* Not among the checkpoints of a job, nor where a later one would find it among its own: jobs adopt and delete what
 * lies there. What other controllers' jobs have the tool looks at, and where links lead. */
static int check_place(struct core *c, const char *to, struct error *err)
{
    char path[PATH_MAX];
    plain_path(to, path);
    for (const char *at = path; *at;) {
        size_t n = strcspn(++at, "/");
        int64_t id = job_of_name(c, at, n);
        at += n;
        const struct job *job = id ? core_job(c, id) : NULL;
        if (!id || (job ? !keeps_there(c, job, path, (size_t)(at - path)) : id < c->next_job_id))
            continue;
        error_set(err, ERR_REFUSED, "%.300s lies in the directory of the checkpoints of %sjob %" PRId64 ", %.*s", to,
                  job ? "" : "a later ", id, (int)(at - path < 300 ? at - path : 300), path);
        return error_hint(err, "what lies there a job goes on from and deletes: name a directory elsewhere");
    }
    return ERR_OK;
}

/* ---- asking ---------------------------------------------------------------------------------- */

static int check(struct core *c, const struct job *job, const Boost__CheckpointRequest *r, const struct core_user *user,
                 struct error *err)
{
    bool writes = r->what == WHAT(EXPORT) || r->what == WHAT(IMPORT) || r->what == WHAT(CONVERT);
    if (job && !user->admin && user->uid != 0 && user->uid != c->ops.uid && user->uid != job->uid) {
        error_set(err, ERR_REFUSED, "job %" PRId64 " belongs to %s (uid %u)", job->id, job->user, job->uid);
        return error_hint(err, "only its owner, root, an admin and the user of boostd may do that");
    }
    if (!job && (!writes || !r->from || *r->from != '/'))
        return error_set(err, ERR_INVALID, "the request names neither a job nor a directory by its full path");
    if (writes && (!r->to || *r->to != '/'))
        return error_set(err, ERR_INVALID, "the directory to write has to be a full path");
    if (r->what == WHAT(RM) && !r->has_step)
        return error_set(err, ERR_INVALID, "deleting a checkpoint needs its step: boostctl ckpt rm JOB@STEP");
    if (r->has_rank && (r->what != WHAT(CONVERT) || r->rank < 1))
        return error_set(err, ERR_INVALID, "rank %d: a conversion to SVD takes one from 1", r->rank);
    return writes ? check_place(c, r->to, err) : ERR_OK;
}

/* The one that is named: of several attempts the last; damaged ones too, but where the newest is asked for, and to be
 * deleted also those of which that is under way. */
static int choose(const struct job *job, const Boost__CheckpointRequest *r, struct checkpoint **out, struct error *err)
{
    int rc = checkpoint_choose(job, r->has_step ? r->step : -1, out, err);
    for (int n = 0; rc && r->has_step && n < job->n_checkpoints; n++) {
        struct checkpoint *k = job->checkpoints[n];
        bool going = k->state == CKPT(DELETING) && r->what == WHAT(RM) && !(*out && (*out)->state == CKPT(COMMITTED));
        if (k->step == r->step && (k->state == CKPT(COMMITTED) || going))
            *out = k;
    }
    return *out ? ERR_OK : rc;
}

void core_checkpoint(struct core *c, struct job *job, const Boost__CheckpointRequest *request,
                     const struct core_user *user, core_ckpt_reply_fn reply, void *arg)
{
    struct error err;
    struct checkpoint *k = NULL;
    struct tool_call *x = calloc(1, sizeof *x);
    int rc = x ? check(c, job, request, user, &err) : error_set(&err, ERR_NOMEM, "out of memory");
    bool all = request->what == WHAT(MIRROR) && !request->has_step;
    bool registry = request->what == WHAT(PIN) || request->what == WHAT(UNPIN) || request->what == WHAT(RM) ||
                    request->what == WHAT(MIRROR);
    if (!rc && job && !all)
        rc = choose(job, request, &k, &err);
    if (!rc) {
        *x = (struct tool_call){.reply = reply, .arg = arg, .what = request->what};
        snprintf(x->actor, sizeof x->actor, "uid %u (%s)", user->uid, user->name ? user->name : "?");
        x->job = job ? job->id : 0;
        x->step = k ? k->step : 0;
        x->attempt = k ? k->attempt : 0;
    }
    if (!rc && registry)
        rc = all                             ? copy_all(c, job, x, &err)
             : request->what == WHAT(MIRROR) ? copy_one(c, job, k, x, &err)
             : request->what == WHAT(RM)     ? delete(c, job, k, x, &err)
                                             : pin(c, job, k, request->what == WHAT(PIN), x);
    else if (!rc)
        rc = send_tool(c, job, k, request, user, x, &err);
    if (rc) {
        reply(arg, rc, &err, NULL);
        free(x);
    } else if (registry) {
        after_durable_or_late(c, changed, changed_late, x, drop_call);
    }
    change_commit(c);
}
