/* A rank's output on its way to the disk and back, without a keeper: disks that stand or are full, times, what is not
 * there. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "daemon/keeper_log.h"
#include "proto/base/clock.h"
#include "proto/base/fs.h"
#include "proto/rankfiles.h"

enum { WAIT_MS = 20000, MIB = 1 << 20 };

static char dir[PATH_MAX];

static int setup(void **state)
{
    const char *base = getenv("BOOST_TEST_DIR");
    (void)state;
    snprintf(dir, sizeof dir, "%s/keeper-log-XXXXXX", base ? base : "/tmp");
    return mkdtemp(dir) ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    return fs_remove_tree(dir, NULL);
}

/* All of rank 0's. */
static void read_log(struct buffer *out)
{
    int64_t offset = 0;
    buffer_init(out, 64 * MIB);
    assert_int_equal(keeper_log_read(dir, 0, &offset, -1, 32 * MIB, out, NULL), 0);
    assert_false(buffer_append(out, "", 0));
}

/* ---- a disk that is slow or full (D37) ---- */

static int gate[2] = {-1, -1}; /* the writer waits for a byte */
static _Atomic int disk_error;

static ssize_t slow_write(int fd, const void *data, size_t len)
{
    char byte;
    if (gate[0] >= 0 && read(gate[0], &byte, 1) < 0)
        return -1;
    return write(fd, data, len);
}

static ssize_t full_write(int fd, const void *data, size_t len)
{
    if (disk_error) {
        errno = disk_error;
        return -1;
    }
    return write(fd, data, len);
}

static void test_standing_disk_never_blocks(void **state)
{
    (void)state;
    struct keeper_logs *logs;
    struct keeper_log *log;
    char block[LIMIT_LOG_LINE];
    memset(block, 'x', sizeof block);
    block[sizeof block - 1] = '\n';
    assert_int_equal(pipe2(gate, O_CLOEXEC), 0);
    assert_int_equal(keeper_logs_create(slow_write, &logs, NULL), 0);
    assert_int_equal(keeper_log_add(logs, dir, 0, 0, &log, NULL), 0);
    int64_t begin = clock_mono_ns(), fed = 0;
    /* Room ends while the disk stands still, and comes back when it has stood still for too long. */
    while (keeper_log_dropped(log) < 4 * MIB) {
        size_t room = keeper_log_room(log);
        assert_true(clock_mono_ns() - begin < WAIT_MS * NS_PER_MS);
        if (!room) {
            poll(NULL, 0, 5);
            continue;
        }
        keeper_log_feed(log, block, sizeof block);
        fed += sizeof block;
    }
    int64_t dropped = keeper_log_dropped(log);
    assert_true(clock_mono_ns() - begin >= KEEPER_LOG_STALL_MS * NS_PER_MS);
    close(gate[1]); /* the disk comes back */
    while (keeper_log_room(log) < KEEPER_LOG_QUEUE / 2 || keeper_log_room(log) == KEEPER_LOG_QUEUE)
        poll(NULL, 0, 2);
    keeper_log_feed(log, "after\n", 6);
    assert_true(keeper_logs_destroy(logs, WAIT_MS));
    struct buffer text;
    char expected[100];
    read_log(&text);
    snprintf(expected, sizeof expected, "[boost: %lld bytes of output were dropped here: the disk", (long long)dropped);
    assert_non_null(strstr((char *)text.data, expected));
    assert_string_equal((char *)text.data + text.len - 6, "after\n");
    assert_true((int64_t)text.len < fed);
    buffer_free(&text);
    close(gate[0]);
    gate[0] = gate[1] = -1;
}

static void test_full_disk_drops_and_says_so(void **state)
{
    (void)state;
    struct keeper_logs *logs;
    struct keeper_log *log;
    assert_int_equal(keeper_logs_create(full_write, &logs, NULL), 0);
    assert_int_equal(keeper_log_add(logs, dir, 0, 0, &log, NULL), 0);
    disk_error = ENOSPC;
    keeper_log_feed(log, "lost\n", 5);
    while (keeper_log_dropped(log) != 5)
        poll(NULL, 0, 1);
    disk_error = 0;
    keeper_log_feed(log, "kept\n", 5);
    assert_true(keeper_logs_destroy(logs, WAIT_MS));
    struct buffer text;
    read_log(&text);
    assert_string_equal((char *)text.data,
                        "\n[boost: 5 bytes of output were dropped here: No space left on device]\nkept\n");
    buffer_free(&text);
}

static void test_missing_log_is_empty(void **state)
{
    (void)state;
    struct buffer out;
    int64_t offset = 10;
    buffer_init(&out, 100);
    assert_int_equal(keeper_log_read(dir, 3, &offset, 5, 100, &out, NULL), 0);
    assert_int_equal(out.len, 0);
    buffer_free(&out);
}

static void test_since(void **state)
{
    (void)state;
    static const int64_t s = NS_PER_S;
    const struct keeper_log_mark marks[] = {{1000 * s, 0, s}, {1010 * s, 100, s}, {2000 * s, 300, 500 * s}};
    static const struct {
        double wall_s;
        int64_t pos;
    } cases[] = {{0, 0}, {1000.5, 0}, {1001, 100}, {1010.9, 100}, {1500, 300}, {2499, 300}, {2500, -1}, {9e8, -1}};
    char path[PATH_MAX];
    uint8_t file[sizeof marks + 7] = {0}; /* the last mark is being written */
    assert_int_equal(keeper_log_since(dir, 0, 5 * s), 0);
    memcpy(file, marks, sizeof marks);
    assert_int_equal(rank_file_path(path, sizeof path, dir, 0, "log.times", NULL), 0);
    assert_int_equal(fs_write_atomic(path, file, sizeof file, 0644, NULL), 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(keeper_log_since(dir, 0, (int64_t)(cases[i].wall_s * (double)s)), cases[i].pos);
}

/* What is written lies behind a mark of its time. */
static void test_times_are_kept(void **state)
{
    (void)state;
    struct keeper_logs *logs;
    struct keeper_log *log;
    int64_t before = clock_wall_ns();
    assert_int_equal(keeper_logs_create(NULL, &logs, NULL), 0);
    assert_int_equal(keeper_log_add(logs, dir, 0, 0, &log, NULL), 0);
    keeper_log_feed(log, "first\n", 6);
    struct timespec pause = {.tv_sec = 1, .tv_nsec = 100000000};
    nanosleep(&pause, NULL);
    keeper_log_feed(log, "second\n", 7);
    assert_true(keeper_logs_destroy(logs, WAIT_MS));
    assert_int_equal(keeper_log_since(dir, 0, before), 0);
    assert_int_equal(keeper_log_since(dir, 0, clock_wall_ns()), 6);
    assert_int_equal(keeper_log_since(dir, 0, clock_wall_ns() + 2 * NS_PER_S), -1);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_standing_disk_never_blocks),
        TEST(test_full_disk_drops_and_says_so),
        TEST(test_missing_log_is_empty),
        TEST(test_since),
        TEST(test_times_are_kept),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
