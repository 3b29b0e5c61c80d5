/* agent_stacks.h
 *
 * What lies in the run directory was written by the job's user: it is shown, never believed. */
#include "daemon/agent_stacks.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "daemon/agent_hang.h"
#include "daemon/agent_node.h"
#include "daemon/keeper_exit.h"
#include "proto/base/clock.h"
#include "proto/base/fs.h"
#include "proto/procstate.h"

enum {
    LOOK_MS = 5,
    APART_MS = 100,      /* between two looks at a page, to tell who gets further */
    AGAIN_MS = 250,      /* a rank that was just started may have missed the signal */
    RECORD_BYTES = 96 << 10,
    THREADS_SHOWN = 128, /* of /proc */
};

int agent_stacks_prepare(struct agent *agent, int64_t job, const Boost__CollectStacks *order, struct agent_stacks *out,
                         struct error *err)
{
    struct agent_attempt *a = attempts_find(agent, job, order->attempt);
    if (!a || !attempt_alive(a))
        return error_set(err, ERR_NOT_FOUND, "nothing of attempt %lld.%d runs on node %s", (long long)job,
                         order->attempt, agent->node);
    out->job = job;
    out->attempt = order->attempt;
    snprintf(out->run_dir, sizeof out->run_dir, "%s", a->run_dir);
    for (size_t i = 0; i < order->n_ranks && out->n_ranks < AGENT_STACKS_RANKS; i++) {
        const struct agent_rank *r = attempt_rank(a, order->ranks[i]);
        int n = out->n_ranks;
        if (!r)
            continue;
        out->ranks[n].rank = r->rank;
        out->ranks[n].pid = r->pid;
        out->ranks[n].has_pid = r->has_pid;
        out->ranks[n].ended = r->exit != NULL;
        out->n_ranks++;
    }
    return ERR_OK;
}

/* ---- asking ---- */

/* A new number into its control page, 0 when there is none. No page is mapped: its owner could cut it short. */
static uint32_t put_request(const char *run_dir, int rank)
{
    char path[PATH_MAX];
    uint32_t number = 0;
    off_t at = offsetof(struct rank_control, stacks);
    if (rank_file_path(path, sizeof path, run_dir, rank, "control", NULL))
        return 0;
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0)
        return 0;
    /* Its owner may have put a second name of somebody else's file there. */
    struct stat st;
    bool ok = fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_nlink == 1 && st.st_size >= RANK_FILE_BYTES && pread(fd, &number, sizeof number, at) == sizeof number;
    number = number + 1 ? number + 1 : 1;
    ok = ok && pwrite(fd, &number, sizeof number, at) == sizeof number;
    close(fd);
    return ok ? number : 0;
}

static Boost__StackRecord *read_answer(const struct agent_stacks *s, int rank, uint32_t request)
{
    char path[PATH_MAX];
    struct buffer packed;
    Boost__StackRecord *r = NULL;
    buffer_init(&packed, RECORD_BYTES);
    if (!rank_file_path(path, sizeof path, s->run_dir, rank, "stacks", NULL) &&
        !fs_read_regular(path, &packed, NULL))
        r = boost__stack_record__unpack(NULL, packed.len, packed.data);
    buffer_free(&packed);
    if (r && (r->job != s->job || r->attempt != s->attempt || r->rank != rank || r->request != request)) {
        boost__stack_record__free_unpacked(r, NULL);
        r = NULL;
    }
    return r;
}

static void signal_rank(struct agent_stacks *s, int i)
{
    if (procid_signal(&s->ranks[i].pid, SIGURG, NULL) == ERR_NOT_FOUND)
        s->ranks[i].ended = true;
}

static void ask(struct agent_stacks *s)
{
    for (int i = 0; i < s->n_ranks; i++) {
        s->ranks[i].has_before = rank_status_read(s->run_dir, s->ranks[i].rank, &s->ranks[i].before);
        if (!s->ranks[i].has_pid || s->ranks[i].ended)
            continue;
        s->ranks[i].request = put_request(s->run_dir, s->ranks[i].rank);
        if (s->ranks[i].request)
            signal_rank(s, i);
    }
}

/* Whether somebody's answer is still to come. */
static bool look_for_answers(struct agent_stacks *s, bool again)
{
    bool missing = false;
    for (int i = 0; i < s->n_ranks; i++) {
        if (!s->ranks[i].request || s->ranks[i].answer || s->ranks[i].ended)
            continue;
        s->ranks[i].answer = read_answer(s, s->ranks[i].rank, s->ranks[i].request);
        if (!s->ranks[i].answer && again)
            signal_rank(s, i);
        missing = missing || !s->ranks[i].answer;
    }
    return missing;
}

static void await_answers(struct agent_stacks *s)
{
    int64_t start = clock_mono_ns(), signalled = start;
    for (;;) {
        int64_t now = clock_mono_ns();
        bool again = now - signalled >= AGAIN_MS * NS_PER_MS;
        signalled = again ? now : signalled;
        bool missing = look_for_answers(s, again);
        if (now - start >= (missing ? AGENT_STACKS_MS : APART_MS) * NS_PER_MS)
            return;
        nanosleep(&(struct timespec){.tv_nsec = LOOK_MS * NS_PER_MS}, NULL);
    }
}

/* ---- answering: protobuf-c's memory ---- */

static char *text(const char *s)
{
    return s && *s ? strdup(s) : NULL;
}

static void add_collective(Boost__RankStacks *r, const struct rank_collective *c)
{
    Boost__CollectiveInfo *x = c->group[0] ? malloc(sizeof *x) : NULL;
    if (!x)
        return;
    boost__collective_info__init(x);
    x->group = text(c->group);
    x->kind = text(c->kind);
    x->what = text(c->what);
    x->has_seq = x->has_bytes = x->has_where = true;
    x->seq = c->seq;
    x->bytes = c->bytes;
    x->where = c->inside == RANK_INSIDE    ? BOOST__COLLECTIVE_INFO__WHERE__INSIDE
               : c->inside == RANK_REACHED ? BOOST__COLLECTIVE_INFO__WHERE__REACHED
                                           : BOOST__COLLECTIVE_INFO__WHERE__LEFT;
    r->collectives[r->n_collectives++] = x;
}

static bool moved(const struct rank_status *x, const struct rank_status *y)
{
    return x->progress != y->progress || x->bytes != y->bytes || x->step != y->step || x->phase != y->phase ||
           x->collective_seq != y->collective_seq;
}

static void add_page(struct agent_stacks *s, int i, Boost__RankStacks *r)
{
    struct rank_status page;
    char last[RANK_COLLECTIVE_TEXT];
    if (!rank_status_read(s->run_dir, s->ranks[i].rank, &page))
        return;
    r->phase = text(phase_name(page.phase));
    r->doing = text(page.doing);
    r->collective = text(rank_collective_text(&page, last, sizeof last));
    r->has_step = r->has_progress = r->has_moved = true;
    r->step = page.step;
    r->progress = page.progress;
    r->moved = s->ranks[i].has_before && moved(&s->ranks[i].before, &page);
    r->collectives = calloc(RANK_GROUPS, sizeof *r->collectives);
    for (int g = 0; r->collectives && g < RANK_GROUPS; g++)
        add_collective(r, &page.groups[g]);
}

static void add_proc_thread(Boost__RankStacks *r, pid_t pid, pid_t tid)
{
    struct proc_thread p;
    Boost__ThreadStack *t = proc_thread_read(pid, tid, &p) ? malloc(sizeof *t) : NULL;
    if (!t)
        return;
    boost__thread_stack__init(t);
    t->has_tid = true;
    t->tid = tid;
    t->name = text(p.name);
    t->state = text(p.state);
    t->wchan = text(p.wchan);
    t->syscall = text(p.syscall);
    t->kernel_stack = text(p.stack);
    r->threads[r->n_threads++] = t;
}

/* Only if it was this very process before and after. */
static void add_proc(const struct agent_stacks *s, int i, Boost__RankStacks *r)
{
    pid_t tids[THREADS_SHOWN], pid = s->ranks[i].pid.pid;
    char note[128];
    int n = procid_alive(&s->ranks[i].pid) ? proc_threads(pid, tids, THREADS_SHOWN) : -1;
    r->threads = n > 0 ? calloc(THREADS_SHOWN, sizeof *r->threads) : NULL;
    for (int k = 0; r->threads && k < n && k < THREADS_SHOWN; k++)
        add_proc_thread(r, pid, tids[k]);
    if (!procid_alive(&s->ranks[i].pid)) {
        while (r->n_threads)
            boost__thread_stack__free_unpacked(r->threads[--r->n_threads], NULL);
        r->note = text("it ended while it was looked at");
        return;
    }
    int shown = n < THREADS_SHOWN ? n : THREADS_SHOWN;
    snprintf(note, sizeof note, "it did not answer in %d s%s; as the kernel tells it", AGENT_STACKS_MS / 1000,
             n > shown ? ", and has more threads than are shown" : "");
    r->note = text(s->ranks[i].request ? note : "it has no control page to be asked by; as the kernel tells it");
}

static Boost__RankStacks *describe(struct agent_stacks *s, int i)
{
    Boost__RankStacks *r = malloc(sizeof *r);
    if (!r)
        return NULL;
    boost__rank_stacks__init(r);
    r->has_rank = r->has_answered = true;
    r->rank = s->ranks[i].rank;
    add_page(s, i, r);
    if (s->ranks[i].has_pid) {
        r->has_pid = true;
        r->pid = s->ranks[i].pid.pid;
    }
    Boost__StackRecord *answer = s->ranks[i].answer;
    if (answer) { /* its threads change hands */
        r->answered = true;
        r->threads = answer->threads;
        r->n_threads = answer->n_threads;
        r->note = text(answer->note);
        answer->threads = NULL;
        answer->n_threads = 0;
    } else if (s->ranks[i].ended) {
        r->note = text("it has ended");
    } else if (!s->ranks[i].has_pid) {
        r->note = text("it has not started yet");
    } else {
        add_proc(s, i, r);
    }
    return r;
}

int agent_stacks_collect(struct agent_stacks *s, struct error *err)
{
    ask(s);
    await_answers(s);
    for (int i = 0; i < s->n_ranks; i++) {
        s->list[s->n] = describe(s, i);
        if (!s->list[s->n])
            return error_set(err, ERR_NOMEM, "no memory for the stacks of rank %d", s->ranks[i].rank);
        s->n++;
    }
    return ERR_OK;
}

void agent_stacks_free(struct agent_stacks *s)
{
    for (int i = 0; i < s->n_ranks; i++)
        if (s->ranks[i].answer)
            boost__stack_record__free_unpacked(s->ranks[i].answer, NULL);
    while (s->n)
        boost__rank_stacks__free_unpacked(s->list[--s->n], NULL);
    s->n_ranks = 0;
}
