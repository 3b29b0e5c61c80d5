/* For LD_PRELOAD, a disk that fails, and a record of what a power cut would leave.
 *
 * BOOST_TEST_FAULT="OP N HOW WHERE", or "@FILE": the same text in a file, which is looked at before each call; without
 * it nothing happens, and a new text begins to count anew. Of the calls of OP (write, fsync, rename, mkdir, open,
 * unlink, cut, or any) that concern a path with WHERE in it, the Nth one
 *   KILL    kills the process before it,     AFTER   right behind it,
 *   ENOSPC, EIO  fails with that (and so does every later one under ENOSPC, as on a full disk; unlink and open of
 *           what is there do not), or
 *   DROP    does nothing and says that it did.
 * Every call that is counted is appended, as one line, to BOOST_TEST_FAULT_LOG. A socket's path is "socket:[...]", and
 * sendmsg is a write too.
 *
 * BOOST_TEST_DISK="JOURNAL ROOT": each fsync of ROOT and what is below is written down in the directory JOURNAL, with
 * what it made durable: a file's bytes, a directory's entries. A line of JOURNAL/list is "SEQ fsync f|d KEY PATH", and
 * JOURNAL/SEQ holds the bytes, or lines "f|d KEY MODE NAME". A change of a directory is written down in the same way,
 * as "SEQ change d KEY PATH": nothing says that it is durable, but a disk may be quicker than it has to be. KEY is the
 * inode with the time it was made, since numbers are given again. What fails or is dropped is not written down. */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum how { PASS, KILL, AFTER, NOSPACE, IO, DROP };

static struct {
    char op[16], where[256], log[4096], file[4096], text[512];
    long n;
    enum how how;
    bool ready;
    char journal[4096], root[4096];
} fault;
static long counted;

static void parse(const char *text)
{
    static const char *const names[] = {"PASS", "KILL", "AFTER", "ENOSPC", "EIO", "DROP"};
    char copy[512], *rest = NULL;
    snprintf(copy, sizeof copy, "%s", text);
    const char *op = strtok_r(copy, " ", &rest), *n = strtok_r(NULL, " ", &rest), *how = strtok_r(NULL, " ", &rest);
    snprintf(fault.op, sizeof fault.op, "%s", op ? op : "");
    fault.n = n ? strtol(n, NULL, 10) : 0;
    snprintf(fault.where, sizeof fault.where, "%s", rest ? rest : "");
    fault.how = PASS;
    for (int i = 0; i < 6; i++)
        if (how && !strcmp(how, names[i]))
            fault.how = (enum how)i;
}

static void setup(void)
{
    const char *text = getenv("BOOST_TEST_FAULT"), *log = getenv("BOOST_TEST_FAULT_LOG");
    const char *disk = getenv("BOOST_TEST_DISK"), *space = disk ? strchr(disk, ' ') : NULL;
    fault.ready = true;
    snprintf(fault.log, sizeof fault.log, "%s", log ? log : "");
    if (space) {
        snprintf(fault.journal, sizeof fault.journal, "%.*s", (int)(space - disk), disk);
        snprintf(fault.root, sizeof fault.root, "%s", space + 1);
    }
    if (text && *text == '@')
        snprintf(fault.file, sizeof fault.file, "%s", text + 1);
    else if (text)
        parse(text);
}

/* From the file, when there is one. */
static void look(void)
{
    char text[512];
    int fd = (int)syscall(SYS_openat, AT_FDCWD, fault.file, O_RDONLY | O_CLOEXEC);
    long n = fd < 0 ? 0 : syscall(SYS_read, fd, text, sizeof text - 1);
    if (fd >= 0)
        syscall(SYS_close, fd);
    text[n > 0 ? n : 0] = '\0';
    if (!strcmp(text, fault.text))
        return;
    snprintf(fault.text, sizeof fault.text, "%s", text);
    parse(text);
    __atomic_store_n(&counted, 0, __ATOMIC_RELAXED);
}

static void append(const char *path, const char *line, size_t len)
{
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (fd >= 0) {
        (void)!syscall(SYS_write, fd, line, len);
        syscall(SYS_close, fd);
    }
}

static void note(const char *op, const char *path)
{
    char line[4600];
    int len = snprintf(line, sizeof line, "%s %s\n", op, path);
    if (*fault.log)
        append(fault.log, line, (size_t)len);
}

/* What is to become of this call. */
static enum how meet(const char *op, const char *path)
{
    if (!fault.ready)
        setup();
    if (!path || (!*fault.file && !*fault.op))
        return PASS;
    if (*fault.file)
        look();
    if (!*fault.op || !strstr(path, fault.where) || (strcmp(fault.op, "any") && strcmp(fault.op, op)))
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

/* ---- what a power cut would leave ------------------------------------------------------------ */

static bool key_of(int dir, const char *name, char key[64], char *kind, unsigned *mode)
{
    struct statx st;
    int flags = AT_SYMLINK_NOFOLLOW | (*name ? 0 : AT_EMPTY_PATH);
    if (syscall(SYS_statx, dir, name, flags, STATX_BASIC_STATS | STATX_BTIME, &st) < 0)
        return false;
    snprintf(key, 64, "%llu-%lld.%09u", (unsigned long long)st.stx_ino, (long long)st.stx_btime.tv_sec,
             st.stx_btime.tv_nsec);
    *kind = S_ISDIR(st.stx_mode) ? 'd' : S_ISREG(st.stx_mode) ? 'f' : '?';
    *mode = st.stx_mode & 07777;
    return true;
}

static void put_entries(int dir, int out)
{
    char key[64], kind, line[512];
    unsigned mode;
    DIR *d = fdopendir(dup(dir));
    for (struct dirent *e; d && (e = readdir(d));) {
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..") || !key_of(dir, e->d_name, key, &kind, &mode) ||
            kind == '?')
            continue;
        int len = snprintf(line, sizeof line, "%c %s %o %s\n", kind, key, mode, e->d_name);
        (void)!syscall(SYS_write, out, line, (size_t)len);
    }
    if (d)
        closedir(d);
}

static void put_bytes(int in, int out)
{
    static const size_t size = 1 << 16;
    char *chunk = malloc(size);
    off_t at = 0;
    for (ssize_t n; chunk && (n = pread(in, chunk, size, at)) > 0; at += n)
        (void)!syscall(SYS_write, out, chunk, (size_t)n);
    free(chunk);
}

/* One at a time, whichever process it is in: the lock is the counter's file. */
static void journal(const char *what, const char *path)
{
    char key[64], name[4300], line[4600], number[32] = "", kind;
    unsigned mode;
    size_t root = strlen(fault.root);
    if (!*fault.journal || strncmp(path, fault.root, root) || (path[root] && path[root] != '/'))
        return;
    int keep = errno;
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    snprintf(name, sizeof name, "%s/next", fault.journal);
    int lock = (int)syscall(SYS_openat, AT_FDCWD, name, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd >= 0 && lock >= 0 && flock(lock, LOCK_EX) == 0 && key_of(fd, "", key, &kind, &mode) && kind != '?') {
        (void)!pread(lock, number, sizeof number - 1, 0);
        long seq = strtol(number, NULL, 10) + 1;
        snprintf(name, sizeof name, "%s/%ld", fault.journal, seq);
        int out = (int)syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
        if (kind == 'd')
            put_entries(fd, out);
        else
            put_bytes(fd, out);
        syscall(SYS_close, out);
        int len = snprintf(line, sizeof line, "%ld %s %c %s %s\n", seq, what, kind, key, path);
        snprintf(name, sizeof name, "%s/list", fault.journal);
        append(name, line, (size_t)len);
        len = snprintf(number, sizeof number, "%ld", seq);
        syscall(SYS_pwrite64, lock, number, (size_t)len, 0);
    }
    if (lock >= 0)
        syscall(SYS_close, lock);
    if (fd >= 0)
        syscall(SYS_close, fd);
    errno = keep;
}

static void journal_parent(const char *path)
{
    char dir[4096];
    const char *slash = strrchr(path, '/');
    if (!*fault.journal || !slash || slash == path)
        return;
    snprintf(dir, sizeof dir, "%.*s", (int)(slash - path), path);
    journal("change", dir);
}

/* ---- the calls ------------------------------------------------------------------------------- */

/* The call itself, or what stands for it. */
#define DO(op, path, dropped, behind, ...)                                                                             \
    do {                                                                                                               \
        const char *path_ = path;                                                                                      \
        enum how how_ = meet(op, path_);                                                                               \
        if (how_ == NOSPACE || how_ == IO) {                                                                           \
            errno = how_ == IO ? EIO : ENOSPC;                                                                         \
            return -1;                                                                                                 \
        }                                                                                                              \
        if (how_ == DROP)                                                                                              \
            return dropped;                                                                                            \
        long rc_ = syscall(__VA_ARGS__);                                                                               \
        if (rc_ >= 0 && path_)                                                                                         \
            behind;                                                                                                    \
        if (how_ == AFTER)                                                                                             \
            kill(getpid(), SIGKILL);                                                                                   \
        return rc_;                                                                                                    \
    } while (0)

ssize_t write(int fd, const void *data, size_t len)
{
    char path[4096];
    DO("write", path_of(fd, path), (ssize_t)len, (void)0, SYS_write, fd, data, len);
}

ssize_t pwrite(int fd, const void *data, size_t len, off_t at)
{
    char path[4096];
    DO("write", path_of(fd, path), (ssize_t)len, (void)0, SYS_pwrite64, fd, data, len, at);
}

ssize_t pwrite64(int fd, const void *data, size_t len, off64_t at)
{
    char path[4096];
    DO("write", path_of(fd, path), (ssize_t)len, (void)0, SYS_pwrite64, fd, data, len, at);
}

static size_t bytes_of(const struct iovec *list, size_t n)
{
    size_t len = 0;
    for (size_t i = 0; i < n; i++)
        len += list[i].iov_len;
    return len;
}

ssize_t writev(int fd, const struct iovec *list, int n)
{
    char path[4096];
    DO("write", path_of(fd, path), (ssize_t)bytes_of(list, (size_t)n), (void)0, SYS_writev, fd, list, n);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
    char path[4096];
    size_t len = bytes_of(message->msg_iov, message->msg_iovlen);
    DO("write", path_of(fd, path), (ssize_t)len, (void)0, SYS_sendmsg, fd, message, flags);
}

static int do_cut(int fd, off_t size)
{
    char path[4096];
    DO("cut", path_of(fd, path), 0, (void)0, SYS_ftruncate, fd, size);
}

int ftruncate(int fd, off_t size)
{
    return do_cut(fd, size);
}

int ftruncate64(int fd, off64_t size)
{
    return do_cut(fd, size);
}

int fsync(int fd)
{
    char path[4096];
    DO("fsync", path_of(fd, path), 0, journal("fsync", path), SYS_fsync, fd);
}

int fdatasync(int fd)
{
    char path[4096];
    DO("fsync", path_of(fd, path), 0, journal("fsync", path), SYS_fdatasync, fd);
}

static int do_rename(const char *from, const char *to)
{
    DO("rename", to, 0, journal_parent(to), SYS_renameat, AT_FDCWD, from, AT_FDCWD, to);
}

int rename(const char *from, const char *to)
{
    return do_rename(from, to);
}

static int do_mkdir(const char *path, mode_t mode)
{
    DO("mkdir", path, 0, journal_parent(path), SYS_mkdirat, AT_FDCWD, path, mode);
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
    DO("unlink", path, 0, journal_parent(path), SYS_unlinkat, dir, name, flags);
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
    DO("open", path, -1, journal_parent(path), SYS_openat, AT_FDCWD, path, flags, mode);
}

int open(const char *path, int flags, ...)
{
    va_list ap;
    va_start(ap, flags);
    mode_t mode = flags & O_CREAT ? va_arg(ap, mode_t) : 0;
    va_end(ap);
    return do_open(path, flags, mode);
}

int open64(const char *path, int flags, ...)
{
    va_list ap;
    va_start(ap, flags);
    mode_t mode = flags & O_CREAT ? va_arg(ap, mode_t) : 0;
    va_end(ap);
    return do_open(path, flags, mode);
}
