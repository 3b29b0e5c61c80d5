/* Following a job to its end: submit --follow and --wait, and boostctl wait. Long
 * polls from a cursor, so attempts and controller restarts go by without a gap. */
#include <stdio.h>
#include <string.h>

#include "ctl/ctl.h"
#include "ctl/format.h"
#include "ctl/json_out.h"
#include "ctl/options.h"
#include "ctl/out.h"
#include "ctl/pace.h"
#include "proto/base/clock.h"

enum { TICK_TTY_MS = 500, TICK_PLAIN_MS = 2000, BAR_CELLS = 24 };

/* Waits for a change of the job after *version. NULL and *err on failure. */
static const Boost__WatchReply *watch(struct ctl *ctl, const char *job, int64_t *version, int wait_ms,
                                      struct arena *arena, struct error *err)
{
    Boost__WatchRequest body = BOOST__WATCH_REQUEST__INIT;
    body.job = ctl_ref(arena, job);
    body.has_version = body.has_wait_ms = true;
    body.version = *version;
    body.wait_ms = wait_ms;
    Boost__Request request = BOOST__REQUEST__INIT;
    request.body_case = BOOST__REQUEST__BODY_WATCH;
    request.watch = &body;
    Boost__Reply *reply = ctl_call_patient(ctl, &request, arena, err);
    if (!reply)
        return NULL;
    if (reply->body_case != BOOST__REPLY__BODY_WATCH || !reply->watch->summary) {
        error_set(err, ERR_PROTOCOL, "boostd answered watch with something else");
        return NULL;
    }
    *version = reply->watch->version;
    return reply->watch;
}

static bool is_json(const struct ctl *ctl)
{
    return ctl->output == OUTPUT_JSON || ctl->output == OUTPUT_JSONL;
}

/* ---- display ----------------------------------------------------------------- */

struct display {
    struct ctl *ctl;
    bool line_open;    /* a progress line without its newline is on the terminal */
    int64_t last_step; /* printed */
    int64_t last_print_ns;
    struct pace pace;
    int64_t after_event;
};

static void close_line(struct display *d)
{
    if (d->line_open)
        fputs("\r\033[K", stdout);
    d->line_open = false;
}

/* Shows where the live attempt is: after a recovery the job's own step is the highest of an attempt that is gone. */
static void print_progress(struct display *d, const Boost__JobSummary *s)
{
    if (is_json(d->ctl) || !s->has_attempt_step || s->state != BOOST__JOB_STATE__VALUE__RUNNING)
        return;
    int64_t now = clock_mono_ns(), step = s->attempt_step;
    double left = pace_left_s(&d->pace, s->attempt, step, s->steps, now);
    if (!d->ctl->tty && (step == d->last_step || now - d->last_print_ns < TICK_PLAIN_MS * NS_PER_MS))
        return;
    char speed[FORMAT_TEXT] = "-", eta[FORMAT_TEXT] = "-", loss[FORMAT_TEXT] = "-";
    if (s->has_tokens_per_s)
        format_count(s->tokens_per_s, speed);
    if (s->has_loss)
        snprintf(loss, sizeof loss, "%.4f", s->loss);
    if (left >= 0)
        format_duration(left, eta);
    if (d->ctl->tty) {
        int full = s->steps > 0 ? (int)(step * BAR_CELLS / s->steps) : 0;
        close_line(d);
        printf("%lld [", (long long)s->id);
        for (int i = 0; i < BAR_CELLS; i++)
            putchar(i < full ? '#' : '.');
        printf("] %lld/%lld  loss %s  %s tok/s  attempt %d  eta %s", (long long)step, (long long)s->steps, loss, speed,
               s->attempt, eta);
        d->line_open = true;
    } else {
        printf("step %lld/%lld  loss %s  %s tok/s  attempt %d  eta %s\n", (long long)step, (long long)s->steps, loss,
               speed, s->attempt, eta);
    }
    d->last_step = step;
    d->last_print_ns = now;
    out_flush();
}

static void print_one(struct display *d, const Boost__Event *e)
{
    if (is_json(d->ctl)) {
        json_emit(json_event(e), true);
        return;
    }
    close_line(d);
    printf("%s: ", e->kind ? e->kind : "event");
    print_safe(stdout, e->text ? e->text : "");
    putchar('\n');
}

/* Events since the last look; false on failure. */
static bool print_events(struct display *d, const char *job, struct error *err)
{
    for (;;) {
        struct arena arena;
        ctl_arena(&arena);
        Boost__EventsRequest body = BOOST__EVENTS_REQUEST__INIT;
        body.job = ctl_ref(&arena, job);
        body.has_after_id = true;
        body.after_id = d->after_event;
        Boost__Request request = BOOST__REQUEST__INIT;
        request.body_case = BOOST__REQUEST__BODY_EVENTS;
        request.events = &body;
        Boost__Reply *reply = ctl_call_patient(d->ctl, &request, &arena, err);
        size_t n = reply && reply->body_case == BOOST__REPLY__BODY_EVENTS ? reply->events->n_events : 0;
        for (size_t i = 0; i < n; i++) {
            print_one(d, reply->events->events[i]);
            d->after_event = reply->events->events[i]->id;
        }
        arena_free(&arena);
        out_flush();
        if (!reply)
            return false;
        if (!n)
            return true;
    }
}

static int end_code(const Boost__JobSummary *s)
{
    return s->state == BOOST__JOB_STATE__VALUE__COMPLETED ? EXIT_OK : EXIT_JOB_BAD;
}

static void say_bad_end(const char *job, const Boost__JobSummary *s)
{
    fprintf(stderr, "boostctl: job %s ended %s: ", job, state_name(s->state));
    print_safe(stderr, s->info ? s->info : "");
    fputc('\n', stderr);
}

/* What waiting came to; takes over `jobs`, which are as in status. */
static void emit_end(json_t *jobs, bool one_line)
{
    json_t *document = json_document("boost.wait/1");
    json_put(document, "jobs", jobs);
    json_emit(document, one_line);
}

static void print_end(struct display *d, const Boost__JobSummary *s)
{
    char took[FORMAT_TEXT];
    if (is_json(d->ctl)) {
        json_t *jobs = json_array();
        json_array_append_new(jobs, json_summary(s));
        emit_end(jobs, true);
        return;
    }
    close_line(d);
    printf("job %lld %s after %s: step %lld/%lld", (long long)s->id, state_name(s->state),
           format_duration(s->elapsed_s, took), (long long)s->step, (long long)s->steps);
    if (s->has_loss)
        printf(", loss %.4f", s->loss);
    if (s->has_eval_loss)
        printf(", eval loss %.4f", s->eval_loss);
    if (s->state == BOOST__JOB_STATE__VALUE__COMPLETED) { /* its info would tell the loss again */
        printf("; %d attempt%s", s->attempt, s->attempt == 1 ? "" : "s");
    } else if (s->info && *s->info) {
        printf("; ");
        print_safe(stdout, s->info);
    }
    putchar('\n');
    out_flush();
}

int follow_job(struct ctl *ctl, const char *job, bool display)
{
    ctl_catch_interrupt();
    struct display d = {.ctl = ctl, .last_step = -1};
    int64_t version = 0;
    for (;;) {
        struct error err;
        struct arena arena;
        ctl_arena(&arena);
        int wait_ms = !display ? LONG_POLL_MS : ctl->tty ? TICK_TTY_MS : TICK_PLAIN_MS;
        const Boost__WatchReply *w = watch(ctl, job, &version, wait_ms, &arena, &err);
        bool ok = w && (!display || print_events(&d, job, &err));
        if (!ok) {
            arena_free(&arena);
            if (d.line_open)
                putchar('\n');
            return ctl_end_follow(job, &err);
        }
        if (display)
            print_progress(&d, w->summary);
        if (w->ended) {
            int code = end_code(w->summary);
            if (display)
                print_end(&d, w->summary);
            else if (code && !ctl->quiet)
                say_bad_end(job, w->summary);
            arena_free(&arena);
            return code;
        }
        arena_free(&arena);
    }
}

/* ---- boostctl wait ------------------------------------------------------------- */

struct goal {
    bool step, state_set;
    long long at_step;
    Boost__JobState__Value state;
};

static bool parse_goal(const char *text, struct goal *goal)
{
    *goal = (struct goal){0};
    if (!text)
        return true;
    if (!strncmp(text, "step>=", 6)) {
        goal->step = true;
        return option_int("wait", "--for=step>=", text + 6, 0, 1LL << 62, &goal->at_step);
    }
    goal->state_set = true;
    if (state_parse(text, &goal->state))
        return true;
    ctl_usage("wait", "--for takes a state (RUNNING, COMPLETED, ...) or step>=N, not '%s'", text);
    return false;
}

static bool reached(const struct goal *goal, const Boost__WatchReply *w)
{
    if (goal->step)
        return w->summary->has_step && w->summary->step >= goal->at_step;
    if (goal->state_set)
        return w->summary->state == goal->state;
    return w->ended;
}

/* Until the goal, the job's end or the deadline (monotonic ns, 0 = none).
 * Adds to `jobs`, which may be NULL, how it is then. */
static int wait_for(struct ctl *ctl, const char *job, const struct goal *goal, int64_t deadline, json_t *jobs)
{
    int64_t version = 0;
    for (;;) {
        struct error err;
        struct arena arena;
        ctl_arena(&arena);
        int wait_ms = LONG_POLL_MS;
        if (deadline) {
            int left = clock_left_ms(deadline);
            wait_ms = left < wait_ms ? left : wait_ms;
        }
        const Boost__WatchReply *w = watch(ctl, job, &version, wait_ms, &arena, &err);
        int code = -1;
        if (!w) {
            code = ctl_end_follow(job, &err);
        } else if (reached(goal, w)) {
            code = goal->step || goal->state_set ? EXIT_OK : end_code(w->summary);
            if (code && !ctl->quiet)
                say_bad_end(job, w->summary);
        } else if (w->ended) {
            fprintf(stderr, "boostctl: job %s ended %s before that\n", job, state_name(w->summary->state));
            code = EXIT_JOB_BAD;
        } else if (deadline && clock_mono_ns() >= deadline) {
            fprintf(stderr, "boostctl: timed out; job %s is %s at step %lld\n", job, state_name(w->summary->state),
                    (long long)w->summary->step);
            code = EXIT_TIMED_OUT;
        }
        if (w && code >= 0 && jobs)
            json_array_append_new(jobs, json_summary(w->summary));
        arena_free(&arena);
        if (code >= 0)
            return code;
    }
}

int verb_wait(struct ctl *ctl, int argc, char **argv)
{
    const char *what = NULL, *timeout = NULL;
    bool help = false, follow = false;
    const struct option_row rows[] = {
        {0, "follow", NULL, "one job: progress, loss and events until it has ended", &follow, NULL, NULL},
        {0, "for", "STATE|step>=N", "what to wait for; default: the end of each job", NULL, &what, NULL},
        {0, "timeout", "TIME", "give up after 90s, 10m, 1h: exit 7", NULL, &timeout, NULL},
        {'h', "help", NULL, "this text", &help, NULL, NULL},
        {0, NULL, NULL, NULL, NULL, NULL, NULL},
    };
    int first = options_parse("wait", argc, argv, rows);
    if (first < 0)
        return EXIT_USAGE;
    if (help) {
        printf("usage: boostctl wait JOB... [options]\n");
        options_help(rows);
        return EXIT_OK;
    }
    struct goal goal;
    double seconds = 0;
    if (first == argc)
        return ctl_usage("wait", "needs a job");
    if (follow && (what || timeout || argc - first > 1))
        return ctl_usage("wait", "--follow takes one job and neither --for nor --timeout");
    if (follow)
        return follow_job(ctl, argv[first], true);
    if (!parse_goal(what, &goal))
        return EXIT_USAGE;
    if (timeout && !parse_duration(timeout, &seconds))
        return ctl_usage("wait", "--timeout takes a time like 90s, 10m or 1h, not '%s'", timeout);
    ctl_catch_interrupt();
    int64_t deadline = timeout ? clock_mono_ns() + (int64_t)(seconds * 1e9) : 0;
    ctl->deadline_ns = deadline;
    json_t *jobs = is_json(ctl) ? json_array() : NULL;
    int code = EXIT_OK;
    for (int i = first; i < argc && code <= EXIT_JOB_BAD; i++) {
        int one = wait_for(ctl, argv[i], &goal, deadline, jobs);
        code = one ? one : code;
    }
    if (json_array_size(jobs))
        emit_end(json_incref(jobs), ctl->output == OUTPUT_JSONL);
    json_decref(jobs);
    return code;
}
