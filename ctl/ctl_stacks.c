/* boostctl stacks: where the ranks of a job are, and whom they wait for. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/behind.h"
#include "ctl/ctl.h"
#include "ctl/format.h"
#include "ctl/json_out.h"
#include "ctl/options.h"

enum { REPLY_BYTES = 1 << 30, MAX_RANKS = 65536 };

struct stacks {
    Boost__StacksReply *head; /* the last page: job, attempt, layout */
    const Boost__RankStacks **ranks; /* by rank */
    size_t n;
    struct behind *behind;
    size_t n_behind;
};

/* ---- asking ---- */

static bool keep(struct stacks *s, const Boost__StacksReply *page)
{
    const Boost__RankStacks **more = realloc(s->ranks, (s->n + page->n_ranks + 1) * sizeof *more);
    if (!more)
        return false;
    s->ranks = more;
    for (size_t i = 0; i < page->n_ranks; i++)
        s->ranks[s->n++] = page->ranks[i];
    return true;
}

static int by_rank(const void *x, const void *y)
{
    const Boost__RankStacks *a = *(const Boost__RankStacks *const *)x, *b = *(const Boost__RankStacks *const *)y;
    return (a->rank > b->rank) - (a->rank < b->rank);
}

static int ask(struct ctl *ctl, Boost__StacksRequest *body, struct stacks *s, struct arena *arena, struct error *err)
{
    Boost__Request request = BOOST__REQUEST__INIT;
    request.body_case = BOOST__REQUEST__BODY_STACKS;
    request.stacks = body;
    Boost__Reply *reply = ctl_call(ctl, &request, arena, err);
    for (;; reply = ctl_more(ctl, arena, err)) {
        if (!reply)
            return err->code;
        if (reply->body_case != BOOST__REPLY__BODY_STACKS)
            return error_set(err, ERR_PROTOCOL, "boostd answered something else");
        s->head = reply->stacks;
        if (!keep(s, reply->stacks))
            return error_set(err, ERR_NOMEM, "out of memory");
        if (!reply->more)
            break;
    }
    qsort(s->ranks, s->n, sizeof *s->ranks, by_rank);
    s->n_behind = behind_find(s->ranks, s->n, s->head, &s->behind);
    if (s->n_behind == (size_t)-1) {
        s->n_behind = 0;
        return error_set(err, ERR_NOMEM, "out of memory");
    }
    return ERR_OK;
}

/* ---- lists of ranks ---- */

/* "0-3,5": of those whose mark is set. */
static void print_marked(const struct stacks *s, const bool *marked)
{
    bool first = true;
    for (size_t i = 0; i < s->n;) {
        if (!marked[i]) {
            i++;
            continue;
        }
        size_t last = i;
        while (last + 1 < s->n && marked[last + 1] && s->ranks[last + 1]->rank == s->ranks[last]->rank + 1)
            last++;
        printf("%s%d", first ? "" : ",", s->ranks[i]->rank);
        if (last > i)
            printf("-%d", s->ranks[last]->rank);
        first = false;
        i = last + 1;
    }
}

static void print_ranks(const struct stacks *s, const bool *marked)
{
    size_t n = 0;
    for (size_t i = 0; i < s->n; i++)
        n += marked[i];
    printf(n == 1 ? "rank " : "ranks ");
    print_marked(s, marked);
}

/* ---- where they are ---- */

static bool same_text(const char *a, const char *b)
{
    return !strcmp(a ? a : "", b ? b : "");
}

static bool same_place(const Boost__RankStacks *a, const Boost__RankStacks *b)
{
    return a->step == b->step && a->has_step == b->has_step && same_text(a->phase, b->phase) &&
           same_text(a->doing, b->doing) && same_text(a->collective, b->collective) && same_text(a->note, b->note) &&
           same_text(a->node, b->node);
}

static void print_place(const struct stacks *s, const Boost__RankStacks *r, const bool *marked)
{
    print_ranks(s, marked);
    printf(" on ");
    print_safe(stdout, r->node ? r->node : "?");
    if (r->phase) {
        printf(": ");
        print_safe(stdout, r->phase);
        printf(", %lld steps done", (long long)r->step);
    }
    if (r->collective) {
        printf(", last collective ");
        print_safe(stdout, r->collective);
    } else if (r->doing) {
        printf(", ");
        print_safe(stdout, r->doing);
    }
    putchar('\n');
    if (r->note) {
        printf("    ");
        print_safe(stdout, r->note);
        putchar('\n');
    }
}

static bool print_places(const struct stacks *s)
{
    bool *done = calloc(s->n + 1, sizeof *done), *marked = calloc(s->n + 1, sizeof *marked);
    for (size_t i = 0; done && marked && i < s->n; i++) {
        if (done[i])
            continue;
        memset(marked, 0, s->n * sizeof *marked);
        for (size_t k = i; k < s->n; k++)
            if (same_place(s->ranks[i], s->ranks[k]))
                done[k] = marked[k] = true;
        print_place(s, s->ranks[i], marked);
    }
    bool ok = done && marked;
    free(done);
    free(marked);
    return ok;
}

static bool print_behind(const struct stacks *s)
{
    bool *marked = calloc(s->n + 1, sizeof *marked);
    for (size_t i = 0; marked && i < s->n_behind; i++) {
        const struct behind *b = &s->behind[i];
        char bytes[FORMAT_TEXT];
        memset(marked, 0, s->n * sizeof *marked);
        for (size_t k = 0; k < s->n; k++)
            for (size_t w = 0; w < b->n_waiting; w++)
                marked[k] = marked[k] || s->ranks[k] == b->waiting[w];
        printf("behind: rank %d on ", b->rank->rank);
        print_safe(stdout, b->rank->node ? b->rank->node : "?");
        printf(" has begun %llu calls of group %s; ", b->calls, b->group);
        print_ranks(s, marked);
        printf(b->n_waiting == 1 ? " waits" : " wait");
        printf(" in call %llu, ", (unsigned long long)b->waits_in->seq);
        print_safe(stdout, b->waits_in->kind ? b->waits_in->kind : "");
        printf(" \"");
        print_safe(stdout, b->waits_in->what ? b->waits_in->what : "");
        printf("\" of %s\n", format_bytes((int64_t)b->waits_in->bytes, bytes));
    }
    free(marked);
    return marked != NULL;
}

/* ---- stacks: alike but for the offsets within functions, they are shown once ---- */

struct one {
    size_t rank; /* index */
    const Boost__ThreadStack *thread;
    bool main, done;
};

/* "poll+0x4f (libc.so.6)": up to the plus, and the file. */
static bool same_frame(const char *a, const char *b)
{
    const char *pa = strstr(a, "+0x"), *pb = strstr(b, "+0x");
    if (!pa || !pb)
        return !strcmp(a, b);
    const char *fa = strchr(pa, ' '), *fb = strchr(pb, ' ');
    if (pa - a != pb - b || strncmp(a, b, (size_t)(pa - a)) != 0)
        return false;
    /* "libx.so+0x4711" has no function: there the offset is the name. */
    return fa && fb ? !strcmp(fa, fb) : !strcmp(a, b);
}

static bool same_stack(const struct one *a, const struct one *b)
{
    const Boost__ThreadStack *x = a->thread, *y = b->thread;
    if (a->main != b->main || x->n_frames != y->n_frames || !same_text(x->name, y->name) ||
        !same_text(x->state, y->state) || !same_text(x->wchan, y->wchan) || !same_text(x->syscall, y->syscall))
        return false;
    for (size_t i = 0; i < x->n_frames; i++)
        if (!same_frame(x->frames[i], y->frames[i]))
            return false;
    return true;
}

static void print_frames(const Boost__ThreadStack *t)
{
    for (size_t i = 0; i < t->n_frames; i++) {
        printf("    ");
        print_safe(stdout, t->frames[i]);
        putchar('\n');
    }
    const struct {
        const char *name, *value;
    } facts[] = {{"state", t->state}, {"wait channel", t->wchan}, {"system call", t->syscall},
                 {"kernel stack", t->kernel_stack}};
    for (size_t i = 0; i < sizeof facts / sizeof *facts; i++)
        if (facts[i].value) {
            printf("    %-13s ", facts[i].name);
            print_safe(stdout, facts[i].value);
            putchar('\n');
        }
    if (!t->n_frames && !t->state)
        printf("    nothing is known\n");
}

static void print_alike(const struct stacks *s, struct one *all, size_t n, size_t at, bool *marked)
{
    size_t threads = 0, ranks = 0;
    memset(marked, 0, s->n * sizeof *marked);
    for (size_t i = at; i < n; i++)
        if (!all[i].done && same_stack(&all[at], &all[i])) {
            all[i].done = true;
            ranks += !marked[all[i].rank];
            marked[all[i].rank] = true;
            threads++;
        }
    putchar('\n');
    print_ranks(s, marked);
    if (all[at].main)
        printf(", main thread\n");
    else if (threads == 1)
        printf(", thread %d\n", all[at].thread->tid);
    else
        printf(", %zu threads%s\n", threads, ranks > 1 ? " in all" : "");
    print_frames(all[at].thread);
}

static bool print_stacks(const struct stacks *s)
{
    size_t n = 0;
    for (size_t i = 0; i < s->n; i++)
        n += s->ranks[i]->n_threads;
    struct one *all = calloc(n + 1, sizeof *all);
    bool *marked = calloc(s->n + 1, sizeof *marked);
    size_t at = 0;
    for (size_t i = 0; all && i < s->n; i++)
        for (size_t t = 0; t < s->ranks[i]->n_threads; t++, at++) {
            const Boost__ThreadStack *thread = s->ranks[i]->threads[t];
            all[at] = (struct one){i, thread, thread->tid == s->ranks[i]->pid, false};
        }
    for (int other = 0; all && marked && other < 2; other++)
        for (size_t i = 0; i < n; i++)
            if (!all[i].done && all[i].main == !other)
                print_alike(s, all, n, i, marked);
    bool ok = all && marked;
    free(all);
    free(marked);
    return ok;
}

static bool print_text(const struct stacks *s)
{
    printf("job %lld, attempt %d: %d rank%s\n", (long long)s->head->job, s->head->attempt, s->head->world,
           s->head->world == 1 ? "" : "s");
    return print_places(s) && print_behind(s) && print_stacks(s);
}

/* ---- JSON ---- */

static json_t *text_or_none(const char *text)
{
    return text ? json_text(text) : NULL;
}

static json_t *json_thread(const Boost__ThreadStack *t)
{
    json_t *o = json_object();
    json_put(o, "tid", json_integer(t->tid));
    json_put(o, "name", text_or_none(t->name));
    json_t *frames = json_array();
    for (size_t i = 0; i < t->n_frames; i++)
        json_array_append_new(frames, json_text(t->frames[i]));
    json_put(o, "frames", frames);
    json_put(o, "state", text_or_none(t->state));
    json_put(o, "wchan", text_or_none(t->wchan));
    json_put(o, "syscall", text_or_none(t->syscall));
    json_put(o, "kernel_stack", text_or_none(t->kernel_stack));
    return o;
}

static json_t *json_collective(const Boost__CollectiveInfo *c)
{
    json_t *o = json_object();
    json_put(o, "group", text_or_none(c->group));
    json_put(o, "kind", text_or_none(c->kind));
    json_put(o, "what", text_or_none(c->what));
    json_put(o, "call", json_integer((json_int_t)c->seq));
    json_put(o, "bytes", json_integer((json_int_t)c->bytes));
    json_put(o, "where", json_string(enum_name(&boost__collective_info__where__descriptor, (int)c->where)));
    return o;
}

static json_t *json_rank(const Boost__RankStacks *r)
{
    json_t *o = json_object(), *collectives = json_array(), *threads = json_array();
    json_put(o, "rank", json_integer(r->rank));
    json_put(o, "node", json_text(r->node));
    json_put(o, "pid", r->has_pid ? json_integer(r->pid) : NULL);
    json_put(o, "answered", json_boolean(r->answered));
    json_put(o, "note", text_or_none(r->note));
    json_put(o, "phase", text_or_none(r->phase));
    json_put(o, "step", r->has_step ? json_integer(r->step) : NULL);
    json_put(o, "progress", r->has_progress ? json_integer((json_int_t)r->progress) : NULL);
    json_put(o, "moved", r->has_moved ? json_boolean(r->moved) : NULL);
    json_put(o, "doing", text_or_none(r->doing));
    json_put(o, "collective", text_or_none(r->collective));
    for (size_t i = 0; i < r->n_collectives; i++)
        json_array_append_new(collectives, json_collective(r->collectives[i]));
    json_put(o, "collectives", collectives);
    for (size_t i = 0; i < r->n_threads; i++)
        json_array_append_new(threads, json_thread(r->threads[i]));
    json_put(o, "threads", threads);
    return o;
}

static void print_json(const struct ctl *ctl, const struct stacks *s)
{
    json_t *o = json_document("boost.stacks/1"), *ranks = json_array(), *behind = json_array();
    json_put(o, "job", json_integer(s->head->job));
    json_put(o, "attempt", json_integer(s->head->attempt));
    for (size_t i = 0; i < s->n; i++)
        json_array_append_new(ranks, json_rank(s->ranks[i]));
    json_put(o, "ranks", ranks);
    for (size_t i = 0; i < s->n_behind; i++) {
        const struct behind *b = &s->behind[i];
        json_t *x = json_object(), *waiting = json_array();
        json_put(x, "rank", json_integer(b->rank->rank));
        json_put(x, "node", json_text(b->rank->node));
        json_put(x, "group", json_string(b->group));
        json_put(x, "calls", json_integer((json_int_t)b->calls));
        for (size_t w = 0; w < b->n_waiting; w++)
            json_array_append_new(waiting, json_integer(b->waiting[w]->rank));
        json_put(x, "waiting", waiting);
        json_put(x, "waits_in", json_collective(b->waits_in));
        json_array_append_new(behind, x);
    }
    json_put(o, "behind", behind);
    json_emit(o, ctl->output == OUTPUT_JSONL);
}

/* ---- the verb ---- */

int verb_stacks(struct ctl *ctl, int argc, char **argv)
{
    bool help = false;
    const char *rank = NULL;
    const struct option_row rows[] = {
        {0, "rank", "R", "of this rank (all)", NULL, &rank, NULL},
        {'h', "help", NULL, "this text", &help, NULL, NULL},
        {0, NULL, NULL, NULL, NULL, NULL, NULL},
    };
    int first = options_parse("stacks", argc, argv, rows);
    if (first < 0)
        return EXIT_USAGE;
    if (help) {
        printf("usage: boostctl stacks JOB [--rank R]\n");
        options_help(rows);
        return EXIT_OK;
    }
    if (argc - first != 1)
        return ctl_usage("stacks", "takes one job");
    if (ctl->output == OUTPUT_NAME)
        return ctl_usage("stacks", "has no names to print (-o)");
    struct ctl_ref ref = ctl_split_ref(argv[first]);
    long long only = ref.rank;
    if (rank && !option_int("stacks", "--rank", rank, 0, MAX_RANKS - 1, &only))
        return EXIT_USAGE;
    struct arena arena;
    struct error err;
    struct stacks s = {.n = 0};
    arena_init(&arena, REPLY_BYTES);
    Boost__StacksRequest body = BOOST__STACKS_REQUEST__INIT;
    int32_t one = (int32_t)only;
    body.job = ctl_ref(&arena, ref.job);
    body.has_attempt = ref.attempt > 0;
    body.attempt = (int32_t)ref.attempt;
    body.n_ranks = only >= 0;
    body.ranks = &one;
    int code = ask(ctl, &body, &s, &arena, &err) ? ctl_fail(&err) : EXIT_OK;
    if (!code && ctl->output >= OUTPUT_JSON)
        print_json(ctl, &s);
    else if (!code && !print_text(&s)) {
        error_set(&err, ERR_NOMEM, "out of memory");
        code = ctl_fail(&err);
    }
    behind_free(s.behind, s.n_behind);
    free(s.ranks);
    arena_free(&arena);
    return code;
}
