/* boostctl events and logs: what happened, and what a rank printed. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/ctl.h"
#include "ctl/format.h"
#include "ctl/json_out.h"
#include "ctl/options.h"
#include "proto/base/clock.h"

static void print_event(const struct ctl *ctl, const Boost__Event *e, bool with_job)
{
    if (ctl->output == OUTPUT_JSONL || ctl->output == OUTPUT_JSON) {
        json_emit(json_event(e), true);
        return;
    }
    char when[CLOCK_TEXT];
    printf("%s  ", clock_rfc3339(e->wall_ns, when));
    if (with_job && e->job)
        printf("job %lld  ", (long long)e->job);
    printf("%-14s ", e->kind ? e->kind : "");
    print_safe(stdout, e->text ? e->text : "");
    if (ctl->output == OUTPUT_WIDE) {
        printf("  [");
        print_safe(stdout, e->actor ? e->actor : "");
        printf("]");
    }
    putchar('\n');
}

/* Pages from the cursor; with follow until the job has ended. */
static int list_events(struct ctl *ctl, const char *job, bool follow)
{
    int64_t after = 0;
    bool json = ctl->output == OUTPUT_JSON && !follow;
    json_t *list = json ? json_array() : NULL;
    for (;;) {
        struct error err;
        struct arena arena;
        ctl_arena(&arena);
        Boost__EventsRequest body = BOOST__EVENTS_REQUEST__INIT;
        body.job = job ? ctl_ref(&arena, job) : NULL;
        body.has_after_id = body.has_wait_ms = true;
        body.after_id = after;
        body.wait_ms = follow ? LONG_POLL_MS : 0;
        Boost__Request request = BOOST__REQUEST__INIT;
        request.body_case = BOOST__REQUEST__BODY_EVENTS;
        request.events = &body;
        Boost__Reply *reply = follow ? ctl_call_patient(ctl, &request, &arena, &err)
                                     : ctl_call(ctl, &request, &arena, &err);
        if (!reply || reply->body_case != BOOST__REPLY__BODY_EVENTS) {
            int code = follow && !reply ? ctl_end_follow(job ? job : "", &err) : ctl_fail(&err);
            arena_free(&arena);
            json_decref(list);
            return code;
        }
        size_t n = reply->events->n_events;
        bool ended = reply->events->job_ended;
        for (size_t i = 0; i < n; i++) {
            after = reply->events->events[i]->id;
            if (json)
                json_array_append_new(list, json_event(reply->events->events[i]));
            else
                print_event(ctl, reply->events->events[i], !job);
        }
        fflush(stdout);
        arena_free(&arena);
        if (!n && (!follow || ended))
            break;
    }
    if (json) {
        json_t *document = json_document("boost.events/1");
        json_put(document, "events", list);
        json_emit(document, false);
    }
    return EXIT_OK;
}

int verb_events(struct ctl *ctl, int argc, char **argv)
{
    bool follow = false, help = false;
    const struct option_row rows[] = {
        {'f', "follow", NULL, "go on until the job has ended", &follow, NULL, NULL},
        {'h', "help", NULL, "this text", &help, NULL, NULL},
        {0, NULL, NULL, NULL, NULL, NULL, NULL},
    };
    int first = options_parse("events", argc, argv, rows);
    if (first < 0)
        return EXIT_USAGE;
    if (help) {
        printf("usage: boostctl events [JOB] [options]\n");
        options_help(rows);
        return EXIT_OK;
    }
    if (argc - first > 1)
        return ctl_usage("events", "takes at most one job");
    if (follow)
        ctl_catch_interrupt();
    return list_events(ctl, first < argc ? argv[first] : NULL, follow);
}

/* ---- logs ---------------------------------------------------------------------- */

struct log_cursor {
    const char *job;
    long long rank, attempt, tail; /* attempt 0 = newest; tail -1 = from the start */
    bool follow;
    bool has_offset;
    int64_t offset;
    bool done;
    char said[256]; /* the note printed last */
};

/* One piece of the log to stdout; moves the cursor. Returns an exit code, EXIT_OK to go on. */
static int next_piece(struct ctl *ctl, struct log_cursor *c)
{
    struct error err;
    struct arena arena;
    ctl_arena(&arena);
    Boost__LogsRequest body = BOOST__LOGS_REQUEST__INIT;
    body.job = ctl_ref(&arena, c->job);
    body.has_rank = true;
    body.rank = (int32_t)c->rank;
    body.has_attempt = c->attempt > 0;
    body.attempt = (int32_t)c->attempt;
    body.has_offset = c->has_offset || c->tail < 0;
    body.offset = c->offset;
    body.has_tail_lines = !body.has_offset;
    body.tail_lines = c->tail;
    body.has_wait_ms = true;
    body.wait_ms = c->follow ? LONG_POLL_MS : 0;
    Boost__Request request = BOOST__REQUEST__INIT;
    request.body_case = BOOST__REQUEST__BODY_LOGS;
    request.logs = &body;
    Boost__Reply *reply = c->follow ? ctl_call_patient(ctl, &request, &arena, &err)
                                    : ctl_call(ctl, &request, &arena, &err);
    int code = EXIT_OK;
    if (!reply || reply->body_case != BOOST__REPLY__BODY_LOGS) {
        code = c->follow && !reply ? ctl_end_follow(c->job, &err) : ctl_fail(&err);
        c->done = true;
        arena_free(&arena);
        return code;
    }
    const Boost__LogsReply *r = reply->logs;
    if (r->note && *r->note && strcmp(r->note, c->said) != 0 && !ctl->quiet) {
        fprintf(stderr, "boostctl: %s\n", r->note);
        snprintf(c->said, sizeof c->said, "%s", r->note);
    }
    /* Raw: a log is passed through as the rank wrote it. */
    if (r->data.len && fwrite(r->data.data, 1, r->data.len, stdout) != r->data.len)
        c->done = true;
    fflush(stdout);
    if (!c->attempt)
        c->attempt = r->attempt;
    c->offset = r->next_offset;
    c->has_offset = true;
    if (r->data.len == 0) {
        bool next_attempt = r->finished && r->newest_attempt > r->attempt;
        if (c->follow && next_attempt) {
            c->attempt++;
            c->offset = 0;
            if (!ctl->quiet)
                fprintf(stderr, "boostctl: attempt %lld\n", c->attempt);
        } else if (!c->follow || (r->job_ended && (r->finished || !r->newest_attempt))) {
            c->done = true;
        }
    }
    arena_free(&arena);
    return code;
}

int verb_logs(struct ctl *ctl, int argc, char **argv)
{
    bool follow = false, help = false;
    const char *rank = NULL, *attempt = NULL, *tail = NULL, *node = NULL, *since = NULL;
    const struct option_row rows[] = {
        {'f', "follow", NULL, "go on, across attempts, until the job has ended", &follow, NULL, NULL},
        {0, "rank", "R", "of this rank (0)", NULL, &rank, NULL},
        {0, "attempt", "K", "of this attempt (the newest)", NULL, &attempt, NULL},
        {0, "tail", "N", "only the last N lines", NULL, &tail, NULL},
        {0, "node", "N", "not built in this version", NULL, &node, NULL},
        {0, "since", "T", "not built in this version", NULL, &since, NULL},
        {'h', "help", NULL, "this text", &help, NULL, NULL},
        {0, NULL, NULL, NULL, NULL, NULL, NULL},
    };
    int first = options_parse("logs", argc, argv, rows);
    if (first < 0)
        return EXIT_USAGE;
    if (help) {
        printf("usage: boostctl logs JOB [options]     (JOB may be 17, 17.2 or 17.2/3: attempt and rank)\n");
        options_help(rows);
        return EXIT_OK;
    }
    if (node || since) {
        fprintf(stderr, "boostctl: logs --%s is not built in this version\n  hint: use --rank, --attempt, --tail\n",
                node ? "node" : "since");
        return EXIT_REFUSED;
    }
    if (argc - first != 1)
        return ctl_usage("logs", "takes one job");
    if (ctl->output > OUTPUT_WIDE)
        return ctl_usage("logs", "prints what the rank printed, there is no other form (-o)");
    struct ctl_ref ref = ctl_split_ref(argv[first]);
    struct log_cursor c = {.job = ref.job,
                           .rank = ref.rank < 0 ? 0 : ref.rank,
                           .attempt = ref.attempt,
                           .tail = -1,
                           .follow = follow};
    if ((rank && !option_int("logs", "--rank", rank, 0, 65535, &c.rank)) ||
        (attempt && !option_int("logs", "--attempt", attempt, 1, 1 << 30, &c.attempt)) ||
        (tail && !option_int("logs", "--tail", tail, 0, 1 << 30, &c.tail)))
        return EXIT_USAGE;
    if (follow)
        ctl_catch_interrupt();
    int code = EXIT_OK;
    while (!c.done && !code)
        code = next_piece(ctl, &c);
    return code;
}
