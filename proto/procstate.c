/* procstate.h */
#include "proto/procstate.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The ones that a rank can be found in for long. */
static const struct {
    long number;
    const char *name;
} names[] = {
    {SYS_read, "read"},           {SYS_write, "write"},         {SYS_pread64, "pread64"},
    {SYS_pwrite64, "pwrite64"},   {SYS_readv, "readv"},         {SYS_writev, "writev"},
    {SYS_ioctl, "ioctl"},         {SYS_futex, "futex"},         {SYS_ppoll, "ppoll"},
    {SYS_epoll_pwait, "epoll_pwait"}, {SYS_nanosleep, "nanosleep"}, {SYS_clock_nanosleep, "clock_nanosleep"},
    {SYS_connect, "connect"},     {SYS_accept4, "accept4"},     {SYS_sendto, "sendto"},
    {SYS_recvfrom, "recvfrom"},   {SYS_sendmsg, "sendmsg"},     {SYS_recvmsg, "recvmsg"},
    {SYS_openat, "openat"},       {SYS_close, "close"},         {SYS_fsync, "fsync"},
    {SYS_fdatasync, "fdatasync"}, {SYS_ftruncate, "ftruncate"}, {SYS_fallocate, "fallocate"},
    {SYS_flock, "flock"},         {SYS_mmap, "mmap"},           {SYS_munmap, "munmap"},
    {SYS_mprotect, "mprotect"},   {SYS_madvise, "madvise"},     {SYS_sched_yield, "sched_yield"},
    {SYS_rt_sigtimedwait, "rt_sigtimedwait"}, {SYS_rt_sigsuspend, "rt_sigsuspend"}, {SYS_wait4, "wait4"},
    {SYS_exit_group, "exit_group"}, {SYS_renameat, "renameat"}, {SYS_unlinkat, "unlinkat"},
    {SYS_pselect6, "pselect6"},
#ifdef SYS_poll /* not on every architecture */
    {SYS_poll, "poll"},           {SYS_epoll_wait, "epoll_wait"}, {SYS_select, "select"},
    {SYS_pause, "pause"},         {SYS_open, "open"},           {SYS_accept, "accept"},
    {SYS_rename, "rename"},       {SYS_unlink, "unlink"},
#endif
};

const char *proc_syscall_name(long number)
{
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].number == number)
            return names[i].name;
    return NULL;
}

/* The file's first bytes without its last newline; -1 with errno. */
static ssize_t slurp(pid_t pid, pid_t tid, const char *file, char *out, size_t cap)
{
    char path[96];
    snprintf(path, sizeof path, "/proc/%ld/task/%ld/%s", (long)pid, (long)tid, file);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t n = read(fd, out, cap - 1);
    int errnum = errno;
    close(fd);
    errno = errnum;
    if (n < 0)
        return -1;
    while (n > 0 && out[n - 1] == '\n')
        n--;
    out[n] = '\0';
    return n;
}

static void not_readable(char *out, size_t cap)
{
    snprintf(out, cap, "not readable (%s)", strerrordesc_np(errno));
}

static void read_state(pid_t pid, pid_t tid, struct proc_thread *out)
{
    static const struct {
        char letter;
        const char *word;
    } words[] = {{'R', "running"}, {'S', "sleeping"}, {'D', "uninterruptible"}, {'T', "stopped"},
                 {'t', "traced"},  {'Z', "ended"},    {'X', "ended"},           {'I', "idle"}};
    char stat[512];
    if (slurp(pid, tid, "stat", stat, sizeof stat) < 0)
        return;
    const char *behind = strrchr(stat, ')');
    if (!behind || behind[1] != ' ')
        return;
    const char *word = "?";
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (words[i].letter == behind[2])
            word = words[i].word;
    snprintf(out->state, sizeof out->state, "%c (%s)", behind[2], word);
}

static void read_syscall(pid_t pid, pid_t tid, struct proc_thread *out)
{
    char text[256], *end;
    if (slurp(pid, tid, "syscall", text, sizeof text) < 0) {
        not_readable(out->syscall, sizeof out->syscall);
        return;
    }
    long number = strtol(text, &end, 10);
    const char *name = proc_syscall_name(number);
    if (end == text)
        snprintf(out->syscall, sizeof out->syscall, "%.40s", text); /* "running" */
    else if (number < 0)
        snprintf(out->syscall, sizeof out->syscall, "none");
    else
        snprintf(out->syscall, sizeof out->syscall, "%ld%s%s", number, name ? " " : "", name ? name : "");
}

/* Lines "[<0>] futex_wait_queue+0x62/0x90". */
static void read_stack(pid_t pid, pid_t tid, struct proc_thread *out)
{
    char text[4096];
    size_t used = 0;
    if (slurp(pid, tid, "stack", text, sizeof text) < 0) {
        not_readable(out->stack, sizeof out->stack);
        return;
    }
    for (char *rest = text, *line; (line = strsep(&rest, "\n"));) {
        char *name = strstr(line, "] ");
        name = name ? name + 2 : line;
        name[strcspn(name, "+ ")] = '\0';
        int n = *name ? snprintf(out->stack + used, sizeof out->stack - used, "%s%s", used ? " < " : "", name) : 0;
        if (n < 0 || (size_t)n >= sizeof out->stack - used)
            break;
        used += (size_t)n;
    }
}

bool proc_thread_read(pid_t pid, pid_t tid, struct proc_thread *out)
{
    *out = (struct proc_thread){.tid = tid};
    if (slurp(pid, tid, "comm", out->name, sizeof out->name) < 0)
        return false;
    for (char *s = out->name; *s; s++)
        if ((unsigned char)*s < 0x20 || *s == 0x7F)
            *s = '?';
    read_state(pid, tid, out);
    read_syscall(pid, tid, out);
    ssize_t n = slurp(pid, tid, "wchan", out->wchan, sizeof out->wchan);
    if (n < 0)
        not_readable(out->wchan, sizeof out->wchan);
    else if (n == 0 || !strcmp(out->wchan, "0")) /* the kernel says the same for both */
        snprintf(out->wchan, sizeof out->wchan, "none (it does not sleep, or the kernel does not tell)");
    read_stack(pid, tid, out);
    return out->state[0] != '\0';
}

int proc_threads(pid_t pid, pid_t *tids, int room)
{
    char path[64];
    int n = 0;
    snprintf(path, sizeof path, "/proc/%ld/task", (long)pid);
    DIR *dir = opendir(path);
    if (!dir)
        return -1;
    for (struct dirent *e; (e = readdir(dir));) {
        char *end;
        long tid = strtol(e->d_name, &end, 10);
        if (*end || tid <= 0)
            continue;
        if (n < room)
            tids[n] = (pid_t)tid;
        n++;
    }
    closedir(dir);
    for (int i = 1; i < n && i < room; i++)
        if (tids[i] == pid) {
            tids[i] = tids[0];
            tids[0] = pid;
        }
    return n;
}
