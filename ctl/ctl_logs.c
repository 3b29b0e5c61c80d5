/* boostctl logs: what a rank printed, or all ranks of a node. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ctl/ctl.h"
#include "ctl/format.h"
#include "ctl/options.h"
#include "ctl/out.h"
#include "proto/base/clock.h"
#include "proto/base/buffer.h"

enum {
    NODE_PAUSE_MS = 300,    /* between two rounds over a node's ranks that brought nothing */
    WHOLE_PIECE = 64 << 10, /* boostd gives at least so much at once where there is more */
};

struct log_cursor {
    const char *job;
    long long rank, attempt, tail, age_ms; /* attempt 0 = newest; tail, age -1 = from the start */
    bool follow;
    int wait_ms;
    bool has_offset;
    int64_t offset;
    bool done;
    char said[256]; /* the note printed last */
    /* of one of a node's ranks: lines are printed whole, behind the rank's number */
    bool tagged, finished, job_ended;
    long long newest;
    struct buffer line;
};

/* Raw: a log is passed through as the rank wrote it. */
static bool print_tagged(struct log_cursor *c, const uint8_t *data, size_t len, bool flush)
{
    while (len) {
        const uint8_t *end = memchr(data, '\n', len);
        size_t part = end ? (size_t)(end - data) : len;
        if (!end && !flush)
            return !buffer_append(&c->line, data, part);
        printf("rank %lld: ", c->rank);
        if (c->line.len)
            fwrite(c->line.data, 1, c->line.len, stdout);
        buffer_clear(&c->line);
        fwrite(data, 1, part, stdout);
        putchar('\n');
        data += part + (end != NULL);
        len -= part + (end != NULL);
    }
    if (flush && c->line.len) {
        printf("rank %lld: ", c->rank);
        fwrite(c->line.data, 1, c->line.len, stdout);
        putchar('\n');
        buffer_clear(&c->line);
    }
    return !ferror(stdout);
}

static void move_cursor(const struct ctl *ctl, struct log_cursor *c, const Boost__LogsReply *r)
{
    if (!c->attempt)
        c->attempt = r->attempt;
    c->offset = r->next_offset;
    c->has_offset = true;
    c->newest = r->newest_attempt;
    if (r->data.len) {
        /* Less than a piece ends where the log ended: of a rank that goes on printing there would be no end else. */
        c->done = !c->follow && r->data.len < WHOLE_PIECE;
        return;
    }
    c->finished = r->finished;
    c->job_ended = r->job_ended;
    bool next_attempt = r->finished && r->newest_attempt > r->attempt;
    if (c->follow && next_attempt && !c->tagged) {
        c->attempt++;
        c->offset = 0;
        if (!ctl->quiet)
            fprintf(stderr, "boostctl: attempt %lld\n", c->attempt);
    } else if (!c->follow || (c->tagged ? r->finished : r->job_ended && (r->finished || !r->newest_attempt))) {
        c->done = true;
    }
}

static void fill_request(const struct log_cursor *c, Boost__LogsRequest *body)
{
    body->has_rank = true;
    body->rank = (int32_t)c->rank;
    body->has_attempt = c->attempt > 0;
    body->attempt = (int32_t)c->attempt;
    body->has_age_ms = !c->has_offset && c->age_ms >= 0;
    body->age_ms = c->age_ms;
    body->has_offset = c->has_offset || (c->tail < 0 && !body->has_age_ms);
    body->offset = c->offset;
    body->has_tail_lines = !body->has_offset && !body->has_age_ms;
    body->tail_lines = c->tail;
    body->has_wait_ms = true;
    body->wait_ms = c->wait_ms;
}

/* The next piece of the log to stdout; moves the cursor. Returns an exit code, EXIT_OK to go on. */
static int next_piece(struct ctl *ctl, struct log_cursor *c, bool *any)
{
    struct error err;
    struct arena arena;
    ctl_arena(&arena);
    Boost__LogsRequest body = BOOST__LOGS_REQUEST__INIT;
    body.job = ctl_ref(&arena, c->job);
    fill_request(c, &body);
    Boost__Request request = BOOST__REQUEST__INIT;
    request.body_case = BOOST__REQUEST__BODY_LOGS;
    request.logs = &body;
    Boost__Reply *reply = c->follow ? ctl_call_patient(ctl, &request, &arena, &err)
                                    : ctl_call(ctl, &request, &arena, &err);
    if (!reply || reply->body_case != BOOST__REPLY__BODY_LOGS) {
        int code = c->follow && !reply ? ctl_end_follow(c->job, &err) : ctl_fail(&err);
        c->done = true;
        arena_free(&arena);
        return code;
    }
    const Boost__LogsReply *r = reply->logs;
    if (r->note && *r->note && strcmp(r->note, c->said) != 0 && !ctl->quiet) {
        if (c->tagged)
            fprintf(stderr, "boostctl: rank %lld: %s\n", c->rank, r->note);
        else
            fprintf(stderr, "boostctl: %s\n", r->note);
        snprintf(c->said, sizeof c->said, "%s", r->note);
    }
    *any = *any || r->data.len > 0;
    bool ok = c->tagged ? print_tagged(c, r->data.data, r->data.len, false)
                        : !r->data.len || fwrite(r->data.data, 1, r->data.len, stdout) == r->data.len;
    out_flush();
    move_cursor(ctl, c, r);
    c->done = c->done || !ok;
    if (c->done && c->tagged)
        print_tagged(c, NULL, 0, true);
    arena_free(&arena);
    return EXIT_OK;
}

/* ---- all ranks of a node ---- */

struct node_logs {
    struct log_cursor *ranks;
    size_t n;
    long long attempt, newest;
};

static void free_ranks(struct node_logs *x)
{
    for (size_t i = 0; i < x->n; i++)
        buffer_free(&x->ranks[i].line);
    free(x->ranks);
    x->ranks = NULL;
    x->n = 0;
}

/* Which ranks are on the node in the attempt; ERR_NOT_FOUND: none. */
static int find_ranks(struct ctl *ctl, const struct log_cursor *like, const char *node, struct node_logs *x,
                      struct error *err)
{
    struct arena arena;
    ctl_arena(&arena);
    Boost__LogsRequest body = BOOST__LOGS_REQUEST__INIT;
    body.job = ctl_ref(&arena, like->job);
    body.node = (char *)(uintptr_t)node;
    body.has_attempt = like->attempt > 0;
    body.attempt = (int32_t)like->attempt;
    Boost__Request request = BOOST__REQUEST__INIT;
    request.body_case = BOOST__REQUEST__BODY_LOGS;
    request.logs = &body;
    Boost__Reply *reply = like->follow ? ctl_call_patient(ctl, &request, &arena, err)
                                       : ctl_call(ctl, &request, &arena, err);
    int rc = reply ? ERR_OK : (int)err->code;
    if (!rc && reply->body_case != BOOST__REPLY__BODY_LOGS)
        rc = error_set(err, ERR_PROTOCOL, "boostd answered something else");
    free_ranks(x);
    if (!rc) {
        x->attempt = reply->logs->attempt;
        x->newest = reply->logs->newest_attempt;
        x->ranks = calloc(reply->logs->n_ranks + 1, sizeof *x->ranks);
        if (!x->ranks)
            rc = error_set(err, ERR_NOMEM, "out of memory");
    }
    for (size_t i = 0; !rc && i < reply->logs->n_ranks; i++) {
        struct log_cursor *c = &x->ranks[x->n++];
        *c = *like;
        c->attempt = x->attempt;
        c->rank = reply->logs->ranks[i];
        c->tagged = true;
        buffer_init(&c->line, LIMIT_LOG_LINE + 256);
    }
    arena_free(&arena);
    return rc;
}

/* One round over the ranks; false when nothing is left to come. */
static bool go_round(struct ctl *ctl, struct node_logs *x, int *code)
{
    bool any = false, left = false;
    for (size_t i = 0; i < x->n && !*code; i++) {
        if (!x->ranks[i].done)
            *code = next_piece(ctl, &x->ranks[i], &any);
        left = left || !x->ranks[i].done;
        x->newest = x->ranks[i].newest > x->newest ? x->ranks[i].newest : x->newest;
    }
    if (left && !any && !*code)
        nanosleep(&(struct timespec){.tv_nsec = NODE_PAUSE_MS * NS_PER_MS}, NULL);
    return left && !*code;
}

/* Whether the job goes on without an attempt now: the next one is waited for with rank 0's log. */
static int await_attempt(struct ctl *ctl, const struct log_cursor *like, long long after, long long *newest)
{
    struct log_cursor probe = *like;
    int code = EXIT_OK;
    bool any = false;
    probe.attempt = after;
    probe.tail = 0;
    probe.age_ms = -1;
    probe.has_offset = false;
    probe.rank = 0;
    probe.tagged = true; /* never moves on by itself */
    probe.wait_ms = NODE_PAUSE_MS;
    buffer_init(&probe.line, LIMIT_LOG_LINE);
    while (!code && probe.newest <= after && !probe.job_ended && !ctl_interrupted()) {
        probe.done = false;
        code = next_piece(ctl, &probe, &any);
        if (!code && probe.newest <= after && !probe.job_ended)
            nanosleep(&(struct timespec){.tv_nsec = NODE_PAUSE_MS * NS_PER_MS}, NULL);
    }
    buffer_free(&probe.line);
    *newest = probe.newest;
    return code;
}

static int node_logs(struct ctl *ctl, struct log_cursor like, const char *node)
{
    struct node_logs x = {.n = 0};
    struct error err;
    int code = EXIT_OK;
    like.wait_ms = 0;
    for (bool first = true; !code; first = false) {
        int rc = find_ranks(ctl, &like, node, &x, &err);
        if (rc && (first || rc != ERR_NOT_FOUND)) {
            code = like.follow && rc == ERR_CANCELLED ? ctl_end_follow(like.job, &err) : ctl_fail(&err);
            break;
        }
        if (!first && !ctl->quiet)
            fprintf(stderr, rc ? "boostctl: attempt %lld, which has no rank on node %s\n" : "boostctl: attempt %lld\n",
                    like.attempt, node);
        long long at = rc ? like.attempt : x.attempt;
        while (!rc && go_round(ctl, &x, &code))
            ;
        if (code || !like.follow)
            break;
        code = await_attempt(ctl, &like, at, &x.newest);
        if (code || x.newest <= at)
            break;
        like.attempt = at + 1;
        like.tail = like.age_ms = -1;
    }
    free_ranks(&x);
    return code;
}

/* ---- the verb ---- */

int verb_logs(struct ctl *ctl, int argc, char **argv)
{
    bool follow = false, help = false;
    const char *rank = NULL, *attempt = NULL, *tail = NULL, *node = NULL, *since = NULL;
    const struct option_row rows[] = {
        {'f', "follow", NULL, "go on, across attempts, until the job has ended", &follow, NULL, NULL},
        {0, "rank", "R", "of this rank (0)", NULL, &rank, NULL},
        {0, "node", "N", "of all ranks on this node, each line behind its rank", NULL, &node, NULL},
        {0, "attempt", "K", "of this attempt (the newest)", NULL, &attempt, NULL},
        {0, "tail", "N", "only the last N lines", NULL, &tail, NULL},
        {0, "since", "T", "only what was printed within 90s, 10m, 2h, 1d, or since 2026-11-29T13:02:46Z", NULL, &since,
         NULL},
        {'h', "help", NULL, "this text", &help, NULL, NULL},
        {0, NULL, NULL, NULL, NULL, NULL, NULL},
    };
    int first = options_parse("logs", argc, argv, rows);
    if (first < 0)
        return EXIT_USAGE;
    if (help) {
        printf("usage: boostctl logs JOB [options]\n");
        options_help(rows);
        return EXIT_OK;
    }
    if (argc - first != 1)
        return ctl_usage("logs", "takes one job");
    if (ctl->output > OUTPUT_WIDE)
        return ctl_usage("logs", "prints what the rank printed, there is no other form (-o)");
    struct ctl_ref ref = ctl_split_ref(argv[first]);
    if (node && (rank || ref.rank >= 0))
        return ctl_usage("logs", "takes a rank or --node, not both");
    if (tail && since)
        return ctl_usage("logs", "takes --tail or --since, not both");
    struct log_cursor c = {.job = ref.job,
                           .rank = ref.rank < 0 ? 0 : ref.rank,
                           .attempt = ref.attempt,
                           .tail = -1,
                           .age_ms = -1,
                           .follow = follow,
                           .wait_ms = follow ? LONG_POLL_MS : 0};
    double age = 0;
    if ((rank && !option_int("logs", "--rank", rank, 0, 65535, &c.rank)) ||
        (attempt && !option_int("logs", "--attempt", attempt, 1, 1 << 30, &c.attempt)) ||
        (tail && !option_int("logs", "--tail", tail, 0, 1 << 30, &c.tail)))
        return EXIT_USAGE;
    if (since && !parse_age(since, clock_wall_ns(), &age))
        return ctl_usage("logs", "--since takes a time like 90s, 10m, 2h or 1d, or 2026-11-29T13:02:46Z, not '%s'",
                         since);
    if (since)
        c.age_ms = (long long)(age * 1e3);
    if (follow)
        ctl_catch_interrupt();
    if (node)
        return node_logs(ctl, c, node);
    int code = EXIT_OK;
    bool any = false;
    while (!c.done && !code)
        code = next_piece(ctl, &c, &any);
    return code;
}
