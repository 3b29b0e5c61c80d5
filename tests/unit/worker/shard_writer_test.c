/* The thread that writes shards, alone: files of every size and place in memory, the order of check and write, one file
 * at a time, the cap, and how much of a processor it takes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "proto/base/clock.h"
#include "proto/base/crc32c.h"
#include "proto/base/fs.h"
#include "proto/reclog.h"
#include "proto/worker.pb-c.h"
#include "worker/shard_writer.h"

enum { MIB = 1 << 20, ROOM = 20 * MIB, LARGEST_PIECE = 4 * MIB };

static char dir[64], records[96];
static char *memory; /* on a page, [ROOM] */

static int set_up(void **state)
{
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/boost-shards-XXXXXX");
    memory = aligned_alloc(4096, ROOM);
    if (!mkdtemp(dir) || !memory)
        return -1;
    snprintf(records, sizeof records, "%s/records", dir);
    uint32_t x = 7;
    for (size_t i = 0; i < ROOM; i++, x = x * 1664525u + 1013904223u)
        memory[i] = (char)(x >> 24);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    free(memory);
    return fs_remove_tree(dir, NULL);
}

static struct shard_writer *open_writer(struct shard_pace pace, uint64_t *bytes)
{
    struct shard_writer *w;
    struct error err;
    assert_int_equal(shard_writer_create(records, 3, &pace, bytes, &w, &err), 0);
    return w;
}

/* Of a step, in a directory of its own. */
static struct shard_job job_of(int64_t step, const void *data, size_t size)
{
    struct shard_job job = {.step = step, .file = "shard", .data = data, .size = size};
    snprintf(job.dir, sizeof job.dir, "%s/step-%lld", dir, (long long)step);
    return job;
}

static void path_of(const struct shard_job *job, char path[1200])
{
    snprintf(path, 1200, "%s/%s", job->dir, job->file);
}

static void expect_file(const struct shard_job *job)
{
    char path[1200];
    struct buffer b;
    struct error err;
    path_of(job, path);
    buffer_init(&b, ROOM + 1);
    assert_int_equal(fs_read_file(path, &b, &err), 0);
    assert_int_equal(b.len, job->size);
    assert_memory_equal(b.data, job->data, job->size);
    buffer_free(&b);
}

static Boost__ShardRecord *last_record(void)
{
    struct buffer b;
    struct error err;
    uint64_t offset = 0;
    bool got = true;
    Boost__ShardRecord *last = NULL;
    buffer_init(&b, RECLOG_MAX_RECORD);
    for (;;) {
        assert_int_equal(reclog_read(records, &offset, &b, &got, &err), 0);
        if (!got)
            break;
        if (last)
            boost__shard_record__free_unpacked(last, NULL);
        last = boost__shard_record__unpack(NULL, b.len, b.data);
    }
    buffer_free(&b);
    return last;
}

/* Past the page cache where memory begins on a page, through it where not; whole pieces, odd ends and less than one. */
static void every_size_and_place_is_written_whole(void **state)
{
    (void)state;
    static const size_t sizes[] = {
        1, 4096, LARGEST_PIECE - 1, LARGEST_PIECE, LARGEST_PIECE + 1, 9 * MIB + 8, 12 * MIB + 4096, 16 * MIB};
    static const size_t places[] = {0, 8, 512, 4096};
    static const double caps[] = {0, 100000};
    int64_t step = 0;
    struct error err;
    for (size_t c = 0; c < 2; c++) {
        uint64_t bytes = 0, want = 0;
        struct shard_writer *w = open_writer((struct shard_pace){.mib_s = caps[c]}, &bytes);
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
            for (size_t j = 0; j < sizeof places / sizeof *places; j++) {
                struct shard_job job = job_of(++step, memory + places[j], sizes[i]);
                shard_writer_start(w, &job);
                assert_int_equal(shard_writer_wait(w, &err), 0);
                expect_file(&job);
                Boost__ShardRecord *r = last_record();
                assert_int_equal(r->step, step);
                assert_int_equal(r->rank, 3);
                assert_int_equal(r->bytes, sizes[i]);
                assert_int_equal(r->crc32c, crc32c(0, job.data, job.size));
                boost__shard_record__free_unpacked(r, NULL);
                assert_int_equal(bytes, want += sizes[i]);
                assert_int_equal(fs_remove_tree(job.dir, &err), 0);
            }
        shard_writer_destroy(w);
    }
}

/* ---- check, then write ------------------------------------------------------------- */

struct watch {
    const struct shard_job *job;
    size_t seen, fail_at; /* SIZE_MAX: never */
    int ready;
    int64_t nap_ns;                          /* once, in the middle */
    int64_t wall_ns, processor_ns;           /* at the first look */
    int64_t last_wall_ns, last_processor_ns; /* at the last one */
    bool wrong;
};

static int64_t now_of(clockid_t id)
{
    struct timespec t;
    clock_gettime(id, &t);
    return t.tv_sec * NS_PER_S + t.tv_nsec;
}

static int ready(const void *arg, struct error *err)
{
    struct watch *x = (void *)(uintptr_t)arg;
    char path[1200];
    (void)err;
    path_of(x->job, path);
    x->wrong |= x->ready++ || x->seen || fs_exists(path);
    return ERR_OK;
}

static int look(const void *arg, size_t from, size_t to, struct error *err)
{
    struct watch *x = (void *)(uintptr_t)arg;
    int64_t wall = now_of(CLOCK_MONOTONIC), processor = now_of(CLOCK_THREAD_CPUTIME_ID);
    if (!x->seen) {
        x->wall_ns = wall;
        x->processor_ns = processor;
    }
    x->last_wall_ns = wall;
    x->last_processor_ns = processor;
    x->wrong |= !x->ready || from != x->seen || to <= from || to > x->job->size;
    if (x->nap_ns && to > x->job->size / 2) {
        nanosleep(&(struct timespec){.tv_nsec = x->nap_ns}, NULL);
        x->nap_ns = 0;
    }
    x->seen = to;
    return to > x->fail_at ? error_set(err, ERR_REFUSED, "byte %zu is not wanted", x->fail_at) : ERR_OK;
}

static int entries(const char *path)
{
    int n = 0;
    DIR *d = opendir(path);
    while (d && readdir(d))
        n++;
    if (d)
        closedir(d);
    return n;
}

static void what_is_refused_leaves_nothing(void **state)
{
    (void)state;
    struct error err;
    struct shard_writer *w = open_writer((struct shard_pace){0}, NULL);
    static const size_t bad[] = {SIZE_MAX, 0, 5 * MIB, 10 * MIB};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct shard_job job = job_of(1 + (int64_t)i, memory, 10 * MIB + 1);
        struct watch x = {.job = &job, .fail_at = bad[i]};
        job.ready = ready;
        job.check = look;
        job.arg = &x;
        shard_writer_start(w, &job);
        int rc = shard_writer_wait(w, &err);
        assert_int_equal(x.ready, 1);
        assert_false(x.wrong);
        Boost__ShardRecord *r = last_record();
        if (bad[i] == SIZE_MAX) {
            assert_int_equal(rc, 0);
            assert_int_equal(x.seen, job.size);
            assert_false(r->failed);
            expect_file(&job);
        } else {
            assert_int_equal(rc, ERR_REFUSED);
            assert_true(r->failed && !r->has_crc32c);
            assert_non_null(strstr(r->error, "is not wanted"));
            assert_int_equal(entries(job.dir), 0);
        }
        boost__shard_record__free_unpacked(r, NULL);
    }
    shard_writer_destroy(w);
}

/* The limit of a file's size cuts a write in the middle: past the cache it is refused, through it half of it is done and
 * the rest fails. */
static void a_write_that_is_cut_leaves_nothing(void **state)
{
    (void)state;
    struct error err;
    struct rlimit was, cut = {.rlim_cur = 6 * MIB + 100};
    struct shard_writer *w = open_writer((struct shard_pace){0}, NULL);
    struct shard_job job = job_of(1, memory, 10 * MIB);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &was), 0);
    signal(SIGXFSZ, SIG_IGN);
    cut.rlim_max = was.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &cut), 0);
    shard_writer_start(w, &job);
    int rc = shard_writer_wait(w, &err);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &was), 0);
    assert_int_equal(rc, ERR_IO);
    assert_non_null(strstr(err.message, "File too large"));
    assert_int_equal(entries(job.dir), 0);
    job = job_of(2, memory, 10 * MIB);
    shard_writer_start(w, &job); /* and the next one is whole */
    assert_int_equal(shard_writer_wait(w, &err), 0);
    expect_file(&job);
    shard_writer_destroy(w);
}

/* The second one's turn comes when the first one's file has its name. */
static void one_file_at_a_time(void **state)
{
    (void)state;
    struct error err;
    struct shard_writer *w = open_writer((struct shard_pace){.mib_s = 40}, NULL);
    struct shard_job first = job_of(1, memory, 4 * MIB), second = job_of(2, memory, MIB);
    struct watch a = {.job = &first, .fail_at = SIZE_MAX}, b = {.job = &second, .fail_at = SIZE_MAX};
    first.ready = second.ready = ready;
    first.check = second.check = look;
    first.arg = &a;
    second.arg = &b;
    shard_writer_start(w, &first);
    assert_true(shard_writer_busy(w));
    shard_writer_start(w, &second); /* stands still for the first */
    expect_file(&first);
    assert_int_equal(a.seen, first.size);
    assert_int_equal(shard_writer_wait(w, &err), 0);
    expect_file(&second);
    assert_true(!a.wrong && !b.wrong && !shard_writer_busy(w));
    shard_writer_destroy(w);
}

/* ---- pace ------------------------------------------------------------------------- */

/* Whenever somebody looks, no more is written than the cap allows since the start and one piece; and what a slow disk
 * has lost is not made up for. Neither can be missed by a machine that is busy with other things. */
static void the_cap_holds_at_any_time(void **state)
{
    (void)state;
    const double cap = 20;
    const size_t size = 8 * MIB, piece = MIB / 4;
    struct error err;
    uint64_t bytes = 0;
    struct shard_writer *w = open_writer((struct shard_pace){.mib_s = cap}, &bytes);
    struct shard_job job = job_of(1, memory, size);
    struct watch x = {.job = &job, .fail_at = SIZE_MAX, .nap_ns = 200 * NS_PER_MS};
    job.ready = ready;
    job.check = look;
    job.arg = &x;
    int64_t start = clock_mono_ns();
    shard_writer_start(w, &job);
    while (shard_writer_busy(w)) {
        uint64_t written = __atomic_load_n(&bytes, __ATOMIC_RELAXED);
        double allowed = (double)(clock_mono_ns() - start) / (double)NS_PER_S * cap * MIB + (double)piece;
        assert_true((double)written <= allowed);
        nanosleep(&(struct timespec){.tv_nsec = NS_PER_MS}, NULL);
    }
    double took = (double)(clock_mono_ns() - start) / (double)NS_PER_S;
    assert_int_equal(shard_writer_wait(w, &err), 0);
    /* the nap lay within the time of one piece */
    assert_true(took >= (double)size / (cap * MIB) + 0.2 - (double)piece / (cap * MIB));
    shard_writer_destroy(w);
}

/* Else its rank is taken to hang: 64 KiB/s bring something every second, and 1 KiB/s 4 KiB at a time. */
static void a_low_cap_shows_progress(void **state)
{
    (void)state;
    static const struct {
        double mib_s;
        size_t piece;
    } caps[] = {{64 / 1024.0, 64 << 10}, {1 / 1024.0, 4 << 10}};
    for (size_t i = 0; i < 2; i++) {
        uint64_t bytes = 0, first = 0;
        struct shard_writer *w = open_writer((struct shard_pace){.mib_s = caps[i].mib_s}, &bytes);
        struct shard_job job = job_of((int64_t)i + 1, memory, 8 * MIB);
        shard_writer_start(w, &job);
        while (!(first = __atomic_load_n(&bytes, __ATOMIC_RELAXED)) && shard_writer_busy(w))
            nanosleep(&(struct timespec){.tv_nsec = NS_PER_MS}, NULL);
        assert_true(first > 0 && first % caps[i].piece == 0 && first <= 4 * caps[i].piece);
        shard_writer_destroy(w);
    }
}

/* The clocks are the writer's own, read in its checks: so much time has passed as its share of it asks for. Half of it
 * is left for what it does between its look at the clock and ours. */
static void it_takes_its_share_of_a_processor(void **state)
{
    (void)state;
    const double share = 0.05;
    struct error err;
    struct shard_writer *w = open_writer((struct shard_pace){.cpu = share}, NULL);
    struct shard_job job = job_of(1, memory, 20 * MIB);
    struct watch x = {.job = &job, .fail_at = SIZE_MAX};
    job.ready = ready;
    job.check = look;
    job.arg = &x;
    shard_writer_start(w, &job);
    while (shard_writer_busy(w))
        nanosleep(&(struct timespec){.tv_nsec = NS_PER_MS}, NULL);
    assert_int_equal(shard_writer_wait(w, &err), 0);
    expect_file(&job);
    double wall = (double)(x.last_wall_ns - x.wall_ns), used = (double)(x.last_processor_ns - x.processor_ns);
    /* the last piece is paced behind the last look */
    assert_true(wall >= used * 0.8 / share / 2);
    shard_writer_destroy(w);
}

/* With a share that would take hours. */
static void who_waits_is_not_kept_waiting(void **state)
{
    (void)state;
    struct error err;
    struct shard_writer *w = open_writer((struct shard_pace){.cpu = 1e-7}, NULL);
    struct shard_job job = job_of(1, memory, 20 * MIB);
    shard_writer_start(w, &job);
    assert_int_equal(shard_writer_wait(w, &err), 0);
    expect_file(&job);
    job = job_of(2, memory, 20 * MIB);
    shard_writer_start(w, &job);
    shard_writer_destroy(w); /* gives it up */
    assert_int_equal(entries(job.dir), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(every_size_and_place_is_written_whole, set_up, tear_down),
        cmocka_unit_test_setup_teardown(what_is_refused_leaves_nothing, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_write_that_is_cut_leaves_nothing, set_up, tear_down),
        cmocka_unit_test_setup_teardown(one_file_at_a_time, set_up, tear_down),
        cmocka_unit_test_setup_teardown(the_cap_holds_at_any_time, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_low_cap_shows_progress, set_up, tear_down),
        cmocka_unit_test_setup_teardown(it_takes_its_share_of_a_processor, set_up, tear_down),
        cmocka_unit_test_setup_teardown(who_waits_is_not_kept_waiting, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
