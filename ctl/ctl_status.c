/* boostctl status: the job table, once or again and again. */
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ctl/ctl.h"
#include "ctl/format.h"
#include "ctl/json_out.h"
#include "ctl/options.h"
#include "ctl/out.h"
#include "proto/base/clock.h"

struct status_options {
    bool all, me, help;
    const char *user, *states, *watch, *since, *limit;
};

void job_table_row(struct table *t, const Boost__JobSummary *s, bool wide)
{
    char a[FORMAT_TEXT];
    table_cell(t, "%lld", (long long)s->id);
    table_cell(t, "%s", s->name ? s->name : "");
    table_cell(t, "%s", state_letters(s->state));
    table_color(t, state_color(s->state));
    if (s->has_step)
        table_cell(t, "%lld/%lld", (long long)s->step, (long long)s->steps);
    else
        table_cell(t, "-");
    if (s->has_loss)
        table_cell(t, "%.4f", s->loss);
    else
        table_cell(t, "-");
    bool fast = s->has_tokens_per_s && s->state == BOOST__JOB_STATE__VALUE__RUNNING;
    table_cell(t, "%s", fast ? format_count(s->tokens_per_s, a) : "-");
    if (s->has_attempt)
        table_cell(t, "%d", s->attempt);
    else
        table_cell(t, "-");
    table_cell(t, "%d", s->devices);
    table_cell(t, "%s", s->has_elapsed_s ? format_duration(s->elapsed_s, a) : "-");
    if (wide) {
        char when[CLOCK_TEXT];
        if (s->has_mfu)
            table_cell(t, "%.1f%%", 100 * s->mfu);
        else
            table_cell(t, "n/a");
        table_cell(t, "%s", s->user ? s->user : "");
        table_cell(t, "%d", s->priority);
        if (s->has_last_checkpoint_step)
            table_cell(t, "%lld", (long long)s->last_checkpoint_step);
        else
            table_cell(t, "-");
        table_cell(t, "%s", s->has_submitted_wall_ns ? clock_rfc3339(s->submitted_wall_ns, when) : "-");
    }
    const char *info = s->info ? s->info : "";
    if (s->has_attempt_step && s->attempt_step < s->step) /* STEP is the highest of any attempt */
        table_cell(t, "%s; repeats step %lld", info, (long long)s->attempt_step);
    else
        table_cell(t, "%s", info);
}

void totals_print(FILE *out, const Boost__Totals *t)
{
    const struct {
        int n;
        const char *what;
    } jobs[] = {{t->running, "running"}, {t->recovering, "recovering"}, {t->queued, "queued"}, {t->held, "held"}};
    bool first = true;
    for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++)
        if (jobs[i].n) {
            fprintf(out, "%s%d %s", first ? "" : ", ", jobs[i].n, jobs[i].what);
            first = false;
        }
    fprintf(out, "%s | nodes %d up", first ? "no live jobs" : "", t->nodes_up);
    if (t->nodes_down)
        fprintf(out, ", %d down", t->nodes_down);
    if (t->nodes_cordoned)
        fprintf(out, ", %d cordoned", t->nodes_cordoned);
    if (t->nodes_draining)
        fprintf(out, ", %d draining", t->nodes_draining);
    fprintf(out, " | devices %d/%d busy", t->devices_busy, t->devices);
    if (t->cpu_slots)
        fprintf(out, ", CPU slots beside GPUs %d/%d busy", t->cpu_slots_busy, t->cpu_slots);
    putc('\n', out);
}

struct page_sink {
    struct ctl *ctl;
    struct table *table;
    json_t *list;
};

static void take_page(struct page_sink *sink, const Boost__ListReply *page)
{
    for (size_t i = 0; i < page->n_jobs; i++) {
        const Boost__JobSummary *s = page->jobs[i];
        switch (sink->ctl->output) {
        case OUTPUT_JSON:
            json_array_append_new(sink->list, json_summary(s));
            break;
        case OUTPUT_JSONL:
            json_emit(json_summary(s), true);
            break;
        case OUTPUT_NAME:
            printf("%lld\n", (long long)s->id);
            break;
        default:
            job_table_row(sink->table, s, sink->ctl->output == OUTPUT_WIDE);
        }
    }
}

struct table *job_table_new(bool wide)
{
    static const char *const narrow[] = {"JOB", "NAME", "ST", "STEP", "LOSS", "TOK/S", "ATT", "DEV", "TIME", "INFO"};
    static const char *const all[] = {"JOB",  "NAME", "ST",   "STEP", "LOSS", "TOK/S",     "ATT", "DEV",
                                      "TIME", "MFU",  "USER", "PRIO", "CKPT", "SUBMITTED", "INFO"};
    return wide ? table_new(15, all, "rlllrrrrrrlrrll") : table_new(10, narrow, "rlllrrrrrl");
}

static void open_sink(struct page_sink *sink, struct ctl *ctl)
{
    *sink = (struct page_sink){.ctl = ctl};
    if (ctl->output == OUTPUT_TABLE || ctl->output == OUTPUT_WIDE)
        sink->table = job_table_new(ctl->output == OUTPUT_WIDE);
    else if (ctl->output == OUTPUT_JSON)
        sink->list = json_array();
}

static void close_sink(struct page_sink *sink, const Boost__Totals *totals)
{
    if (sink->table) {
        table_print(sink->table, stdout, sink->ctl->color, 1);
        table_free(sink->table);
        if (totals)
            totals_print(stdout, totals);
    }
    if (sink->list) {
        json_t *document = json_document("boost.status/1");
        json_put(document, "jobs", sink->list);
        json_emit(document, false);
    }
}

/* One picture. */
static int print_status(struct ctl *ctl, Boost__ListRequest *list, bool patient, struct error *err)
{
    Boost__Request request = BOOST__REQUEST__INIT;
    request.body_case = BOOST__REQUEST__BODY_LIST;
    request.list = list;
    struct arena arena;
    ctl_arena(&arena);
    Boost__Reply *reply = patient ? ctl_call_patient(ctl, &request, &arena, err) : ctl_call(ctl, &request, &arena, err);
    if (!reply) {
        arena_free(&arena);
        return err->code;
    }
    struct page_sink sink;
    open_sink(&sink, ctl);
    const Boost__Totals *totals = NULL;
    int rc = ERR_OK;
    for (;;) {
        if (reply->body_case != BOOST__REPLY__BODY_LIST) {
            rc = error_set(err, ERR_PROTOCOL, "boostd answered status with something else");
            break;
        }
        take_page(&sink, reply->list);
        totals = reply->list->totals;
        if (!reply->more)
            break;
        arena_free(&arena);
        reply = ctl_more(ctl, &arena, err);
        if (!reply) {
            rc = err->code;
            break;
        }
    }
    close_sink(&sink, totals);
    arena_free(&arena);
    return rc;
}

static bool fill_states(const char *text, Boost__ListRequest *list, Boost__JobState__Value *states)
{
    char copy[256];
    if (strlen(text) >= sizeof copy) {
        ctl_usage("status", "-s takes a list of at most %zu bytes", sizeof copy - 1);
        return false;
    }
    memcpy(copy, text, strlen(text) + 1);
    char *rest = copy, *word;
    while ((word = strsep(&rest, ",")))
        if (list->n_states == 16 || !state_parse(word, &states[list->n_states++])) {
            ctl_usage("status", "'%s' is no state (QUEUED, HELD, ... or Q, H, S, R, RC, SP, CD, F, CA, TO)", word);
            return false;
        }
    list->states = states;
    return true;
}

const char *ctl_own_name(void)
{
    static char number[16];
    struct passwd *pw = getpwuid(getuid());
    snprintf(number, sizeof number, "%u", (unsigned)getuid());
    return pw ? pw->pw_name : number;
}

static int watch_status(struct ctl *ctl, Boost__ListRequest *list, double seconds)
{
    struct error err;
    ctl_catch_interrupt();
    for (;;) {
        if (ctl->tty)
            fputs("\033[H\033[2J", stdout);
        if (print_status(ctl, list, true, &err))
            return err.code == ERR_CANCELLED ? EXIT_INTERRUPTED : ctl_fail(&err);
        if (!ctl->tty && ctl->output == OUTPUT_TABLE)
            putchar('\n');
        out_flush();
        struct timespec pause = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
        nanosleep(&pause, NULL);
        if (ctl_interrupted())
            return EXIT_INTERRUPTED;
    }
}

int verb_status(struct ctl *ctl, int argc, char **argv)
{
    struct status_options o = {0};
    const struct option_row rows[] = {
        {'a', "all", NULL, "ended jobs too", &o.all, NULL, NULL},
        {0, "me", NULL, "only my jobs", &o.me, NULL, NULL},
        {'u', "user", "USER", "only this user's jobs", NULL, &o.user, NULL},
        {'s', "state", "STATE,..", "only these states, by name or letters", NULL, &o.states, NULL},
        {'w', "watch", "[SEC]", "again every SEC seconds (2)", NULL, &o.watch, NULL},
        {0, "since", "TIME", "submitted or ended within 90s, 10m, 2h, 1d (takes in ended jobs)", NULL, &o.since, NULL},
        {'N', "limit", "N", "the newest N", NULL, &o.limit, NULL},
        {'h', "help", NULL, "this text", &o.help, NULL, NULL},
        {0, NULL, NULL, NULL, NULL, NULL, NULL},
    };
    int first = options_parse("status", argc, argv, rows);
    if (first < 0)
        return EXIT_USAGE;
    if (o.help) {
        printf("usage: boostctl status [JOB ...] [options]\n");
        options_help(rows);
        return EXIT_OK;
    }
    struct arena arena;
    ctl_arena(&arena);
    Boost__ListRequest list = BOOST__LIST_REQUEST__INIT;
    Boost__JobState__Value states[16];
    long long limit;
    double seconds = 2;
    int code = EXIT_USAGE;
    if (o.me && o.user) {
        ctl_usage("status", "--me and -u exclude each other");
        goto out;
    }
    if (first < argc && (o.me || o.user || o.states || o.since || o.limit)) {
        ctl_usage("status", "jobs that are named are all shown: leave the filters out, or the jobs");
        goto out;
    }
    list.has_all = true;
    list.all = o.all || o.since || o.states;
    list.user = (char *)(uintptr_t)(o.me ? ctl_own_name() : o.user);
    if (o.states && !fill_states(o.states, &list, states))
        goto out;
    if (o.limit) {
        if (!option_int("status", "-N", o.limit, 1, 1 << 30, &limit))
            goto out;
        list.has_limit = true;
        list.limit = (int32_t)limit;
    }
    if (o.since) {
        if (!parse_duration(o.since, &seconds)) {
            ctl_usage("status", "--since takes a time like 90s, 10m, 2h or 1d, not '%s'", o.since);
            goto out;
        }
        list.has_since_wall_ns = true;
        list.since_wall_ns = clock_wall_ns() - (int64_t)(seconds * 1e9);
    }
    seconds = 2;
    if (o.watch && *o.watch && (!parse_duration(o.watch, &seconds) || seconds < 0.1)) {
        ctl_usage("status", "-w takes seconds, 0.1 or more, not '%s'", o.watch);
        goto out;
    }
    list.n_jobs = (size_t)(argc - first);
    list.jobs = arena_alloc(&arena, (list.n_jobs + 1) * sizeof *list.jobs);
    for (int i = first; i < argc; i++)
        list.jobs[i - first] = ctl_ref(&arena, argv[i]);
    if (o.watch) {
        code = watch_status(ctl, &list, seconds);
    } else {
        struct error err;
        code = print_status(ctl, &list, false, &err) ? ctl_fail(&err) : EXIT_OK;
    }
out:
    arena_free(&arena);
    return code;
}
