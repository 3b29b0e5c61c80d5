/* boostctl cancel, hold, release, checkpoint, ping, version: short requests. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "ctl/ctl.h"
#include "ctl/format.h"
#include "ctl/json_out.h"
#include "ctl/options.h"
#include "proto/version.h"

static const struct {
    const char *name;
    Boost__ControlRequest__Verb verb;
} control_verbs[] = {
    {"cancel", BOOST__CONTROL_REQUEST__VERB__CANCEL},
    {"hold", BOOST__CONTROL_REQUEST__VERB__HOLD},
    {"release", BOOST__CONTROL_REQUEST__VERB__RELEASE},
    {"checkpoint", BOOST__CONTROL_REQUEST__VERB__CHECKPOINT},
};

int ctl_print_results(struct ctl *ctl, const Boost__ControlReply *r)
{
    int code = EXIT_OK;
    json_t *list = json_array();
    for (size_t i = 0; i < r->n_results; i++) {
        const Boost__ControlResult *one = r->results[i];
        struct error err;
        if (one->failure) {
            client_failure(one->failure, &err);
            int got = ctl_fail(&err);
            code = code ? code : got;
            json_t *failed = json_object();
            json_put(failed, "ref", json_text(one->ref));
            json_put(failed, "error", json_text(err.message));
            if (*err.hint)
                json_put(failed, "hint", json_text(err.hint));
            json_array_append_new(list, failed);
            continue;
        }
        json_t *o = json_object();
        json_put(o, "id", json_integer(one->job));
        json_put(o, "text", json_text(one->text));
        json_array_append_new(list, o);
        if (ctl->output == OUTPUT_NAME)
            printf("%lld\n", (long long)one->job);
        else if (ctl->output <= OUTPUT_WIDE && !ctl->quiet)
            printf("job %lld: %s\n", (long long)one->job, one->text ? one->text : "");
    }
    if (ctl->output == OUTPUT_JSON || ctl->output == OUTPUT_JSONL) {
        json_t *document = json_document("boost.control/1");
        json_put(document, "results", json_incref(list));
        json_emit(document, ctl->output == OUTPUT_JSONL);
    }
    json_decref(list);
    return code;
}

static bool confirmed(const char *verb, int n)
{
    char answer[8] = "";
    fprintf(stderr, "%s %d jobs? [y/N] ", verb, n);
    return fgets(answer, sizeof answer, stdin) && (answer[0] == 'y' || answer[0] == 'Y');
}

int verb_control(struct ctl *ctl, int argc, char **argv)
{
    const char *name = argv[0];
    bool now = false, yes = false, help = false;
    bool cancel = !strcmp(name, "cancel");
    const struct option_row cancel_rows[] = {
        {0, "now", NULL, "without a checkpoint first", &now, NULL, NULL},
        {'y', "yes", NULL, "do not ask before cancelling several jobs from a terminal", &yes, NULL, NULL},
        {'h', "help", NULL, "this text", &help, NULL, NULL},
        {0, NULL, NULL, NULL, NULL, NULL, NULL},
    };
    const struct option_row *rows = cancel ? cancel_rows : cancel_rows + 2;
    int first = options_parse(name, argc, argv, rows);
    if (first < 0)
        return EXIT_USAGE;
    if (help) {
        printf("usage: boostctl %s JOB...\n", name);
        options_help(rows);
        return EXIT_OK;
    }
    int n = argc - first;
    if (!n)
        return ctl_usage(name, "needs a job");
    if (cancel && n > 1 && !yes && isatty(STDIN_FILENO) && !confirmed(name, n))
        return EXIT_REFUSED;
    struct arena arena;
    ctl_arena(&arena);
    Boost__ControlRequest body = BOOST__CONTROL_REQUEST__INIT;
    body.has_verb = body.has_now = true;
    body.now = now;
    for (size_t i = 0; i < sizeof control_verbs / sizeof *control_verbs; i++)
        if (!strcmp(name, control_verbs[i].name))
            body.verb = control_verbs[i].verb;
    body.n_jobs = (size_t)n;
    body.jobs = arena_alloc(&arena, (size_t)n * sizeof *body.jobs);
    for (int i = 0; i < n; i++)
        body.jobs[i] = ctl_ref(&arena, argv[first + i]);
    Boost__Request request = BOOST__REQUEST__INIT;
    request.body_case = BOOST__REQUEST__BODY_CONTROL;
    request.control = &body;
    struct error err;
    Boost__Reply *reply = ctl_call(ctl, &request, &arena, &err);
    if (reply && reply->body_case != BOOST__REPLY__BODY_CONTROL) {
        error_set(&err, ERR_PROTOCOL, "boostd answered %s with something else", name);
        reply = NULL;
    }
    int code = reply ? ctl_print_results(ctl, reply->control) : ctl_fail(&err);
    arena_free(&arena);
    return code;
}

static Boost__Reply *ping(struct ctl *ctl, struct arena *arena, struct error *err)
{
    Boost__PingRequest body = BOOST__PING_REQUEST__INIT;
    Boost__Request request = BOOST__REQUEST__INIT;
    request.body_case = BOOST__REQUEST__BODY_PING;
    request.ping = &body;
    Boost__Reply *reply = ctl_call(ctl, &request, arena, err);
    if (reply && reply->body_case != BOOST__REPLY__BODY_PING) {
        error_set(err, ERR_PROTOCOL, "boostd answered ping with something else");
        return NULL;
    }
    return reply;
}

static bool wants_help(int argc, char **argv, const char *usage)
{
    if (argc < 2 || (strcmp(argv[1], "-h") != 0 && strcmp(argv[1], "--help") != 0))
        return false;
    printf("usage: %s\n", usage);
    return true;
}

static void say_health(const char *so, const char *trouble)
{
    if (!trouble)
        return;
    printf("%s: ", so);
    print_safe(stdout, trouble);
    putchar('\n');
}

int verb_ping(struct ctl *ctl, int argc, char **argv)
{
    if (wants_help(argc, argv, "boostctl ping"))
        return EXIT_OK;
    if (argc > 1)
        return ctl_usage("ping", "takes nothing, not '%s'", argv[1]);
    struct error err;
    struct arena arena;
    ctl_arena(&arena);
    Boost__Reply *reply = ping(ctl, &arena, &err);
    int code = EXIT_OK;
    if (!reply) {
        code = ctl_fail(&err);
    } else if (ctl->output == OUTPUT_JSON || ctl->output == OUTPUT_JSONL) {
        json_t *o = json_document("boost.ping/1");
        json_put(o, "version", json_text(reply->ping->version));
        json_put(o, "store_id", json_text(reply->ping->store_id));
        json_put(o, "up_s", json_number(reply->ping->up_s));
        json_put(o, "jobs_live", json_integer(reply->ping->jobs_live));
        json_put(o, "nodes_up", json_integer(reply->ping->nodes_up));
        if (reply->ping->state_health)
            json_put(o, "state_health", json_text(reply->ping->state_health));
        if (reply->ping->metrics_health)
            json_put(o, "metrics_health", json_text(reply->ping->metrics_health));
        json_emit(o, ctl->output == OUTPUT_JSONL);
    } else {
        char up[FORMAT_TEXT];
        printf("boostd %s is up for %s, store %s, %d live %s, %d %s up\n", reply->ping->version,
               format_duration(reply->ping->up_s, up), reply->ping->store_id, reply->ping->jobs_live,
               reply->ping->jobs_live == 1 ? "job" : "jobs", reply->ping->nodes_up,
               reply->ping->nodes_up == 1 ? "node" : "nodes");
        say_health("no job is taken", reply->ping->state_health);
        say_health("metrics wait", reply->ping->metrics_health);
    }
    arena_free(&arena);
    return code;
}

/* Without a link (ctl NULL, from --version) only its own. */
int verb_version(struct ctl *ctl, int argc, char **argv)
{
    if (ctl && wants_help(argc, argv, "boostctl version"))
        return EXIT_OK;
    if (ctl && argc > 1)
        return ctl_usage("version", "takes nothing, not '%s'", argv[1]);
    bool json = ctl && (ctl->output == OUTPUT_JSON || ctl->output == OUTPUT_JSONL);
    json_t *o = json_document("boost.version/1");
    json_put(o, "boostctl", json_string(boost_version()));
    json_put(o, "build", json_string(boost_build_id()));
    if (!json)
        printf("boostctl %s (%s)\n", boost_version(), boost_build_id());
    if (ctl) {
        struct error err;
        struct arena arena;
        ctl_arena(&arena);
        Boost__Reply *reply = ping(ctl, &arena, &err);
        if (reply && !json)
            printf("boostd   %s (%s)\n", reply->ping->version, ctl->client.peer_build);
        else if (!reply && !json && !ctl->quiet)
            fprintf(stderr, "boostctl: boostd: %s\n", err.message);
        if (reply) {
            json_put(o, "boostd", json_text(reply->ping->version));
            json_put(o, "boostd_build", json_text(ctl->client.peer_build));
        }
        arena_free(&arena);
    }
    if (json)
        json_emit(o, ctl->output == OUTPUT_JSONL);
    else
        json_decref(o);
    return EXIT_OK;
}
