/* Ranks of tiny_job.h's job as processes, as a keeper starts them. */
#ifndef BOOST_TESTS_WORKER_RANK_PROCESSES_H
#define BOOST_TESTS_WORKER_RANK_PROCESSES_H

#include <fcntl.h>
#include <time.h>

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
static int ranks = TP;
static const char *const *sets; /* fields of the job to set */
static size_t n_sets;
static void (*change)(Boost__JobSpec *resolved); /* more to change, NULL: nothing */

static inline int set_up(void **state)
{
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/boost-proc-XXXXXX");
    if (!mkdtemp(dir))
        return -1;
    snprintf(run, sizeof run, "%s/run", dir);
    attempt = 1;
    snprintf(socket_path, sizeof socket_path, "%s/rv.sock", dir);
    snprintf(checkpoints, sizeof checkpoints, "%s/ckpt-proc", dir);
    snprintf(job, sizeof job, "%s/job.pbtxt", dir);
    tiny_job_write(dir, TP, STEPS, "eval_every: 30 eval_tokens: 300", "every_steps: 20");
    change = NULL;
    agent = fake_agent_start(socket_path);
    return agent && !fs_make_dirs(run, 0755, NULL) ? 0 : -1;
}

static inline int tear_down(void **state)
{
    (void)state;
    fake_agent_stop(agent);
    return fs_remove_tree(dir, NULL);
}

/* What the agent does before the keeper starts: the pages of each rank. */
static inline void make_pages(void)
{
    struct error err;
    for (int r = 0; r < ranks; r++) {
        rank_file_unmap(rank_file_map(run, r, "status", RANK_STATUS_MAGIC, 1, &err));
        rank_file_unmap(rank_file_map(run, r, "control", RANK_CONTROL_MAGIC, 1, &err));
    }
}

/* Runs one rank in this process; never returns. */
static inline void rank_process(int rank, int out, int64_t steps, int timeout_ms)
{
    struct job_file f;
    struct error err;
    Boost__JobSpec *spec = NULL;
    if (signals_start(&err))
        _exit(1);
    alarm(60);
    dup2(out, 1);
    dup2(out, 2);
    if (jobfile_load(&f, job, JOB_FORMAT_AUTO, false, &err))
        _exit(1);
    for (size_t i = 0; i < n_sets; i++)
        if (jobfile_set(f.spec, &f.arena, sets[i], &err))
            _exit(1);
    if (plan_resolve(f.spec, &(struct plan_machine){0}, &spec, &err))
        _exit(1);
    spec->run->steps = steps;
    if (change)
        change(spec);
    Boost__AttemptStart start = BOOST__ATTEMPT_START__INIT;
    start.job = 5;
    start.attempt = attempt;
    start.spec = spec;
    start.world = ranks;
    start.run_dir = run;
    start.rendezvous_socket = socket_path;
    start.data_address = (char *)(uintptr_t) "127.0.0.1";
    start.checkpoint_dir = checkpoints;
    start.threads_per_rank = 1;
    start.rendezvous_timeout_ms = timeout_ms;
    struct rank_orders orders = {.start = &start, .rank = rank, .log = stdout, .end_process = _exit};
    int code = rank_run(&orders, &err);
    if (code)
        printf("error: %s (%s)\n", err.message, err.hint);
    fflush(NULL);
    _exit(code);
}

static inline pid_t start_rank(int rank, int64_t steps, int timeout_ms, int *out)
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

static inline const char *rest_of(int out)
{
    static char text[1 << 16];
    size_t len = 0;
    for (ssize_t n; len < sizeof text - 1 && (n = read(out, text + len, sizeof text - 1 - len)) > 0;)
        len += (size_t)n;
    text[len] = '\0';
    close(out);
    return text;
}

static inline Boost__DoneRecord *done_of(int rank)
{
    return tiny_job_done(run, rank);
}

/* Two ranks, of which number 1 is killed after step 20; each may live alive_ms. The other ends with its name within
 * limit_ns. */
static inline void kill_one_of_two(int alive_ms, int64_t limit_ns)
{
    int out[TP];
    pid_t pid[TP];
    make_pages();
    for (int r = 0; r < TP; r++)
        pid[r] = start_rank(r, 1000000, alive_ms, &out[r]);
    FILE *f = fdopen(dup(out[0]), "r");
    char line[512];
    while (fgets(line, sizeof line, f) && strncmp(line, "step 20/", 8))
        ;
    fclose(f);
    kill(pid[1], SIGKILL);
    int64_t killed = clock_mono_ns();
    const char *text = rest_of(out[0]);
    assert_int_equal(tiny_job_end(pid[0]), RANK_EXIT_PEER);
    assert_true(clock_mono_ns() - killed < limit_ns);
    assert_int_equal(tiny_job_end(pid[1]), -SIGKILL);
    close(out[1]);
    if (!strstr(text, "lost rank 1"))
        fail_msg("rank 0 says: %s", text);
    Boost__DoneRecord *d = done_of(0);
    assert_int_equal(d->why, BOOST__DONE_RECORD__WHY__FAILED);
    assert_non_null(strstr(d->error, "lost rank 1"));
    assert_true(d->step >= 20);
    boost__done_record__free_unpacked(d, NULL);
}

#endif
