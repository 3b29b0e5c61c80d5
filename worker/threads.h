/* The threads of a worker process, those of libraries too, and where each of them stands.
 *
 * A handler must not run on the stack of a thread that computes: dnnl_sgemm of oneDNN 2.6 uses the stack pointer as one
 * more register, so that a signal frame lands in its data or in the heap. So every thread gets an alternate stack
 * before it runs anything else: pthread_create() of this program stands before the C library's, for all libraries it
 * loads. Only threads that have such a stack are ever signalled. */
#ifndef BOOST_WORKER_THREADS_H
#define BOOST_WORKER_THREADS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "proto/base/error.h"

enum {
    THREAD_FRAMES = 48, /* innermost */
    THREAD_GUESSES = 24,
    THREADS_MAX = 512, /* that can be asked; others run as well */
};

struct thread_frames {
    pid_t tid;
    bool answered;
    bool faulted; /* the unwinder met something it could not read; what it had is here */
    /* Addresses, innermost first: where the thread was, then return addresses. The last `guesses` of them were found by
     * looking through the stack for calls of this program, behind code of which nobody says how to unwind it (a JIT's);
     * some of them may be over. */
    uintptr_t pc[THREAD_FRAMES + THREAD_GUESSES];
    int n, guesses;
};

/* Prepares the main thread, and what unwinding needs. Once, by the main thread, before it makes others. */
MUST_USE int threads_start(struct error *err);
/* Asks every other thread where it stands; waits at most wait_ms for their answers. Fills out[THREADS_MAX]; returns how
 * many. One caller at a time. Threads that block the signal do not answer. */
int threads_look(struct thread_frames *out, int wait_ms);
/* Threads that were not given an alternate stack, since THREADS_MAX others had one. */
int threads_beyond(void);

#endif
