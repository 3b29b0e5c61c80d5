/* agent_tool.h */
#include "daemon/agent_tool.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/agent_user.h"
#include "proto/base/buffer.h"

enum { OUTPUT_MAX = 1 << 20, SILENT_MS = 3600 * 1000, FAULTS_MAX = 1000 };
extern char **environ;

struct tool_child {
    char *const *argv;
    int out, err, null;
    bool change_user;
    uid_t uid;
    gid_t gid;
    gid_t groups[AS_USER_GROUPS];
    int group_count;
};

/* Between fork and exec of a process with threads: only async-signal-safe calls. */
static _Noreturn void child_run(const struct tool_child *c)
{
    static const char failed[] = "boost-worker: cannot be run as the job's user\n";
    struct sigaction sa = {.sa_handler = SIG_DFL};
    sigset_t none;
    for (int sig = 1; sig < NSIG; sig++)
        sigaction(sig, &sa, NULL);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    bool ok = setpgid(0, 0) == 0 && dup2(c->null, 0) >= 0 && dup2(c->out, 1) >= 0 && dup2(c->err, 2) >= 0;
    if (close_range(3, ~0U, 0) < 0)
        for (int fd = 3; fd < 4096; fd++)
            close(fd);
    if (ok && c->change_user)
        ok = setgroups((size_t)c->group_count, c->groups) == 0 && setgid(c->gid) == 0 && setuid(c->uid) == 0;
    if (ok && chdir("/") == 0)
        execve(c->argv[0], c->argv, environ);
    (void)!write(2, failed, sizeof failed - 1);
    _exit(127);
}

/* Reads both until they are closed; false: silent for too long. */
static bool collect(int fds[2], struct buffer texts[2])
{
    int open = 2;
    while (open) {
        struct pollfd p[2] = {{.fd = fds[0], .events = POLLIN}, {.fd = fds[1], .events = POLLIN}};
        int n = poll(p, 2, SILENT_MS);
        if (n == 0)
            return false;
        for (int i = 0; i < 2 && n > 0; i++) {
            char chunk[4096];
            if (!p[i].revents)
                continue;
            ssize_t got = read(fds[i], chunk, sizeof chunk);
            if (got > 0 && texts[i].len + (size_t)got < OUTPUT_MAX)
                buffer_append(&texts[i], chunk, (size_t)got);
            if (got == 0 || (got < 0 && errno != EINTR)) {
                close(fds[i]);
                fds[i] = -1;
                open--;
            }
        }
    }
    return true;
}

static int start(struct tool_child *c, int fds[2], pid_t *pid, struct error *err)
{
    int out[2] = {-1, -1}, errs[2] = {-1, -1};
    int rc = ERR_OK;
    c->null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (c->null < 0 || pipe2(out, O_CLOEXEC) < 0 || pipe2(errs, O_CLOEXEC) < 0)
        rc = error_errno(err, errno, "no descriptors to run %s", c->argv[0]);
    c->out = out[1];
    c->err = errs[1];
    *pid = rc ? -1 : fork();
    if (!rc && *pid == 0)
        child_run(c);
    if (!rc && *pid < 0)
        rc = error_errno(err, errno, "cannot run %s", c->argv[0]);
    int mine[] = {c->null, out[1], errs[1], rc ? out[0] : -1, rc ? errs[0] : -1};
    for (size_t i = 0; i < sizeof mine / sizeof *mine; i++)
        if (mine[i] >= 0)
            close(mine[i]);
    fds[0] = out[0];
    fds[1] = errs[0];
    return rc;
}

static int read_lines(struct buffer *text, struct arena *mem, struct tool_output *out)
{
    static const char mark[] = "fault: ";
    out->faults = arena_alloc(mem, FAULTS_MAX * sizeof *out->faults);
    if (!out->faults)
        return ERR_NOMEM;
    for (char *line = (char *)text->data, *next; line && *line; line = next) {
        next = strchr(line, '\n');
        if (next)
            *next++ = '\0';
        char **at = &out->text;
        bool fault = !strncmp(line, mark, sizeof mark - 1);
        if (fault && out->n_faults == FAULTS_MAX)
            continue;
        if (fault)
            at = &out->faults[out->n_faults++];
        *at = arena_strdup(mem, fault ? line + sizeof mark - 1 : line);
        if (!*at)
            return ERR_NOMEM;
    }
    return ERR_OK;
}

/* What a program that failed said last. */
static int failed(const char *program, int status, struct buffer *said, struct error *err)
{
    static const char mark[] = "boost-worker: ";
    char none[1] = "", *text = said->len ? (char *)said->data : none;
    size_t len = strlen(text);
    while (len && text[len - 1] == '\n')
        text[--len] = '\0';
    char *line = len ? strrchr(text, '\n') : NULL;
    line = line ? line + 1 : text;
    if (WIFSIGNALED(status))
        return error_set(err, ERR_INTERNAL, "%s was killed by signal %d (%s)%s%s", program, WTERMSIG(status),
                         strsignal(WTERMSIG(status)), *line ? ": " : "", line);
    if (WEXITSTATUS(status) == 127)
        return error_set(err, ERR_INTERNAL, "%s cannot be run: %s", program, line);
    return error_set(err, ERR_INVALID, "%s", strncmp(line, mark, sizeof mark - 1) ? line : line + sizeof mark - 1);
}

int agent_tool_run(char *const argv[], uid_t uid, gid_t gid, struct arena *mem, struct tool_output *out,
                   struct error *err)
{
    struct tool_child c = {.argv = argv, .uid = uid, .gid = gid};
    struct buffer texts[2];
    int fds[2], status = 0;
    pid_t pid;
    *out = (struct tool_output){0};
    if (geteuid() != 0 && geteuid() != uid)
        return error_set(err, ERR_REFUSED, "this agent runs as uid %u and cannot act for uid %u", (unsigned)geteuid(),
                         (unsigned)uid);
    c.change_user = geteuid() == 0 && uid != 0;
    if (c.change_user)
        c.group_count = as_user_groups(uid, gid, c.groups);
    if (start(&c, fds, &pid, err))
        return err->code = ERR_INTERNAL;
    buffer_init(&texts[0], OUTPUT_MAX);
    buffer_init(&texts[1], OUTPUT_MAX);
    if (!collect(fds, texts))
        kill(-pid, SIGKILL); /* not reaped yet: its number is its own */
    for (int i = 0; i < 2; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    int rc;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        rc = read_lines(&texts[0], mem, out) ? error_set(err, ERR_NOMEM, "no memory for what %s said", argv[0]) : ERR_OK;
    else
        rc = failed(argv[0], status, &texts[1], err);
    buffer_free(&texts[0]);
    buffer_free(&texts[1]);
    return rc;
}
