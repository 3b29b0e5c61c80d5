/* Scripts of a site: how their ends are told, and that nothing they leave behind is waited for. */
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
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/agent_script.h"
#include "daemon/procid.h"
#include "proto/base/clock.h"
#include "proto/base/fs.h"

static char dir[PATH_MAX], path[PATH_MAX + 16];

static int setup(void **state)
{
    const char *base = getenv("BOOST_TEST_DIR");
    (void)state;
    snprintf(dir, sizeof dir, "%s/script-XXXXXX", base ? base : "/tmp");
    if (!mkdtemp(dir))
        return -1;
    snprintf(path, sizeof path, "%s/script.sh", dir);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    return fs_remove_tree(dir, NULL);
}

static void write_script(const char *text)
{
    assert_int_equal(fs_write_atomic(path, text, strlen(text), 0755, NULL), 0);
}

static int run(const char *text, int timeout_ms, bool kill_children, struct error *err)
{
    const struct script_variable variables[] = {{"BOOST_NODE", "n1"}, {"BOOST_USER", NULL}, {"DIR", dir}};
    const struct script s = {.path = path,
                             .variables = variables,
                             .n_variables = 3,
                             .timeout_ms = timeout_ms,
                             .limit = "prolog_timeout_ms",
                             .kill_children = kill_children};
    write_script(text);
    *err = (struct error){0};
    return script_run(&s, err);
}

static void assert_says(const struct error *err, const char *text)
{
    if (!strstr(err->message, text))
        fail_msg("'%s' is not in '%s'", text, err->message);
}

static void ends_are_told_in_full(void **state)
{
    (void)state;
    struct error err;
    assert_int_equal(run("#!/bin/sh\nexit 0\n", 5000, false, &err), 0);
    assert_int_equal(run("#!/bin/sh\necho one; echo 'no scratch disk' >&2; echo; exit 3\n", 5000, false, &err), ERR_IO);
    assert_says(&err, "script.sh: status 3 after ");
    assert_says(&err, " s: no scratch disk");
    assert_int_equal(run("#!/bin/sh\nexit 255\n", 5000, false, &err), ERR_IO);
    assert_says(&err, "status 255");
    assert_says(&err, ": it printed nothing");
    assert_int_equal(run("#!/bin/sh\nkill -SEGV $$\n", 5000, false, &err), ERR_IO);
    assert_says(&err, "signal 11 (Segmentation fault) after");
    assert_int_equal(run("", 5000, false, &err), ERR_IO); /* no first line that names an interpreter */
    assert_says(&err, "cannot be run: Exec format error");
    assert_non_null(strstr(err.hint, "#!"));
    unlink(path);
    const struct script gone = {.path = path, .timeout_ms = 1000, .limit = "x"};
    assert_int_equal(script_run(&gone, &err), ERR_IO);
    assert_says(&err, "cannot be run: No such file");
}

/* D41: bytes of any kind become one line of text, cut between characters. */
static void any_output_is_one_line(void **state)
{
    (void)state;
    struct error err;
    run("#!/bin/sh\nprintf 'a\\033[31m\\000b\\tc\\377'; exit 1\n", 5000, false, &err);
    assert_says(&err, "s: a [31m b c\377");
    char text[700];
    int used = snprintf(text, sizeof text, "#!/bin/sh\nprintf 'x");
    for (int i = 0; i < 200; i++)
        used += snprintf(text + used, sizeof text - (size_t)used, "\xc3\xa9");
    snprintf(text + used, sizeof text - (size_t)used, "'; exit 1\n");
    run(text, 5000, false, &err);
    assert_says(&err, "s: x\xc3\xa9");
    size_t len = strlen(err.message);
    assert_true((unsigned char)err.message[len - 1] == 0xa9 && (unsigned char)err.message[len - 2] == 0xc3);
}

static void await_file(const char *name, struct procid *id)
{
    char file[PATH_MAX + 32];
    struct buffer text;
    snprintf(file, sizeof file, "%s/%s", dir, name);
    int64_t deadline = clock_mono_ns() + 10 * NS_PER_S;
    buffer_init(&text, 64);
    while (fs_read_file(file, &text, NULL) || !memchr(text.data, '\n', text.len)) {
        assert_true(clock_mono_ns() < deadline);
        buffer_clear(&text);
        poll(NULL, 0, 2);
    }
    assert_int_equal(procid_get((pid_t)strtol((char *)text.data, NULL, 10), id, NULL), 0);
    buffer_free(&text);
}

/* D31: a child that keeps the pipe open, and writes into it, is not waited for. */
static void children_in_the_background_are_not_waited_for(void **state)
{
    (void)state;
    struct error err;
    struct procid child;
    int64_t from = clock_mono_ns();
    assert_int_equal(run("#!/bin/sh\n(while :; do echo x; sleep 0.01; done; sleep 60) & echo $! >$DIR/child\n"
                         "echo started\nexit 4\n",
                         30000, false, &err),
                     ERR_IO);
    assert_true(clock_mono_ns() - from < 20 * NS_PER_S);
    assert_int_equal(run("#!/bin/sh\nsleep 60 & echo $! >$DIR/kept\n", 30000, false, &err), 0);
    await_file("kept", &child);
    assert_true(procid_alive(&child)); /* what a prolog leaves behind may be a service */
    assert_int_equal(procid_signal(&child, SIGKILL, NULL), 0);
    assert_int_equal(run("#!/bin/sh\nsleep 60 & echo $! >$DIR/swept\nexec sleep 0.05\n", 30000, true, &err), 0);
    assert_true(clock_mono_ns() - from < 20 * NS_PER_S);
}

static void a_flood_does_not_stop_it(void **state)
{
    (void)state;
    struct error err;
    assert_int_equal(run("#!/bin/sh\nhead -c 3000000 /dev/zero\necho\necho the end\nexit 1\n", 20000, false, &err),
                     ERR_IO);
    assert_says(&err, "s: the end");
}

static void time_runs_out(void **state)
{
    (void)state;
    struct error err;
    struct procid child;
    int64_t from = clock_mono_ns();
    assert_int_equal(
        run("#!/bin/sh\ntrap '' TERM INT HUP\necho waiting for the moon\nsleep 60 & echo $! >$DIR/late\nwait\n", 2000,
            false, &err),
        ERR_TIMEOUT);
    assert_true(clock_mono_ns() - from < 20 * NS_PER_S);
    assert_says(&err, "not over after 2.0 s, killed: waiting for the moon");
    assert_non_null(strstr(err.hint, "prolog_timeout_ms"));
    char file[PATH_MAX + 32];
    struct buffer text;
    snprintf(file, sizeof file, "%s/late", dir);
    buffer_init(&text, 64);
    assert_int_equal(fs_read_file(file, &text, NULL), 0);
    pid_t pid = (pid_t)strtol((char *)text.data, NULL, 10);
    int64_t deadline = clock_mono_ns() + 5 * NS_PER_S;
    while (!procid_get(pid, &child, NULL) && procid_alive(&child)) {
        assert_true(clock_mono_ns() < deadline);
        poll(NULL, 0, 2);
    }
    buffer_free(&text);
}

/* BOOST_RUN_DIR would make it a process of the attempt, to be killed with it. */
static void what_it_gets(void **state)
{
    (void)state;
    struct error err;
    setenv("BOOST_RUN_DIR", "/x", 1);
    setenv("SITE", "there", 1);
    assert_int_equal(run("#!/bin/sh\necho \"$PWD $BOOST_NODE ${BOOST_RUN_DIR-none} ${BOOST_USER-none} $SITE\"\n"
                         "ls /proc/self/fd | wc -l\nread x\nexit 9\n",
                         5000, false, &err),
                     ERR_IO);
    assert_says(&err, "s: 4"); /* its three and the one of ls */
    run("#!/bin/sh\necho \"$PWD $BOOST_NODE ${BOOST_RUN_DIR-none} ${BOOST_USER-none} $SITE\"\nexit 1\n", 5000, false,
        &err);
    assert_says(&err, "s: / n1 none none there");
    run("#!/bin/sh\nkill -PIPE $$\nsleep 9\n", 5000, false, &err);
    assert_says(&err, "signal 13"); /* the agent ignores it, and a mask is inherited */
    unsetenv("BOOST_RUN_DIR");
}

/* An agent that is killed leaves its script, and what that has started, to the next one. */
static void a_script_whose_agent_is_gone_is_killed(void **state)
{
    (void)state;
    struct error err;
    struct buffer text;
    struct procid child;
    char records[PATH_MAX + 16], started[PATH_MAX + 16];
    snprintf(records, sizeof records, "%s/scripts", dir);
    snprintf(started, sizeof started, "%s/started", dir);
    assert_int_equal(scripts_open(records, &err), ERR_OK);
    pid_t agent = fork();
    if (agent == 0) {
        run("#!/bin/sh\ntrap '' TERM HUP\nsetsid sleep 1000 &\necho $! >$DIR/new && mv $DIR/new $DIR/started\nwait\n",
            600000, false, &err);
        _exit(0);
    }
    int64_t deadline = clock_mono_ns() + 20 * NS_PER_S;
    while (!fs_exists(started) || (rmdir(records) == 0 && mkdir(records, 0700) == 0)) {
        assert_true(clock_mono_ns() < deadline);
        poll(NULL, 0, 2);
    }
    kill(agent, SIGKILL);
    waitpid(agent, NULL, 0);
    buffer_init(&text, 64);
    assert_int_equal(fs_read_file(started, &text, &err), ERR_OK);
    assert_int_equal(procid_get((pid_t)strtol((char *)text.data, NULL, 10), &child, &err), ERR_OK);
    assert_true(procid_alive(&child));
    assert_int_equal(scripts_open(records, &err), ERR_OK);
    while (procid_alive(&child)) {
        assert_true(clock_mono_ns() < deadline);
        poll(NULL, 0, 2);
    }
    assert_int_equal(rmdir(records), 0); /* nothing is noted any more */
    assert_int_equal(scripts_open(records, &err), ERR_OK);
    run("#!/bin/sh\nexit 0\n", 5000, false, &err);
    assert_int_equal(rmdir(records), 0);
    buffer_free(&text);
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ends_are_told_in_full),
        cmocka_unit_test(any_output_is_one_line),
        cmocka_unit_test(a_flood_does_not_stop_it),
        cmocka_unit_test(children_in_the_background_are_not_waited_for),
        cmocka_unit_test(time_runs_out),
        cmocka_unit_test(what_it_gets),
        cmocka_unit_test(a_script_whose_agent_is_gone_is_killed),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
