/* The shared pages of a rank: one writer's stores are the other's loads; bad files are refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/base/fs.h"
#include "proto/rankfiles.h"

static char dir[256];
static struct error err;

static int make_dir(void **state)
{
    (void)state;
    const char *base = getenv("BOOST_TEST_DIR");
    snprintf(dir, sizeof dir, "%s/rank-XXXXXX", base ? base : "/tmp");
    return mkdtemp(dir) ? 0 : -1;
}

static int remove_dir(void **state)
{
    (void)state;
    return fs_remove_tree(dir, &err);
}

static void test_page_is_shared_between_processes(void **state)
{
    (void)state;
    struct rank_status *mine = rank_file_map(dir, 3, "status", RANK_STATUS_MAGIC, 1, &err);
    assert_non_null(mine);
    struct stat st;
    char path[300];
    assert_int_equal(rank_file_path(path, sizeof path, dir, 3, "status", &err), 0);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_size, RANK_FILE_BYTES);
    assert_true(mine->magic == RANK_STATUS_MAGIC && mine->progress == 0 && mine->step == 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (!child) {
        struct rank_status *theirs = rank_file_map(dir, 3, "status", RANK_STATUS_MAGIC, 0, &err);
        if (!theirs)
            _exit(1);
        __atomic_store_n(&theirs->progress, 42, __ATOMIC_RELEASE);
        snprintf(theirs->doing, sizeof theirs->doing, "waiting for rank 1");
        rank_file_unmap(theirs);
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_int_equal(__atomic_load_n(&mine->progress, __ATOMIC_ACQUIRE), 42);
    assert_string_equal(mine->doing, "waiting for rank 1");
    rank_file_unmap(mine);
    mine = rank_file_map(dir, 3, "status", RANK_STATUS_MAGIC, 1, &err); /* made again: what is there stays */
    assert_non_null(mine);
    assert_int_equal(mine->progress, 42);
    rank_file_unmap(mine);
    rank_file_unmap(NULL);
}

static void test_bad_files(void **state)
{
    (void)state;
    char path[300];
    assert_null(rank_file_map(dir, 9, "status", RANK_STATUS_MAGIC, 0, &err));
    assert_int_equal(err.code, ERR_NOT_FOUND);
    assert_int_equal(rank_file_path(path, sizeof path, dir, 4, "control", &err), 0);
    assert_int_equal(fs_write_atomic(path, "short", 5, 0600, &err), 0);
    assert_null(rank_file_map(dir, 4, "control", RANK_CONTROL_MAGIC, 0, &err)); /* would be SIGBUS */
    assert_int_equal(err.code, ERR_CORRUPT);
    void *page = rank_file_map(dir, 5, "control", RANK_CONTROL_MAGIC, 1, &err);
    assert_non_null(page);
    rank_file_unmap(page);
    assert_null(rank_file_map(dir, 5, "control", RANK_STATUS_MAGIC, 0, &err));
    assert_int_equal(err.code, ERR_CORRUPT);
    char small[8];
    assert_int_equal(rank_file_path(small, sizeof small, dir, 1, "log", &err), ERR_INVALID);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_page_is_shared_between_processes),
        cmocka_unit_test(test_bad_files),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
