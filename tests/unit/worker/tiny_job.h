/* A job that trains in milliseconds, for tests that run whole jobs in one process. */
#ifndef BOOST_TESTS_TINY_JOB_H
#define BOOST_TESTS_TINY_JOB_H

#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/base/fs.h"
#include "proto/worker.pb-c.h"
#include "proto/reclog.h"
#include "worker/signals.h"
#include "worker/standalone.h"

/* <dir>/train.txt, val.txt and job.pbtxt; `run` and `checkpoint` are further fields of those groups. */
static inline void tiny_job_write(const char *dir, int tp, int steps, const char *run, const char *checkpoint)
{
    char path[256], job[2048];
    struct error err;
    struct buffer text;
    buffer_init(&text, 1 << 20);
    uint32_t x = 1;
    for (int i = 0; i < 4000; i++) { /* words of a small language: there is something to learn */
        x = x * 1664525 + 1013904223;
        static const char *const words[] = {"the ", "lord ", "said ", "unto ", "moses ", "and ", "it ", "was ", "so "};
        buffer_append_str(&text, words[(x >> 24) % 9]);
    }
    snprintf(path, sizeof path, "%s/train.txt", dir);
    assert_int_equal(fs_write_atomic(path, text.data, text.len, 0644, &err), 0);
    snprintf(path, sizeof path, "%s/val.txt", dir);
    assert_int_equal(fs_write_atomic(path, text.data, 700, 0644, &err), 0);
    buffer_free(&text);
    int len = snprintf(job, sizeof job,
                       "spec_version: 1 name: \"tiny\"\n"
                       "model { factorization: COLA hidden: 16 layers: 2 heads: 2 intermediate: 32 rank: 4\n"
                       "        vocab: 128 }\n"
                       "parallel { strategy: BTP tp: %d micro_batch: 2 global_batch: 4 }\n"
                       "data { train { path: \"%s/train.txt\" } eval { path: \"%s/val.txt\" } format: TEXT\n"
                       "       seq_len: 16 }\n"
                       "optimizer { lr: 1e-2 warmup_steps: 10 }\n"
                       "run { steps: %d %s }\n"
                       "checkpoint { dir: \"%s/ckpt\" %s }\n"
                       "resources { threads_per_rank: 1 }\n",
                       tp, dir, dir, steps, run, dir, checkpoint);
    assert_true(len > 0 && (size_t)len < sizeof job);
    snprintf(path, sizeof path, "%s/job.pbtxt", dir);
    assert_int_equal(fs_write_atomic(path, job, (size_t)len, 0644, &err), 0);
}

/* Runs the job in a child process whose standard output and error are the pipe *out (may be NULL: dropped). */
static inline pid_t tiny_job_start(const char *dir, const char *run_dir, const char *resume, const char *const *set,
                                   size_t n_set, int *out)
{
    int fds[2] = {-1, -1};
    assert_int_equal(pipe(fds), 0);
    fcntl(fds[1], F_SETPIPE_SZ, 4096); /* a child can run ahead of its reader by some 60 lines, not more */
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid) {
        close(fds[1]);
        if (out)
            *out = fds[0];
        else
            close(fds[0]);
        return pid;
    }
    close(fds[0]);
    FILE *null = out ? NULL : fopen("/dev/null", "we");
    dup2(out ? fds[1] : fileno(null), 1);
    dup2(out ? fds[1] : fileno(null), 2);
    char job[256];
    struct error err;
    error_clear(&err);
    if (signals_start(&err))
        _exit(1);
    snprintf(job, sizeof job, "%s/job.pbtxt", dir);
    struct standalone s = {.job_file = job, .run_dir = run_dir, .resume = resume, .set = set, .n_set = n_set};
    int code = standalone_run(&s, &err);
    if (code)
        fprintf(stderr, "error: %s (%s)\n", err.message, err.hint);
    fflush(NULL);
    _exit(code);
}

/* Exit status, a signal negated. */
static inline int tiny_job_end(pid_t pid)
{
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

/* The values `name` of rank 0's metrics by step into out[0..steps]; the highest step seen. A step that is
 * there twice must have the same bits. */
static inline int64_t tiny_job_metric(const char *run_dir, const char *name, double *out, bool *have, int64_t steps)
{
    char path[256];
    struct buffer b;
    struct error err;
    uint64_t offset = 0;
    bool got = true;
    int64_t highest = 0;
    snprintf(path, sizeof path, "%s/rank-0.metrics", run_dir);
    buffer_init(&b, RECLOG_MAX_RECORD);
    while (true) {
        assert_int_equal(reclog_read(path, &offset, &b, &got, &err), 0);
        if (!got)
            break;
        Boost__MetricRecord *m = boost__metric_record__unpack(NULL, b.len, b.data);
        assert_non_null(m);
        for (size_t i = 0; i < m->n_values; i++) {
            if (strcmp(m->values[i]->name, name))
                continue;
            assert_in_range(m->step, 0, steps);
            if (have[m->step])
                assert_memory_equal(&out[m->step], &m->values[i]->value, sizeof(double));
            out[m->step] = m->values[i]->value;
            have[m->step] = true;
            highest = m->step > highest ? m->step : highest;
        }
        boost__metric_record__free_unpacked(m, NULL);
    }
    buffer_free(&b);
    return highest;
}

/* Newest checkpoint directory below <dir>/ckpt with all shards; false: none. */
static inline bool tiny_job_newest(const char *dir, int world, int64_t steps, char *out, size_t cap)
{
    for (int64_t n = steps; n > 0; n--)
        for (int a = 20; a > 0; a--) {
            int whole = 0;
            for (int r = 0; r < world; r++) {
                char shard[320];
                snprintf(shard, sizeof shard, "%s/ckpt/step-%lld.a%d/rank-%05d-of-%05d.safetensors", dir, (long long)n,
                         a, r, world);
                whole += fs_exists(shard);
            }
            if (whole == world) {
                snprintf(out, cap, "%s/ckpt/step-%lld.a%d", dir, (long long)n, a);
                return true;
            }
        }
    return false;
}

static inline Boost__DoneRecord *tiny_job_done(const char *run, int rank)
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

#endif
