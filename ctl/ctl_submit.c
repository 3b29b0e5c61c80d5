/* boostctl submit: a job file to the controller, and what may follow it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ctl/array.h"
#include "ctl/ctl.h"
#include "ctl/format.h"
#include "ctl/json_out.h"
#include "ctl/options.h"
#include "ctl/out.h"
#include "proto/jobfile.h"
#include "proto/json.h"
#include "proto/text.h"
#include "worker/plan/plan.h"

struct submit_options {
    const char *format;
    bool allow_unknown, dry_run, wait, follow, parsable, hold, help;
    struct option_list set;
    const char *array_text;
    struct array array;
};

/* Absolute paths; then the same checks that the server makes, so that a bad file is told without a controller. */
static int finish_spec(Boost__JobSpec *spec, struct arena *arena, const char *path, struct error *err)
{
    char cwd[4096];
    if (!getcwd(cwd, sizeof cwd))
        return error_set(err, ERR_IO, "cannot tell the current directory");
    int rc = jobfile_absolute_paths(spec, arena, cwd, err);
    if (!rc && (rc = plan_validate(spec, err)))
        error_context(err, "%s", path);
    return rc;
}

/* The k-th task of an array: "name-<index>", and what --set says to it. */
static int make_task(struct job_file *file, const struct submit_options *o, int k, Boost__JobSpec **out,
                     struct error *err)
{
    Boost__JobSpec *spec = (Boost__JobSpec *)reflect_copy(&file->arena, &file->spec->base);
    if (!spec)
        return error_set(err, ERR_NOMEM, "out of memory");
    int rc = ERR_OK;
    for (int i = 0; !rc && i < o->set.n; i++) {
        char *assignment;
        rc = array_substitute(&o->array, k, o->set.items[i], &assignment, err);
        if (!rc && (rc = jobfile_set(spec, &file->arena, assignment, err)))
            error_context(err, "--set %s", assignment);
        free(assignment);
    }
    if (!rc) {
        spec->name = arena_printf(&file->arena, "%s-%d", spec->name ? spec->name : "", o->array.index[k]);
        rc = spec->name ? ERR_OK : error_set(err, ERR_NOMEM, "out of memory");
    }
    *out = spec;
    return rc;
}

/* The specs of all tasks, or the one of a job that is no array; in the file's arena. */
static int load_specs(struct job_file *file, const char *path, const struct submit_options *o, Boost__JobSpec ***specs,
                      struct error *err)
{
    static const struct option_list nothing = {.n = 0};
    int n = o->array.n ? o->array.n : 1;
    int rc = ctl_load_job(file, path, o->format, o->allow_unknown, o->array.n ? &nothing : &o->set, err);
    if (rc)
        return rc;
    *specs = arena_alloc(&file->arena, (size_t)n * sizeof **specs);
    if (!*specs)
        return error_set(err, ERR_NOMEM, "out of memory");
    (*specs)[0] = file->spec;
    for (int k = 0; !rc && k < n; k++) {
        rc = o->array.n ? make_task(file, o, k, &(*specs)[k], err) : ERR_OK;
        rc = rc ? rc : finish_spec((*specs)[k], &file->arena, path, err);
        if (rc && o->array.n)
            error_context(err, "task %d", o->array.index[k]);
    }
    return rc;
}

static void print_array(struct ctl *ctl, const Boost__SubmitReply *r, const struct submit_options *o,
                        Boost__JobSpec *const *specs, enum job_format format)
{
    long long first = r->job;
    if (o->parsable || ctl->output == OUTPUT_NAME) {
        for (int k = 0; k < o->array.n; k++)
            printf("%lld\n", first + k);
    } else if (ctl->output == OUTPUT_JSON || ctl->output == OUTPUT_JSONL) {
        json_t *document = json_document("boost.submit/1"), *tasks = json_array();
        for (int k = 0; k < o->array.n; k++) {
            json_t *task = json_object();
            json_put(task, "id", json_integer(first + k));
            json_put(task, "index", json_integer(o->array.index[k]));
            json_put(task, "name", json_text(specs[k]->name));
            json_array_append_new(tasks, task);
        }
        json_put(document, "array_job", json_integer(first));
        if (o->array.limit)
            json_put(document, "array_limit", json_integer(o->array.limit));
        json_put(document, "tasks", tasks);
        json_emit(document, ctl->output == OUTPUT_JSONL);
    } else if (!ctl->quiet) {
        char limit[48] = "";
        if (o->array.limit)
            snprintf(limit, sizeof limit, ", %d at once", o->array.limit);
        printf("array %lld %s: jobs %lld to %lld, %s to %s%s (each %d %s x %d %s, priority %d)  [%s spec]\n", first,
               o->hold ? "held" : "queued", first, first + o->array.n - 1, specs[0]->name, specs[o->array.n - 1]->name,
               limit, r->nodes, r->nodes == 1 ? "node" : "nodes", r->devices_per_node,
               r->devices_per_node == 1 ? "device" : "devices", r->priority, job_format_name(format));
    }
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
        json_emit(document, ctl->output == OUTPUT_JSONL || o->follow); /* a line, as those that follow */
    } else if (!ctl->quiet) {
        printf("job %lld %s: %s (%d %s x %d %s, priority %d)  [%s spec]\n", (long long)r->job,
               o->hold ? "held" : "queued", r->name, r->nodes, r->nodes == 1 ? "node" : "nodes", r->devices_per_node,
               r->devices_per_node == 1 ? "device" : "devices", r->priority, job_format_name(format));
    }
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

/* Until all have ended; the worst that one of them came to. */
static int wait_all(struct ctl *ctl, int64_t first, int n, bool display)
{
    int code = EXIT_OK;
    for (int k = 0; k < n; k++) {
        char job[24];
        snprintf(job, sizeof job, "%lld", (long long)(first + k));
        int one = follow_job(ctl, job, display);
        if (one == EXIT_INTERRUPTED)
            return one;
        code = one ? one : code;
    }
    return code;
}

/* Nobody should submit it again because its number did not come out. */
static void say_submitted(int64_t first, int n)
{
    if (out_try())
        return;
    if (n > 1)
        fprintf(stderr, "boostctl: submitted as jobs %lld to %lld, though that could not be printed\n",
                (long long)first, (long long)first + n - 1);
    else
        fprintf(stderr, "boostctl: submitted as job %lld, though that could not be printed\n", (long long)first);
}

static int send_specs(struct ctl *ctl, const struct job_file *file, Boost__JobSpec **specs, struct submit_options *o)
{
    Boost__SubmitRequest submit = BOOST__SUBMIT_REQUEST__INIT;
    int n = o->array.n ? o->array.n : 1;
    submit.spec = specs[0];
    submit.has_hold = submit.has_dry_run = submit.has_allow_unknown = true;
    submit.hold = o->hold;
    submit.dry_run = o->dry_run;
    submit.allow_unknown = o->allow_unknown;
    submit.more = specs + 1;
    submit.n_more = (size_t)n - 1;
    submit.array_index = o->array.index;
    submit.n_array_index = (size_t)o->array.n;
    submit.has_array_limit = o->array.limit > 0;
    submit.array_limit = o->array.limit;
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
        if (o->array.n)
            print_array(ctl, reply->submit, o, specs, file->format);
        else
            print_submitted(ctl, reply->submit, o, file->format);
        say_submitted(reply->submit->job, n);
        code = o->follow || o->wait ? wait_all(ctl, reply->submit->job, n, o->follow) : EXIT_OK;
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
        {0, "array", "0-9%4",
         "one job for each number, at most 4 at once; in --set {i} is the number, {a|b} one of a list", NULL,
         &o.array_text, NULL},
        {0, "hold", NULL, "set aside until released; its files are looked at when it starts", &o.hold, NULL, NULL},
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
    Boost__JobSpec **specs = NULL;
    if (o.array_text && array_parse(o.array_text, &o.array, &err))
        return ctl_fail(&err);
    if (o.array.n > 1 && o.follow)
        return ctl_usage("submit", "--follow shows one job, not an array: use --wait");
    int code = load_specs(&file, argv[first], &o, &specs, &err) ? ctl_fail(&err) : EXIT_OK;
    if (!code && file.unknown.len && !ctl->quiet)
        fprintf(stderr, "boostctl: passed over unknown fields: %s\n", (const char *)file.unknown.data);
    if (!code)
        code = send_specs(ctl, &file, specs, &o);
    jobfile_free(&file);
    return code;
}
