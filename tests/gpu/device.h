/* The GPU of a test whose parent process must not touch it, since it forks processes that do. */
#ifndef BOOST_TESTS_GPU_DEVICE_H
#define BOOST_TESTS_GPU_DEVICE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "worker/cuda.h"

/* Of a process that opened it. */
static const struct cuda_library *library;
static const struct kernels *k;
static struct kstream *ks;

static inline int open_device(struct error *err)
{
    int rc = cuda_library_open(&library, err);
    if (rc)
        return rc;
    k = library->kernels();
    return k->stream_create(1, &ks, err);
}

/* In a process of its own: a process that has used CUDA cannot fork ranks that use it. The code of its error. */
static inline int probe(void)
{
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (!pid) {
        struct error err;
        error_clear(&err);
        int rc = open_device(&err);
        if (rc)
            printf("# no CUDA: %s\n", err.message);
        fflush(NULL);
        _exit(rc);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* A machine that has a GPU must not pass by skipping, unless this build has no CUDA backend. */
static inline void need_gpu(void)
{
    static int code = -2;
    if (code == -2)
        code = probe();
    bool must = getenv("BOOST_CUDA_LIBRARY") || (!access("/dev/nvidia0", F_OK) && code != ERR_UNSUPPORTED);
    if (code && must)
        fail_msg("CUDA cannot be used here");
    if (code)
        skip();
}

#endif
