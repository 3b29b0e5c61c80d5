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

/* A handler that runs while oneDNN computes damages the heap, unless it has a stack of its own (worker/signals.h). */
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

enum { ASKED_STEPS = 600 };

/* Asks for the stacks of a rank; its answer, NULL when none came within 2 s. */
static Boost__StackRecord *ask(int rank, pid_t pid, uint32_t request)
{
    struct error err;
    char path[PATH_MAX];
    struct rank_control *control = rank_file_map(run, rank, "control", RANK_CONTROL_MAGIC, 0, &err);
    Boost__StackRecord *r = NULL;
    assert_non_null(control);
    assert_int_equal(rank_file_path(path, sizeof path, run, rank, "stacks", NULL), 0);
    __atomic_store_n(&control->stacks, request, __ATOMIC_RELAXED);
    rank_file_unmap(control);
    kill(pid, SIGURG);
    for (int64_t end = clock_mono_ns() + 2 * NS_PER_S; !r && clock_mono_ns() < end;) {
        struct buffer b;
        buffer_init(&b, LIMIT_FRAME);
        if (!fs_read_file(path, &b, NULL))
            r = boost__stack_record__unpack(NULL, b.len, b.data);
        buffer_free(&b);
        if (r && r->request == request)
            return r;
        if (r)
            boost__stack_record__free_unpacked(r, NULL);
        r = NULL;
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    }
    return NULL;
}

static bool has_frame(const Boost__StackRecord *r, const char *name)
{
    for (size_t t = 0; t < r->n_threads; t++)
        for (size_t i = 0; i < r->threads[t]->n_frames; i++)
            if (strstr(r->threads[t]->frames[i], name))
                return true;
    return false;
}

/* Both ranks are asked where they are for as long as they train: nothing of the run changes, to the bit. */
static void being_asked_changes_nothing(void **state)
{
    (void)state;
    static const char *const steps[] = {"run.steps=600"};
    int out[TP], answers = 0, products = 0, collectives = 0;
    pid_t pid[TP];
    make_pages();
    for (int r = 0; r < TP; r++)
        pid[r] = start_rank(r, ASKED_STEPS, 20000, &out[r]);
    FILE *f = fdopen(dup(out[0]), "r");
    setvbuf(f, NULL, _IONBF, 0);
    char line[512];
    while (fgets(line, sizeof line, f) && strncmp(line, "step 1/", 7))
        ;
    fclose(f);
    for (uint32_t request = 1;; request++) {
        int rank = (int)(request % TP);
        siginfo_t end = {0};
        Boost__StackRecord *r = ask(rank, pid[rank], request);
        if (!r) {
            assert_int_equal(waitid(P_PID, (id_t)pid[rank], &end, WEXITED | WNOHANG | WNOWAIT), 0);
            if (end.si_pid == pid[rank])
                break;
            fail_msg("rank %d did not answer request %u", rank, request);
        }
        assert_true(r->job == 5 && r->rank == rank && r->n_threads >= 1 && r->threads[0]->tid == pid[rank]);
        answers++;
        products += has_frame(r, "gemm");
        collectives += has_frame(r, "comm_");
        boost__stack_record__free_unpacked(r, NULL);
    }
    for (int r = 0; r < TP; r++) {
        const char *text = rest_of(out[r]);
        int code = tiny_job_end(pid[r]);
        if (code)
            fail_msg("rank %d: exit %d: %s", r, code, text);
    }
    printf("# %d answers: %d in a product, %d in a collective\n", answers, products, collectives);
    assert_true(answers >= 50 && collectives > 0);
    static double asked[ASKED_STEPS + 1], alone_values[ASKED_STEPS + 1];
    static bool have[ASKED_STEPS + 1], also[ASKED_STEPS + 1];
    char alone[160];
    snprintf(alone, sizeof alone, "%s/alone", dir);
    assert_int_equal(tiny_job_end(tiny_job_start(dir, alone, NULL, steps, 1, NULL)), 0);
    assert_int_equal(tiny_job_metric(run, "loss", asked, have, ASKED_STEPS), ASKED_STEPS);
    assert_int_equal(tiny_job_metric(alone, "loss", alone_values, also, ASKED_STEPS), ASKED_STEPS);
    assert_memory_equal(asked + 1, alone_values + 1, ASKED_STEPS * sizeof(double));
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
        cmocka_unit_test_setup_teardown(being_asked_changes_nothing, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_rank_that_never_starts_is_named, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_device_that_is_not_there_is_no_fault_of_the_job, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
