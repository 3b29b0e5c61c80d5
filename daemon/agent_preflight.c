/* agent_preflight.h */
#include "daemon/agent_preflight.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/agent_checkpoint.h"
#include "daemon/agent_tool.h"
#include "daemon/agent_user.h"
#include "proto/base/clock.h"
#include "proto/base/fs.h"
#include "proto/jobfile.h"
#include "proto/json.h"
#include "proto/reflect.h"
#include "proto/tokenfile.h"
#include "worker/plan/plan.h"

enum { PROBE_BYTES = 4096, CUDA_CHECK_MS = 30000, MANIFEST_ARENA = 64 << 20 };
extern char **environ;

static int check_data_file(const char *path, Boost__Format__Value format, int64_t seq_len, struct error *err)
{
    struct token_file f;
    if (!path || !*path)
        return error_set(err, ERR_INVALID, "a data file has no path");
    if (jobfile_is_url(path))
        return ERR_OK; /* agent_data looks at it, and an attempt has a file in its place */
    int rc = token_file_open(&f, path, format, seq_len, INT32_MAX, err);
    if (!rc)
        token_file_close(&f);
    else if (rc != ERR_UNSUPPORTED && rc != ERR_NOMEM)
        rc = err->code = ERR_INVALID; /* missing, unreadable or wrong: the job's mistake all the same */
    return rc;
}

static int check_data(const Boost__Data *data, struct error *err)
{
    int rc = ERR_OK;
    for (size_t i = 0; i < data->n_train && !rc; i++)
        rc = check_data_file(data->train[i]->path, data->format, data->seq_len, err);
    for (size_t i = 0; i < data->n_eval && !rc; i++)
        rc = check_data_file(data->eval[i]->path, data->format, data->seq_len, err);
    return rc;
}

/* Whether files can be made in dir ("checkpoint directory"): by making one, since only that tells of quotas and full
 * disks. */
static int probe_dir(const char *what, const char *dir, struct error *err)
{
    char path[PATH_MAX];
    static const char zeros[PROBE_BYTES];
    int used = snprintf(path, sizeof path, "%s/.boost-probe-XXXXXX", dir);
    if (used < 0 || (size_t)used >= sizeof path)
        return error_set(err, ERR_INVALID, "path too long: %s", dir);
    int fd = mkostemp(path, O_CLOEXEC);
    if (fd < 0)
        return error_errno(err, errno, "%s %s cannot be written", what, dir);
    int rc = fs_write_all(fd, zeros, sizeof zeros, err);
    if (!rc && fsync(fd) < 0)
        rc = error_errno(err, errno, "fsync");
    if (rc)
        error_context(err, "%s %s cannot be written", what, dir);
    close(fd);
    unlink(path);
    return rc;
}

/* Of a checkpoint: weights and both moments, in the precision in which they are kept; 0: the job does not say. */
static int64_t checkpoint_bytes(const Boost__JobSpec *spec)
{
    struct plan plan;
    struct error ignored;
    if (!spec->model || plan_validate(spec, &ignored) || plan_make(spec, &plan, &ignored))
        return 0;
    return 3 * plan_parameters(&plan) * (plan.precision == BOOST__PRECISION__VALUE__FP64 ? 8 : 4);
}

/* Old ones go when a new one is committed, so there has to be room for one more. A file system that does not say how
 * much it has is found out when it is written. */
static int check_space(const char *dir, int64_t bytes, struct error *err)
{
    struct statvfs fs;
    if (bytes <= 0 || statvfs(dir, &fs) < 0 || !fs.f_blocks)
        return ERR_OK;
    double there = (double)fs.f_bavail * (double)fs.f_frsize;
    if (there >= (double)bytes)
        return ERR_OK;
    return error_set(err, ERR_NOSPACE, "checkpoint directory %s has room for %.1f MiB, and a checkpoint takes %.1f MiB",
                     dir, there / (1 << 20), (double)bytes / (1 << 20));
}

/* `own` is made as a rank makes it, or somebody may have made it before. */
static int check_checkpoint_dir(const char *dir, const char *own, int64_t bytes, Boost__Reason__Value *reason,
                                struct error *err)
{
    int rc = fs_make_dirs(dir, 0777, err);
    if (!rc)
        rc = probe_dir("checkpoint directory", dir, err);
    if (!rc && own && *own && !(rc = fs_make_dirs(own, 0755, err)))
        rc = probe_dir("the job's checkpoint directory", own, err);
    if (!rc)
        rc = check_space(dir, bytes, err);
    else
        error_context(err, "checkpoint.dir %s", dir);
    if (rc == ERR_NOSPACE) {
        *reason = BOOST__REASON__VALUE__DiskFull;
        return error_hint(err, "make room on that file system, or set checkpoint.dir to another one");
    }
    if (rc) {
        err->code = ERR_INVALID;
        rc = error_hint(err, "set checkpoint.dir to a directory that the job's user can make and write");
    }
    return rc;
}

static int check_tensorboard_dir(const char *dir, struct error *err)
{
    int rc = fs_make_dirs(dir, 0777, err);
    if (!rc)
        rc = probe_dir("directory", dir, err);
    if (!rc)
        return ERR_OK;
    err->code = ERR_INVALID;
    error_context(err, "run.tensorboard_dir %s", dir);
    return error_hint(err, "set it to a directory that the job's user can make and write, or leave it out");
}

static int check_workdir(const char *dir, struct error *err)
{
    struct stat st;
    if (stat(dir, &st) == 0 && S_ISDIR(st.st_mode))
        return ERR_OK;
    error_set(err, ERR_INVALID, "workdir %s is not a directory that the job's user can reach", dir);
    return error_hint(err, "make it on the node, or leave workdir out");
}

int agent_preflight(const Boost__JobSpec *spec, const char *own_dir, uint32_t uid, uint32_t gid,
                    Boost__Reason__Value *reason, struct error *err)
{
    struct as_user user;
    *reason = BOOST__REASON__VALUE__SpecError;
    if (!spec || !spec->data || !spec->checkpoint || !spec->checkpoint->dir || !*spec->checkpoint->dir)
        return error_set(err, ERR_INVALID, "the job has no data or no checkpoint.dir");
    int rc = as_user_begin(&user, uid, gid, err);
    if (rc)
        return rc;
    rc = check_data(spec->data, err);
    if (rc)
        *reason = BOOST__REASON__VALUE__DataError;
    if (!rc)
        rc = check_checkpoint_dir(spec->checkpoint->dir, own_dir, checkpoint_bytes(spec), reason, err);
    if (!rc && spec->run && spec->run->tensorboard_dir && *spec->run->tensorboard_dir)
        rc = check_tensorboard_dir(spec->run->tensorboard_dir, err);
    if (!rc && spec->workdir && *spec->workdir)
        rc = check_workdir(spec->workdir, err);
    as_user_end(&user);
    return rc;
}

int agent_preflight_model(char *worker, const char *dir, uint32_t uid, uint32_t gid, struct arena *mem,
                          Boost__JobSpec **out, struct error *err)
{
    struct tool_output said = {0};
    char *argv[] = {worker, (char[]){"ckpt"}, (char[]){"model"}, (char *)(uintptr_t)dir, NULL};
    int rc = agent_tool_run(argv, uid, gid, mem, &said, err);
    if (!rc && !(*out = (Boost__JobSpec *)reflect_new(mem, &boost__job_spec__descriptor)))
        rc = error_set(err, ERR_NOMEM, "no memory for the model of %s", dir);
    const char *text = said.text ? said.text : "";
    if (!rc)
        rc = json_read(&(*out)->base, mem, "boost-worker ckpt model", text, strlen(text), &(struct read_options){0}, err);
    return rc;
}

int agent_preflight_init(const Boost__JobSpec *spec, char *worker, uint32_t uid, uint32_t gid, struct error *err)
{
    const Boost__InitFrom *from = spec->checkpoint ? spec->checkpoint->init_from : NULL;
    struct as_user user;
    struct arena mem;
    Boost__JobSpec *was = NULL;
    if (!from || !from->path || !*from->path || jobfile_is_url(from->path))
        return ERR_OK; /* what is fetched, agent_init looks at */
    const char *name = strrchr(from->path, '/');
    int64_t step;
    int attempt, rc;
    arena_init(&mem, MANIFEST_ARENA);
    if (!checkpoint_parse_name(name ? name + 1 : from->path, &step, &attempt)) {
        rc = agent_preflight_model(worker, from->path, uid, gid, &mem, &was, err);
    } else if (!(rc = as_user_begin(&user, uid, gid, err))) {
        rc = checkpoint_spec(from->path, from->weights_only, &mem, &was, err);
        as_user_end(&user);
    }
    if (!rc)
        rc = plan_continues(was, spec, from->weights_only, err);
    arena_free(&mem);
    return rc ? error_context(err, "checkpoint.init_from %s", from->path) : ERR_OK;
}

/* ---- CUDA ---- */

/* What the process says, until it has closed `fd` or the time is over. */
static bool read_answer(int fd, char *out, size_t cap)
{
    int64_t deadline = clock_mono_ns() + CUDA_CHECK_MS * NS_PER_MS;
    size_t used = 0;
    out[0] = '\0';
    for (;;) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        char chunk[512];
        int left = clock_left_ms(deadline), ready = left ? poll(&p, 1, left) : 0;
        if (ready < 0 && errno == EINTR)
            continue;
        if (ready <= 0)
            return false;
        ssize_t n = read(fd, chunk, sizeof chunk);
        if (n <= 0)
            return true;
        size_t keep = (size_t)n < cap - 1 - used ? (size_t)n : cap - 1 - used;
        memcpy(out + used, chunk, keep);
        used += keep;
        out[used] = '\0';
    }
}

/* What a file is; all zero: there is none. */
struct file_identity {
    dev_t device;
    ino_t inode;
    struct timespec changed;
};

static struct file_identity identify(const char *path)
{
    struct stat st;
    struct file_identity none = {0};
    return stat(path, &st) < 0 ? none : (struct file_identity){st.st_dev, st.st_ino, st.st_ctim};
}

static bool same_file(const struct file_identity *a, const struct file_identity *b)
{
    return a->device == b->device && a->inode == b->inode && a->changed.tv_sec == b->changed.tv_sec &&
           a->changed.tv_nsec == b->changed.tv_nsec;
}

/* The worker whose answer was good, and its library; what they load takes a second to map, at every start of a job. */
static struct {
    pthread_mutex_t lock;
    bool good;
    struct file_identity worker, library;
} checked = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* As boost-worker finds it. */
static struct file_identity identify_library(const char *worker)
{
    char path[PATH_MAX];
    const char *given = getenv("BOOST_CUDA_LIBRARY"), *slash = strrchr(worker, '/');
    int len = slash ? (int)(slash - worker) : 1;
    if (given && *given)
        return identify(given);
    snprintf(path, sizeof path, "%.*s/../lib/boost-cuda.so", len, slash ? worker : ".");
    return identify(path);
}

static int ask_worker(const char *worker, struct error *err);

int agent_preflight_cuda(const char *worker, struct error *err)
{
    struct file_identity program = identify(worker), library = identify_library(worker);
    pthread_mutex_lock(&checked.lock);
    bool good = checked.good && same_file(&checked.worker, &program) && same_file(&checked.library, &library);
    pthread_mutex_unlock(&checked.lock);
    if (good)
        return ERR_OK;
    int rc = ask_worker(worker, err);
    if (rc)
        return rc;
    pthread_mutex_lock(&checked.lock);
    checked.good = true;
    checked.worker = program;
    checked.library = library;
    pthread_mutex_unlock(&checked.lock);
    return ERR_OK;
}

static int ask_worker(const char *worker, struct error *err)
{
    char *argv[] = {(char *)(uintptr_t)worker, "--check-cuda", NULL};
    char said[400];
    int fds[2], status = 0;
    pid_t pid;
    if (pipe2(fds, O_CLOEXEC) < 0)
        return error_errno(err, errno, "no descriptors to ask %s", worker);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fds[1], 2);
    int errnum = posix_spawn(&pid, worker, &actions, NULL, argv, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(fds[1]);
    if (errnum) {
        close(fds[0]);
        return error_errno(err, errnum, "cannot run %s", worker);
    }
    bool answered = read_answer(fds[0], said, sizeof said);
    close(fds[0]);
    if (!answered)
        kill(pid, SIGKILL); /* our own child, not reaped yet: the pid is nobody else's */
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    if (answered && WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return ERR_OK;
    said[strcspn(said, "\n")] = '\0';
    static const char prefix[] = "boost-worker: ";
    const char *why = strncmp(said, prefix, sizeof prefix - 1) == 0 ? said + sizeof prefix - 1 : said;
    char killed[64];
    if (WIFSIGNALED(status) && answered && !*why) {
        snprintf(killed, sizeof killed, "it was killed by signal %d", WTERMSIG(status));
        why = killed;
    }
    error_set(err, ERR_UNSUPPORTED, "this node's boost-worker is without CUDA: %s",
              !answered ? "it did not answer"
              : *why    ? why
                        : "it ended without a word");
    return error_hint(err, "build or install boost-cuda.so beside it, or set resources.device: CPU");
}
