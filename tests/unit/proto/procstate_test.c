/* What the kernel says of a thread: of a child that sleeps, is stopped, is gone. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/procstate.h"

static pid_t start_sleeper(void)
{
    int fds[2];
    char byte;
    assert_int_equal(pipe(fds), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (!pid) {
        close(fds[1]);
        (void)!read(fds[0], &byte, 1); /* until the parent is gone, or kills it */
        _exit(0);
    }
    close(fds[0]);
    return pid; /* the writing end stays open with this process */
}

/* Until its state begins with the letter. */
static void await_state(pid_t pid, char letter, struct proc_thread *out)
{
    for (int i = 0; i < 5000; i++) {
        assert_true(proc_thread_read(pid, pid, out));
        bool told = strstr(out->syscall, "read") != NULL; /* "not readable" too */
        if (out->state[0] == letter && (letter != 'S' || told))
            return;
        usleep(1000);
    }
    fail_msg("its state is %s, its system call %s", out->state, out->syscall);
}

static void one_that_sleeps_and_is_stopped(void **state)
{
    (void)state;
    pid_t pid = start_sleeper(), tids[4];
    struct proc_thread t;
    await_state(pid, 'S', &t);
    assert_string_equal(t.state, "S (sleeping)");
    assert_string_equal(t.name, "procstate_test");
    assert_true(!strncmp(t.syscall, "not readable (", 14) || strstr(t.syscall, " read"));
    assert_true(t.wchan[0] && t.stack[0]); /* something, or why there is nothing */
    assert_int_equal(proc_threads(pid, tids, 4), 1);
    assert_int_equal(tids[0], pid);
    kill(pid, SIGSTOP);
    await_state(pid, 'T', &t);
    assert_string_equal(t.state, "T (stopped)");
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    assert_false(proc_thread_read(pid, pid, &t));
    assert_int_equal(proc_threads(pid, tids, 4), -1);
}

/* A name is the process's own to choose. */
static void a_name_with_control_bytes(void **state)
{
    (void)state;
    pid_t pid = fork();
    if (!pid) {
        FILE *f = fopen("/proc/self/comm", "we");
        if (f) {
            fputs("a\033[31mb", f);
            fclose(f);
        }
        raise(SIGSTOP);
        _exit(0);
    }
    struct proc_thread t;
    await_state(pid, 'T', &t);
    assert_string_equal(t.name, "a?[31mb");
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

static void system_calls_have_names(void **state)
{
    (void)state;
    assert_string_equal(proc_syscall_name(SYS_futex), "futex");
    assert_string_equal(proc_syscall_name(SYS_ppoll), "ppoll");
    assert_null(proc_syscall_name(-1));
    assert_null(proc_syscall_name(1 << 20));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_that_sleeps_and_is_stopped),
        cmocka_unit_test(a_name_with_control_bytes),
        cmocka_unit_test(system_calls_have_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
