/* Ranks as processes, as a keeper starts them: orders, rendezvous, Gloo. The run is the one of threads
 * bit for bit; a killed rank ends the other with exit code 65 and its name; one that never starts too. */
#include <fcntl.h>

#include "proto/base/clock.h"
#include "proto/jobfile.h"
#include "proto/rankfiles.h"
#include "tests/unit/support/fake_agent.h"
#include "tests/unit/worker/tiny_job.h"
#include "worker/plan/plan.h"
#include "worker/rank.h"
#include "worker/signals.h"

enum { STEPS = 60, TP = 2 };

static char dir[64], run[160], socket_path[160], checkpoints[160], job[160];
static struct fake_agent *agent;
static int attempt; /* rendezvous keys carry it */
static bool bf16;   /* else the job's own precision */

static int set_up(void **state)
{
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/boost-proc-XXXXXX");
    if (!mkdtemp(dir))
        return -1;
    snprintf(run, sizeof run, "%s/run", dir);
    attempt = 1;
    bf16 = false;
    snprintf(socket_path, sizeof socket_path, "%s/rv.sock", dir);
    snprintf(checkpoints, sizeof checkpoints, "%s/ckpt-proc", dir);
    snprintf(job, sizeof job, "%s/job.pbtxt", dir);
    tiny_job_write(dir, TP, STEPS, "eval_every: 30 eval_tokens: 300", "every_steps: 20");
    agent = fake_agent_start(socket_path);
    return agent && !fs_make_dirs(run, 0755, NULL) ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    fake_agent_stop(agent);
    return fs_remove_tree(dir, NULL);
}

/* What the agent does before the keeper starts: the pages of each rank. */
static void make_pages(void)
{
    struct error err;
    for (int r = 0; r < TP; r++) {
        rank_file_unmap(rank_file_map(run, r, "status", RANK_STATUS_MAGIC, 1, &err));
        rank_file_unmap(rank_file_map(run, r, "control", RANK_CONTROL_MAGIC, 1, &err));
    }
}

/* Runs one rank in this process; never returns. */
static void rank_process(int rank, int out, int64_t steps, int timeout_ms)
{
    struct job_file f;
    struct error err;
    Boost__JobSpec *spec = NULL;
    if (signals_start(&err))
        _exit(1);
    alarm(60);
    dup2(out, 1);
    dup2(out, 2);
    if (jobfile_load(&f, job, JOB_FORMAT_AUTO, false, &err) ||
        plan_resolve(f.spec, &(struct plan_machine){0}, &spec, &err))
        _exit(1);
    spec->run->steps = steps;
    if (bf16)
        spec->run->precision = BOOST__PRECISION__VALUE__BF16;
    Boost__AttemptStart start = BOOST__ATTEMPT_START__INIT;
    start.job = 5;
    start.attempt = attempt;
    start.spec = spec;
    start.world = TP;
    start.run_dir = run;
    start.rendezvous_socket = socket_path;
    start.data_address = (char *)(uintptr_t) "127.0.0.1";
    start.checkpoint_dir = checkpoints;
    start.threads_per_rank = 1;
    start.rendezvous_timeout_ms = timeout_ms;
    struct rank_orders orders = {.start = &start, .rank = rank, .log = stdout};
    int code = rank_run(&orders, &err);
    if (code)
        printf("error: %s (%s)\n", err.message, err.hint);
    fflush(NULL);
    _exit(code);
}

static pid_t start_rank(int rank, int64_t steps, int timeout_ms, int *out)
{
    int fds[2];
    assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (!pid)
        rank_process(rank, fds[1], steps, timeout_ms);
    close(fds[1]);
    *out = fds[0];
    return pid;
}

static const char *rest_of(int out)
{
    static char text[1 << 16];
    size_t len = 0;
    for (ssize_t n; len < sizeof text - 1 && (n = read(out, text + len, sizeof text - 1 - len)) > 0;)
        len += (size_t)n;
    text[len] = '\0';
    close(out);
    return text;
}

static Boost__DoneRecord *done_of(int rank)
{
    char path[256];
    struct buffer b;
    struct error err;
    snprintf(path, sizeof path, "%s/rank-%d.done", run, rank);
    buffer_init(&b, 1 << 16);
    assert_int_equal(fs_read_file(path, &b, &err), 0);
    Boost__DoneRecord *d = boost__done_record__unpack(NULL, b.len, b.data);
    assert_non_null(d);
    buffer_free(&b);
    return d;
}

static void compare_with_threads(void)
{
    int out[TP];
    pid_t pid[TP];
    make_pages();
    for (int r = 0; r < TP; r++)
        pid[r] = start_rank(r, STEPS, 20000, &out[r]);
    for (int r = 0; r < TP; r++) {
        const char *text = rest_of(out[r]);
        int code = tiny_job_end(pid[r]);
        if (code)
            fail_msg("rank %d: exit %d: %s", r, code, text);
        Boost__DoneRecord *d = done_of(r);
        assert_int_equal(d->why, BOOST__DONE_RECORD__WHY__COMPLETED);
        assert_int_equal(d->job, 5);
        boost__done_record__free_unpacked(d, NULL);
    }
    double mine[STEPS + 1], theirs[STEPS + 1];
    bool have[STEPS + 1] = {false}, also[STEPS + 1] = {false};
    char alone[160];
    snprintf(alone, sizeof alone, "%s/alone", dir);
    const char *set[] = {"run.precision=BF16"};
    assert_int_equal(tiny_job_end(tiny_job_start(dir, alone, NULL, set, bf16, NULL)), 0);
    assert_int_equal(tiny_job_metric(run, "loss", mine, have, STEPS), STEPS);
    assert_int_equal(tiny_job_metric(alone, "loss", theirs, also, STEPS), STEPS);
    assert_memory_equal(mine + 1, theirs + 1, STEPS * sizeof(double));
    memset(have, 0, sizeof have);
    memset(also, 0, sizeof also);
    tiny_job_metric(run, "eval_loss", mine, have, STEPS);
    tiny_job_metric(alone, "eval_loss", theirs, also, STEPS);
    for (int n = 0; n <= STEPS; n += 30) {
        assert_true(have[n] && also[n]);
        assert_memory_equal(&mine[n], &theirs[n], sizeof(double));
    }
}

static void processes_do_what_threads_do(void **state)
{
    (void)state;
    compare_with_threads();
}

/* Two ranks have one order to add in, so Gloo's sums of bf16 latents and their fp32 statistics are LOCAL's. */
static void and_so_in_bf16(void **state)
{
    (void)state;
    bf16 = true;
    compare_with_threads();
}

static void a_killed_rank_ends_the_other(void **state)
{
    (void)state;
    int out[TP];
    pid_t pid[TP];
    make_pages();
    for (int r = 0; r < TP; r++)
        pid[r] = start_rank(r, 1000000, 20000, &out[r]);
    FILE *f = fdopen(dup(out[0]), "r");
    char line[512];
    while (fgets(line, sizeof line, f) && strncmp(line, "step 20/", 8))
        ;
    fclose(f);
    kill(pid[1], SIGKILL);
    int64_t killed = clock_mono_ns();
    const char *text = rest_of(out[0]);
    assert_int_equal(tiny_job_end(pid[0]), RANK_EXIT_PEER);
    assert_true(clock_mono_ns() - killed < 2 * NS_PER_S);
    assert_int_equal(tiny_job_end(pid[1]), -SIGKILL);
    close(out[1]);
    assert_non_null(strstr(text, "lost rank 1"));
    Boost__DoneRecord *d = done_of(0);
    assert_int_equal(d->why, BOOST__DONE_RECORD__WHY__FAILED);
    assert_non_null(strstr(d->error, "lost rank 1"));
    assert_true(d->step >= 20);
    boost__done_record__free_unpacked(d, NULL);
}

/* Signals that the process would handle on whichever thread they find, computing ones too. */
static uint64_t handled_signals(pid_t pid)
{
    char path[64], line[256];
    unsigned long long mask = ~0ULL;
    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    FILE *f = fopen(path, "re");
    assert_non_null(f);
    while (fgets(line, sizeof line, f))
        if (!strncmp(line, "SigCgt:", 7))
            mask = strtoull(line + 7, NULL, 16);
    fclose(f);
    return mask;
}

/* A handler that runs while oneDNN computes damages the heap (worker/signals.h). */
static void sigterm_stops_ranks_without_a_handler(void **state)
{
    (void)state;
    make_pages();
    for (attempt = 1; attempt <= 5; attempt++) {
        int out[TP];
        pid_t pid[TP];
        for (int r = 0; r < TP; r++)
            pid[r] = start_rank(r, 1000000, 20000, &out[r]);
        FILE *f = fdopen(dup(out[0]), "r");
        setvbuf(f, NULL, _IONBF, 0);
        char line[512];
        while (fgets(line, sizeof line, f) && strncmp(line, "step 10/", 8))
            ;
        fclose(f);
        assert_int_equal(handled_signals(pid[0]) & (1ULL << (SIGTERM - 1)), 0);
        for (int r = 0; r < TP; r++)
            kill(pid[r], SIGTERM);
        for (int r = 0; r < TP; r++) {
            const char *text = rest_of(out[r]);
            int code = tiny_job_end(pid[r]);
            if (code)
                fail_msg("rank %d: exit %d: %s", r, code, text);
            Boost__DoneRecord *d = done_of(r);
            assert_int_equal(d->why, BOOST__DONE_RECORD__WHY__STOPPED);
            boost__done_record__free_unpacked(d, NULL);
        }
    }
}

static void a_rank_that_never_starts_is_named(void **state)
{
    (void)state;
    int out;
    make_pages();
    pid_t pid = start_rank(0, STEPS, 400, &out);
    const char *text = rest_of(out);
    assert_int_equal(tiny_job_end(pid), RANK_EXIT_PEER);
    assert_non_null(strstr(text, "rank 1 did not come to the rendezvous"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(processes_do_what_threads_do, set_up, tear_down),
        cmocka_unit_test_setup_teardown(and_so_in_bf16, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_killed_rank_ends_the_other, set_up, tear_down),
        cmocka_unit_test_setup_teardown(sigterm_stops_ranks_without_a_handler, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_rank_that_never_starts_is_named, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
