/* boostctl ckpt: the checkpoints of a job, and what is done with one of them. */
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ctl/ctl.h"
#include "ctl/format.h"
#include "ctl/json_out.h"
#include "ctl/options.h"
#include "proto/base/clock.h"
#include "proto/base/fs.h"

#define WHAT(w) BOOST__CHECKPOINT_REQUEST__WHAT__##w

enum { LIST_ARENA = 1 << 30 };

/* "MIRRORED", "PENDING 42%" while the copy is made. */
static void mirror_cell(struct table *t, const Boost__CheckpointInfo *c)
{
    const char *state = c->has_mirror ? enum_name(&boost__mirror_state__value__descriptor, (int)c->mirror) : "-";
    if (c->has_mirror_total && c->mirror_total > 0)
        table_cell(t, "%s %.0f%%", state, floor(100.0 * (double)c->mirror_done / (double)c->mirror_total));
    else
        table_cell(t, "%s", state);
}

/* SINCE is when the row came into its state: of a deleted one, when it was deleted. MIRROR is there for a job that has
 * one. */
void checkpoint_table(const struct ctl *ctl, Boost__CheckpointInfo *const *list, size_t n, int indent)
{
    static const char *const plain[] = {"STEP", "ATT", "STATE", "SHARDS", "SIZE", "SINCE", "PATH", "NOTE"};
    static const char *const both[] = {"STEP", "ATT", "STATE", "SHARDS", "SIZE", "SINCE", "MIRROR", "PATH", "NOTE"};
    bool mirrored = false;
    for (size_t i = 0; i < n; i++)
        mirrored = mirrored || list[i]->has_mirror;
    struct table *t = mirrored ? table_new(9, both, "rrlrrllll") : table_new(8, plain, "rrlrrlll");
    for (size_t i = 0; i < n; i++) {
        const Boost__CheckpointInfo *c = list[i];
        char size[FORMAT_TEXT], when[CLOCK_TEXT];
        table_cell(t, "%lld", (long long)c->step);
        table_cell(t, "%d", c->attempt);
        table_cell(t, "%s", enum_name(&boost__checkpoint_state__value__descriptor, (int)c->state));
        table_cell(t, "%d/%d", c->shards, c->world);
        table_cell(t, "%s", format_bytes(c->bytes, size));
        table_cell(t, "%s", c->wall_ns ? clock_rfc3339(c->wall_ns, when) : "-");
        if (mirrored)
            mirror_cell(t, c);
        table_cell(t, "%s", c->path ? c->path : "");
        char again[FORMAT_TEXT + 16] = "", in[FORMAT_TEXT];
        if (c->has_mirror_retry_s)
            snprintf(again, sizeof again, "next try in %s", format_duration(c->mirror_retry_s, in));
        const char *said[] = {c->pinned ? "pinned" : "", c->note ? c->note : "", c->mirror_note ? c->mirror_note : "",
                              again};
        char notes[2048] = "";
        for (size_t k = 0, used = 0; k < sizeof said / sizeof *said; k++)
            if (*said[k] && used < sizeof notes)
                used += (size_t)snprintf(notes + used, sizeof notes - used, "%s%s", used ? "; " : "", said[k]);
        table_cell(t, "%s", notes);
    }
    table_print(t, stdout, ctl->color, indent);
    table_free(t);
}

/* ---- ls ---- */

bool checkpoint_listed(const Boost__CheckpointInfo *c)
{
    return c->state != BOOST__CHECKPOINT_STATE__VALUE__DELETED && c->state != BOOST__CHECKPOINT_STATE__VALUE__ABANDONED;
}

/* Which rows `ckpt ls` shows: what is gone only when asked for. attempt 0: of any. */
static bool listed(const Boost__CheckpointInfo *c, bool all, long long attempt)
{
    return (!attempt || c->attempt == attempt) && (all || checkpoint_listed(c));
}

/* Those that are shown. */
struct listing {
    int64_t job;
    Boost__CheckpointInfo **checkpoints;
    size_t n;
};

static void take_page(struct listing *l, const Boost__CheckpointsReply *page, bool all, long long attempt)
{
    Boost__CheckpointInfo **more = realloc(l->checkpoints, (l->n + page->n_checkpoints + 1) * sizeof *more);
    if (!more)
        abort();
    l->checkpoints = more;
    l->job = page->job;
    for (size_t i = 0; i < page->n_checkpoints; i++)
        if (listed(page->checkpoints[i], all, attempt))
            more[l->n++] = page->checkpoints[i];
}

static void print_checkpoints(const struct ctl *ctl, const struct listing *l)
{
    if (ctl->output == OUTPUT_JSON || ctl->output == OUTPUT_JSONL) {
        json_t *document = json_document("boost.checkpoints/1"), *list = json_array();
        for (size_t i = 0; i < l->n; i++)
            json_array_append_new(list, json_checkpoint(l->checkpoints[i]));
        json_put(document, "job", json_integer(l->job));
        json_put(document, "checkpoints", list);
        json_emit(document, ctl->output == OUTPUT_JSONL);
    } else if (ctl->output == OUTPUT_NAME) {
        for (size_t i = 0; i < l->n; i++)
            printf("%s\n", l->checkpoints[i]->path);
    } else {
        checkpoint_table(ctl, l->checkpoints, l->n, 0);
    }
}

static int list(struct ctl *ctl, char *job, bool all)
{
    struct arena arena;
    struct listing found = {0};
    struct error err;
    arena_init(&arena, LIST_ARENA); /* all pages, since a table is as wide as its widest row */
    Boost__CheckpointsRequest body = BOOST__CHECKPOINTS_REQUEST__INIT;
    body.job = ctl_ref(&arena, job);
    Boost__Request request = BOOST__REQUEST__INIT;
    request.body_case = BOOST__REQUEST__BODY_CHECKPOINTS;
    request.checkpoints = &body;
    int code;
    Boost__Reply *reply = ctl_ask(ctl, &request, BOOST__REPLY__BODY_CHECKPOINTS, &arena, &code);
    long long attempt = ctl_split_ref(job).attempt; /* boostd has seen that there is such a one */
    while (reply) {
        take_page(&found, reply->checkpoints, all, attempt);
        if (!reply->more)
            break;
        reply = ctl_more(ctl, &arena, &err);
        if (reply && reply->body_case != BOOST__REPLY__BODY_CHECKPOINTS) {
            error_set(&err, ERR_PROTOCOL, "boostd answered with something else");
            reply = NULL;
        }
        if (!reply)
            code = ctl_fail(&err);
    }
    if (reply)
        print_checkpoints(ctl, &found);
    free(found.checkpoints);
    arena_free(&arena);
    return code;
}

/* ---- one checkpoint ---- */

struct command {
    const char *name;
    Boost__CheckpointRequest__What what;
    const char *takes;
    int words; /* behind the command */
};
static const struct command commands[] = {
    {"verify", WHAT(VERIFY), "JOB[@STEP]", 1},
    {"pin", WHAT(PIN), "JOB[@STEP]", 1},
    {"unpin", WHAT(UNPIN), "JOB[@STEP]", 1},
    {"rm", WHAT(RM), "JOB@STEP", 1},
    {"mirror", WHAT(MIRROR), "JOB[@STEP]", 1},
    {"export", WHAT(EXPORT), "JOB[@STEP]|CKPTDIR DIR [--dtype bf16|fp32]", 2},
    {"import", WHAT(IMPORT), "HFDIR DIR", 2},
    {"convert", WHAT(CONVERT), "JOB[@STEP]|CKPTDIR DIR [--rank R]", 2},
};

/* "17@8000" */
static int split(struct arena *arena, const char *text, Boost__CheckpointRequest *body, struct error *err)
{
    const char *at = strrchr(text, '@');
    char *end = NULL;
    if (!at && body->what == WHAT(RM)) {
        error_set(err, ERR_USAGE, "ckpt rm needs the step of the checkpoint");
        return error_hint(err, "boostctl ckpt rm %s@STEP; boostctl ckpt ls %s shows which there are", text, text);
    }
    if (!at) {
        body->job = ctl_ref(arena, text);
        return ERR_OK;
    }
    char *job = arena_printf(arena, "%.*s", (int)(at - text), text);
    errno = 0;
    body->has_step = true;
    body->step = strtoll(at + 1, &end, 10);
    if (!job || !*job || at[1] < '0' || at[1] > '9' || *end || errno) {
        error_set(err, ERR_USAGE, "'%s' is no checkpoint", text);
        return error_hint(err, "write 17@8000 for the one that job 17 wrote at step 8000");
    }
    body->job = ctl_ref(arena, job);
    return ERR_OK;
}

/* A full path, from where boostctl runs. */
static char *absolute(struct arena *arena, const char *path, struct error *err)
{
    char cwd[PATH_MAX];
    char *out = NULL;
    if (*path == '/')
        out = arena_strdup(arena, path);
    else if (getcwd(cwd, sizeof cwd))
        out = arena_printf(arena, "%s/%s", cwd, path);
    if (!out)
        error_set(err, ERR_IO, "cannot tell the full path of %s", path);
    return out;
}

struct choices {
    const char *dtype, *rank;
};

/* What a command's options mean; they are refused where they mean nothing. */
static int choose(const struct command *command, const struct choices *o, Boost__CheckpointRequest *body,
                  struct error *err)
{
    if (o->dtype && command->what != WHAT(EXPORT))
        return error_set(err, ERR_USAGE, "--dtype is for ckpt export");
    if (o->rank && command->what != WHAT(CONVERT))
        return error_set(err, ERR_USAGE, "--rank is for ckpt convert");
    if (o->dtype && strcmp(o->dtype, "bf16") != 0 && strcmp(o->dtype, "fp32") != 0)
        return error_set(err, ERR_USAGE, "--dtype is bf16 or fp32, not '%s'", o->dtype);
    body->has_bf16 = o->dtype != NULL;
    body->bf16 = o->dtype && !strcmp(o->dtype, "bf16");
    char *end = NULL;
    long long rank = o->rank ? strtoll(o->rank, &end, 10) : 0;
    if (o->rank && (end == o->rank || *end || rank < 1 || rank > INT32_MAX))
        return error_set(err, ERR_USAGE, "--rank wants a number from 1, not '%s'", o->rank);
    body->has_rank = o->rank != NULL;
    body->rank = (int32_t)rank;
    return ERR_OK;
}

/* Which checkpoint, and where to. A word with a slash is a directory. */
static int fill(struct arena *arena, const struct command *command, char **words, Boost__CheckpointRequest *body,
                struct error *err)
{
    bool directory = command->what == WHAT(IMPORT) || (command->words > 1 && strchr(words[0], '/'));
    if (directory && !(body->from = absolute(arena, words[0], err)))
        return (int)err->code;
    if (command->words > 1 && !(body->to = absolute(arena, words[1], err)))
        return (int)err->code;
    if (command->what == WHAT(VERIFY) && strchr(words[0], '/')) {
        error_set(err, ERR_USAGE, "ckpt verify takes a job's checkpoint, not a directory");
        return error_hint(err, "boost-worker ckpt verify %s", words[0]);
    }
    return directory ? ERR_OK : split(arena, words[0], body, err);
}

static json_t *reply_json(const Boost__CheckpointReply *r, const char *command)
{
    json_t *document = json_document("boost.checkpoint/1"), *faults = json_array();
    json_put(document, "command", json_text(command));
    if (r->has_job) {
        json_put(document, "job", json_integer(r->job));
        json_put(document, "step", json_integer(r->step));
        json_put(document, "attempt", json_integer(r->attempt));
    }
    if (r->path)
        json_put(document, "path", json_text(r->path));
    if (r->node)
        json_put(document, "node", json_text(r->node));
    if (r->text)
        json_put(document, "text", json_text(r->text));
    for (size_t i = 0; i < r->n_faults; i++)
        json_array_append_new(faults, json_text(r->faults[i]));
    if (!strcmp(command, "verify")) {
        json_put(document, "sound", json_boolean(r->n_faults == 0));
        json_put(document, "faults", json_incref(faults));
    }
    json_decref(faults);
    return document;
}

static void print_reply(const struct ctl *ctl, const struct command *command, const Boost__CheckpointReply *r)
{
    if (ctl->output == OUTPUT_JSON || ctl->output == OUTPUT_JSONL) {
        json_emit(reply_json(r, command->name), ctl->output == OUTPUT_JSONL);
    } else if (ctl->output == OUTPUT_NAME) {
        printf("%s\n", r->path ? r->path : "");
    } else if (r->n_faults) {
        printf("checkpoint of step %lld of job %lld is damaged: %s\n", (long long)r->step, (long long)r->job,
               r->path ? r->path : "");
        for (size_t i = 0; i < r->n_faults; i++) {
            fputs("  ", stdout);
            print_safe(stdout, r->faults[i]);
            putchar('\n');
        }
    } else if (!ctl->quiet) {
        if (command->what == WHAT(VERIFY))
            printf("checkpoint of step %lld of job %lld is sound: ", (long long)r->step, (long long)r->job);
        print_safe(stdout, command->what == WHAT(VERIFY) ? (r->path ? r->path : "") : (r->text ? r->text : "done"));
        putchar('\n');
    }
}

/* As long as it takes: the answer comes when the work is done, or the connection breaks. */
static Boost__Reply *ask(struct ctl *ctl, Boost__CheckpointRequest *body, struct arena *arena, struct error *err)
{
    Boost__Request request = BOOST__REQUEST__INIT;
    request.body_case = BOOST__REQUEST__BODY_CHECKPOINT;
    request.checkpoint = body;
    Boost__Reply *reply = ctl_call_long(ctl, &request, arena, err);
    if (reply && reply->body_case != BOOST__REPLY__BODY_CHECKPOINT) {
        error_set(err, ERR_PROTOCOL, "boostd answered ckpt with something else");
        return NULL;
    }
    return reply;
}

static int one(struct ctl *ctl, const struct command *command, char **words, const struct choices *chosen)
{
    struct arena arena;
    struct error err;
    Boost__CheckpointRequest body = BOOST__CHECKPOINT_REQUEST__INIT;
    Boost__Reply *reply = NULL;
    ctl_arena(&arena);
    body.has_what = true;
    body.what = command->what;
    int rc = choose(command, chosen, &body, &err);
    if (!rc)
        rc = fill(&arena, command, words, &body, &err);
    if (!rc)
        reply = ask(ctl, &body, &arena, &err);
    int code = EXIT_OK;
    if (!reply)
        code = ctl_fail(&err);
    else
        print_reply(ctl, command, reply->checkpoint);
    if (code == EXIT_INVALID) /* a place or a model that does not do: there is no job file here */
        code = EXIT_REFUSED;
    if (reply && reply->checkpoint->n_faults)
        code = EXIT_JOB_BAD;
    arena_free(&arena);
    return code;
}

int verb_ckpt(struct ctl *ctl, int argc, char **argv)
{
    bool all = false, help = false;
    struct choices chosen = {NULL, NULL};
    const struct option_row rows[] = {
        {'a', "all", NULL, "ls: deleted and abandoned ones too", &all, NULL, NULL},
        {0, "dtype", "TYPE", "export: bf16 or fp32 (the default)", NULL, &chosen.dtype, NULL},
        {0, "rank", "R", "convert: a FULL_RANK model to SVD of this rank; without it SVD to FULL_RANK", NULL,
         &chosen.rank, NULL},
        {'h', "help", NULL, "this text", &help, NULL, NULL},
        {0, NULL, NULL, NULL, NULL, NULL, NULL},
    };
    int first = options_parse("ckpt", argc, argv, rows);
    if (first < 0)
        return EXIT_USAGE;
    if (help) {
        printf("usage: boostctl ckpt ls JOB [-a]\n");
        for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
            printf("       boostctl ckpt %s %s\n", commands[i].name, commands[i].takes);
        options_help(rows);
        return EXIT_OK;
    }
    int words = argc - first - 1;
    if (words >= 0 && !strcmp(argv[first], "ls"))
        return words == 1 ? list(ctl, argv[first + 1], all) : ctl_usage("ckpt", "takes: ckpt ls JOB");
    for (size_t i = 0; words >= 0 && i < sizeof commands / sizeof *commands; i++) {
        const struct command *k = &commands[i];
        if (strcmp(argv[first], k->name) != 0)
            continue;
        return words == k->words ? one(ctl, k, argv + first + 1, &chosen)
                                 : ctl_usage("ckpt", "takes: ckpt %s %s", k->name, k->takes);
    }
    if (words < 0)
        return ctl_usage("ckpt", "takes: ckpt ls JOB");
    return ctl_usage("ckpt", "unknown command '%s'", argv[first]);
}
