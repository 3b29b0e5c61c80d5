/* For LD_PRELOAD, a disk that fails once: BOOST_TEST_FAULT="OP N HOW WHERE". Of the calls of OP (write, fsync, rename,
 * mkdir, open, unlink, or any) that concern a path with WHERE in it, the Nth one
 *   KILL    kills the process before it,     AFTER   right behind it,
 *   ENOSPC, EIO  fails with that (and so does every later one under ENOSPC, as on a full disk; unlink and open of
 *           what is there do not), or
 *   DROP    does nothing and says that it did.
 * Every call that is counted is appended, as one line, to BOOST_TEST_FAULT_LOG. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum how { PASS, KILL, AFTER, NOSPACE, IO, DROP };

static struct {
    char op[16], where[256], log[4096];
    long n;
    enum how how;
    bool ready;
} fault;
static long counted;

static void setup(void)
{
    static const char *const names[] = {"PASS", "KILL", "AFTER", "ENOSPC", "EIO", "DROP"};
    const char *text = getenv("BOOST_TEST_FAULT"), *log = getenv("BOOST_TEST_FAULT_LOG");
    char how[16] = "";
    fault.ready = true;
    if (!text)
        return;
    char copy[512], *rest = NULL;
    snprintf(copy, sizeof copy, "%s", text);
    const char *op = strtok_r(copy, " ", &rest), *n = strtok_r(NULL, " ", &rest), *h = strtok_r(NULL, " ", &rest);
    snprintf(fault.op, sizeof fault.op, "%s", op ? op : "");
    fault.n = n ? strtol(n, NULL, 10) : 0;
    snprintf(how, sizeof how, "%s", h ? h : "");
    snprintf(fault.where, sizeof fault.where, "%s", rest ? rest : "");
    snprintf(fault.log, sizeof fault.log, "%s", log ? log : "");
    for (int i = 0; i < 6; i++)
        if (!strcmp(how, names[i]))
            fault.how = (enum how)i;
}

static void note(const char *op, const char *path)
{
    char line[4600];
    int len = snprintf(line, sizeof line, "%s %s\n", op, path);
    int fd = *fault.log ? (int)syscall(SYS_openat, AT_FDCWD, fault.log, O_WRONLY | O_CREAT | O_APPEND, 0644) : -1;
    if (fd >= 0) {
        (void)!syscall(SYS_write, fd, line, (size_t)len);
        syscall(SYS_close, fd);
    }
}

/* What is to become of this call. */
static enum how meet(const char *op, const char *path)
{
    if (!fault.ready)
        setup();
    if (!*fault.op || !path || !strstr(path, fault.where) || (strcmp(fault.op, "any") && strcmp(fault.op, op)))
        return PASS;
    long k = __atomic_add_fetch(&counted, 1, __ATOMIC_RELAXED);
    note(op, path);
    if (k < fault.n || (k > fault.n && fault.how != NOSPACE))
        return PASS;
    if (fault.how == NOSPACE && !strcmp(op, "unlink"))
        return PASS;
    if (fault.how == KILL)
        kill(getpid(), SIGKILL);
    return fault.how;
}

static const char *path_of(int fd, char out[4096])
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long n = readlink(link, out, 4095);
    if (n < 0)
        return NULL;
    out[n] = '\0';
    return out;
}

/* The call itself, or what stands for it. */
#define DO(op, path, dropped, ...)                                                                                     \
    do {                                                                                                               \
        enum how how_ = meet(op, path);                                                                                \
        if (how_ == NOSPACE || how_ == IO) {                                                                           \
            errno = how_ == IO ? EIO : ENOSPC;                                                                         \
            return -1;                                                                                                 \
        }                                                                                                              \
        if (how_ == DROP)                                                                                              \
            return dropped;                                                                                            \
        long rc_ = syscall(__VA_ARGS__);                                                                               \
        if (how_ == AFTER)                                                                                             \
            kill(getpid(), SIGKILL);                                                                                   \
        return rc_;                                                                                                    \
    } while (0)

ssize_t write(int fd, const void *data, size_t len)
{
    char path[4096];
    DO("write", path_of(fd, path), (ssize_t)len, SYS_write, fd, data, len);
}

int fsync(int fd)
{
    char path[4096];
    DO("fsync", path_of(fd, path), 0, SYS_fsync, fd);
}

int fdatasync(int fd)
{
    char path[4096];
    DO("fsync", path_of(fd, path), 0, SYS_fdatasync, fd);
}

static int do_rename(const char *from, const char *to)
{
    DO("rename", to, 0, SYS_renameat, AT_FDCWD, from, AT_FDCWD, to);
}

int rename(const char *from, const char *to)
{
    return do_rename(from, to);
}

static int do_mkdir(const char *path, mode_t mode)
{
    DO("mkdir", path, 0, SYS_mkdirat, AT_FDCWD, path, mode);
}

int mkdir(const char *path, mode_t mode)
{
    return do_mkdir(path, mode);
}

static int do_unlinkat(int dir, const char *name, int flags)
{
    char base[4096], path[8400];
    const char *in = dir == AT_FDCWD || *name == '/' ? "" : path_of(dir, base);
    snprintf(path, sizeof path, "%s%s%s", in ? in : "", in && *in ? "/" : "", name);
    DO("unlink", path, 0, SYS_unlinkat, dir, name, flags);
}

int unlink(const char *path)
{
    return do_unlinkat(AT_FDCWD, path, 0);
}

int unlinkat(int dir, const char *name, int flags)
{
    return do_unlinkat(dir, name, flags);
}

static int do_open(const char *path, int flags, mode_t mode)
{
    if (!(flags & O_CREAT))
        return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
    DO("open", path, -1, SYS_openat, AT_FDCWD, path, flags, mode);
}

int open(const char *path, int flags, ...)
{
    va_list ap;
    va_start(ap, flags);
    mode_t mode = flags & O_CREAT ? va_arg(ap, mode_t) : 0;
    va_end(ap);
    return do_open(path, flags, mode);
}
