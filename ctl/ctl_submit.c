/* boostctl submit: a job file to the controller, and what may follow it. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "ctl/ctl.h"
#include "ctl/format.h"
#include "ctl/json_out.h"
#include "ctl/options.h"
#include "proto/jobfile.h"
#include "proto/json.h"
#include "proto/text.h"
#include "worker/plan/plan.h"

struct submit_options {
    const char *format;
    bool allow_unknown, dry_run, wait, follow, parsable, hold, help;
    struct option_list set;
};

/* File, --set and absolute paths; then the same checks that the server makes, so that
 * a bad file is told without a controller. */
static int load_spec(struct job_file *file, const char *path, const struct submit_options *o, struct error *err)
{
    int rc = ctl_load_job(file, path, o->format, o->allow_unknown, &o->set, err);
    if (rc)
        return rc;
    char cwd[4096];
    if (!getcwd(cwd, sizeof cwd))
        return error_set(err, ERR_IO, "cannot tell the current directory");
    rc = jobfile_absolute_paths(file->spec, &file->arena, cwd, err);
    if (!rc && (rc = plan_validate(file->spec, err)))
        error_context(err, "%s", path);
    return rc;
}

static void print_submitted(struct ctl *ctl, const Boost__SubmitReply *r, const struct submit_options *o,
                            enum job_format format)
{
    if (o->parsable || ctl->output == OUTPUT_NAME) {
        printf("%lld\n", (long long)r->job);
    } else if (ctl->output == OUTPUT_JSON || ctl->output == OUTPUT_JSONL) {
        json_t *document = json_document("boost.submit/1");
        json_put(document, "id", json_integer(r->job));
        json_put(document, "name", json_text(r->name));
        json_put(document, "nodes", json_integer(r->nodes));
        json_put(document, "devices_per_node", json_integer(r->devices_per_node));
        json_put(document, "priority", json_integer(r->priority));
        json_emit(document, ctl->output == OUTPUT_JSONL);
    } else if (!ctl->quiet) {
        printf("job %lld %s: %s (%d %s x %d %s, priority %d)  [%s spec]\n", (long long)r->job,
               o->hold ? "held" : "queued", r->name, r->nodes, r->nodes == 1 ? "node" : "nodes", r->devices_per_node,
               r->devices_per_node == 1 ? "device" : "devices", r->priority, job_format_name(format));
    }
    fflush(stdout);
}

static int print_dry_run(struct ctl *ctl, const Boost__SubmitReply *r, struct error *err)
{
    if (ctl->output == OUTPUT_JSON || ctl->output == OUTPUT_JSONL) {
        json_t *document = json_document("boost.dry_run/1");
        json_put(document, "would_wait", json_boolean(r->would_wait));
        if (r->wait_reason && *r->wait_reason)
            json_put(document, "wait_reason", json_text(r->wait_reason));
        if (r->resolved)
            json_put(document, "resolved", json_tree(&r->resolved->base));
        json_emit(document, ctl->output == OUTPUT_JSONL);
    } else {
        struct buffer text;
        buffer_init(&text, LIMIT_FRAME);
        if (r->resolved && text_write(&r->resolved->base, &text, err)) {
            buffer_free(&text);
            return ctl_fail(err);
        }
        if (text.len)
            print_safe(stdout, (const char *)text.data);
        buffer_free(&text);
        if (!ctl->quiet)
            fprintf(stderr, "boostctl: valid; %s%s\n", r->would_wait ? "it would wait: " : "it would start now",
                    r->would_wait && r->wait_reason ? r->wait_reason : "");
    }
    return r->would_wait ? EXIT_MUST_WAIT : EXIT_OK;
}

static int send_spec(struct ctl *ctl, struct job_file *file, const struct submit_options *o)
{
    Boost__SubmitRequest submit = BOOST__SUBMIT_REQUEST__INIT;
    submit.spec = file->spec;
    submit.has_hold = submit.has_dry_run = submit.has_allow_unknown = true;
    submit.hold = o->hold;
    submit.dry_run = o->dry_run;
    submit.allow_unknown = o->allow_unknown;
    Boost__Request request = BOOST__REQUEST__INIT;
    request.body_case = BOOST__REQUEST__BODY_SUBMIT;
    request.submit = &submit;

    struct error err;
    struct arena arena;
    ctl_arena(&arena);
    int code;
    Boost__Reply *reply = ctl_call(ctl, &request, &arena, &err);
    if (!reply) {
        code = ctl_fail(&err);
    } else if (reply->body_case != BOOST__REPLY__BODY_SUBMIT) {
        error_set(&err, ERR_PROTOCOL, "boostd answered submit with something else");
        code = ctl_fail(&err);
    } else if (o->dry_run) {
        code = print_dry_run(ctl, reply->submit, &err);
    } else {
        print_submitted(ctl, reply->submit, o, file->format);
        char job[24];
        snprintf(job, sizeof job, "%lld", (long long)reply->submit->job);
        code = o->follow || o->wait ? follow_job(ctl, job, o->follow) : EXIT_OK;
    }
    arena_free(&arena);
    return code;
}

int verb_submit(struct ctl *ctl, int argc, char **argv)
{
    struct submit_options o = {0};
    const struct option_row rows[] = {
        {0, "format", "F", "binary, text or json instead of going by content", NULL, &o.format, NULL},
        {0, "allow-unknown", NULL, "pass over fields this version does not know", &o.allow_unknown, NULL, NULL},
        {'n', "dry-run", NULL, "check and resolve only; exit 10 when it would have to wait", &o.dry_run, NULL, NULL},
        {0, "wait", NULL, "until the job has ended", &o.wait, NULL, NULL},
        {0, "follow", NULL, "the same with progress, loss and events", &o.follow, NULL, NULL},
        {0, "parsable", NULL, "print the id and nothing else", &o.parsable, NULL, NULL},
        {0, "set", "a.b=v", "change a field of the file; can be repeated", NULL, NULL, &o.set},
        {0, "hold", NULL, "set aside until released", &o.hold, NULL, NULL},
        {'h', "help", NULL, "this text", &o.help, NULL, NULL},
        {0, NULL, NULL, NULL, NULL, NULL, NULL},
    };
    int first = options_parse("submit", argc, argv, rows);
    if (first < 0)
        return EXIT_USAGE;
    if (o.help) {
        printf("usage: boostctl submit FILE [options]     (FILE - is standard input)\n");
        options_help(rows);
        return EXIT_OK;
    }
    if (argc - first != 1)
        return ctl_usage("submit", "takes one job file, not %d", argc - first);
    struct error err;
    struct job_file file = {0};
    int code = load_spec(&file, argv[first], &o, &err) ? ctl_fail(&err) : EXIT_OK;
    if (!code && file.unknown.len && !ctl->quiet)
        fprintf(stderr, "boostctl: passed over unknown fields: %s\n", (const char *)file.unknown.data);
    if (!code)
        code = send_spec(ctl, &file, &o);
    jobfile_free(&file);
    return code;
}
