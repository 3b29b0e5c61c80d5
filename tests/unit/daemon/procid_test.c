/* Process identities: what may be signalled and what may not (D1), and finding the
 * processes of an attempt whose keeper is gone (D3, D44). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/cgroup.h"
#include "daemon/procid.h"
#include "proto/base/fs.h"

enum { DEEP = 3 };

static pid_t spawn_sleeper(void)
{
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        for (;;)
            pause();
    }
    return pid;
}

static void end(pid_t pid)
{
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

static void test_identity(void **state)
{
    (void)state;
    struct procid self, child;
    struct error err;
    assert_int_equal(procid_get(getpid(), &self, &err), 0);
    assert_int_equal(strlen(self.boot_id), 36);
    assert_true(procid_alive(&self));
    pid_t pid = spawn_sleeper();
    assert_int_equal(procid_get(pid, &child, &err), 0);
    assert_true(procid_alive(&child));
    assert_int_equal(procid_signal(&child, SIGKILL, &err), 0);
    siginfo_t info;
    assert_int_equal(waitid(P_PID, (id_t)pid, &info, WEXITED | WNOWAIT), 0);
    assert_false(procid_alive(&child)); /* a zombie is over */
    assert_int_equal(procid_signal(&child, SIGTERM, &err), ERR_NOT_FOUND);
    waitpid(pid, NULL, 0);
    assert_false(procid_alive(&child));
    assert_int_equal(procid_signal(&child, SIGKILL, &err), ERR_NOT_FOUND);
    assert_int_equal(procid_get(pid, &child, &err), ERR_NOT_FOUND);
}

/* D1: the pid lives, but it is another process (other start time) or of another boot. */
static void test_reused_pid_is_never_signalled(void **state)
{
    (void)state;
    pid_t pid = spawn_sleeper();
    struct procid id, stale;
    struct error err;
    assert_int_equal(procid_get(pid, &id, &err), 0);
    stale = id;
    stale.start--;
    assert_false(procid_alive(&stale));
    assert_int_equal(procid_signal(&stale, SIGKILL, &err), ERR_NOT_FOUND);
    stale = id;
    stale.boot_id[0] = stale.boot_id[0] == 'a' ? 'b' : 'a';
    assert_false(procid_alive(&stale));
    assert_int_equal(procid_signal(&stale, SIGKILL, &err), ERR_NOT_FOUND);
    struct proc_sweep sweep = {.leaders = &stale, .leader_count = 1};
    assert_int_equal(proc_sweep(&sweep, SIGKILL), 0);
    assert_int_equal(waitpid(pid, NULL, WNOHANG), 0);
    assert_true(procid_alive(&id));
    end(pid);
}

static void test_file(void **state)
{
    (void)state;
    char path[PATH_MAX];
    const char *dir = getenv("BOOST_TEST_DIR");
    snprintf(path, sizeof path, "%s/procid-%d", dir ? dir : "/tmp", (int)getpid());
    struct procid id, back;
    struct error err;
    assert_int_equal(procid_get(getpid(), &id, &err), 0);
    assert_int_equal(procid_save(path, &id, &err), 0);
    assert_int_equal(procid_load(path, &back, &err), 0);
    assert_string_equal(back.boot_id, id.boot_id);
    assert_int_equal(back.pid, id.pid);
    assert_int_equal(back.start, id.start);
    static const char *const bad[] = {"", "\n", "x", "x 1", "x 0 5\n", "x -3 5\n", "x 7 0\n", "x 7 abc\n"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(fs_write_atomic(path, bad[i], strlen(bad[i]), 0644, &err), 0);
        assert_int_equal(procid_load(path, &back, &err), ERR_CORRUPT);
    }
    unlink(path);
    assert_int_equal(procid_load(path, &back, &err), ERR_NOT_FOUND);
}

static void test_names_with_parentheses(void **state)
{
    (void)state;
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_NAME, ") R 1 2 (x)");
        raise(SIGSTOP);
        _exit(0);
    }
    waitpid(pid, NULL, WUNTRACED);
    struct proc_info info;
    assert_true(proc_read(pid, &info));
    assert_int_equal(info.ppid, getpid());
    assert_int_equal(info.state, 'T');
    assert_int_equal(info.uid, geteuid());
    end(pid);
}

/* A process in a session of its own, whose parents are gone, found by its environment only. */
static void test_sweep_finds_what_escaped(void **state)
{
    (void)state;
    char marker[64], value[32];
    snprintf(value, sizeof value, "%d-sweep", (int)getpid());
    snprintf(marker, sizeof marker, "BOOST_RUN_DIR=%s", value);
    int fds[2];
    assert_int_equal(pipe(fds), 0);
    pid_t pid = fork();
    if (pid == 0) {
        setsid();
        if (fork() == 0) {
            setenv("BOOST_RUN_DIR", value, 1);
            dup2(fds[1], 1);
            execl("/bin/sh", "sh", "-c", "sleep 1000 & echo up; wait", (char *)NULL);
        }
        _exit(0);
    }
    close(fds[1]);
    waitpid(pid, NULL, 0);
    char up[4];
    assert_int_equal(read(fds[0], up, 3), 3);
    struct proc_sweep sweep = {.marker = marker};
    assert_int_equal(proc_sweep(&sweep, 0), 2); /* the shell and its child */
    sweep.only_uid = true;
    sweep.uid = geteuid() + 1;
    assert_int_equal(proc_sweep(&sweep, SIGKILL), 0); /* another user's: left alone */
    sweep.only_uid = false;
    assert_int_equal(proc_sweep(&sweep, SIGKILL), 2);
    /* The pipe's end: both are dead. */
    assert_int_equal(read(fds[0], up, 1), 0);
    for (int i = 0; proc_sweep(&sweep, 0) > 0 && i < 1000; i++)
        poll(NULL, 0, 1); /* until their parent has taken notice */
    assert_int_equal(proc_sweep(&sweep, 0), 0);
    close(fds[0]);
}

static void test_sweep_takes_group_and_descendants(void **state)
{
    (void)state;
    int fds[2];
    assert_int_equal(pipe(fds), 0);
    pid_t pid = fork();
    if (pid == 0) {
        setpgid(0, 0);
        for (int i = 0; i < DEEP; i++) {
            if (fork())
                break;
            if (i == 0)
                setpgid(0, 0); /* leaves the group, stays a descendant */
        }
        if (write(fds[1], "x", 1) == 1)
            for (;;)
                pause();
        _exit(1);
    }
    close(fds[1]);
    char bytes[DEEP + 1];
    for (int i = 0; i < DEEP + 1; i++)
        assert_int_equal(read(fds[0], bytes + i, 1), 1);
    struct procid leader;
    assert_int_equal(procid_get(pid, &leader, NULL), 0);
    struct proc_sweep sweep = {.leaders = &leader, .leader_count = 1};
    assert_int_equal(proc_sweep(&sweep, SIGKILL), DEEP + 1);
    assert_int_equal(read(fds[0], bytes, 1), 0);
    waitpid(pid, NULL, 0);
    close(fds[0]);
}

static void test_cgroup(void **state)
{
    (void)state;
    struct cgroup cg, again;
    struct error err;
    cgroup_adopt(&again, "/sys/fs/cgroup");
    assert_string_equal(again.path, ""); /* only groups of our making */
    assert_false(cgroup_kill(&again));
    assert_false(cgroup_populated(&again));
    char name[64];
    snprintf(name, sizeof name, "test-%d", (int)getpid());
    if (cgroup_create(&cg, name, &err)) {
        assert_int_equal(err.code, ERR_UNSUPPORTED);
        skip();
    }
    int join = cgroup_join_fd(&cg);
    assert_true(join >= 0);
    pid_t pid = fork();
    if (pid == 0) {
        if (write(join, "0", 1) == 1)
            raise(SIGSTOP);
        for (;;)
            pause();
    }
    close(join);
    waitpid(pid, NULL, WUNTRACED);
    assert_true(cgroup_populated(&cg));
    cgroup_adopt(&again, cg.path);
    assert_string_equal(again.path, cg.path);
    assert_true(cgroup_kill(&again));
    int status;
    waitpid(pid, &status, 0);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    assert_false(cgroup_populated(&cg));
    cgroup_remove(&cg);
    assert_int_not_equal(access(again.path, F_OK), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_identity),
        cmocka_unit_test(test_reused_pid_is_never_signalled),
        cmocka_unit_test(test_file),
        cmocka_unit_test(test_names_with_parentheses),
        cmocka_unit_test(test_sweep_finds_what_escaped),
        cmocka_unit_test(test_sweep_takes_group_and_descendants),
        cmocka_unit_test(test_cgroup),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
