/* boostctl events: what happened. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/ctl.h"
#include "ctl/format.h"
#include "ctl/json_out.h"
#include "ctl/options.h"
#include "ctl/out.h"
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
        out_flush();
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
