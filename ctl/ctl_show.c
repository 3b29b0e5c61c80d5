/* boostctl show: a job in detail. */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/ctl.h"
#include "ctl/ctl_node.h"
#include "ctl/format.h"
#include "ctl/json_out.h"
#include "ctl/options.h"
#include "proto/base/clock.h"
#include "proto/text.h"

static void show_summary(const struct ctl *ctl, const Boost__ShowReply *r)
{
    const Boost__JobSummary *s = r->summary;
    char text[256], a[FORMAT_TEXT], when[CLOCK_TEXT];
    printf("%sjob %lld%s  ", ctl->color ? "\033[1m" : "", (long long)s->id, ctl->color ? "\033[0m" : "");
    print_safe(stdout, s->name);
    putchar('\n');
    snprintf(text, sizeof text, "%s%s%s", state_name(s->state), *reason_name(s->reason) ? " " : "",
             reason_name(s->reason));
    print_line("state", text);
    print_line("info", s->info);
    if (r->reason_text && !(s->info && strstr(s->info, r->reason_text))) /* of a waiting job they are one */
        print_line("reason", r->reason_text);
    print_line("user", s->user);
    snprintf(text, sizeof text, "%d", s->priority);
    print_line("priority", text);
    if (s->has_step) {
        int used = snprintf(text, sizeof text, "%lld/%lld", (long long)s->step, (long long)s->steps);
        if (s->has_attempt_step && s->attempt_step < s->step)
            used += snprintf(text + used, sizeof text - (size_t)used, "  repeats %lld", (long long)s->attempt_step);
        if (s->has_loss)
            used += snprintf(text + used, sizeof text - (size_t)used, "  loss %.4f", s->loss);
        if (s->has_eval_loss)
            used += snprintf(text + used, sizeof text - (size_t)used, "  eval %.4f", s->eval_loss);
        if (s->has_tokens_per_s)
            used += snprintf(text + used, sizeof text - (size_t)used, "  %s tok/s", format_count(s->tokens_per_s, a));
        if (s->has_mfu)
            snprintf(text + used, sizeof text - (size_t)used, "  MFU %.1f%%", 100 * s->mfu);
        else if (s->has_tokens_per_s)
            snprintf(text + used, sizeof text - (size_t)used, "  MFU n/a");
        print_line("step", text);
    }
    if (s->has_submitted_wall_ns)
        print_line("submitted", clock_rfc3339(s->submitted_wall_ns, when));
    if (s->has_ended_wall_ns && s->ended_wall_ns)
        print_line("ended", clock_rfc3339(s->ended_wall_ns, when));
    if (s->has_elapsed_s)
        print_line("elapsed", format_duration(s->elapsed_s, a));
    int max = r->resolved && r->resolved->restart ? r->resolved->restart->max_restarts : 0;
    snprintf(text, sizeof text, "%d of %d used", r->restarts_used, max);
    print_line("restarts", text);
    if (r->has_checkpoint_every_s) {
        char b[FORMAT_TEXT];
        snprintf(text, sizeof text, "every %s: one costs %.3g s, a failure is expected every %s",
                 format_duration(r->checkpoint_every_s, a), r->checkpoint_cost_s, format_duration(r->mean_failure_s, b));
        print_line("checkpoint", text);
    }
}

static void show_attempts(const struct ctl *ctl, const Boost__ShowReply *r)
{
    if (!r->n_attempts)
        return;
    static const char *const headers[] = {"ATTEMPT", "FROM", "TO", "START", "RAN", "NODES", "END"};
    struct table *t = table_new(7, headers, "rrrlrll");
    printf("\nattempts\n");
    for (size_t i = 0; i < r->n_attempts; i++) {
        const Boost__AttemptInfo *a = r->attempts[i];
        char when[CLOCK_TEXT], ran[FORMAT_TEXT] = "-", nodes[512] = "";
        bool ended = a->has_end_wall_ns && a->end_wall_ns;
        if (a->start_wall_ns)
            format_duration((double)((ended ? a->end_wall_ns : clock_wall_ns()) - a->start_wall_ns) / 1e9, ran);
        for (size_t n = 0, used = 0; n < a->n_nodes && used < sizeof nodes - 1; n++)
            used += (size_t)snprintf(nodes + used, sizeof nodes - used, "%s%s", n ? "," : "", a->nodes[n]);
        for (size_t n = 0, used = strlen(nodes); n < a->n_spares && used < sizeof nodes - 1; n++)
            used += (size_t)snprintf(nodes + used, sizeof nodes - used, "%s%s", n ? "," : " spare ", a->spares[n]);
        table_cell(t, "%d", a->attempt);
        table_cell(t, "%lld", (long long)a->from_step);
        table_cell(t, "%lld", (long long)a->to_step);
        table_cell(t, "%s", a->start_wall_ns ? clock_rfc3339(a->start_wall_ns, when) : "-");
        table_cell(t, "%s", ran);
        table_cell(t, "%s", nodes);
        const char *end = ended ? reason_name(a->reason) : "live";
        table_cell(t, "%s%s%s", end, *end && a->text && *a->text ? ": " : "", a->text ? a->text : "");
    }
    table_print(t, stdout, ctl->color, 2);
    table_free(t);
}

/* What a queued job waits for stands in its info: the line here then adds only for how long. */
static void show_waits(const Boost__ShowReply *r)
{
    static const char devices[] = "devices: ";
    const char *info = r->summary->info;
    for (size_t i = 0; i < r->n_waits; i++) {
        char a[FORMAT_TEXT], b[FORMAT_TEXT];
        const Boost__WaitInfo *w = r->waits[i];
        const char *name = w->name ? w->name : "";
        bool said = info && !strncmp(name, devices, strlen(devices)) && !strcmp(name + strlen(devices), info);
        printf("%s%-10s ", i ? "" : "\nwaiting for\n", "");
        print_safe(stdout, said ? "devices" : name);
        printf(", %s so far", format_duration(w->elapsed_s, a));
        if (w->has_limit_s)
            printf(" of %s", format_duration(w->limit_s, b));
        if (w->has_bytes_done)
            printf(", %s", format_bytes(w->bytes_done, a));
        if (w->has_bytes_total)
            printf(" of %s", format_bytes(w->bytes_total, b));
        putchar('\n');
    }
}

static void show_stragglers(const Boost__ShowReply *r)
{
    for (size_t i = 0; i < r->n_stragglers; i++) {
        const Boost__StragglerInfo *x = r->stragglers[i];
        printf("%s  rank %d on ", i ? "" : "\nslow ranks (time of a step outside collectives)\n", x->rank);
        print_safe(stdout, x->node ? x->node : "?");
        if (x->itself)
            printf(": %.1f ms, %.1f times its own best (%.1f ms)\n", x->outside_ms, x->factor, x->best_ms);
        else
            printf(": %.1f ms, %.1f times as long as rank %d (%.1f ms)\n", x->outside_ms, x->factor, x->fastest_rank,
                   x->fastest_ms);
    }
}

static void show_goodput(const Boost__Goodput *g)
{
    if (!g)
        return;
    char a[FORMAT_TEXT], b[FORMAT_TEXT], c[FORMAT_TEXT], d[FORMAT_TEXT], e[FORMAT_TEXT], f[FORMAT_TEXT];
    double lost = g->detection_s + g->restart_s + g->replay_s + g->stall_s;
    double total = g->productive_s + lost;
    printf("\ngoodput      %.1f%%: productive %s, detection %s, restart %s, replay %s, checkpoint stall %s, queue %s\n",
           total > 0 ? 100 * g->productive_s / total : 100.0, format_duration(g->productive_s, a),
           format_duration(g->detection_s, b), format_duration(g->restart_s, c), format_duration(g->replay_s, d),
           format_duration(g->stall_s, e), format_duration(g->queue_s, f));
    if (g->has_device_s)
        printf("%-12s %.0f device-seconds\n", "used", g->device_s);
}

static void show_events(const Boost__ShowReply *r)
{
    if (r->n_events)
        printf("\nlast events\n");
    for (size_t i = 0; i < r->n_events; i++) {
        char when[CLOCK_TEXT];
        printf("  %s  %-12s ", clock_rfc3339(r->events[i]->wall_ns, when), r->events[i]->kind);
        print_safe(stdout, r->events[i]->text ? r->events[i]->text : "");
        putchar('\n');
    }
}

static void show_spec(const Boost__ShowReply *r)
{
    struct buffer text;
    buffer_init(&text, LIMIT_FRAME);
    if (r->resolved && !text_write(&r->resolved->base, &text, NULL)) {
        printf("\nresolved spec\n");
        print_safe(stdout, (const char *)text.data);
    }
    buffer_free(&text);
}

/* Whether `ref` named an attempt of the job that came, as 17.2: the name of a job may look so too. */
static bool is_attempt(const char *ref, const Boost__ShowReply *r)
{
    char *end;
    return isdigit((unsigned char)*ref) && strtoll(ref, &end, 10) == r->summary->id && *end == '.' &&
           isdigit((unsigned char)end[1]) && strspn(end + 1, "0123456789/") == strlen(end + 1);
}

/* Without those that are gone, which a job of weeks has thousands of. */
static void show_checkpoints(const struct ctl *ctl, const Boost__ShowReply *r)
{
    size_t n = 0;
    for (size_t i = 0; i < r->n_checkpoints; i++)
        if (checkpoint_listed(r->checkpoints[i]))
            r->checkpoints[n++] = r->checkpoints[i];
    if (!r->n_checkpoints)
        return;
    printf("\ncheckpoints\n");
    if (n)
        checkpoint_table(ctl, r->checkpoints, n, 2);
    if (n < r->n_checkpoints)
        printf("  %zu deleted or given up: boostctl ckpt ls -a %lld\n", r->n_checkpoints - n,
               (long long)r->summary->id);
}

static void print_show(const struct ctl *ctl, const Boost__ShowReply *r)
{
    show_summary(ctl, r);
    show_waits(r);
    show_attempts(ctl, r);
    if (r->n_devices) {
        printf("\ndevices\n");
        device_table(ctl, r->devices, r->n_devices, 2);
    }
    show_checkpoints(ctl, r);
    show_stragglers(r);
    show_goodput(r->goodput);
    show_events(r);
    show_spec(r);
}

int verb_show(struct ctl *ctl, int argc, char **argv)
{
    bool help = false;
    const struct option_row rows[] = {
        {'h', "help", NULL, "this text", &help, NULL, NULL},
        {0, NULL, NULL, NULL, NULL, NULL, NULL},
    };
    int first = options_parse("show", argc, argv, rows);
    if (first < 0)
        return EXIT_USAGE;
    if (help) {
        printf("usage: boostctl show JOB\n");
        options_help(rows);
        return EXIT_OK;
    }
    if (argc - first != 1)
        return ctl_usage("show", "takes one job");
    struct arena arena;
    ctl_arena(&arena);
    Boost__ShowRequest body = BOOST__SHOW_REQUEST__INIT;
    body.job = ctl_ref(&arena, argv[first]);
    Boost__Request request = BOOST__REQUEST__INIT;
    request.body_case = BOOST__REQUEST__BODY_SHOW;
    request.show = &body;
    int code;
    Boost__Reply *reply = ctl_ask(ctl, &request, BOOST__REPLY__BODY_SHOW, &arena, &code);
    if (reply && is_attempt(argv[first], reply->show)) {
        long long id = reply->show->summary->id;
        fprintf(stderr, "boostctl: show takes a job, and %s is one attempt of it\n"
                        "  hint: boostctl show %lld lists its attempts; boostctl logs %s shows the output of this one\n",
                argv[first], id, argv[first]);
        code = EXIT_USAGE;
    } else if (reply && (ctl->output == OUTPUT_JSON || ctl->output == OUTPUT_JSONL)) {
        json_emit(json_show(reply->show), ctl->output == OUTPUT_JSONL);
    } else if (reply && ctl->output == OUTPUT_NAME) {
        printf("%lld\n", (long long)reply->show->summary->id);
    } else if (reply) {
        print_show(ctl, reply->show);
    }
    arena_free(&arena);
    return code;
}
