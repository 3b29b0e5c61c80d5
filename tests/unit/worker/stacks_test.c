/* Where the threads of a process are: names of functions, static ones too; code that nobody can unwind; threads that
 * do not answer; and no harm to what they compute. */
#include <oneapi/dnnl/dnnl.h>
#include <omp.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/base/clock.h"
#include "proto/procstate.h"
#include "worker/symbols.h"
#include "worker/threads.h"

enum { LOOKS = 4000, SIZE = 96, MALLOCS = 64 };

static struct thread_frames *seen;
static struct symbols *names;

static int start(void **state)
{
    (void)state;
    struct error err;
    seen = calloc(THREADS_MAX, sizeof *seen);
    names = symbols_new();
    return threads_start(&err);
}

static int finish(void **state)
{
    (void)state;
    free(seen);
    symbols_free(names);
    return 0;
}

/* ---- a thread that waits at a known place ---- */

struct waiter {
    atomic_int tid;
    atomic_bool go;
    bool deaf;             /* blocks all signals */
    void (*through)(void); /* code between; NULL: none */
};
static struct waiter *current;

static __attribute__((noinline)) void wait_here(void)
{
    while (!atomic_load(&current->go))
        usleep(1000);
    atomic_fetch_add(&current->tid, 0); /* no tail call */
}

static __attribute__((noinline)) void *waiting(void *arg)
{
    struct waiter *w = arg;
    if (w->deaf) {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_BLOCK, &all, NULL);
    }
    current = w;
    atomic_store(&w->tid, (int)syscall(SYS_gettid));
    if (w->through)
        w->through();
    else
        wait_here();
    return NULL;
}

/* What a look says of the thread, once it is where it waits. */
static const struct thread_frames *look_at(const struct waiter *w, bool answers)
{
    for (int tries = 0; tries < 1000; tries++) {
        int n = threads_look(seen, answers ? 1000 : 20);
        for (int i = 0; i < n; i++) {
            char top[256] = "";
            bool there = false;
            for (int k = 0; k < seen[i].n; k++)
                there = there || strstr(symbols_describe(names, seen[i].pc[k], k > 0, top, sizeof top), "wait_here");
            if (seen[i].tid == atomic_load(&w->tid) && (there || !answers))
                return &seen[i];
        }
        usleep(1000);
    }
    fail_msg("the thread was never seen where it waits");
    return NULL;
}

static int frame_of(const struct thread_frames *f, const char *name, char text[256])
{
    for (int i = 0; i < f->n; i++)
        if (!strncmp(symbols_describe(names, f->pc[i], i > 0, text, 256), name, strlen(name)))
            return i;
    for (int i = 0; i < f->n; i++)
        fprintf(stderr, "# %s\n", symbols_describe(names, f->pc[i], i > 0, text, 256));
    fail_msg("no frame of %s", name);
    return -1;
}

static void static_functions_have_names(void **state)
{
    (void)state;
    struct waiter w = {.go = false};
    pthread_t thread;
    char text[256];
    assert_int_equal(pthread_create(&thread, NULL, waiting, &w), 0);
    const struct thread_frames *f = look_at(&w, true);
    assert_true(f->answered && !f->faulted && f->guesses == 0);
    int inner = frame_of(f, "wait_here+0x", text);
    assert_non_null(strstr(text, " (stacks_test)"));
    assert_true(inner < frame_of(f, "waiting+0x", text));
    atomic_store(&w.go, true);
    pthread_join(thread, NULL);
    int n = threads_look(seen, 1000);
    for (int i = 0; i < n; i++)
        assert_int_not_equal(seen[i].tid, atomic_load(&w.tid));
}

static void one_that_blocks_signals_is_told_by_the_kernel(void **state)
{
    (void)state;
    struct waiter w = {.deaf = true};
    struct proc_thread p;
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, waiting, &w), 0);
    while (!atomic_load(&w.tid))
        usleep(100);
    const struct thread_frames *f = look_at(&w, false);
    assert_false(f->answered);
    assert_true(proc_thread_read(getpid(), f->tid, &p));
    assert_string_equal(p.name, "stacks_test");
    assert_true(p.state[0] == 'S' || p.state[0] == 'R');
    atomic_store(&w.go, true);
    pthread_join(thread, NULL);
    assert_false(proc_thread_read(getpid(), atomic_load(&w.tid), &p));
}

#if defined(__x86_64__)
/* push %rbp; mov $wait_here,%rax; sub $0x420,%rsp; call *%rax; add $0x420,%rsp; pop %rbp; ret */
static void code_without_tables_is_looked_through(void **state)
{
    (void)state;
    unsigned char code[] = {0x55, 0x48, 0xB8, 0, 0, 0, 0, 0, 0, 0, 0, 0x48, 0x81, 0xEC, 0x20, 0x04, 0, 0,
                            0xFF, 0xD0, 0x48, 0x81, 0xC4, 0x20, 0x04, 0, 0, 0x5D, 0xC3};
    void (*target)(void) = wait_here;
    memcpy(code + 3, &target, sizeof target);
    void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(page != MAP_FAILED);
    memcpy(page, code, sizeof code);
    struct waiter w = {.go = false};
    memcpy(&w.through, &page, sizeof page);
    pthread_t thread;
    char text[256];
    assert_int_equal(pthread_create(&thread, NULL, waiting, &w), 0);
    const struct thread_frames *f = look_at(&w, true);
    assert_true(f->guesses > 0);
    int jit = frame_of(f, "code without a file", text);
    assert_true(frame_of(f, "wait_here", text) < jit);
    int outer = frame_of(f, "waiting+0x", text);
    assert_true(outer > jit && outer >= f->n - f->guesses);
    atomic_store(&w.go, true);
    pthread_join(thread, NULL);
    munmap(page, 4096);
}
#endif

/* ---- no harm ---- */

static atomic_bool enough;
static float left[SIZE * SIZE], right[SIZE * SIZE];

static void multiply(float *out)
{
    memset(out, 0xFF, SIZE * SIZE * sizeof *out);
    assert_int_equal(dnnl_sgemm('N', 'T', SIZE, SIZE, SIZE, 1, left, SIZE, right, SIZE, 0, out, SIZE), dnnl_success);
}

static atomic_long products, wrong;

/* Products, and a heap that would notice damage. */
static void *compute(void *arg)
{
    const float *expected = arg;
    float *out = malloc(SIZE * SIZE * sizeof *out);
    void *blocks[MALLOCS] = {NULL};
    for (unsigned i = 0; !atomic_load(&enough); i++) {
        multiply(out);
        atomic_fetch_add(&products, 1);
        if (memcmp(out, expected, SIZE * SIZE * sizeof *out) != 0)
            atomic_fetch_add(&wrong, 1);
        free(blocks[i % MALLOCS]);
        blocks[i % MALLOCS] = malloc(16 + i * 37 % 5000);
    }
    for (int i = 0; i < MALLOCS; i++)
        free(blocks[i]);
    free(out);
    return NULL;
}

/* Two threads of products, one of them with OpenMP's helpers, asked as fast as they answer. */
static void products_under_looks_are_equal_to_the_bit(void **state)
{
    (void)state;
    float *expected = malloc(SIZE * SIZE * sizeof *expected);
    pthread_t thread[2];
    int answers = 0, inside = 0, helpers = 0;
    char text[256];
    for (int i = 0; i < SIZE * SIZE; i++) {
        left[i] = (float)((i * 37) % 101 - 50) / 7;
        right[i] = (float)((i * 53) % 89 - 44) / 9;
    }
    omp_set_num_threads(2);
    multiply(expected);
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, compute, expected), 0);
    for (int i = 0; i < LOOKS; i++) {
        int n = threads_look(seen, 2000);
        helpers = n > helpers ? n : helpers;
        for (int k = 0; k < n; k++) {
            answers += seen[k].answered;
            assert_false(seen[k].faulted);
            bool product = false;
            for (int p = 0; i % 16 == 0 && p < seen[k].n; p++)
                product = product || strstr(symbols_describe(names, seen[k].pc[p], p > 0, text, sizeof text), "gemm");
            inside += product;
        }
    }
    atomic_store(&enough, true);
    for (int i = 0; i < 2; i++)
        pthread_join(thread[i], NULL);
    printf("# %d looks, %d answers of up to %d threads, %ld products\n", LOOKS, answers, helpers,
           atomic_load(&products));
    assert_int_equal(atomic_load(&wrong), 0);
    assert_true(answers >= LOOKS && inside > 0);
    free(expected);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(static_functions_have_names),
        cmocka_unit_test(one_that_blocks_signals_is_told_by_the_kernel),
#if defined(__x86_64__)
        cmocka_unit_test(code_without_tables_is_looked_through),
#endif
        cmocka_unit_test(products_under_looks_are_equal_to_the_bit),
    };
    return cmocka_run_group_tests(tests, start, finish);
}
