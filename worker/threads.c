/* threads.h */
#include "worker/threads.h"

#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include "proto/base/clock.h"

enum {
    ALTERNATE_BYTES = 128 << 10, /* a signal frame with all vector registers, and the unwinder */
    GUARD_BYTES = 64 << 10,      /* a page of any architecture */
    SCAN_BYTES = 64 << 10,       /* of a stack */
};

struct slot {
    atomic_int tid; /* 0: free */
    uintptr_t stack_start, stack_end; /* 0: not known */
    atomic_uint answer; /* the look whose answer lies here */
    volatile sig_atomic_t unwinding;
    sigjmp_buf fault;
    int n, guesses;
    bool outside_in; /* the guesses begin with the outermost */
    bool faulted;
    void *pc[THREAD_FRAMES + THREAD_GUESSES];
};

static struct slot slots[THREADS_MAX];
static atomic_int beyond;
static atomic_uint look; /* counts looks; 0: none yet */
static _Thread_local struct slot *mine;

static int dump_signal(void)
{
    return SIGRTMIN + 5;
}

/* ---- in the handler: nothing that is not async-signal-safe --------------------------- */

static uintptr_t interrupted_pc(const ucontext_t *u)
{
#if defined(__x86_64__)
    return (uintptr_t)u->uc_mcontext.gregs[REG_RIP];
#elif defined(__aarch64__)
    return (uintptr_t)u->uc_mcontext.pc;
#else
    (void)u;
    return 0;
#endif
}

static uintptr_t interrupted_sp(const ucontext_t *u)
{
#if defined(__x86_64__)
    return (uintptr_t)u->uc_mcontext.gregs[REG_RSP];
#elif defined(__aarch64__)
    return (uintptr_t)u->uc_mcontext.sp;
#else
    (void)u;
    return 0;
#endif
}

static bool known_code(uintptr_t pc)
{
    struct dl_find_object o; /* takes no lock, unlike dladdr() */
    return _dl_find_object((void *)pc, &o) == 0;
}

/* Whether a call can lie just before the address. */
static bool behind_call(uintptr_t pc)
{
#if defined(__x86_64__)
    const uint8_t *p = (const uint8_t *)pc; /* NOLINT: an address is what it is */
    return p[-5] == 0xE8 || (p[-2] == 0xFF && (p[-1] & 0x38) == 0x10) || (p[-3] == 0xFF && (p[-2] & 0x38) == 0x10) ||
           (p[-6] == 0xFF && (p[-5] & 0x38) == 0x10) || (p[-7] == 0xFF && (p[-6] & 0x38) == 0x10);
#else
    (void)pc;
    return false;
#endif
}

extern const char __executable_start[], etext[]; /* of the linker: this program */

static bool own_return(uintptr_t word)
{
    return word > (uintptr_t)__executable_start + 16 && word < (uintptr_t)etext && behind_call(word);
}

/* Words of the stack that can be return addresses into this program; the libraries between say little, and there is
 * much that was left over from earlier calls. */
static void scan_inside_out(struct slot *s, uintptr_t sp)
{
    uintptr_t end = s->stack_end - sp > SCAN_BYTES ? sp + SCAN_BYTES : s->stack_end;
    for (uintptr_t at = (sp + 7) & ~(uintptr_t)7; at + sizeof at <= end && s->guesses < THREAD_GUESSES; at += sizeof at)
        if (own_return(*(const uintptr_t *)at)) {
            s->pc[s->n++] = (void *)*(const uintptr_t *)at;
            s->guesses++;
        }
}

/* Products of oneDNN use the stack pointer for something else: the outermost calls are there all the same. */
static void scan_outside_in(struct slot *s)
{
    s->outside_in = true;
    for (uintptr_t at = s->stack_end & ~(uintptr_t)7; s->stack_end - at < SCAN_BYTES && s->guesses < THREAD_GUESSES;) {
        at -= sizeof at;
        if (own_return(*(const uintptr_t *)at)) {
            s->pc[s->n++] = (void *)*(const uintptr_t *)at;
            s->guesses++;
        }
    }
}

static void unwind(struct slot *s, const ucontext_t *u)
{
    void *raw[THREAD_FRAMES + 8];
    uintptr_t pc = interrupted_pc(u);
    s->n = s->guesses = 0;
    s->outside_in = false;
    int n = backtrace(raw, THREAD_FRAMES + 8), first = 0;
    while (first < n && (uintptr_t)raw[first] != pc)
        first++;
    if (first == n) { /* it did not get out of the handler */
        s->pc[s->n++] = (void *)pc;
    } else {
        for (int i = first; i < n && s->n < THREAD_FRAMES; i++)
            s->pc[s->n++] = raw[i];
    }
    uintptr_t sp = interrupted_sp(u);
    if (known_code((uintptr_t)s->pc[s->n - 1] - (s->n > 1)) || !s->stack_end)
        return;
    if (sp < s->stack_end && sp >= s->stack_start)
        scan_inside_out(s, sp);
    else
        scan_outside_in(s);
}

static void on_dump(int signal, siginfo_t *info, void *context)
{
    struct slot *s = mine;
    int saved = errno;
    unsigned now = atomic_load(&look);
    (void)signal, (void)info;
    if (!s || s->unwinding)
        return;
    s->faulted = false;
    s->unwinding = 1;
    if (sigsetjmp(s->fault, 1) == 0)
        unwind(s, context);
    else
        s->faulted = true;
    s->unwinding = 0;
    atomic_store(&s->answer, now);
    errno = saved;
}

/* Of an unwinder that follows wrong tables; every other fault dies as it would without us. */
static void on_fault(int signal, siginfo_t *info, void *context)
{
    struct slot *s = mine;
    (void)info, (void)context;
    if (s && s->unwinding)
        siglongjmp(s->fault, 1);
    struct sigaction plain = {.sa_handler = SIG_DFL};
    sigaction(signal, &plain, NULL); /* the instruction is tried again */
}

/* ---- threads come and go ---------------------------------------------------------------- */

static struct slot *take_slot(void)
{
    pid_t tid = (pid_t)syscall(SYS_gettid);
    for (int i = 0; i < THREADS_MAX; i++) {
        int unused = 0;
        if (atomic_load(&slots[i].tid) == 0 && atomic_compare_exchange_strong(&slots[i].tid, &unused, -tid))
            return &slots[i];
    }
    atomic_fetch_add(&beyond, 1);
    return NULL;
}

static void note_stack(struct slot *s)
{
    pthread_attr_t attr;
    void *start = NULL;
    size_t size = 0;
    s->stack_start = s->stack_end = 0;
    if (pthread_getattr_np(pthread_self(), &attr))
        return;
    pthread_attr_getstack(&attr, &start, &size);
    pthread_attr_destroy(&attr);
    s->stack_start = (uintptr_t)start;
    s->stack_end = (uintptr_t)start + size;
}

static void *enter(void)
{
    struct slot *s = take_slot();
    void *memory = MAP_FAILED;
    if (s)
        memory = mmap(NULL, GUARD_BYTES + ALTERNATE_BYTES, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        if (s)
            atomic_store(&s->tid, 0);
        return NULL;
    }
    mprotect(memory, GUARD_BYTES, PROT_NONE);
    stack_t alternate = {.ss_sp = (char *)memory + GUARD_BYTES, .ss_size = ALTERNATE_BYTES};
    if (sigaltstack(&alternate, NULL) < 0) {
        munmap(memory, GUARD_BYTES + ALTERNATE_BYTES);
        atomic_store(&s->tid, 0);
        return NULL;
    }
    note_stack(s);
    s->unwinding = 0;
    atomic_store(&s->answer, 0);
    mine = s;
    atomic_store(&s->tid, -atomic_load(&s->tid)); /* from here on it may be asked */
    return memory;
}

static void leave(void *memory)
{
    if (!memory)
        return;
    sigset_t dump;
    sigemptyset(&dump);
    sigaddset(&dump, dump_signal());
    pthread_sigmask(SIG_BLOCK, &dump, NULL); /* what still comes finds no stack */
    stack_t none = {.ss_flags = SS_DISABLE};
    sigaltstack(&none, NULL);
    atomic_store(&mine->tid, 0);
    mine = NULL;
    munmap(memory, GUARD_BYTES + ALTERNATE_BYTES);
}

struct birth {
    void *(*run)(void *);
    void *arg;
};

static void *run_thread(void *arg)
{
    struct birth b = *(struct birth *)arg;
    void *result;
    free(arg);
    void *memory = enter();
    pthread_cleanup_push(leave, memory);
    result = b.run(b.arg);
    pthread_cleanup_pop(1);
    return result;
}

/* In front of the C library's, for every library of the process. */
int pthread_create(pthread_t *restrict thread, const pthread_attr_t *restrict attr, void *(*run)(void *),
                   void *restrict arg)
{
    static _Atomic(void *) next;
    void *found = atomic_load(&next);
    int (*create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    if (!found) {
        found = dlsym(RTLD_NEXT, "pthread_create");
        atomic_store(&next, found);
    }
    struct birth *b = found ? malloc(sizeof *b) : NULL;
    if (!b)
        return EAGAIN;
    *b = (struct birth){run, arg};
    memcpy(&create, &found, sizeof create);
    int rc = create(thread, attr, run_thread, b);
    if (rc)
        free(b);
    return rc;
}

/* ---- looking ------------------------------------------------------------------------------- */

int threads_start(struct error *err)
{
    struct sigaction dump = {.sa_sigaction = on_dump, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART};
    void *touched[4];
    (void)backtrace(touched, 4); /* loads the unwinder now: the handler may not */
    for (int i = 0; i < THREADS_MAX; i++) /* of the process that this one was forked from */
        atomic_store(&slots[i].tid, 0);
    mine = NULL;
    if (!enter())
        return error_errno(err, errno ? errno : ENOMEM, "no alternate stack for the main thread");
    sigfillset(&dump.sa_mask);
    sigdelset(&dump.sa_mask, SIGSEGV);
    sigdelset(&dump.sa_mask, SIGBUS);
    return sigaction(dump_signal(), &dump, NULL) < 0 ? error_errno(err, errno, "sigaction") : ERR_OK;
}

static void guard_faults(struct sigaction before[2], bool on)
{
    struct sigaction fault = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
    sigaction(SIGSEGV, on ? &fault : &before[0], on ? &before[0] : NULL);
    sigaction(SIGBUS, on ? &fault : &before[1], on ? &before[1] : NULL);
}

static void take_answer(struct slot *s, unsigned now, struct thread_frames *out)
{
    out->answered = atomic_load(&s->answer) == now;
    if (!out->answered)
        return;
    out->faulted = s->faulted;
    out->n = s->n >= 0 && s->n <= THREAD_FRAMES + THREAD_GUESSES ? s->n : 0;
    out->guesses = s->guesses >= 0 && s->guesses <= out->n ? s->guesses : 0;
    int first = s->outside_in ? out->n - out->guesses : out->n;
    for (int i = 0; i < out->n; i++)
        out->pc[i] = (uintptr_t)s->pc[i < first ? i : first + out->n - 1 - i];
}

int threads_look(struct thread_frames *out, int wait_ms)
{
    struct slot *asked[THREADS_MAX];
    struct sigaction before[2];
    int n = 0, missing = 0;
    int64_t deadline = clock_mono_ns() + wait_ms * NS_PER_MS;
    unsigned now = atomic_fetch_add(&look, 1) + 1;
    guard_faults(before, true);
    for (int i = 0; i < THREADS_MAX; i++) {
        pid_t tid = atomic_load(&slots[i].tid);
        if (tid <= 0 || &slots[i] == mine || syscall(SYS_tgkill, getpid(), tid, dump_signal()) < 0)
            continue;
        asked[n] = &slots[i];
        out[n++] = (struct thread_frames){.tid = tid};
    }
    do {
        missing = 0;
        for (int i = 0; i < n; i++)
            missing += atomic_load(&asked[i]->answer) != now && atomic_load(&asked[i]->tid) == out[i].tid;
        if (missing)
            nanosleep(&(struct timespec){.tv_nsec = 500000}, NULL);
    } while (missing && clock_mono_ns() < deadline);
    for (int i = 0; i < n; i++)
        take_answer(asked[i], now, &out[i]);
    if (!missing) /* else one that is late may still fault */
        guard_faults(before, false);
    return n;
}

int threads_beyond(void)
{
    return atomic_load(&beyond);
}
