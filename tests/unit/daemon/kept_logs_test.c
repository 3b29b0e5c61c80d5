/* Files of kept output: written and read back, the oldest go, trouble is no failure. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/kept_logs.h"
#include "proto/base/fs.h"

static uv_loop_t loop;
static struct kept_logs kept;
static char dir[64];

static int begin(void **state)
{
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/boost-kept-XXXXXX");
    if (!mkdtemp(dir) || uv_loop_init(&loop) < 0)
        return -1;
    kept_logs_init(&kept, &loop, dir);
    return 0;
}

static int finish(void **state)
{
    (void)state;
    uv_run(&loop, UV_RUN_DEFAULT);
    uv_loop_close(&loop);
    return fs_remove_tree(dir, NULL);
}

static struct {
    int calls;
    bool there;
    size_t len;
    char first;
} got;

static void on_kept(void *arg, const void *data, size_t len)
{
    (void)arg;
    got.calls++;
    got.there = data != NULL;
    got.len = len;
    got.first = len ? *(const char *)data : '\0';
}

static void put(int64_t job, char fill, size_t len)
{
    char *data = malloc(len);
    memset(data, fill, len);
    kept_logs_put(&kept, job, 1, data, len);
    free(data); /* it was copied */
    uv_run(&loop, UV_RUN_DEFAULT);
}

static bool get(int64_t job)
{
    memset(&got, 0, sizeof got);
    kept_logs_get(&kept, job, 1, on_kept, NULL);
    uv_run(&loop, UV_RUN_DEFAULT);
    assert_int_equal(got.calls, 1);
    return got.there;
}

static void written_and_read_back(void **state)
{
    (void)state;
    assert_false(get(7));
    put(7, 'a', 1000);
    assert_true(get(7) && got.len == 1000 && got.first == 'a');
    put(7, 'b', 10); /* in place of it */
    assert_true(get(7) && got.len == 10 && got.first == 'b');
    assert_false(get(8));
}

static void the_oldest_go(void **state)
{
    (void)state;
    enum { FILES = KEPT_LOGS_BYTES / KEPT_LOGS_ONE + 2 };
    for (int i = 0; i < FILES; i++)
        put(i, 'x', KEPT_LOGS_ONE);
    assert_false(get(0));
    assert_false(get(1));
    assert_true(get(2) && get(FILES - 1));
}

static void what_cannot_be_written_is_only_lost(void **state)
{
    (void)state;
    char path[PATH_MAX];
    assert_int_equal(fs_join(path, sizeof path, NULL, dir, "kept"), 0);
    assert_int_equal(fs_write_atomic(path, "a file", 6, 0600, NULL), 0);
    put(1, 'x', 10);
    assert_false(get(1));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(written_and_read_back, begin, finish),
        cmocka_unit_test_setup_teardown(the_oldest_go, begin, finish),
        cmocka_unit_test_setup_teardown(what_cannot_be_written_is_only_lost, begin, finish),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
