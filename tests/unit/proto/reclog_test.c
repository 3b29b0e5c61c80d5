/* Record logs: torn at every byte, damaged at every byte, written again, followed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/base/fs.h"
#include "proto/reclog.h"

static char dir[256], path[300];
static struct error err;

static int make_dir(void **state)
{
    (void)state;
    const char *base = getenv("BOOST_TEST_DIR");
    snprintf(dir, sizeof dir, "%s/reclog-XXXXXX", base ? base : "/tmp");
    if (!mkdtemp(dir))
        return -1;
    snprintf(path, sizeof path, "%s/log", dir);
    return 0;
}

static int remove_dir(void **state)
{
    (void)state;
    return fs_remove_tree(dir, &err);
}

static const char *const records[] = {"first", "", "the third record", "4"};
enum { RECORDS = 4 };

/* The whole log as bytes, and where each record ends. */
static void whole_log(struct buffer *out, size_t ends[RECORDS])
{
    struct reclog_writer w;
    unlink(path);
    assert_int_equal(reclog_open(&w, path, &err), 0);
    for (int i = 0; i < RECORDS; i++) {
        assert_int_equal(reclog_append(&w, records[i], strlen(records[i]), i % 2, &err), 0);
        ends[i] = (i ? ends[i - 1] : 0) + 8 + strlen(records[i]);
    }
    reclog_close(&w);
    buffer_init(out, 4096);
    assert_int_equal(fs_read_file(path, out, &err), 0);
    assert_int_equal(out->len, ends[RECORDS - 1]);
}

/* Reads until there is no more; the count, or -1 on ERR_CORRUPT. */
static int read_all(void)
{
    struct buffer record;
    buffer_init(&record, RECLOG_MAX_RECORD);
    uint64_t offset = 0;
    int count = 0, rc;
    bool got;
    while (!(rc = reclog_read(path, &offset, &record, &got, &err)) && got) {
        if (count < RECORDS)
            assert_string_equal(record.data ? (char *)record.data : "", records[count]);
        count++;
    }
    buffer_free(&record);
    return rc ? -1 : count;
}

static void test_torn_at_every_byte(void **state)
{
    (void)state;
    struct buffer log;
    size_t ends[RECORDS];
    whole_log(&log, ends);
    for (size_t len = 0; len <= log.len; len++) {
        int whole = 0;
        while (whole < RECORDS && ends[whole] <= len)
            whole++;
        assert_int_equal(fs_write_atomic(path, log.data, len, 0600, &err), 0);
        assert_int_equal(read_all(), whole); /* a torn record is never returned */
        struct reclog_writer w;
        assert_int_equal(reclog_open(&w, path, &err), 0); /* and is cut off by the next writer */
        struct stat st;
        assert_int_equal(stat(path, &st), 0);
        assert_int_equal(st.st_size, whole ? ends[whole - 1] : 0);
        for (int i = whole; i < RECORDS; i++)
            assert_int_equal(reclog_append(&w, records[i], strlen(records[i]), false, &err), 0);
        reclog_close(&w);
        assert_int_equal(read_all(), RECORDS);
    }
    buffer_free(&log);
}

/* One changed byte: no reader returns a record that was not written. */
static void test_damaged_at_every_byte(void **state)
{
    (void)state;
    struct buffer log;
    size_t ends[RECORDS];
    whole_log(&log, ends);
    for (size_t at = 0; at < log.len; at++) {
        log.data[at] ^= 0x40;
        assert_int_equal(fs_write_atomic(path, log.data, log.len, 0600, &err), 0);
        int count = read_all(); /* compares each record it gets */
        int before = 0;
        while (ends[before] <= at)
            before++;
        assert_true(count == -1 || count == before);
        struct reclog_writer w;
        assert_int_equal(reclog_open(&w, path, &err), 0);
        reclog_close(&w);
        assert_int_equal(read_all(), before);
        log.data[at] ^= 0x40;
    }
    buffer_free(&log);
}

static void test_following(void **state)
{
    (void)state;
    struct reclog_writer w;
    struct buffer record;
    uint64_t offset = 0;
    bool got = true;
    unlink(path);
    buffer_init(&record, RECLOG_MAX_RECORD);
    assert_int_equal(reclog_read(path, &offset, &record, &got, &err), 0); /* not there yet */
    assert_false(got);
    assert_int_equal(reclog_open(&w, path, &err), 0);
    for (int i = 0; i < 100; i++) {
        char text[32];
        int len = snprintf(text, sizeof text, "record %d", i);
        assert_int_equal(reclog_append(&w, text, (size_t)len, false, &err), 0);
        assert_int_equal(reclog_read(path, &offset, &record, &got, &err), 0);
        assert_true(got);
        assert_string_equal((char *)record.data, text);
        assert_int_equal(reclog_read(path, &offset, &record, &got, &err), 0);
        assert_false(got);
    }
    reclog_close(&w);
    reclog_close(&w); /* twice is once */
    buffer_free(&record);
}

static void test_limits(void **state)
{
    (void)state;
    struct reclog_writer w;
    unlink(path);
    assert_int_equal(reclog_open(&w, path, &err), 0);
    char *large = calloc(1, RECLOG_MAX_RECORD + 1);
    assert_non_null(large);
    assert_int_equal(reclog_append(&w, large, RECLOG_MAX_RECORD + 1, false, &err), ERR_INTERNAL);
    assert_int_equal(reclog_append(&w, large, RECLOG_MAX_RECORD, false, &err), 0);
    reclog_close(&w);
    free(large);
    struct buffer record;
    uint64_t offset = 0;
    bool got;
    buffer_init(&record, RECLOG_MAX_RECORD);
    assert_int_equal(reclog_read(path, &offset, &record, &got, &err), 0);
    assert_true(got && record.len == RECLOG_MAX_RECORD);
    buffer_free(&record);
    buffer_init(&record, 1000); /* a reader with less room says so */
    offset = 0;
    assert_int_equal(reclog_read(path, &offset, &record, &got, &err), ERR_NOMEM);
    assert_true(!got && offset == 0);
    buffer_free(&record);
    static const uint8_t header[8] = {0xff, 0xff, 0xff, 0x7f};
    assert_int_equal(fs_write_atomic(path, header, sizeof header, 0600, &err), 0);
    assert_int_equal(read_all(), -1);
    assert_int_equal(err.code, ERR_CORRUPT);
}

/* Disk is taken ahead of the records and given back, and no reader sees it. */
static void test_room(void **state)
{
    (void)state;
    static char payload[4096];
    struct reclog_writer w;
    struct stat st;
    unlink(path);
    assert_int_equal(reclog_open(&w, path, &err), 0);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_size, 0);
    if (st.st_blocks == 0) { /* not every file system can */
        reclog_close(&w);
        skip();
    }
    for (int i = 1; i <= 200; i++) {
        assert_int_equal(reclog_append(&w, payload, sizeof payload, false, &err), 0);
        assert_int_equal(stat(path, &st), 0);
        assert_int_equal(st.st_size, i * (8 + (int)sizeof payload));
        assert_true(st.st_blocks * 512 >= st.st_size + RECLOG_ROOM / 2 - 4096);
    }
    reclog_close(&w);
    assert_int_equal(stat(path, &st), 0);
    assert_true(st.st_blocks * 512 < st.st_size + RECLOG_ROOM / 4);
    struct buffer record;
    buffer_init(&record, RECLOG_MAX_RECORD);
    uint64_t offset = 0;
    int count = 0;
    bool got;
    while (!reclog_read(path, &offset, &record, &got, &err) && got)
        count++;
    buffer_free(&record);
    assert_int_equal(count, 200);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_torn_at_every_byte),
        cmocka_unit_test(test_damaged_at_every_byte),
        cmocka_unit_test(test_following),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_room),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
