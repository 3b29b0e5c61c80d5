/* stacks.h */
#include "worker/stacks.h"

#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/base/arena.h"
#include "proto/base/clock.h"
#include "proto/base/fs.h"
#include "proto/procstate.h"
#include "worker/symbols.h"
#include "worker/threads.h"

enum { LOOK_MS = 500, FRAME_TEXT = 320, ARENA_BYTES = 16 << 20 };

static struct {
    pthread_mutex_t lock;
    const struct report *report; /* NULL: nobody to answer for */
    uint32_t answered;
} serving = {.lock = PTHREAD_MUTEX_INITIALIZER};

static char *copy(struct arena *mem, const char *text)
{
    return *text ? arena_strdup(mem, text) : NULL;
}

/* What the kernel says of one that did not answer: it blocks the signal, or is in a call that cannot be interrupted. */
static bool from_kernel(struct arena *mem, pid_t tid, Boost__ThreadStack *out)
{
    struct proc_thread p;
    if (!proc_thread_read(getpid(), tid, &p))
        return false;
    out->name = copy(mem, p.name);
    out->state = copy(mem, p.state);
    out->wchan = copy(mem, p.wchan);
    out->syscall = copy(mem, p.syscall);
    return true;
}

static int add_frames(struct arena *mem, struct symbols *names, const struct thread_frames *f, Boost__ThreadStack *out)
{
    char text[FRAME_TEXT];
    out->frames = arena_alloc(mem, (size_t)(f->n + 1) * sizeof *out->frames);
    if (!out->frames)
        return ERR_NOMEM;
    for (int i = 0; i < f->n; i++) {
        bool guess = i >= f->n - f->guesses;
        symbols_describe(names, f->pc[i], i > 0, text, sizeof text);
        char *frame = arena_printf(mem, "%s%s", guess ? "? " : "", text);
        if (!frame)
            return ERR_NOMEM;
        out->frames[out->n_frames++] = frame;
    }
    if (f->faulted) {
        char *end = arena_strdup(mem, "(the rest cannot be unwound)");
        out->frames[out->n_frames] = end;
        out->n_frames += end != NULL;
    }
    return ERR_OK;
}

static int add_thread(struct arena *mem, struct symbols *names, const struct thread_frames *f, Boost__StackRecord *r)
{
    struct proc_thread p;
    Boost__ThreadStack *t = arena_alloc(mem, sizeof *t);
    if (!t)
        return ERR_NOMEM;
    boost__thread_stack__init(t);
    t->has_tid = true;
    t->tid = f->tid;
    if (!f->answered) {
        if (!from_kernel(mem, f->tid, t))
            return ERR_OK; /* it has ended */
    } else {
        if (proc_thread_read(getpid(), f->tid, &p))
            t->name = copy(mem, p.name);
        if (add_frames(mem, names, f, t))
            return ERR_NOMEM;
    }
    r->threads[r->n_threads++] = t;
    if (f->tid == getpid()) { /* the main one first */
        r->threads[r->n_threads - 1] = r->threads[0];
        r->threads[0] = t;
    }
    return ERR_OK;
}

static int fill(struct arena *mem, struct symbols *names, Boost__StackRecord *r)
{
    struct thread_frames *frames = malloc(THREADS_MAX * sizeof *frames);
    r->threads = arena_alloc(mem, THREADS_MAX * sizeof *r->threads);
    int rc = frames && r->threads ? ERR_OK : ERR_NOMEM;
    int n = rc ? 0 : threads_look(frames, LOOK_MS);
    for (int i = 0; i < n && !rc; i++)
        rc = add_thread(mem, names, &frames[i], r);
    if (threads_beyond())
        r->note = arena_printf(mem, "%d threads more than the %d that can be asked", threads_beyond(), THREADS_MAX);
    free(frames);
    return rc;
}

int stacks_write(const Boost__AttemptStart *start, int rank, uint32_t request, struct error *err)
{
    static struct symbols *names; /* kept: libraries are large, and stay */
    struct arena mem;
    char path[PATH_MAX];
    Boost__StackRecord r = BOOST__STACK_RECORD__INIT;
    r.has_job = r.has_attempt = r.has_rank = r.has_request = r.has_wall_ns = true;
    r.job = start->job;
    r.attempt = start->attempt;
    r.rank = rank;
    r.request = request;
    r.wall_ns = clock_wall_ns();
    arena_init(&mem, ARENA_BYTES);
    names = names ? names : symbols_new();
    int rc = rank_file_path(path, sizeof path, start->run_dir, rank, "stacks", err);
    if (!rc && (!names || fill(&mem, names, &r)))
        rc = error_set(err, ERR_NOMEM, "out of memory");
    size_t len = boost__stack_record__get_packed_size(&r);
    uint8_t *packed = rc ? NULL : arena_alloc(&mem, len);
    if (!rc && !packed)
        rc = error_set(err, ERR_NOMEM, "out of memory");
    if (!rc) {
        boost__stack_record__pack(&r, packed);
        rc = fs_write_atomic(path, packed, len, 0644, err);
    }
    arena_free(&mem);
    return rc;
}

void stacks_serve(const struct report *report)
{
    pthread_mutex_lock(&serving.lock);
    serving.report = report;
    serving.answered = report ? __atomic_load_n(&report->control->stacks, __ATOMIC_RELAXED) : 0;
    pthread_mutex_unlock(&serving.lock);
}

void stacks_answer(void)
{
    struct error err;
    pthread_mutex_lock(&serving.lock);
    const struct report *r = serving.report;
    uint32_t asked = r ? __atomic_load_n(&r->control->stacks, __ATOMIC_RELAXED) : serving.answered;
    if (asked != serving.answered) {
        serving.answered = asked;
        if (stacks_write(r->start, r->rank, asked, &err))
            fprintf(r->log, "rank %d: its stacks cannot be written: %s\n", r->rank, err.message);
    }
    pthread_mutex_unlock(&serving.lock);
}
