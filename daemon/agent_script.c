/* agent_script.h */
#include "daemon/agent_script.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/log.h"
#include "daemon/procid.h"
#include "proto/base/clock.h"
#include "proto/base/fs.h"

extern char **environ;

enum {
    TAIL = 1024,      /* of what it prints */
    LINE = 300,       /* of the last line, in a message */
    DRAIN = 64 << 10, /* read after its end; a child of it may go on printing for ever */
    SLICE_MS = 20,    /* between two looks, on a kernel without pidfd */
    DEAD_MS = 5000,   /* after SIGKILL */
};

struct tail {
    char text[TAIL];
    size_t len;
};

static void tail_add(struct tail *t, const char *data, size_t n)
{
    if (n > TAIL) {
        data += n - TAIL;
        n = TAIL;
    }
    size_t over = t->len + n > TAIL ? t->len + n - TAIL : 0;
    memmove(t->text, t->text + over, t->len - over);
    memcpy(t->text + t->len - over, data, n);
    t->len += n - over;
}

/* The last line that is not empty, without bytes that would drive a terminal, cut between characters. */
static void last_line(const struct tail *t, char out[LINE + 1])
{
    size_t end = t->len, len = 0;
    while (end && (unsigned char)t->text[end - 1] <= ' ')
        end--;
    size_t start = end;
    while (start && t->text[start - 1] != '\n')
        start--;
    for (; start < end && len < LINE; start++) {
        unsigned char c = (unsigned char)t->text[start];
        out[len++] = c < ' ' || c == 0x7f ? ' ' : (char)c;
    }
    while (start < end && len && ((unsigned char)t->text[start] & 0xc0) == 0x80) {
        start--;
        len--;
    }
    out[len] = '\0';
}

/* ---- what outlives the agent ---- */

static char records[PATH_MAX]; /* a file for each script that runs: who it is */

int scripts_open(const char *dir, struct error *err)
{
    int rc = fs_make_dirs(dir, 0700, err);
    DIR *d = rc ? NULL : opendir(dir);
    if (!rc && !d)
        return error_errno(err, errno, "cannot read %s", dir);
    for (const struct dirent *e; d && (e = readdir(d));) {
        char path[PATH_MAX];
        struct procid id;
        if (e->d_name[0] == '.' || fs_join(path, sizeof path, NULL, dir, e->d_name))
            continue;
        if (!procid_load(path, &id, NULL) && procid_alive(&id)) {
            const struct proc_sweep sweep = {.leaders = &id, .leader_count = 1};
            log_line(LOG_WARN, "script %ld of the agent before this one still runs: killed", (long)id.pid);
            proc_sweep(&sweep, SIGKILL);
        }
        unlink(path);
    }
    if (d)
        closedir(d);
    snprintf(records, sizeof records, "%s", rc ? "" : dir);
    return rc;
}

/* Without a record, on a full disk, it is only not found by the next agent. */
static void record(pid_t pid, char path[PATH_MAX])
{
    char name[32];
    struct procid id;
    struct error err;
    snprintf(name, sizeof name, "%ld", (long)pid);
    path[0] = '\0';
    if (!*records || fs_join(path, PATH_MAX, NULL, records, name))
        return;
    if (procid_get(pid, &id, &err) || procid_save(path, &id, &err))
        log_error(LOG_DEBUG, &err, "no record of script %ld", (long)pid);
}

/* ---- starting it ---- */

static bool is_ours(const char *entry)
{
    return strncmp(entry, "BOOST_", 6) == 0 || strncmp(entry, "UV_THREADPOOL_SIZE=", 19) == 0;
}

/* NULL-terminated; the strings that are made here begin at `made`. */
static char **make_environment(const struct script *s, size_t *made)
{
    size_t n = 0;
    while (environ[n])
        n++;
    char **list = calloc(n + s->n_variables + 1, sizeof *list);
    size_t used = 0;
    for (size_t i = 0; list && i < n; i++)
        if (!is_ours(environ[i]))
            list[used++] = environ[i];
    *made = used;
    for (size_t i = 0; list && i < s->n_variables; i++) {
        if (s->variables[i].value && asprintf(&list[used], "%s=%s", s->variables[i].name, s->variables[i].value) >= 0)
            used++;
        else
            list[used] = NULL;
    }
    return list;
}

static void free_environment(char **list, size_t made)
{
    for (size_t i = made; list && list[i]; i++)
        free(list[i]);
    free(list);
}

/* In a session of its own, so that all of it can be killed; signals as a new process expects them. */
static int spawn(const struct script *s, int output, pid_t *pid)
{
    char *argv[] = {(char *)(uintptr_t)s->path, NULL};
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    sigset_t none, all;
    size_t made = 0;
    char **env = make_environment(s, &made);
    if (!env)
        return ENOMEM;
    sigemptyset(&none);
    sigfillset(&all);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, output, 1);
    posix_spawn_file_actions_adddup2(&actions, output, 2);
    posix_spawn_file_actions_addclosefrom_np(&actions, 3);
    posix_spawn_file_actions_addchdir_np(&actions, "/");
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setsigdefault(&attributes, &all);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSID);
    int errnum = posix_spawn(pid, s->path, &actions, &attributes, argv, env);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
    free_environment(env, made);
    return errnum;
}

/* ---- its end ---- */

/* Reads what is there; false: the pipe is closed. */
static bool drain(int fd, struct tail *t, size_t limit)
{
    char chunk[4096];
    for (size_t got = 0; got < limit;) {
        ssize_t n = read(fd, chunk, sizeof chunk);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 && errno == EAGAIN;
        tail_add(t, chunk, (size_t)n);
        got += (size_t)n;
    }
    return true;
}

/* It is a child that nobody else waits for: while it is not reaped its pid, and its group's number, are its own. */
static bool has_ended(pid_t pid)
{
    siginfo_t info = {0};
    return waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) < 0 || info.si_pid == pid;
}

enum waited { ENDED, OUT_OF_TIME, CANCELLED };

/* Until the end of the process, or the deadline, or a word that it is not wanted any more. */
static enum waited await_end(pid_t pid, int *output, struct tail *t, int64_t deadline, int cancel_fd)
{
    int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    enum waited waited = ENDED;
    while (waited == ENDED && !has_ended(pid)) {
        int left = clock_left_ms(deadline);
        struct pollfd p[3] = {{.fd = *output, .events = POLLIN},
                              {.fd = pidfd, .events = POLLIN},
                              {.fd = cancel_fd > 0 ? cancel_fd : -1, .events = POLLIN}};
        if (!left)
            waited = OUT_OF_TIME;
        else if (poll(p, 3, pidfd < 0 && left > SLICE_MS ? SLICE_MS : left) <= 0)
            continue; /* the deadline says whether it was that */
        if (p[2].revents)
            waited = CANCELLED;
        if (p[0].revents && !drain(*output, t, DRAIN)) {
            close(*output);
            *output = -1; /* poll() passes it over */
        }
    }
    if (pidfd >= 0)
        close(pidfd);
    return waited;
}

static void reap(pid_t pid, int *status)
{
    while (waitpid(pid, status, 0) < 0 && errno == EINTR)
        ;
}

static int say(const struct script *s, int status, double seconds, const struct tail *t, struct error *err)
{
    char line[LINE + 1], how[96];
    last_line(t, line);
    if (WIFSIGNALED(status))
        snprintf(how, sizeof how, "signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
    else
        snprintf(how, sizeof how, "status %d", WEXITSTATUS(status));
    return error_set(err, ERR_IO, "%.200s: %s after %.1f s: %s", s->path, how, seconds,
                     *line ? line : "it printed nothing");
}

/* After its time, or when it is cancelled: what is left of it is killed. */
static int end_by_force(const struct script *s, pid_t pid, enum waited why, int *output, struct tail *t,
                        struct error *err)
{
    char line[LINE + 1];
    int status;
    kill(-pid, SIGKILL);
    bool dead = await_end(pid, output, t, clock_mono_ns() + DEAD_MS * NS_PER_MS, -1) == ENDED;
    if (dead)
        reap(pid, &status);
    last_line(t, line);
    if (why == CANCELLED)
        return error_set(err, ERR_REFUSED, "%.200s: stopped with its attempt%s", s->path,
                         dead ? "" : ", and not dead 5 s after SIGKILL");
    error_set(err, ERR_TIMEOUT, "%.200s: not over after %.1f s%s: %s", s->path, s->timeout_ms / 1e3,
              dead ? ", killed" : ", and not dead 5 s after SIGKILL", *line ? line : "it printed nothing");
    return error_hint(err, "mend the script, or raise %s", s->limit);
}

int script_run(const struct script *s, struct error *err)
{
    struct tail t = {.len = 0};
    int64_t from = clock_mono_ns(), deadline = from + s->timeout_ms * NS_PER_MS;
    enum waited waited;
    char note[PATH_MAX] = "";
    int fds[2], status = 0;
    pid_t pid;
    if (pipe2(fds, O_CLOEXEC) < 0)
        return error_errno(err, errno, "no descriptors to run %s", s->path);
    int errnum = spawn(s, fds[1], &pid);
    close(fds[1]);
    fcntl(fds[0], F_SETFL, O_NONBLOCK);
    int rc = ERR_OK;
    if (!errnum)
        record(pid, note);
    if (errnum) {
        rc = error_set(err, ERR_IO, "%.200s: cannot be run: %s", s->path, strerror(errnum));
        error_hint(err, "make it executable, with an interpreter in its first line (#!/bin/sh)");
    } else if ((waited = await_end(pid, &fds[0], &t, deadline, s->cancel_fd)) != ENDED) {
        rc = end_by_force(s, pid, waited, &fds[0], &t, err);
    } else {
        siginfo_t info = {0};
        waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT);
        if (s->kill_children || info.si_code != CLD_EXITED || info.si_status != 0)
            kill(-pid, SIGKILL); /* before the group's number is free */
        reap(pid, &status);
        if (fds[0] >= 0)
            (void)drain(fds[0], &t, DRAIN);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
            rc = say(s, status, (double)(clock_mono_ns() - from) / (double)NS_PER_S, &t, err);
    }
    if (fds[0] >= 0)
        close(fds[0]);
    if (*note)
        unlink(note);
    return rc;
}
