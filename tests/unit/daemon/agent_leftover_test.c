/* Finding what attempts have left: processes by their environment, and who has a file open (D45). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/agent_leftover.h"
#include "proto/base/fs.h"

static char dir[PATH_MAX];

static int setup(void **state)
{
    const char *base = getenv("BOOST_TEST_DIR");
    (void)state;
    snprintf(dir, sizeof dir, "%s/leftover-XXXXXX", base ? base : "/tmp");
    return mkdtemp(dir) ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    return fs_remove_tree(dir, NULL);
}

/* A process with this environment, which has `file` open when it is not NULL; it runs when this returns. */
static pid_t start(char *const env[], const char *file)
{
    static char *argv[] = {"sleep", "60", NULL};
    int up[2];
    assert_int_equal(pipe2(up, O_CLOEXEC), 0); /* closed by the exec */
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        if (file && open(file, O_RDWR | O_CREAT, 0600) < 0)
            _exit(126);
        execve("/bin/sleep", argv, env);
        _exit(127);
    }
    char byte;
    close(up[1]);
    assert_int_equal(read(up[0], &byte, 1), 0);
    close(up[0]);
    return pid;
}

static void stop(pid_t pid)
{
    int status;
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status));
}

static void processes_are_found_by_their_attempt(void **state)
{
    (void)state;
    static struct leftover found[LEFTOVERS_MAX];
    char attempts[PATH_MAX + 16], mine[PATH_MAX + 64], near[PATH_MAX + 64];
    snprintf(attempts, sizeof attempts, "%s/attempts", dir);
    snprintf(mine, sizeof mine, "BOOST_RUN_DIR=%s/0badcafe-17.2", attempts);
    snprintf(near, sizeof near, "BOOST_RUN_DIR=%s-of-another/0badcafe-17.2", attempts);
    char *env[] = {"A=1", mine, NULL}, *others[] = {near, NULL}, *none[] = {NULL};
    assert_int_equal(leftovers_find(attempts, "", found), 0);
    pid_t one = start(env, NULL), two = start(others, NULL), three = start(none, NULL);
    assert_int_equal(leftovers_find(attempts, "", found), 1);
    assert_int_equal(found[0].id.pid, one);
    assert_string_equal(found[0].attempt, "0badcafe-17.2");
    assert_string_equal(found[0].name, "sleep");
    assert_int_equal(found[0].uid, geteuid());
    assert_int_equal(procid_signal(&found[0].id, SIGKILL, NULL), 0);
    stop(one);
    stop(two);
    stop(three);
    assert_int_equal(leftovers_find(attempts, "", found), 0);
}

/* More of an attempt that lives than the list has room for hide nothing. */
static void those_that_live_take_no_room(void **state)
{
    (void)state;
    enum { LIVE = LEFTOVERS_MAX + 2 };
    static struct leftover found[LEFTOVERS_MAX];
    char attempts[PATH_MAX + 16], live[PATH_MAX + 64], over[PATH_MAX + 64];
    snprintf(attempts, sizeof attempts, "%s/attempts", dir);
    snprintf(live, sizeof live, "BOOST_RUN_DIR=%s/0badcafe-17.3", attempts);
    snprintf(over, sizeof over, "BOOST_RUN_DIR=%s/0badcafe-17.2", attempts);
    char *env[] = {live, NULL}, *other[] = {over, NULL};
    pid_t pids[LIVE + 1];
    for (int i = 0; i < LIVE; i++)
        pids[i] = start(env, NULL);
    pids[LIVE] = start(other, NULL);
    assert_int_equal(leftovers_find(attempts, "", found), LEFTOVERS_MAX);
    assert_int_equal(leftovers_find(attempts, "0badcafe-1.1\0" "0badcafe-17.3\0", found), 1);
    assert_int_equal(found[0].id.pid, pids[LIVE]);
    for (int i = 0; i <= LIVE; i++)
        stop(pids[i]);
}

static void who_has_a_file_open(void **state)
{
    (void)state;
    char device[PATH_MAX + 16], longer[PATH_MAX + 16], name[32] = "";
    char *none[] = {NULL};
    snprintf(device, sizeof device, "%s/nvidia1", dir);
    snprintf(longer, sizeof longer, "%s/nvidia12", dir);
    assert_int_equal(file_holder(device, name), 0);
    pid_t other = start(none, longer), holder = start(none, device);
    assert_int_equal(file_holder(device, name), holder);
    assert_string_equal(name, "sleep");
    stop(holder);
    assert_int_equal(file_holder(device, name), 0);
    stop(other);
    int fd = open(device, O_RDWR | O_CLOEXEC);
    assert_int_equal(file_holder(device, name), 0); /* the caller is no stranger */
    close(fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(processes_are_found_by_their_attempt),
        cmocka_unit_test(those_that_live_take_no_room),
        cmocka_unit_test(who_has_a_file_open),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
