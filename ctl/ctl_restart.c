/* boostctl restart: a job goes on in a new attempt or as a new job, with --set changes. */
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "ctl/ctl.h"
#include "ctl/json_out.h"
#include "ctl/options.h"
#include "proto/jobfile.h"

/* The spec as it was submitted, with the changes; NULL with *code set. */
static Boost__JobSpec *changed_spec(struct ctl *ctl, Boost__JobRef *job, const struct option_list *set,
                                    struct arena *arena, int *code)
{
    Boost__ShowRequest body = BOOST__SHOW_REQUEST__INIT;
    Boost__Request request = BOOST__REQUEST__INIT;
    struct error err;
    char cwd[PATH_MAX];
    request.body_case = BOOST__REQUEST__BODY_SHOW;
    request.show = &body;
    body.job = job;
    Boost__Reply *reply = ctl_ask(ctl, &request, BOOST__REPLY__BODY_SHOW, arena, code);
    if (!reply)
        return NULL;
    Boost__JobSpec *spec = reply->show->spec;
    int rc = spec ? ERR_OK : error_set(&err, ERR_PROTOCOL, "boostd did not say what the job is");
    for (int i = 0; i < set->n && !rc; i++) {
        rc = jobfile_set(spec, arena, set->items[i], &err);
        if (rc)
            error_context(&err, "--set");
    }
    if (!rc && !getcwd(cwd, sizeof cwd))
        rc = error_set(&err, ERR_IO, "cannot tell the working directory");
    if (!rc)
        rc = jobfile_absolute_paths(spec, arena, cwd, &err);
    if (!rc)
        return spec;
    *code = ctl_fail(&err);
    return NULL;
}

static void print_result(const struct ctl *ctl, const Boost__RestartReply *r)
{
    if (ctl->output == OUTPUT_JSON || ctl->output == OUTPUT_JSONL) {
        json_t *o = json_document("boost.restart/1");
        json_put(o, "id", json_integer(r->job));
        json_put(o, "new_job", json_boolean(r->new_job));
        json_put(o, "text", json_text(r->text));
        json_emit(o, ctl->output == OUTPUT_JSONL);
    } else if (ctl->output == OUTPUT_NAME) {
        printf("%lld\n", (long long)r->job);
    } else if (!ctl->quiet) {
        printf("job %lld: %s\n", (long long)r->job, r->text ? r->text : "");
    }
}

int verb_restart(struct ctl *ctl, int argc, char **argv)
{
    struct option_list set = {.n = 0};
    const char *from = NULL;
    bool help = false;
    long long step = -1;
    const struct option_row rows[] = {
        {0, "from", "STEP", "from the committed checkpoint of that step; later ones are set aside", NULL, &from, NULL},
        {0, "set", "FIELD=VALUE", "change a field of the job file; may be given many times", NULL, NULL, &set},
        {'h', "help", NULL, "this text", &help, NULL, NULL},
        {0, NULL, NULL, NULL, NULL, NULL, NULL},
    };
    int first = options_parse("restart", argc, argv, rows);
    if (first < 0)
        return EXIT_USAGE;
    if (help) {
        printf("usage: boostctl restart JOB [--from STEP] [--set optimizer.lr=1e-3 ...]\n"
               "A job that has not ended checkpoints and goes on in a new attempt; one that has, as a new job.\n");
        options_help(rows);
        return EXIT_OK;
    }
    if (argc - first != 1)
        return ctl_usage("restart", "takes one job");
    if (from && !option_int("restart", "--from", from, 0, 1000000000, &step))
        return EXIT_USAGE;
    struct arena arena;
    int code = EXIT_OK;
    ctl_arena(&arena);
    Boost__RestartRequest body = BOOST__RESTART_REQUEST__INIT;
    Boost__Request request = BOOST__REQUEST__INIT;
    request.body_case = BOOST__REQUEST__BODY_RESTART;
    request.restart = &body;
    body.job = ctl_ref(&arena, argv[first]);
    body.has_from_step = from != NULL;
    body.from_step = step;
    body.spec = set.n ? changed_spec(ctl, body.job, &set, &arena, &code) : NULL;
    if (code == EXIT_OK) {
        Boost__Reply *reply = ctl_ask(ctl, &request, BOOST__REPLY__BODY_RESTART, &arena, &code);
        if (reply)
            print_result(ctl, reply->restart);
    }
    arena_free(&arena);
    return code;
}
