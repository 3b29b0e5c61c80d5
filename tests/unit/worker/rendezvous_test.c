/* The rank's rendezvous client against a small server: values, waiting, deadlines, an agent
 * that restarts, limits. */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/base/clock.h"
#include "tests/unit/support/fake_agent.h"
#include "worker/rendezvous.h"

struct fixture {
    char dir[64], path[96];
    struct fake_agent *agent;
    struct rendezvous_client a, b;
};

static int set_up(void **state)
{
    static struct fixture f;
    snprintf(f.dir, sizeof f.dir, "/tmp/boost-rv-XXXXXX");
    if (!mkdtemp(f.dir))
        return -1;
    snprintf(f.path, sizeof f.path, "%s/rv.sock", f.dir);
    f.agent = fake_agent_start(f.path);
    struct error err;
    if (!f.agent || rendezvous_open(&f.a, f.path, 7, 2, 0, 2000, &err) ||
        rendezvous_open(&f.b, f.path, 7, 2, 1, 2000, &err))
        return -1;
    *state = &f;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *f = *state;
    rendezvous_close(&f->a);
    rendezvous_close(&f->b);
    fake_agent_stop(f->agent);
    unlink(f->path);
    return rmdir(f->dir);
}

static void value_arrives(void **state)
{
    struct fixture *f = *state;
    struct error err;
    struct buffer out;
    buffer_init(&out, LIMIT_KV_VALUE);
    uint8_t big[LIMIT_KV_VALUE];
    for (size_t i = 0; i < sizeof big; i++)
        big[i] = (uint8_t)(i * 31 >> 3);
    assert_int_equal(rendezvous_set(&f->a, "tp0", "0", big, sizeof big, &err), 0);
    assert_int_equal(rendezvous_set(&f->a, "tp1", "0", "x", 1, &err), 0);
    assert_int_equal(rendezvous_get(&f->b, "tp0", "0", 1000, &out, &err), 0);
    assert_int_equal(out.len, sizeof big);
    assert_memory_equal(out.data, big, sizeof big);
    buffer_clear(&out);
    assert_int_equal(rendezvous_get(&f->b, "tp1", "0", 1000, &out, &err), 0);
    assert_int_equal(out.len, 1);
    buffer_free(&out);
    assert_int_equal(rendezvous_set(&f->a, "tp0", "1", big, sizeof big + 1, &err), ERR_INVALID);
}

static void *get_in_thread(void *arg)
{
    struct fixture *f = arg;
    struct buffer out;
    struct error err;
    buffer_init(&out, LIMIT_KV_VALUE);
    int rc = rendezvous_get(&f->b, "world", "late", 5000, &out, &err);
    intptr_t ok = !rc && out.len == 4 && !memcmp(out.data, "here", 4);
    buffer_free(&out);
    return (void *)ok;
}

static void get_waits_for_the_key(void **state)
{
    struct fixture *f = *state;
    struct error err;
    pthread_t thread;
    void *ok;
    assert_int_equal(pthread_create(&thread, NULL, get_in_thread, f), 0);
    assert_int_equal(rendezvous_set(&f->a, "world", "late", "here", 4, &err), 0);
    pthread_join(thread, &ok);
    assert_non_null(ok);
}

static void a_key_that_never_comes_is_named(void **state)
{
    struct fixture *f = *state;
    struct error err;
    struct buffer out;
    buffer_init(&out, LIMIT_KV_VALUE);
    int64_t start = clock_mono_ns();
    assert_int_equal(rendezvous_get(&f->a, "tp3", "missing-5", 100, &out, &err), ERR_TIMEOUT);
    assert_true(clock_mono_ns() - start < 3 * NS_PER_S);
    assert_non_null(strstr(err.message, "tp3/missing-5"));
    buffer_free(&out);
}

static void a_restarting_agent_is_waited_for(void **state)
{
    struct fixture *f = *state;
    struct error err;
    struct buffer out;
    buffer_init(&out, LIMIT_KV_VALUE);
    fake_agent_drop(f->agent, 1);
    assert_int_equal(rendezvous_set(&f->a, "g", "k", "v", 1, &err), 0);
    fake_agent_drop(f->agent, 1);
    assert_int_equal(rendezvous_get(&f->b, "g", "k", 1000, &out, &err), 0);
    assert_int_equal(out.len, 1);
    buffer_free(&out);
}

static void no_agent_is_an_error_with_its_path(void **state)
{
    (void)state;
    struct rendezvous_client c;
    struct error err;
    assert_int_equal(rendezvous_open(&c, "/nonexistent/rv.sock", 1, 1, 0, 120, &err), 0);
    assert_int_equal(rendezvous_set(&c, "g", "k", "v", 1, &err), ERR_UNREACHABLE);
    assert_non_null(strstr(err.message, "/nonexistent/rv.sock"));
    rendezvous_close(&c);
    char path[200];
    memset(path, 'x', sizeof path - 1);
    path[sizeof path - 1] = '\0';
    assert_int_equal(rendezvous_open(&c, path, 1, 1, 0, 100, &err), ERR_INVALID);
    rendezvous_close(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(value_arrives, set_up, tear_down),
        cmocka_unit_test_setup_teardown(get_waits_for_the_key, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_key_that_never_comes_is_named, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_restarting_agent_is_waited_for, set_up, tear_down),
        cmocka_unit_test(no_agent_is_an_error_with_its_path),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
