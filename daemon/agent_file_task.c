/* agent_file_task.h */
#include "daemon/agent_file_task.h"

#include <stdio.h>
#include <unistd.h>

#include "daemon/agent_checkpoint.h"
#include "daemon/agent_data.h"
#include "daemon/agent_mirror.h"
#include "daemon/agent_node.h"
#include "daemon/agent_preflight.h"
#include "daemon/agent_remote.h"
#include "daemon/agent_shared.h"
#include "daemon/agent_user.h"

enum { RESULT_ARENA = 16 << 20 };

void file_task_init(struct file_task *t, struct agent *agent, const Boost__Task *order, bool gpus)
{
    *t = (struct file_task){.agent = agent, .order = order, .gpus = gpus};
    arena_init(&t->mem, RESULT_ARENA);
}

void file_task_free(struct file_task *t)
{
    arena_free(&t->mem);
}

static struct agent_remote remote_of(struct file_task *t, uint32_t uid, uint32_t gid)
{
    return (struct agent_remote){t->agent->config, &t->stop, &t->progress, uid, gid};
}

static struct data_fetch data_work(struct file_task *t, uint32_t uid, uint32_t gid)
{
    return (struct data_fetch){remote_of(t, uid, gid), t->agent->attempts_dir, t->agent->worker_path};
}

/* That there are keys: whether they are the right ones only the store can say, and that may take its time. */
static int preflight_mirror(const struct file_task *t, uint32_t uid, uint32_t gid, struct error *err)
{
    const Boost__JobSpec *spec = t->order->preflight->spec;
    const char *mirror = spec->checkpoint->mirror;
    struct s3_credentials keys;
    struct s3_url at;
    if (!mirror || !*mirror)
        return ERR_OK;
    int rc = s3_url_parse(mirror, &at, err);
    if (!rc)
        rc = agent_s3_credentials(t->agent->config, uid, gid, &keys, err);
    s3_credentials_wipe(&keys);
    if (rc)
        rc = err->code = ERR_INVALID;
    return rc ? error_context(err, "checkpoint.mirror") : ERR_OK;
}

/* Of a node without GPUs nothing is asked about them: the job will not come here. */
static int preflight(struct file_task *t, uint32_t uid, uint32_t gid, struct error *err)
{
    Boost__Reason__Value reason;
    const Boost__JobSpec *spec = t->order->preflight->spec;
    int rc = agent_preflight(spec, NULL, uid, gid, &reason, err);
    if (!rc)
        rc = agent_preflight_init(spec, t->agent->worker_path, uid, gid, err);
    if (!rc)
        rc = preflight_mirror(t, uid, gid, err);
    if (!rc && data_has_urls(spec)) {
        struct data_fetch x = data_work(t, uid, gid);
        rc = data_look(&x, spec, err);
    }
    bool cuda = spec && spec->resources && spec->resources->device == BOOST__DEVICE__VALUE__CUDA;
    return rc || !cuda || !t->gpus ? rc : agent_preflight_cuda(t->agent->worker_path, err);
}

/* Of an object store that the task works with; NULL: none. */
static const char *mirror_of(const Boost__Task *order)
{
    const char *at = order->body_case == BOOST__TASK__BODY_MIRROR_CHECKPOINT ? order->mirror_checkpoint->mirror
                     : order->body_case == BOOST__TASK__BODY_DELETE_CHECKPOINT ? order->delete_checkpoint->mirror
                                                                               : NULL;
    return at && *at ? at : NULL;
}

/* From its copy, when what is here is missing or damaged. The keys are looked for only then. */
static int verify_or_fetch(struct file_task *t, uint32_t uid, uint32_t gid, struct error *err)
{
    const Boost__VerifyCheckpoint *o = t->order->verify;
    const struct agent_remote remote = remote_of(t, uid, gid);
    struct as_user user;
    struct s3 *s = NULL;
    struct error here;
    int rc = as_user_begin(&user, uid, gid, err);
    if (rc)
        return rc;
    rc = checkpoint_verify(o, err);
    as_user_end(&user);
    if ((rc != ERR_NOT_FOUND && rc != ERR_CORRUPT) || !o->mirror || !*o->mirror)
        return rc;
    here = *err;
    rc = agent_s3_open(&remote, 0, &s, err);
    if (!rc)
        rc = as_user_begin(&user, uid, gid, err);
    else if (rc == ERR_NOT_FOUND) /* keys: says nothing about the checkpoint */
        rc = err->code = ERR_REFUSED;
    if (!rc) {
        rc = mirror_fetch(s, o, &t->progress, &t->moved, err);
        if (!rc)
            rc = checkpoint_verify(o, err);
        as_user_end(&user);
    }
    s3_close(s);
    return rc ? error_context(err, "%.300s", here.message) : ERR_OK;
}

/* What the headers of the shards say, which only the worker can read. */
static int verify_headers(struct file_task *t, uint32_t uid, uint32_t gid, const char *dir, struct error *err)
{
    char *argv[] = {t->agent->worker_path, "ckpt", "verify", "--headers", (char *)(uintptr_t)dir, NULL};
    return agent_tool_run(argv, uid, gid, &t->mem, &t->tool, err);
}

/* A checkpoint that an attempt is to start from. */
static int verify(struct file_task *t, uint32_t uid, uint32_t gid, struct error *err)
{
    const Boost__VerifyCheckpoint *o = t->order->verify;
    int rc = verify_or_fetch(t, uid, gid, err);
    if (!rc && verify_headers(t, uid, gid, o->dir, err))
        rc = err->code = ERR_INTERNAL; /* says nothing about the files */
    if (!rc && t->tool.n_faults)
        rc = error_set(err, ERR_CORRUPT, "checkpoint of step %lld, attempt %d: %s", (long long)o->step, o->attempt,
                       t->tool.faults[0]);
    return rc;
}

/* For a user: all that is wrong with it. */
static int verify_whole(struct file_task *t, uint32_t uid, uint32_t gid, const Boost__VerifyCheckpoint *o,
                        struct error *err)
{
    struct as_user user;
    char **found;
    size_t n = 0;
    int rc = as_user_begin(&user, uid, gid, err);
    if (!rc) {
        rc = checkpoint_faults(o, &t->mem, &found, &n, err);
        as_user_end(&user);
    }
    if (!rc)
        rc = verify_headers(t, uid, gid, o->dir, err);
    char **all = rc ? NULL : arena_alloc(&t->mem, (n + t->tool.n_faults + 1) * sizeof *all);
    if (!rc && !all)
        return error_set(err, ERR_NOMEM, "no memory for what is wrong with %s", o->dir);
    for (size_t i = 0; !rc && i < n + t->tool.n_faults; i++)
        all[i] = i < n ? found[i] : t->tool.faults[i - n];
    if (!rc)
        t->tool = (struct tool_output){.faults = all, .n_faults = n + t->tool.n_faults, .text = t->tool.text};
    return rc;
}

static int checkpoint_tool(struct file_task *t, uint32_t uid, uint32_t gid, struct error *err)
{
    const Boost__CheckpointTool *o = t->order->checkpoint_tool;
    const Boost__CheckpointRequest *r = o->order;
    char rank[16], *argv[8];
    size_t n = 0;
    if (o->verify)
        return verify_whole(t, uid, gid, o->verify, err);
    if (!r || !r->from || *r->from != '/' || !r->to || *r->to != '/')
        return error_set(err, ERR_PROTOCOL, "the checkpoint tool is not told what to read and what to write");
    argv[n++] = t->agent->worker_path;
    argv[n++] = "ckpt";
    argv[n++] = r->what == BOOST__CHECKPOINT_REQUEST__WHAT__EXPORT   ? "export"
                : r->what == BOOST__CHECKPOINT_REQUEST__WHAT__IMPORT ? "import"
                                                                     : "convert";
    if (r->what == BOOST__CHECKPOINT_REQUEST__WHAT__EXPORT && r->bf16)
        argv[n++] = "--bf16";
    if (r->has_rank) {
        snprintf(rank, sizeof rank, "--rank=%d", r->rank);
        argv[n++] = rank;
    }
    argv[n++] = r->from;
    argv[n++] = r->to;
    argv[n] = NULL;
    return agent_tool_run(argv, uid, gid, &t->mem, &t->tool, err);
}

static int open_store(struct file_task *t, uint32_t uid, uint32_t gid, struct s3 **out, struct error *err)
{
    const struct agent_remote remote = remote_of(t, uid, gid);
    int rc = agent_s3_open(&remote, 0, out, err);
    if (rc == ERR_NOT_FOUND) /* the keys, not the files */
        rc = err->code = ERR_REFUSED;
    return rc ? error_context(err, "%s", mirror_of(t->order)) : ERR_OK;
}

static int delete_files(const Boost__DeleteCheckpoint *o, uint32_t uid, uint32_t gid, struct error *err)
{
    struct as_user user;
    int rc = as_user_begin(&user, uid, gid, err);
    if (rc)
        return rc;
    rc = checkpoint_delete(o->dir, err);
    if (!rc)
        rc = mirror_forget(o->dir, err);
    as_user_end(&user);
    return rc;
}

static int delete_copy(struct file_task *t, uint32_t uid, uint32_t gid, struct error *err)
{
    const Boost__DeleteCheckpoint *o = t->order->delete_checkpoint;
    struct as_user user;
    struct s3 *s = NULL;
    int rc = open_store(t, uid, gid, &s, err);
    if (!rc)
        rc = as_user_begin(&user, uid, gid, err);
    if (!rc) {
        rc = mirror_delete(s, o->dir, o->mirror, err);
        as_user_end(&user);
    }
    s3_close(s);
    return rc;
}

/* The files have to go even where the copy cannot be reached, and the copy where their file system is not mounted: then
 * ERR_BUSY, whatever became of it. */
static int delete_checkpoint(struct file_task *t, uint32_t uid, uint32_t gid, struct error *err)
{
    struct error copy;
    int rc = delete_files(t->order->delete_checkpoint, uid, gid, err);
    if (!mirror_of(t->order) || (rc && rc != ERR_BUSY))
        return rc;
    int gone = delete_copy(t, uid, gid, &copy);
    if (!rc && gone)
        *err = copy;
    return rc ? rc : gone;
}

int file_task_run(struct file_task *t, struct error *err)
{
    const Boost__Task *order = t->order;
    struct as_user user;
    uint32_t uid = order->has_uid ? order->uid : (uint32_t)geteuid();
    uint32_t gid = order->has_gid ? order->gid : (uint32_t)getegid();
    if (order->body_case == BOOST__TASK__BODY_PREFLIGHT)
        return preflight(t, uid, gid, err);
    if (order->body_case == BOOST__TASK__BODY_VERIFY)
        return verify(t, uid, gid, err);
    if (order->body_case == BOOST__TASK__BODY_CHECKPOINT_TOOL)
        return checkpoint_tool(t, uid, gid, err);
    if (order->body_case == BOOST__TASK__BODY_FETCH_DATA) {
        struct data_fetch x = data_work(t, uid, gid);
        const Boost__FetchData *o = order->fetch_data;
        return o->spec ? data_fetch(&x, o->spec, o->init, o->tries, &t->moved, err)
                       : error_set(err, ERR_PROTOCOL, "an order to fetch names no job");
    }
    if (order->body_case == BOOST__TASK__BODY_DELETE_CHECKPOINT)
        return delete_checkpoint(t, uid, gid, err);
    struct s3 *s = NULL;
    int rc = ERR_OK;
    if (mirror_of(order))
        rc = open_store(t, uid, gid, &s, err);
    if (!rc)
        rc = as_user_begin(&user, uid, gid, err);
    if (rc) {
        s3_close(s);
        return rc;
    }
    switch (order->body_case) {
    case BOOST__TASK__BODY_WRITE_MANIFEST:
        rc = checkpoint_write_manifest(order->write_manifest, order->job, err);
        break;
    case BOOST__TASK__BODY_MIRROR_CHECKPOINT:
        rc = s ? mirror_copy(s, order->mirror_checkpoint, &t->progress, &t->moved, err)
               : error_set(err, ERR_PROTOCOL, "an order to copy says not where to");
        break;
    case BOOST__TASK__BODY_PROVE_SHARED:
        rc = agent_prove_shared(order->prove_shared, err);
        break;
    case BOOST__TASK__BODY_FIND_CHECKPOINTS:
        rc = checkpoints_find(order->find_checkpoints->dir, &t->mem, &t->found, err);
        break;
    default:
        rc = error_set(err, ERR_UNSUPPORTED, "this agent does not know the task");
        rc = error_hint(err, "install the same version of boostd and boost-agent");
        break;
    }
    as_user_end(&user);
    s3_close(s);
    return rc;
}
