/* Ranks as processes, as a keeper starts them: orders, rendezvous, Gloo. The run is the one of threads
 * bit for bit; a killed rank ends the other with exit code 65 and its name; one that never starts too. */
#include "tests/unit/worker/rank_processes.h"

static const char *const in_bf16[] = {"run.precision=BF16"};

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
    assert_int_equal(tiny_job_end(tiny_job_start(dir, alone, NULL, sets, n_sets, NULL)), 0);
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
    sets = in_bf16;
    n_sets = 1;
    compare_with_threads();
    n_sets = 0;
}

static void a_killed_rank_ends_the_other(void **state)
{
    (void)state;
    kill_one_of_two(20000, 2 * NS_PER_S);
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

static void on_cuda(Boost__JobSpec *spec)
{
    spec->resources->has_device = true;
    spec->resources->device = BOOST__DEVICE__VALUE__CUDA;
    setenv("BOOST_CUDA_LIBRARY", "/nonexistent/boost-cuda.so", 1);
}

/* On a machine without driver or library the machine is at fault, another may take the job; a precision that the
 * device's kernels lack is the job's. */
static void a_device_that_is_not_there_is_no_fault_of_the_job(void **state)
{
    (void)state;
    static const struct {
        const char *const *sets;
        int code;
        const char *says;
    } cases[] = {{in_bf16, RANK_EXIT_INFRA, ""}, {NULL, RANK_EXIT_SPEC, "run.precision"}};
    change = on_cuda;
    make_pages();
    for (int i = 0; i < 2; i++) {
        int out;
        sets = cases[i].sets;
        n_sets = sets != NULL;
        pid_t pid = start_rank(0, STEPS, 400, &out);
        const char *text = rest_of(out);
        int code = tiny_job_end(pid);
        if (code != cases[i].code || !strstr(text, cases[i].says))
            fail_msg("exit %d: %s", code, text);
        Boost__DoneRecord *d = done_of(0);
        assert_int_equal(d->why, BOOST__DONE_RECORD__WHY__FAILED);
        boost__done_record__free_unpacked(d, NULL);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(processes_do_what_threads_do, set_up, tear_down),
        cmocka_unit_test_setup_teardown(and_so_in_bf16, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_killed_rank_ends_the_other, set_up, tear_down),
        cmocka_unit_test_setup_teardown(sigterm_stops_ranks_without_a_handler, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_rank_that_never_starts_is_named, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_device_that_is_not_there_is_no_fault_of_the_job, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
