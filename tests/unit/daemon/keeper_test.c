/* The keeper with small workers: this program again, told by KEEPER_TEST in its
 * environment what to do as a rank. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/keeper.h"
#include "daemon/keeper_log.h"
#include "daemon/procid.h"
#include "proto/base/clock.h"
#include "proto/base/fs.h"
#include "proto/rankfiles.h"
#include "proto/worker.pb-c.h"

enum { WAIT_MS = 20000, MAX_RANKS = 4, MIB = 1 << 20 };

/* ---- the rank's side ---- */

static void save_own_identity(const char *run_dir, const char *name)
{
    char path[PATH_MAX];
    struct procid id;
    if (procid_get(getpid(), &id, NULL) || fs_join(path, sizeof path, NULL, run_dir, name) ||
        procid_save(path, &id, NULL))
        _exit(99);
}

/* Returns in the new process once; it has its own session, and its parent is gone. */
static bool escape(void)
{
    pid_t pid = fork();
    if (pid == 0) {
        setsid();
        if (fork() == 0)
            return true;
        _exit(0);
    }
    waitpid(pid, NULL, 0);
    return false;
}

static void wait_for_file(const char *run_dir, const char *name)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", run_dir, name);
    while (!fs_exists(path))
        poll(NULL, 0, 2);
}

static int list_descriptors(void)
{
    DIR *dir = opendir("/proc/self/fd");
    struct dirent *e;
    while ((e = readdir(dir))) {
        if (e->d_name[0] != '.' && strtol(e->d_name, NULL, 10) != dirfd(dir))
            printf("fd %s\n", e->d_name);
    }
    closedir(dir);
    struct stat st;
    printf("stdin %s\n", fstat(0, &st) == 0 && S_ISCHR(st.st_mode) ? "null" : "other");
    printf("group %s\n", getpgrp() == getpid() ? "own" : "shared");
    return 0;
}

static int worker(const char *what, const char *run_dir, int rank)
{
    if (!strcmp(what, "codes")) {
        static const int codes[] = {0, 7, 64, 65};
        printf("rank %d says hello\n", rank);
        return codes[rank];
    }
    if (!strcmp(what, "segv")) {
        signal(SIGSEGV, SIG_DFL);
        raise(SIGSEGV);
    }
    if (!strcmp(what, "escape") || !strcmp(what, "escape-and-exit") || !strcmp(what, "hold-pipe")) {
        if (rank == 0 && escape()) {
            save_own_identity(run_dir, "escaped.id");
            for (;;)
                pause();
        }
        if (rank == 0)
            wait_for_file(run_dir, "escaped.id");
        if (rank == 0 && strcmp(what, "escape"))
            return 3;
        for (;;)
            pause();
    }
    if (!strcmp(what, "flood")) {
        for (int i = 0; i < 200000; i++)
            printf("line %d of the flood\n", i);
        return 0;
    }
    if (!strcmp(what, "long")) {
        for (int i = 0; i < 200000; i++)
            putchar(i % 256 == '\n' ? 'n' : i % 256);
        fputs("\nend\n", stdout);
        return 0;
    }
    if (!strcmp(what, "fds"))
        return list_descriptors();
    if (!strcmp(what, "fill")) {
        char path[PATH_MAX], block[4096] = {0};
        snprintf(path, sizeof path, "%s/ballast", run_dir);
        int fd = open(path, O_WRONLY | O_CREAT, 0644);
        while (write(fd, block, sizeof block) > 0)
            ;
        if (errno != ENOSPC)
            return 12;
        for (int i = 0; i < 50000; i++) /* what cannot be written must not hold us */
            puts("more and more and more");
        return 11;
    }
    if (!strcmp(what, "env")) {
        printf("%s %s %s %s %s %s uid %d\n", getenv("BOOST_RANK"), getenv("BOOST_ATTEMPT"), getenv("OMP_NUM_THREADS"),
               getenv("GOMP_SPINCOUNT"), getenv("MINE"), getenv("BOOST_SOCKET") ? "socket" : "none", (int)getuid());
        return 0;
    }
    for (;;)
        pause();
}

/* ---- fixture ---- */

struct fixture {
    char dir[PATH_MAX];
    Boost__AttemptStart start;
    Boost__JobSpec spec;
    Boost__KeyValue what, mine, *env[2];
    int32_t ranks[MAX_RANKS];
    pid_t keeper;
    int watch;
};

static char self_path[PATH_MAX];

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);
    const char *base = getenv("BOOST_TEST_DIR");
    snprintf(f->dir, sizeof f->dir, "%s/keeper-XXXXXX", base ? base : "/tmp");
    assert_non_null(mkdtemp(f->dir));
    boost__attempt_start__init(&f->start);
    boost__job_spec__init(&f->spec);
    boost__key_value__init(&f->what);
    boost__key_value__init(&f->mine);
    f->what.key = "KEEPER_TEST";
    f->mine.key = "MINE";
    f->mine.value = "yes";
    f->env[0] = &f->what;
    f->env[1] = &f->mine;
    f->spec.env = f->env;
    f->spec.n_env = 2;
    f->start.spec = &f->spec;
    f->start.has_job = f->start.has_attempt = f->start.has_world = f->start.has_threads_per_rank = true;
    f->start.job = 17;
    f->start.attempt = 2;
    f->start.threads_per_rank = 3;
    f->start.store_id = "deadbeef";
    f->start.node = "here";
    f->start.run_dir = f->dir;
    f->start.worker_path = self_path;
    for (int i = 0; i < MAX_RANKS; i++)
        f->ranks[i] = i;
    f->start.ranks = f->ranks;
    f->watch = inotify_init1(IN_CLOEXEC);
    assert_true(inotify_add_watch(f->watch, f->dir, IN_CREATE | IN_MOVED_TO) >= 0);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    if (f->keeper > 0) {
        kill(f->keeper, SIGTERM);
        waitpid(f->keeper, NULL, 0);
    }
    close(f->watch);
    int rc = fs_remove_tree(f->dir, NULL);
    free(f);
    return rc;
}

static void path_of(const struct fixture *f, const char *name, char out[PATH_MAX])
{
    assert_int_equal(fs_join(out, PATH_MAX, NULL, f->dir, name), 0);
}

static void write_start(struct fixture *f, const char *what, int ranks)
{
    char path[PATH_MAX];
    f->what.value = (char *)(uintptr_t)what;
    f->start.n_ranks = (size_t)ranks;
    f->start.world = ranks;
    size_t size = boost__attempt_start__get_packed_size(&f->start);
    uint8_t *packed = malloc(size);
    boost__attempt_start__pack(&f->start, packed);
    path_of(f, "start.pb", path);
    assert_int_equal(fs_write_durable(path, packed, size, 0644, NULL), 0);
    free(packed);
}

static void start_keeper(struct fixture *f, const char *what, int ranks, bool use_cgroup)
{
    write_start(f, what, ranks);
    f->keeper = fork();
    assert_true(f->keeper >= 0);
    if (f->keeper == 0) {
        struct keeper_options options = {.run_dir = f->dir, .use_cgroup = use_cgroup, .ready_fd = -1};
        struct error err;
        char path[PATH_MAX];
        path_of(f, "keeper.log", path);
        int log = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
        dup2(log, 2);
        int rc = keeper_run(&options, &err);
        if (rc)
            dprintf(2, "%s\n", err.message);
        _exit(rc);
    }
}

/* Waits until the run directory has the file; false after `ms`. */
static bool await_file(struct fixture *f, const char *name, int ms)
{
    char path[PATH_MAX];
    uint8_t events[4096];
    path_of(f, name, path);
    int64_t deadline = clock_mono_ns() + ms * NS_PER_MS;
    while (!fs_exists(path)) {
        int64_t left = (deadline - clock_mono_ns()) / NS_PER_MS;
        struct pollfd p = {.fd = f->watch, .events = POLLIN};
        if (left <= 0 || poll(&p, 1, (int)left) <= 0)
            return fs_exists(path);
        if (read(f->watch, events, sizeof events) < 0)
            return false;
    }
    return true;
}

static int join_keeper(struct fixture *f)
{
    int status = -1;
    assert_true(await_file(f, "keeper.end", WAIT_MS));
    assert_int_equal(waitpid(f->keeper, &status, 0), f->keeper);
    f->keeper = 0;
    return status;
}

static void tell_stop(struct fixture *f)
{
    char path[PATH_MAX];
    path_of(f, "stop", path);
    assert_int_equal(fs_write_atomic(path, "kill\n", 5, 0644, NULL), 0);
}

static Boost__ExitRecord *read_exit(struct fixture *f, int rank)
{
    char path[PATH_MAX];
    struct buffer packed;
    buffer_init(&packed, LIMIT_FRAME);
    assert_int_equal(rank_file_path(path, sizeof path, f->dir, rank, "exit", NULL), 0);
    assert_int_equal(fs_read_file(path, &packed, NULL), 0);
    Boost__ExitRecord *r = boost__exit_record__unpack(NULL, packed.len, packed.data);
    assert_non_null(r);
    assert_int_equal(r->job, 17);
    assert_int_equal(r->attempt, 2);
    assert_int_equal(r->rank, rank);
    buffer_free(&packed);
    return r;
}

static void read_log(struct fixture *f, int rank, struct buffer *out)
{
    int64_t offset = 0;
    buffer_init(out, 64 * MIB);
    assert_int_equal(keeper_log_read(f->dir, rank, &offset, -1, 32 * MIB, out, NULL), 0);
    assert_false(buffer_append(out, "", 0));
}

static bool escaped_alive(struct fixture *f)
{
    char path[PATH_MAX];
    struct procid id;
    path_of(f, "escaped.id", path);
    assert_int_equal(procid_load(path, &id, NULL), 0);
    return procid_alive(&id);
}

/* ---- tests ---- */

static void test_exit_codes(void **state)
{
    static const int codes[] = {0, 7, 64, 65};
    struct fixture *f = *state;
    start_keeper(f, "codes", 4, true);
    assert_int_equal(join_keeper(f), 0);
    unsigned seen = 0;
    for (int i = 0; i < 4; i++) {
        char text[64];
        Boost__ExitRecord *r = read_exit(f, i);
        assert_true(r->has_exit_code && !r->has_signal && !r->done && !r->killed_by_us && !r->lost && !r->oom);
        assert_int_equal(r->exit_code, codes[i]);
        snprintf(text, sizeof text, "rank %d says hello\n", i);
        assert_int_equal(r->log_tail.len, strlen(text));
        assert_memory_equal(r->log_tail.data, text, r->log_tail.len);
        assert_in_range(r->seq, 1, 4);
        seen |= 1u << r->seq;
        boost__exit_record__free_unpacked(r, NULL);
    }
    assert_int_equal(seen, 0x1e); /* each number once */
}

static void test_signal(void **state)
{
    struct fixture *f = *state;
    start_keeper(f, "segv", 1, false);
    assert_int_equal(join_keeper(f), 0);
    Boost__ExitRecord *r = read_exit(f, 0);
    assert_true(r->has_signal && !r->has_exit_code && !r->killed_by_us);
    assert_int_equal(r->signal, SIGSEGV);
    boost__exit_record__free_unpacked(r, NULL);
}

static void put_done(struct fixture *f, int rank, int32_t attempt, const char *error)
{
    Boost__DoneRecord done = BOOST__DONE_RECORD__INIT;
    uint8_t packed[512];
    char path[PATH_MAX];
    done.has_job = done.has_attempt = done.has_rank = done.has_why = done.has_step = true;
    done.job = 17;
    done.attempt = attempt;
    done.rank = rank;
    done.why = error ? BOOST__DONE_RECORD__WHY__FAILED : BOOST__DONE_RECORD__WHY__COMPLETED;
    done.step = 42;
    done.error = (char *)(uintptr_t)error;
    done.hint = error ? "mend it" : NULL;
    size_t len = boost__done_record__pack(&done, packed);
    assert_int_equal(rank_file_path(path, sizeof path, f->dir, rank, "done", NULL), 0);
    assert_int_equal(fs_write_atomic(path, packed, len, 0644, NULL), 0);
}

static void test_done_record(void **state)
{
    struct fixture *f = *state;
    put_done(f, 0, 2, NULL);
    put_done(f, 1, 2, "token 300 is not below vocab 256");
    put_done(f, 2, 1, NULL); /* of another attempt: not valid */
    struct rank_status *page = rank_file_map(f->dir, 2, "status", RANK_STATUS_MAGIC, 1, NULL);
    assert_non_null(page);
    page->step = 9;
    page->group = 1;
    page->groups[1] = (struct rank_collective){7, 3 << 19, RANK_INSIDE, "tp", "all_reduce", "latent qkv"};
    rank_file_unmap(page);
    start_keeper(f, "codes", 3, false);
    assert_int_equal(join_keeper(f), 0);
    Boost__ExitRecord *r = read_exit(f, 0);
    assert_true(r->done && r->last_step == 42 && !r->error && !r->collective);
    boost__exit_record__free_unpacked(r, NULL);
    r = read_exit(f, 1);
    assert_true(r->done);
    assert_string_equal(r->error, "token 300 is not below vocab 256 (mend it)");
    boost__exit_record__free_unpacked(r, NULL);
    r = read_exit(f, 2);
    assert_true(!r->done && r->last_step == 9);
    assert_string_equal(r->collective, "all_reduce \"latent qkv\" in group tp (call 7, 1.5 MiB)");
    boost__exit_record__free_unpacked(r, NULL);
}

static void stop_kills_everything(struct fixture *f, bool use_cgroup)
{
    start_keeper(f, "escape", 2, use_cgroup);
    assert_true(await_file(f, "escaped.id", WAIT_MS));
    assert_true(await_file(f, "rank-1.pid", WAIT_MS));
    assert_true(escaped_alive(f));
    tell_stop(f);
    assert_int_equal(join_keeper(f), 0);
    assert_false(escaped_alive(f));
    for (int i = 0; i < 2; i++) {
        Boost__ExitRecord *r = read_exit(f, i);
        assert_true(r->killed_by_us);
        assert_int_equal(r->signal, SIGKILL);
        boost__exit_record__free_unpacked(r, NULL);
    }
}

static void test_stop_as_subreaper(void **state)
{
    stop_kills_everything(*state, false);
}

static void test_stop_with_cgroup(void **state)
{
    stop_kills_everything(*state, true);
}

static void test_sigterm_kills_everything(void **state)
{
    struct fixture *f = *state;
    start_keeper(f, "escape", 1, false);
    assert_true(await_file(f, "escaped.id", WAIT_MS));
    kill(f->keeper, SIGTERM);
    assert_int_equal(join_keeper(f), 0);
    assert_false(escaped_alive(f));
}

/* Without its directory nobody can be told of it, so nothing may go on, and the keeper does not wait for ever. */
static void lost_directory_kills_everything(struct fixture *f, bool moved)
{
    char path[PATH_MAX], away[PATH_MAX + 8];
    struct procid escaped;
    int status = -1;
    start_keeper(f, "escape", 2, false);
    assert_true(await_file(f, "escaped.id", WAIT_MS));
    assert_true(await_file(f, "rank-1.pid", WAIT_MS));
    path_of(f, "escaped.id", path);
    assert_int_equal(procid_load(path, &escaped, NULL), 0);
    assert_true(procid_alive(&escaped));
    snprintf(away, sizeof away, "%s.away", f->dir);
    assert_int_equal(rename(f->dir, away), 0);
    if (!moved)
        assert_int_equal(fs_remove_tree(away, NULL), 0);
    assert_int_equal(waitpid(f->keeper, &status, 0), f->keeper);
    f->keeper = 0;
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) != 0);
    assert_false(procid_alive(&escaped));
    if (moved)
        assert_int_equal(fs_remove_tree(away, NULL), 0);
}

static void test_moved_directory(void **state)
{
    lost_directory_kills_everything(*state, true);
}

static void test_removed_directory(void **state)
{
    lost_directory_kills_everything(*state, false);
}

static void test_leftovers_die_with_the_last_rank(void **state)
{
    struct fixture *f = *state;
    start_keeper(f, "escape-and-exit", 1, false);
    assert_int_equal(join_keeper(f), 0);
    assert_false(escaped_alive(f));
    Boost__ExitRecord *r = read_exit(f, 0);
    assert_int_equal(r->exit_code, 3);
    assert_false(r->killed_by_us);
    boost__exit_record__free_unpacked(r, NULL);
}

/* D31, D48: an escaped process holds rank 0's pipe and rank 1 runs on, yet the record comes at once. */
static void test_record_does_not_wait_for_the_pipe(void **state)
{
    struct fixture *f = *state;
    start_keeper(f, "hold-pipe", 2, false);
    assert_true(await_file(f, "escaped.id", WAIT_MS));
    assert_true(await_file(f, "rank-0.exit", WAIT_MS)); /* the one that holds the pipe lives on: asserted below */
    assert_true(escaped_alive(f));
    Boost__ExitRecord *r = read_exit(f, 0);
    assert_int_equal(r->exit_code, 3);
    boost__exit_record__free_unpacked(r, NULL);
    char path[PATH_MAX];
    path_of(f, "rank-1.exit", path);
    assert_false(fs_exists(path)); /* the keeper kills nobody by itself */
    tell_stop(f);
    join_keeper(f);
}

static void test_stop_before_start(void **state)
{
    struct fixture *f = *state;
    tell_stop(f);
    start_keeper(f, "wait", 1, false);
    assert_int_equal(join_keeper(f), 0);
    Boost__ExitRecord *r = read_exit(f, 0);
    assert_true(r->killed_by_us);
    boost__exit_record__free_unpacked(r, NULL);
}

static void test_descriptors_of_a_rank(void **state)
{
    struct fixture *f = *state;
    int leak = open("/dev/null", O_RDONLY); /* without O_CLOEXEC, as a careless library would */
    int high = fcntl(leak, F_DUPFD, 900);
    start_keeper(f, "fds", 1, true);
    close(leak);
    close(high);
    assert_int_equal(join_keeper(f), 0);
    struct buffer log;
    read_log(f, 0, &log);
    assert_string_equal((char *)log.data, "fd 0\nfd 1\nfd 2\nstdin null\ngroup own\n");
    buffer_free(&log);
}

static void test_environment(void **state)
{
    struct fixture *f = *state;
    setenv("BOOST_SOCKET", "/nowhere", 1);
    unsetenv("GOMP_SPINCOUNT");
    if (geteuid() == 0) {
        f->start.has_uid = f->start.has_gid = true;
        f->start.uid = f->start.gid = 65534;
        assert_int_equal(chown(f->dir, 65534, 65534), 0);
    }
    /* The other user has to reach this program too. */
    start_keeper(f, "env", 1, false);
    unsetenv("BOOST_SOCKET");
    assert_int_equal(join_keeper(f), 0);
    struct buffer log;
    char expected[128];
    Boost__ExitRecord *r = read_exit(f, 0);
    bool unreachable = r->error && strstr(r->error, "Permission denied");
    boost__exit_record__free_unpacked(r, NULL);
    if (unreachable)
        skip();
    read_log(f, 0, &log);
    snprintf(expected, sizeof expected, "0 deadbeef-17.2 3 5000 yes none uid %d\n",
             geteuid() == 0 ? 65534 : (int)getuid());
    assert_string_equal((char *)log.data, expected);
    buffer_free(&log);
}

static void check_no_start(struct fixture *f, int code, const char *text)
{
    start_keeper(f, "codes", 1, false);
    assert_int_equal(join_keeper(f), 0);
    Boost__ExitRecord *r = read_exit(f, 0);
    assert_int_equal(r->exit_code, code);
    assert_non_null(strstr(r->error, text));
    boost__exit_record__free_unpacked(r, NULL);
}

static void test_missing_worker(void **state)
{
    struct fixture *f = *state;
    f->start.worker_path = "/no/such/boost-worker";
    check_no_start(f, RANK_EXIT_INFRA, "/no/such/boost-worker");
}

static void test_missing_workdir(void **state)
{
    struct fixture *f = *state;
    f->spec.workdir = "/no/such/workdir";
    check_no_start(f, RANK_EXIT_SPEC, "/no/such/workdir");
}

static void test_one_keeper_a_directory(void **state)
{
    struct fixture *f = *state;
    int fd;
    struct error err;
    start_keeper(f, "wait", 1, false);
    assert_true(await_file(f, "rank-0.pid", WAIT_MS));
    assert_int_equal(keeper_lock(f->dir, &fd, &err), ERR_BUSY);
    struct procid id;
    char path[PATH_MAX];
    path_of(f, "keeper.id", path);
    assert_int_equal(procid_load(path, &id, &err), 0);
    assert_int_equal(id.pid, f->keeper);
    assert_true(procid_alive(&id));
    tell_stop(f);
    join_keeper(f);
    assert_int_equal(keeper_lock(f->dir, &fd, &err), 0);
    close(fd);
}

static void test_damaged_start(void **state)
{
    struct fixture *f = *state;
    char path[PATH_MAX];
    start_keeper(f, "wait", 1, false);
    assert_true(await_file(f, "rank-0.pid", WAIT_MS));
    tell_stop(f);
    join_keeper(f);
    path_of(f, "start.pb", path);
    assert_int_equal(fs_write_atomic(path, "", 0, 0644, NULL), 0);
    struct keeper_options options = {.run_dir = f->dir, .ready_fd = -1};
    struct error err;
    assert_int_equal(keeper_run(&options, &err), ERR_CORRUPT);
}

static void test_flood_and_rotation(void **state)
{
    struct fixture *f = *state;
    f->start.has_log_max_bytes = true;
    f->start.log_max_bytes = MIB;
    start_keeper(f, "flood", 1, false);
    assert_int_equal(join_keeper(f), 0);
    struct stat st;
    char path[PATH_MAX];
    path_of(f, "rank-0.log", path);
    assert_int_equal(stat(path, &st), 0);
    assert_in_range(st.st_size, 1, MIB);
    path_of(f, "rank-0.log.1", path);
    assert_int_equal(stat(path, &st), 0);
    assert_in_range(st.st_size, MIB - 64, MIB);
    /* What is kept is one piece of the stream, in place and to the last line. */
    struct buffer log;
    int64_t total = 0, offset = 0;
    for (int i = 0; i < 200000; i++)
        total += snprintf(NULL, 0, "line %d of the flood\n", i);
    buffer_init(&log, 4 * MIB);
    assert_int_equal(keeper_log_read(f->dir, 0, &offset, -1, 4 * MIB - 1, &log, NULL), 0);
    assert_int_equal(offset + (int64_t)log.len, total);
    /* A read of the pipe may end within a line, and the file with it: the first line kept may then lack its beginning.
     */
    const char *at = (char *)log.data;
    if (strncmp(at, "line ", 5) != 0)
        at = strchr(at, '\n') + 1;
    char *end;
    long number = strtol(at + strlen("line "), &end, 10);
    for (; *at; number++) {
        char line[64];
        int len = snprintf(line, sizeof line, "line %ld of the flood\n", number);
        assert_memory_equal(at, line, (size_t)len);
        at += len;
    }
    assert_int_equal(number, 200000);
    /* The last two lines, then a piece from the middle by offset. */
    buffer_clear(&log);
    offset = -1;
    assert_int_equal(keeper_log_read(f->dir, 0, &offset, 2, 1000, &log, NULL), 0);
    assert_string_equal((char *)log.data, "line 199998 of the flood\nline 199999 of the flood\n");
    buffer_clear(&log);
    offset = total - 6;
    assert_int_equal(keeper_log_read(f->dir, 0, &offset, -1, 5, &log, NULL), 0);
    assert_string_equal((char *)log.data, "flood");
    buffer_free(&log);
}

static void test_long_lines_and_binary_bytes(void **state)
{
    struct fixture *f = *state;
    start_keeper(f, "long", 1, false);
    assert_int_equal(join_keeper(f), 0);
    struct buffer log, expected;
    static const char mark[] = " [boost: line goes on]\n";
    buffer_init(&expected, MIB);
    for (int i = 0; i < 200000; i++) {
        uint8_t byte = i % 256 == '\n' ? 'n' : (uint8_t)i;
        if (i && i % LIMIT_LOG_LINE == 0)
            buffer_append_str(&expected, mark);
        buffer_append(&expected, &byte, 1);
    }
    buffer_append_str(&expected, "\nend\n");
    read_log(f, 0, &log);
    assert_int_equal(log.len, expected.len);
    assert_memory_equal(log.data, expected.data, log.len);
    Boost__ExitRecord *r = read_exit(f, 0);
    assert_int_equal(r->log_tail.len, KEEPER_LOG_TAIL);
    assert_memory_equal(r->log_tail.data, expected.data + expected.len - KEEPER_LOG_TAIL, KEEPER_LOG_TAIL);
    boost__exit_record__free_unpacked(r, NULL);
    buffer_free(&log);
    buffer_free(&expected);
}

/* A real full disk: a small one of our own, filled by the rank. The end is recorded all the same. */
static void test_full_disk_keeps_the_exit_record(void **state)
{
    struct fixture *f = *state;
    if (unshare(CLONE_NEWNS) < 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
        mount("none", f->dir, "tmpfs", 0, "size=1m") < 0)
        skip(); /* not root */
    start_keeper(f, "fill", 1, false);
    int status;
    assert_int_equal(waitpid(f->keeper, &status, 0), f->keeper);
    f->keeper = 0;
    assert_int_equal(status, 0);
    Boost__ExitRecord *r = read_exit(f, 0);
    assert_int_equal(r->exit_code, 11);
    boost__exit_record__free_unpacked(r, NULL);
    char path[PATH_MAX];
    path_of(f, "keeper.end", path);
    assert_true(fs_exists(path));
    assert_int_equal(umount(f->dir), 0);
}

int main(int argc, char **argv)
{
    const char *what = getenv("KEEPER_TEST");
    if (what && argc == 5) /* --run-dir DIR --rank R */
        return worker(what, argv[2], (int)strtol(argv[4], NULL, 10));
    ssize_t n = readlink("/proc/self/exe", self_path, sizeof self_path - 1);
    if (n <= 0)
        return 1;
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_exit_codes),
        TEST(test_signal),
        TEST(test_done_record),
        TEST(test_stop_as_subreaper),
        TEST(test_stop_with_cgroup),
        TEST(test_sigterm_kills_everything),
        TEST(test_moved_directory),
        TEST(test_removed_directory),
        TEST(test_leftovers_die_with_the_last_rank),
        TEST(test_record_does_not_wait_for_the_pipe),
        TEST(test_stop_before_start),
        TEST(test_descriptors_of_a_rank),
        TEST(test_environment),
        TEST(test_missing_worker),
        TEST(test_missing_workdir),
        TEST(test_one_keeper_a_directory),
        TEST(test_damaged_start),
        TEST(test_flood_and_rotation),
        TEST(test_long_lines_and_binary_bytes),
        TEST(test_full_disk_keeps_the_exit_record),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
