/* keeper_rank.h */
#include "daemon/keeper_rank.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/base/fs.h"
#include "proto/validate.h"

extern char **environ;

/* ---- environment ---- */

struct env_list {
    char **items;
    size_t count, cap;
};

static void env_free(struct env_list *env)
{
    for (size_t i = 0; i < env->count; i++)
        free(env->items[i]);
    free(env->items);
}

/* Adds or replaces "key=value"; the list stays NULL-terminated. False when out of memory. */
static bool env_put(struct env_list *env, const char *key, const char *value)
{
    size_t key_len = strlen(key), len = key_len + strlen(value) + 2;
    char *entry = malloc(len);
    if (!entry)
        return false;
    snprintf(entry, len, "%s=%s", key, value);
    for (size_t i = 0; i < env->count; i++) {
        if (!strncmp(env->items[i], entry, key_len + 1)) {
            free(env->items[i]);
            env->items[i] = entry;
            return true;
        }
    }
    if (env->count + 2 > env->cap) {
        size_t cap = env->cap ? env->cap * 2 : 64;
        char **items = realloc(env->items, cap * sizeof *items);
        if (!items) {
            free(entry);
            return false;
        }
        env->items = items;
        env->cap = cap;
    }
    env->items[env->count++] = entry;
    env->items[env->count] = NULL;
    return true;
}

static bool env_put_int(struct env_list *env, const char *key, long long value)
{
    char text[32];
    snprintf(text, sizeof text, "%lld", value);
    return env_put(env, key, text);
}

static bool env_inherit(struct env_list *env)
{
    for (char **e = environ; *e; e++) {
        char *eq = strchr(*e, '=');
        /* Where the agent finds its controller and how it sets up libuv is not the rank's business. */
        bool ours = !strncmp(*e, "BOOST_", 6) && strncmp(*e, "BOOST_CUDA_LIBRARY=", 19) != 0;
        if (!eq || ours || !strncmp(*e, "UV_THREADPOOL_SIZE=", 19))
            continue;
        char *key = strndup(*e, (size_t)(eq - *e));
        bool ok = key && env_put(env, key, eq + 1);
        free(key);
        if (!ok)
            return false;
    }
    return true;
}

static bool env_fill(struct env_list *env, const struct rank_launch *launch)
{
    const Boost__AttemptStart *s = launch->start;
    char attempt[96];
    snprintf(attempt, sizeof attempt, "%s-%lld.%d", s->store_id ? s->store_id : "", (long long)s->job, s->attempt);
    int threads = s->threads_per_rank > 0 ? s->threads_per_rank : 1;
    /* How long an OpenMP thread spins before it sleeps, some 50 us. libgomp's own is 60 times as long: where other
     * processes want the cores too, a thread that spins keeps the one that it waits for from running. */
    bool ok = env_put(env, "GOMP_SPINCOUNT", "5000") && env_inherit(env);
    for (size_t i = 0; ok && i < s->n_node_env; i++) {
        const Boost__KeyValue *kv = s->node_env[i];
        if (kv->key && *kv->key)
            ok = env_put(env, kv->key, kv->value ? kv->value : "");
    }
    ok = ok && env_put(env, "BOOST_RUN_DIR", s->run_dir) && env_put(env, "BOOST_ATTEMPT", attempt) &&
         env_put_int(env, "BOOST_RANK", s->ranks[launch->local_rank]) &&
         env_put_int(env, "BOOST_LOCAL_RANK", launch->local_rank) && env_put_int(env, "BOOST_WORLD", s->world) &&
         env_put_int(env, "OMP_NUM_THREADS", threads) && (!s->node || env_put(env, "BOOST_NODE", s->node));
    if (ok && geteuid() == 0 && s->uid != 0 && s->user && *s->user)
        ok = env_put(env, "USER", s->user) && env_put(env, "LOGNAME", s->user);
    if (ok && (size_t)launch->local_rank < s->n_devices && s->devices[launch->local_rank]->uuid)
        ok = env_put(env, "CUDA_VISIBLE_DEVICES", s->devices[launch->local_rank]->uuid) &&
             env_put(env, "CUDA_DEVICE_ORDER", "PCI_BUS_ID");
    for (size_t i = 0; ok && s->spec && i < s->spec->n_env; i++) {
        const Boost__KeyValue *kv = s->spec->env[i];
        /* Who the rank is, and the marker by which a lost one is found, stay ours. */
        if (kv->key && *kv->key && !validate_env_is_ours(kv->key))
            ok = env_put(env, kv->key, kv->value ? kv->value : "");
    }
    return ok;
}

/* ---- child ---- */

enum stage { STAGE_SETUP, STAGE_CGROUP, STAGE_USER, STAGE_WORKDIR, STAGE_EXEC };
struct failure {
    int stage;
    int errnum;
};

struct child {
    int output, report, null, cgroup;
    const char *workdir;
    char **argv;
    char **env;
    bool change_user;
    uid_t uid;
    gid_t gid;
    const gid_t *groups;
    size_t group_count;
};

/* Between fork and exec of a process with threads: only async-signal-safe calls. */
static _Noreturn void child_fail(const struct child *c, enum stage stage)
{
    struct failure f = {.stage = stage, .errnum = errno};
    ssize_t n = write(c->report, &f, sizeof f);
    _exit(n == sizeof f ? 127 : 126);
}

/* Every descriptor from `first` on, but `keep`. */
static void close_from(int first, int keep)
{
    if (keep > first && close_range((unsigned)first, (unsigned)keep - 1, 0) == 0 &&
        close_range((unsigned)keep + 1, ~0U, 0) == 0)
        return;
    long max = sysconf(_SC_OPEN_MAX);
    for (int fd = first; fd < (max > 0 && max < 65536 ? max : 65536); fd++) {
        if (fd != keep)
            close(fd);
    }
}

static void reset_signals(void)
{
    struct sigaction sa = {.sa_handler = SIG_DFL};
    for (int sig = 1; sig < NSIG; sig++)
        sigaction(sig, &sa, NULL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

static _Noreturn void child_run(struct child *c)
{
    if (setpgid(0, 0) < 0)
        child_fail(c, STAGE_SETUP);
    if (c->cgroup >= 0 && write(c->cgroup, "0", 1) != 1)
        child_fail(c, STAGE_CGROUP);
    reset_signals();
    if (dup2(c->null, 0) < 0 || dup2(c->output, 1) < 0 || dup2(c->output, 2) < 0)
        child_fail(c, STAGE_SETUP);
    close_from(3, c->report);
    if (c->change_user && (setgroups(c->group_count, c->groups) < 0 || setgid(c->gid) < 0 || setuid(c->uid) < 0))
        child_fail(c, STAGE_USER);
    if (chdir(c->workdir) < 0)
        child_fail(c, STAGE_WORKDIR);
    execve(c->argv[0], c->argv, c->env);
    child_fail(c, STAGE_EXEC);
}

/* ---- parent ---- */

static int report_failure(const struct failure *f, const struct rank_launch *launch, const struct child *c,
                          struct error *err)
{
    const Boost__AttemptStart *s = launch->start;
    switch ((enum stage)f->stage) {
    case STAGE_WORKDIR:
        error_set(err, ERR_INVALID, "cannot enter the working directory %s: %s", c->workdir, strerror(f->errnum));
        return error_hint(err, "set workdir to a directory that exists on node %s and that the job's user may enter",
                          s->node ? s->node : "?");
    case STAGE_EXEC:
        error_errno(err, f->errnum, "cannot run %s", c->argv[0]);
        err->code = ERR_IO;
        return error_hint(err, "install boost-worker next to boost-agent on node %s", s->node ? s->node : "?");
    case STAGE_USER:
        error_errno(err, f->errnum, "cannot become user %u", (unsigned)c->uid);
        break;
    case STAGE_CGROUP:
        error_errno(err, f->errnum, "cannot join the cgroup %s", launch->cgroup->path);
        break;
    case STAGE_SETUP:
        error_errno(err, f->errnum, "cannot set up a rank");
        break;
    }
    err->code = ERR_IO;
    return err->code;
}

static int find_groups(struct child *c, const Boost__AttemptStart *s, gid_t *groups, size_t cap, struct error *err)
{
    c->change_user = geteuid() == 0 && s->uid != 0;
    c->uid = s->uid;
    c->gid = s->gid;
    c->groups = groups;
    if (!c->change_user)
        return ERR_OK;
    int count = (int)cap;
    groups[0] = s->gid;
    c->group_count = 1;
    if (s->user && *s->user) {
        if (getgrouplist(s->user, s->gid, groups, &count) < 0)
            return error_set(err, ERR_IO, "user %s is in more than %zu groups", s->user, cap);
        c->group_count = (size_t)count;
    }
    return ERR_OK;
}

int keeper_rank_start(const struct rank_launch *launch, struct rank_process *out, struct error *err)
{
    const Boost__AttemptStart *s = launch->start;
    struct env_list env = {0};
    struct child c = {.output = -1, .report = -1, .null = -1, .cgroup = -1};
    int pipe_fds[2] = {-1, -1}, report_fds[2] = {-1, -1};
    char rank_text[16];
    gid_t groups[256];
    snprintf(rank_text, sizeof rank_text, "%d", s->ranks[launch->local_rank]);
    char *argv[] = {s->worker_path, "--run-dir", s->run_dir, "--rank", rank_text, NULL};
    c.argv = argv;
    c.workdir = s->spec && s->spec->workdir && *s->spec->workdir ? s->spec->workdir : s->run_dir;
    int rc = find_groups(&c, s, groups, sizeof groups / sizeof *groups, err);
    if (!rc && !env_fill(&env, launch))
        rc = error_set(err, ERR_NOMEM, "no memory for the environment of rank %s", rank_text);
    if (rc)
        goto out;
    c.env = env.items;
    c.null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (c.null < 0 || pipe2(pipe_fds, O_CLOEXEC) < 0 || pipe2(report_fds, O_CLOEXEC) < 0 ||
        fcntl(pipe_fds[0], F_SETFL, O_NONBLOCK) < 0) {
        rc = error_errno(err, errno, "no descriptors for rank %s", rank_text);
        goto out;
    }
    c.output = pipe_fds[1];
    c.report = report_fds[1];
    if (launch->cgroup)
        c.cgroup = cgroup_join_fd(launch->cgroup);
    pid_t pid = fork();
    if (pid == 0)
        child_run(&c);
    if (pid < 0) {
        rc = error_errno(err, errno, "cannot fork rank %s", rank_text);
        goto out;
    }
    setpgid(pid, pid); /* both sides, so that the group is there whoever runs first */
    close(report_fds[1]);
    report_fds[1] = -1;
    struct failure f;
    ssize_t n;
    do
        n = read(report_fds[0], &f, sizeof f);
    while (n < 0 && errno == EINTR);
    if (n == sizeof f) {
        while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
            ;
        rc = report_failure(&f, launch, &c, err);
        goto out;
    }
    *out = (struct rank_process){.pid = pid, .output_fd = pipe_fds[0]};
    pipe_fds[0] = -1;
out:
    for (int i = 0; i < 2; i++) {
        if (pipe_fds[i] >= 0)
            close(pipe_fds[i]);
        if (report_fds[i] >= 0)
            close(report_fds[i]);
    }
    if (c.null >= 0)
        close(c.null);
    if (c.cgroup >= 0)
        close(c.cgroup);
    env_free(&env);
    return rc;
}
