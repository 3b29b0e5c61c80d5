/* proto/base/fs: files that are old or new and never half, directories, paths. */
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/base/fs.h"

static char dir[256];
static struct error err;

static int make_dir(void **state)
{
    (void)state;
    const char *base = getenv("BOOST_TEST_DIR");
    snprintf(dir, sizeof dir, "%s/fs-XXXXXX", base ? base : "/tmp");
    return mkdtemp(dir) ? 0 : -1;
}

static int remove_dir(void **state)
{
    (void)state;
    return fs_remove_tree(dir, &err);
}

static const char *in_dir(const char *name)
{
    static char paths[4][512];
    static int turn;
    char *path = paths[turn++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", dir, name);
    return path;
}

static void expect_content(const char *path, const char *want)
{
    struct buffer b;
    buffer_init(&b, 1 << 20);
    assert_int_equal(fs_read_file(path, &b, &err), 0);
    assert_string_equal(b.data ? (char *)b.data : "", want);
    buffer_free(&b);
}

static int entries(const char *path)
{
    DIR *d = opendir(path);
    assert_non_null(d);
    int n = 0;
    for (struct dirent *e; (e = readdir(d));)
        n += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    closedir(d);
    return n;
}

static void test_write_replaces(void **state)
{
    (void)state;
    const char *path = in_dir("file");
    for (int durable = 0; durable < 2; durable++) {
        int (*put)(const char *, const void *, size_t, mode_t, struct error *) =
            durable ? fs_write_durable : fs_write_atomic;
        assert_int_equal(put(path, "old", 3, 0640, &err), 0);
        assert_int_equal(put(path, "new content", 11, 0640, &err), 0);
        expect_content(path, "new content");
        assert_int_equal(put(path, "", 0, 0640, &err), 0);
        expect_content(path, "");
    }
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777 & ~0640, 0);
    assert_int_equal(entries(dir), 1); /* no temporary name is left */
    unlink(path);
}

/* When the write fails half-way (a file size limit stands in for a full disk) the old content stays. */
static void test_failed_write_leaves_the_old(void **state)
{
    (void)state;
    const char *path = in_dir("kept");
    assert_int_equal(fs_write_durable(path, "old", 3, 0600, &err), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (!child) {
        static char large[64 << 10];
        struct rlimit limit = {4096, 4096};
        signal(SIGXFSZ, SIG_IGN);
        struct error e = {0};
        if (setrlimit(RLIMIT_FSIZE, &limit) < 0 || fs_write_durable(path, large, sizeof large, 0600, &e) != ERR_IO ||
            !strstr(e.message, "File too large"))
            _exit(1);
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    expect_content(path, "old");
    assert_int_equal(entries(dir), 1);
    unlink(path);
}

/* Readers beside a writer see whole contents only. */
static void test_readers_never_see_half(void **state)
{
    (void)state;
    const char *path = in_dir("shared");
    enum { SIZE = 100000 };
    char *text = malloc(SIZE);
    assert_non_null(text);
    memset(text, 'a', SIZE);
    assert_int_equal(fs_write_atomic(path, text, SIZE, 0600, &err), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (!child) {
        for (int i = 0; i < 300; i++) {
            memset(text, 'a' + i % 26, SIZE);
            if (fs_write_atomic(path, text, SIZE, 0600, &err))
                _exit(1);
        }
        _exit(0);
    }
    struct buffer b;
    buffer_init(&b, 1 << 20);
    int status, reads = 0;
    do {
        buffer_clear(&b);
        assert_int_equal(fs_read_file(path, &b, &err), 0);
        assert_int_equal(b.len, SIZE);
        assert_true(memcmp(b.data, b.data + 1, SIZE - 1) == 0); /* one letter throughout */
        reads++;
    } while (waitpid(child, &status, WNOHANG) == 0);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0 && reads > 1);
    buffer_free(&b);
    free(text);
    unlink(path);
}

static void test_read_faults(void **state)
{
    (void)state;
    struct buffer b;
    buffer_init(&b, 10);
    assert_int_equal(fs_read_file(in_dir("none"), &b, &err), ERR_NOT_FOUND);
    assert_int_equal(fs_read_file(dir, &b, &err), ERR_IO);
    assert_int_equal(fs_write_atomic(in_dir("ten"), "0123456789", 10, 0600, &err), 0);
    assert_int_equal(fs_read_file(in_dir("ten"), &b, &err), 0);
    assert_int_equal(b.len, 10);
    buffer_clear(&b);
    assert_int_equal(fs_write_atomic(in_dir("ten"), "0123456789x", 11, 0600, &err), 0);
    assert_int_equal(fs_read_file(in_dir("ten"), &b, &err), ERR_INVALID);
    assert_non_null(strstr(err.message, "larger than the limit of 10 bytes"));
    buffer_free(&b);
    assert_int_not_equal(fs_write_durable(in_dir("none/file"), "x", 1, 0600, &err), 0);
    unlink(in_dir("ten"));
}

static void test_directories(void **state)
{
    (void)state;
    assert_int_equal(fs_make_dirs(in_dir("a/b//c/"), 0755, &err), 0);
    assert_int_equal(fs_make_dirs(in_dir("a/b/c"), 0755, &err), 0); /* is there already */
    assert_true(fs_exists(in_dir("a/b/c")));
    assert_int_equal(fs_write_atomic(in_dir("a/file"), "x", 1, 0600, &err), 0);
    assert_int_equal(fs_make_dirs(in_dir("a/file/d"), 0755, &err), ERR_IO);
    assert_non_null(strstr(err.message, "/a/file is not a directory"));
    assert_int_equal(fs_make_dirs("", 0755, &err), ERR_INVALID);
    assert_int_equal(symlink(in_dir("a"), in_dir("a/b/link")), 0);
    assert_int_equal(fs_write_atomic(in_dir("outside"), "x", 1, 0600, &err), 0);
    assert_int_equal(symlink(in_dir("outside"), in_dir("a/b/c/link")), 0);
    assert_int_equal(fs_remove_tree(in_dir("a"), &err), 0);
    assert_false(fs_exists(in_dir("a")));
    assert_true(fs_exists(in_dir("outside"))); /* links are not followed */
    assert_int_equal(fs_remove_tree(in_dir("a"), &err), 0);
    assert_int_equal(fs_sync_dir(dir, &err), 0);
    assert_int_equal(fs_sync_dir(in_dir("a"), &err), ERR_NOT_FOUND);
    unlink(in_dir("outside"));
}

/* In a directory of somebody else a name may be a link to what only the reader may read, or a fifo. */
static void test_only_regular_files(void **state)
{
    (void)state;
    struct buffer b;
    buffer_init(&b, 64);
    assert_int_equal(fs_write_atomic(in_dir("plain"), "text", 4, 0600, &err), 0);
    assert_int_equal(symlink(in_dir("plain"), in_dir("link")), 0);
    assert_int_equal(mkfifo(in_dir("fifo"), 0600), 0);
    assert_int_equal(fs_read_regular(in_dir("plain"), &b, &err), 0);
    assert_string_equal((char *)b.data, "text");
    buffer_clear(&b);
    assert_int_equal(fs_read_regular(in_dir("link"), &b, &err), ERR_CORRUPT);
    assert_int_equal(fs_read_regular(in_dir("fifo"), &b, &err), ERR_CORRUPT);
    assert_int_equal(fs_read_regular(dir, &b, &err), ERR_CORRUPT);
    assert_int_equal(fs_read_regular(in_dir("plain/below"), &b, &err), ERR_CORRUPT);
    assert_int_equal(fs_read_regular(in_dir("missing"), &b, &err), ERR_NOT_FOUND);
    assert_int_equal(b.len, 0);
    assert_int_equal(fs_read_linked(in_dir("link"), &b, &err), 0);
    assert_string_equal((char *)b.data, "text");
    buffer_clear(&b);
    assert_int_equal(fs_read_linked(in_dir("fifo"), &b, &err), ERR_CORRUPT);
    assert_int_equal(fs_read_linked(dir, &b, &err), ERR_CORRUPT);
    assert_int_equal(fs_read_linked("/dev/zero", &b, &err), ERR_CORRUPT);
    assert_int_equal(fs_read_linked(in_dir("missing"), &b, &err), ERR_NOT_FOUND);
    assert_int_equal(b.len, 0);
    buffer_free(&b);
    /* A link and a file are trees too. */
    assert_int_equal(fs_remove_tree(in_dir("link"), &err), 0);
    assert_true(fs_exists(in_dir("plain")));
    assert_int_equal(fs_remove_tree(in_dir("plain"), &err), 0);
    assert_int_equal(fs_remove_tree(in_dir("fifo"), &err), 0);
    assert_false(fs_exists(in_dir("plain")));
}

static void test_trees_have_a_depth(void **state)
{
    (void)state;
    for (int extra = 0; extra < 2; extra++) {
        int top = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC), at = top;
        assert_true(top >= 0);
        for (int i = 0; i < FS_MAX_DEPTH + extra; i++) {
            (void)mkdirat(at, "d", 0700);
            int next = openat(at, "d", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
            assert_true(next >= 0);
            close(at);
            at = next;
        }
        close(at);
        assert_int_equal(fs_remove_tree(in_dir("d"), &err), extra ? ERR_IO : 0);
        if (!extra)
            assert_false(fs_exists(in_dir("d")));
    }
    assert_int_equal(rename(in_dir("d/d"), in_dir("e")), 0); /* the test's own clean-up */
    assert_int_equal(fs_remove_tree(in_dir("d"), &err), 0);
    assert_int_equal(fs_remove_tree(in_dir("e"), &err), 0);
}

static void test_paths(void **state)
{
    (void)state;
    char out[16];
    assert_int_equal(fs_join(out, sizeof out, &err, "/a", "b"), 0);
    assert_string_equal(out, "/a/b");
    assert_int_equal(fs_join(out, sizeof out, &err, "/a/", "b"), 0);
    assert_string_equal(out, "/a/b");
    assert_int_equal(fs_join(out, sizeof out, &err, "/12345678", "90123"), 0); /* 15 bytes fit in 16 */
    assert_int_equal(fs_join(out, sizeof out, &err, "/12345678", "901234"), ERR_INVALID);
    static const char *const parents[][2] = {{"/a/b", "/a"}, {"/a", "/"}, {"a/b", "a"}, {"a", "."}, {"/", "/"}};
    for (size_t i = 0; i < sizeof parents / sizeof *parents; i++) {
        char path[PATH_MAX];
        fs_parent(path, parents[i][0]);
        assert_string_equal(path, parents[i][1]);
        snprintf(path, sizeof path, "%s", parents[i][0]);
        fs_parent(path, path);
        assert_string_equal(path, parents[i][1]);
    }
    char self[PATH_MAX];
    assert_int_equal(fs_self_dir(self, sizeof self, &err), 0);
    assert_true(self[0] == '/' && fs_exists(self));
}

static void test_write_all_through_a_pipe(void **state)
{
    (void)state;
    int ends[2];
    enum { SIZE = 300000 }; /* more than a pipe holds: the writes come back short */
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (!child) {
        static char text[SIZE];
        close(ends[0]);
        _exit(fs_write_all(ends[1], text, SIZE, &err) ? 1 : 0);
    }
    close(ends[1]);
    static char sink[4096];
    size_t total = 0;
    for (ssize_t n; (n = read(ends[0], sink, sizeof sink)) > 0;)
        total += (size_t)n;
    assert_int_equal(total, SIZE);
    close(ends[0]);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_int_equal(fs_write_all(-1, "x", 1, &err), ERR_IO);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_write_replaces),
        cmocka_unit_test(test_failed_write_leaves_the_old),
        cmocka_unit_test(test_readers_never_see_half),
        cmocka_unit_test(test_read_faults),
        cmocka_unit_test(test_directories),
        cmocka_unit_test(test_only_regular_files),
        cmocka_unit_test(test_trees_have_a_depth),
        cmocka_unit_test(test_paths),
        cmocka_unit_test(test_write_all_through_a_pipe),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
