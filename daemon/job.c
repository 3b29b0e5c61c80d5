/* The in-memory records of a job: making, finding, ending. */
#include "daemon/job.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/straggler.h"
#include "proto/base/buffer.h"

void text_set(char **field, const char *text)
{
    char *copy = strdup(text ? text : "");
    if (!copy)
        return;
    free(*field);
    *field = copy;
}

struct job *job_new(void)
{
    struct job *job = calloc(1, sizeof *job);
    if (!job)
        return NULL;
    job->step = -1;
    job->checkpoint_step = -1;
    job->next_step = -1;
    job->loss = job->eval_loss = job->tokens_per_s = job->mfu = NAN;
    return job;
}

void rank_end_free(struct rank_end *end)
{
    if (!end)
        return;
    free(end->error);
    free(end->collective);
    free(end->device);
    free(end->log_tail);
    free(end);
}

void attempt_clear_ranks(struct attempt *a)
{
    stragglers_free(a->stragglers);
    a->stragglers = NULL;
    for (int r = 0; r < a->world; r++) {
        rank_end_free(a->ranks[r].end);
        free(a->ranks[r].tail);
    }
    free(a->ranks);
    a->ranks = NULL;
    a->world = 0;
    for (int p = 0; p < a->n_parts; p++) {
        free(a->parts[p].node);
        free(a->parts[p].doing);
        free(a->parts[p].ranks);
    }
    free(a->parts);
    a->parts = NULL;
    a->n_parts = 0;
}

static void attempt_free(struct attempt *a)
{
    attempt_clear_ranks(a);
    for (int i = 0; i < a->n_spares; i++)
        free(a->spares[i]);
    free(a->spares);
    if (a->spec)
        boost__job_spec__free_unpacked(a->spec, NULL);
    free(a->hang_text);
    free(a->text);
    free(a);
}

static void checkpoint_free(struct checkpoint *k)
{
    for (int r = 0; k->shards && r < k->world; r++)
        free(k->shards[r].file);
    free(k->shards);
    free(k->path);
    free(k->note);
    free(k->mirror_url);
    free(k->mirror_note);
    free(k);
}

void job_free(struct job *job)
{
    if (!job)
        return;
    for (int i = 0; i < job->n_attempts; i++)
        attempt_free(job->attempts[i]);
    free(job->attempts);
    for (int i = 0; i < job->n_checkpoints; i++)
        checkpoint_free(job->checkpoints[i]);
    free(job->checkpoints);
    if (job->spec)
        boost__job_spec__free_unpacked(job->spec, NULL);
    if (job->resolved)
        boost__job_spec__free_unpacked(job->resolved, NULL);
    if (job->next_spec)
        boost__job_spec__free_unpacked(job->next_spec, NULL);
    if (job->next_resolved)
        boost__job_spec__free_unpacked(job->next_resolved, NULL);
    free(job->name);
    free(job->user);
    free(job->reason_text);
    for (int i = 0; i < job->n_shared; i++)
        free(job->shared[i]);
    free(job->shared);
    free(job->start_trouble);
    free(job->fetch_trouble);
    free(job);
}

struct attempt *job_attempt(const struct job *job, int number)
{
    return number >= 1 && number <= job->n_attempts ? job->attempts[number - 1] : NULL;
}

struct attempt *job_live_attempt(const struct job *job)
{
    struct attempt *a = job_attempt(job, job->n_attempts);
    return a && a->end_ns == 0 ? a : NULL;
}

bool job_has_trained(const struct job *job)
{
    for (int i = 0; i < job->n_attempts; i++)
        if (job->attempts[i]->to_step > job->attempts[i]->from_step)
            return true;
    return job->checkpoint_step >= 0;
}

struct attempt *job_add_attempt(struct job *job)
{
    struct attempt **list = realloc(job->attempts, (size_t)(job->n_attempts + 1) * sizeof *list);
    if (!list)
        return NULL;
    job->attempts = list;
    struct attempt *a = calloc(1, sizeof *a);
    if (!a)
        return NULL;
    a->number = job->n_attempts + 1;
    a->replay_until = -1;
    list[job->n_attempts++] = a;
    return a;
}

Boost__JobState__Value job_shown_state(const struct job *job)
{
    bool ends = job_state_terminal(job->state) && !job_state_terminal(job->durable.state);
    return ends ? job->ended_from : job->state;
}

const char *job_ended_text(const struct job *job)
{
    return job_shown_state(job) == job->state ? "it has ended" : "it ends as soon as state.db is written";
}

struct checkpoint *job_checkpoint(const struct job *job, int64_t step, int attempt)
{
    /* The newest ones are asked for most. */
    for (int i = job->n_checkpoints - 1; i >= 0; i--)
        if (job->checkpoints[i]->step == step && job->checkpoints[i]->attempt == attempt)
            return job->checkpoints[i];
    return NULL;
}

struct checkpoint *job_add_checkpoint(struct job *job, int64_t step, int attempt, int world)
{
    struct checkpoint *k = calloc(1, sizeof *k);
    struct checkpoint **list = realloc(job->checkpoints, (size_t)(job->n_checkpoints + 1) * sizeof *list);
    if (list)
        job->checkpoints = list;
    if (k)
        k->shards = calloc((size_t)world, sizeof *k->shards);
    if (!k || !list || !k->shards) {
        free(k);
        return NULL;
    }
    k->step = step;
    k->attempt = attempt;
    k->world = world;
    int at = job->n_checkpoints++;
    while (at > 0 && (list[at - 1]->step > step || (list[at - 1]->step == step && list[at - 1]->attempt > attempt))) {
        list[at] = list[at - 1];
        at--;
    }
    list[at] = k;
    return k;
}

/* Not by printf: a large job has thousands of these. */
static void append_number(struct buffer *b, int v)
{
    char digits[16];
    size_t at = sizeof digits;
    do {
        digits[--at] = (char)('0' + v % 10);
        v /= 10;
    } while (v > 0);
    buffer_append(b, digits + at, sizeof digits - at);
}

char *attempt_placement(const struct attempt *a)
{
    struct buffer b;
    buffer_init(&b, 16 << 20);
    buffer_append_str(&b, "");
    for (int p = 0; p < a->n_parts; p++) {
        buffer_append_str(&b, p ? ";" : "");
        buffer_append_str(&b, a->parts[p].node);
        for (int i = 0; i < a->parts[p].n_ranks; i++) {
            buffer_append_str(&b, i ? "," : ":");
            append_number(&b, a->parts[p].ranks[i]);
        }
    }
    char *text = b.failed ? NULL : strdup((const char *)b.data);
    buffer_free(&b);
    return text;
}

char *attempt_spares(const struct attempt *a)
{
    struct buffer b;
    buffer_init(&b, 16 << 20);
    for (int i = 0; i < a->n_spares; i++)
        buffer_printf(&b, "%s%s", i ? "," : "", a->spares[i]);
    char *text = b.failed || !a->n_spares ? NULL : strdup((const char *)b.data);
    buffer_free(&b);
    return text;
}

int attempt_add_spare(struct attempt *a, const char *node, size_t len)
{
    char **list = realloc(a->spares, (size_t)(a->n_spares + 1) * sizeof *list);
    if (list)
        a->spares = list;
    char *copy = list ? strndup(node, len) : NULL;
    if (!copy)
        return ERR_NOMEM;
    list[a->n_spares++] = copy;
    return ERR_OK;
}

/* One "node:rank,rank" of `text`; *next is behind it and its ';'. */
static int parse_part(struct attempt *a, const char *text, const char **next, struct error *err)
{
    const char *colon = strchr(text, ':');
    const char *end = strchr(text, ';');
    if (!end)
        end = text + strlen(text);
    if (!colon || colon > end || colon == text)
        return error_set(err, ERR_CORRUPT, "placement \"%.80s\" has no node", text);
    struct attempt_part *list = realloc(a->parts, (size_t)(a->n_parts + 1) * sizeof *list);
    if (!list)
        return error_set(err, ERR_NOMEM, "out of memory");
    a->parts = list;
    struct attempt_part *p = &list[a->n_parts];
    *p = (struct attempt_part){.node = strndup(text, (size_t)(colon - text))};
    size_t commas = 1;
    for (const char *s = colon; s < end; s++)
        commas += *s == ',';
    p->ranks = calloc(commas, sizeof *p->ranks);
    a->n_parts++;
    if (!p->node || !p->ranks)
        return error_set(err, ERR_NOMEM, "out of memory");
    for (const char *s = colon + 1; s < end;) {
        char *stop = NULL;
        long rank = strtol(s, &stop, 10);
        if (stop == s || rank < 0 || rank >= 65536 || (stop < end && *stop != ','))
            return error_set(err, ERR_CORRUPT, "placement \"%.80s\" has a bad rank", text);
        p->ranks[p->n_ranks++] = (int)rank;
        s = stop < end ? stop + 1 : stop;
    }
    *next = *end ? end + 1 : end;
    return ERR_OK;
}

int attempt_parse_placement(struct attempt *a, const char *placement, struct error *err)
{
    int rc = ERR_OK;
    attempt_clear_ranks(a);
    int world = 0;
    for (const char *s = placement; *s;) {
        rc = parse_part(a, s, &s, err);
        if (rc)
            goto out;
        world += a->parts[a->n_parts - 1].n_ranks;
    }
    a->ranks = calloc((size_t)(world ? world : 1), sizeof *a->ranks);
    if (!a->ranks) {
        rc = error_set(err, ERR_NOMEM, "out of memory");
        goto out;
    }
    for (int r = 0; r < world; r++)
        a->ranks[r].part = -1;
    a->world = world;
    for (int p = 0; p < a->n_parts; p++) {
        for (int i = 0; i < a->parts[p].n_ranks; i++) {
            int r = a->parts[p].ranks[i];
            if (r >= world || a->ranks[r].part != -1) {
                rc = error_set(err, ERR_CORRUPT, "placement \"%.80s\" does not name every rank once", placement);
                goto out;
            }
            a->ranks[r].part = p;
            a->ranks[r].step = -1;
        }
    }
out:
    if (rc)
        attempt_clear_ranks(a);
    return rc;
}
