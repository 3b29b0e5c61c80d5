/* boostctl usage: who has had how much. boostctl update: what a job asks for, changed. */
#include <stdio.h>
#include <string.h>

#include "ctl/ctl.h"
#include "ctl/format.h"
#include "ctl/json_out.h"
#include "ctl/options.h"
#include "proto/base/clock.h"

/* ---- usage ------------------------------------------------------------------- */

static json_t *usage_object(const Boost__UsageRow *r)
{
    json_t *o = json_object();
    json_put(o, "user", json_text(r->user));
    json_put(o, "uid", json_integer(r->uid));
    json_put(o, "jobs", json_integer(r->jobs));
    json_put(o, "device_seconds", json_number(r->device_seconds));
    json_put(o, "gpu_seconds", json_number(r->gpu_seconds));
    json_put(o, "devices", json_integer(r->devices));
    json_put(o, "running", json_integer(r->running));
    json_put(o, "queued", json_integer(r->queued));
    if (r->has_recent)
        json_put(o, "recent_device_seconds", json_number(r->recent));
    return o;
}

static void print_usage(struct ctl *ctl, const Boost__UsageReply *r)
{
    if (ctl->output == OUTPUT_JSON) {
        json_t *document = json_document("boost.usage/1"), *list = json_array();
        for (size_t i = 0; i < r->n_rows; i++)
            json_array_append_new(list, usage_object(r->rows[i]));
        json_put(document, "users", list);
        json_emit(document, false);
        return;
    }
    static const char *const headers[] = {"USER", "JOBS", "DEVICE-H", "GPU-H", "RECENT-H", "DEV", "RUN", "QUEUED"};
    struct table *t = ctl->output <= OUTPUT_WIDE ? table_new(8, headers, "lrrrrrrr") : NULL;
    for (size_t i = 0; i < r->n_rows; i++) {
        const Boost__UsageRow *x = r->rows[i];
        if (ctl->output == OUTPUT_JSONL) {
            json_emit(usage_object(x), true);
        } else if (!t) {
            print_safe(stdout, x->user ? x->user : "");
            putchar('\n');
        } else {
            table_cell(t, "%s", x->user ? x->user : "");
            table_cell(t, "%d", x->jobs);
            table_cell(t, "%.2f", x->device_seconds / 3600);
            table_cell(t, "%.2f", x->gpu_seconds / 3600);
            if (x->has_recent)
                table_cell(t, "%.2f", x->recent / 3600);
            else
                table_cell(t, "-");
            table_cell(t, "%d", x->devices);
            table_cell(t, "%d", x->running);
            table_cell(t, "%d", x->queued);
        }
    }
    if (t) {
        table_print(t, stdout, ctl->color, 0);
        table_free(t);
    }
}

int verb_usage(struct ctl *ctl, int argc, char **argv)
{
    bool me = false, help = false;
    const char *user = NULL, *since = NULL;
    double seconds;
    const struct option_row rows[] = {
        {0, "me", NULL, "only mine", &me, NULL, NULL},
        {'u', "user", "USER", "only this user's", NULL, &user, NULL},
        {0, "since", "TIME", "what was used within 10m, 2h, 7d instead of ever", NULL, &since, NULL},
        {'h', "help", NULL, "this text", &help, NULL, NULL},
        {0, NULL, NULL, NULL, NULL, NULL, NULL},
    };
    int first = options_parse("usage", argc, argv, rows);
    if (first < 0)
        return EXIT_USAGE;
    if (help) {
        printf(
            "usage: boostctl usage [options]     (devices x hours of each user; RECENT-H: what fair share goes by)\n");
        options_help(rows);
        return EXIT_OK;
    }
    if (first < argc)
        return ctl_usage("usage", "takes no operand, not '%s'", argv[first]);
    if (me && user)
        return ctl_usage("usage", "--me and -u exclude each other");
    Boost__UsageRequest body = BOOST__USAGE_REQUEST__INIT;
    body.user = (char *)(uintptr_t)(me ? ctl_own_name() : user);
    if (since) {
        if (!parse_duration(since, &seconds))
            return ctl_usage("usage", "--since takes a time like 90s, 10m, 2h or 7d, not '%s'", since);
        body.has_since_wall_ns = true;
        body.since_wall_ns = clock_wall_ns() - (int64_t)(seconds * 1e9);
    }
    Boost__Request request = BOOST__REQUEST__INIT;
    request.body_case = BOOST__REQUEST__BODY_USAGE;
    request.usage = &body;
    struct arena arena;
    ctl_arena(&arena);
    int code;
    Boost__Reply *reply = ctl_ask(ctl, &request, BOOST__REPLY__BODY_USAGE, &arena, &code);
    if (reply)
        print_usage(ctl, reply->usage);
    arena_free(&arena);
    return code;
}

/* ---- update ------------------------------------------------------------------- */

/* One field=value; false with the message printed. */
static bool take_setting(const char *text, Boost__UpdateRequest *body)
{
    const char *equals = strchr(text, '=');
    size_t len = (size_t)(equals - text);
    long long v;
    if (len == strlen("priority") && strncmp(text, "priority", len) == 0) {
        if (!option_int("update", "priority", equals + 1, 0, 100, &v))
            return false;
        body->has_priority = true;
        body->priority = (int32_t)v;
        return true;
    }
    if (len == strlen("time_limit_s") && strncmp(text, "time_limit_s", len) == 0) {
        if (!option_int("update", "time_limit_s", equals + 1, 0, 1000000000, &v))
            return false;
        body->has_time_limit_s = true;
        body->time_limit_s = v;
        return true;
    }
    ctl_usage("update", "cannot change '%.*s', only priority and time_limit_s (all else: boostctl restart JOB --set %s)",
              (int)len, text, text);
    return false;
}

int verb_update(struct ctl *ctl, int argc, char **argv)
{
    bool help = false;
    const struct option_row rows[] = {
        {'h', "help", NULL, "this text", &help, NULL, NULL},
        {0, NULL, NULL, NULL, NULL, NULL, NULL},
    };
    int first = options_parse("update", argc, argv, rows);
    if (first < 0)
        return EXIT_USAGE;
    if (help) {
        printf("usage: boostctl update JOB... [priority=0..100] [time_limit_s=SECONDS]     (0: no limit)\n");
        options_help(rows);
        return EXIT_OK;
    }
    struct arena arena;
    ctl_arena(&arena);
    Boost__UpdateRequest body = BOOST__UPDATE_REQUEST__INIT;
    body.jobs = arena_alloc(&arena, (size_t)argc * sizeof *body.jobs);
    int code = EXIT_USAGE;
    for (int i = first; body.jobs && i < argc; i++) {
        if (!strchr(argv[i], '='))
            body.jobs[body.n_jobs++] = ctl_ref(&arena, argv[i]);
        else if (!take_setting(argv[i], &body))
            goto out;
    }
    if (!body.n_jobs || (!body.has_priority && !body.has_time_limit_s)) {
        ctl_usage("update", "takes jobs and what to change: boostctl update 17 priority=80 time_limit_s=3600");
        goto out;
    }
    Boost__Request request = BOOST__REQUEST__INIT;
    request.body_case = BOOST__REQUEST__BODY_UPDATE;
    request.update = &body;
    Boost__Reply *reply = ctl_ask(ctl, &request, BOOST__REPLY__BODY_CONTROL, &arena, &code);
    if (reply)
        code = ctl_print_results(ctl, reply->control);
out:
    arena_free(&arena);
    return code;
}
