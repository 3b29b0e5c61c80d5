/* Why an attempt failed: classes of ends, the first failing rank, and the texts. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"
#include "proto/base/buffer.h"
#include "proto/base/utf8.h"
#include "proto/rankfiles.h"

enum { TAIL_LINES = 3, TAIL_LINE_BYTES = 200 };

Boost__ExitClass__Value classify(const Boost__ExitRecord *x)
{
    if (x->lost)
        return CLASS(INFRA);
    /* What was clean was clean, even if the kill was on its way. */
    if (x->has_exit_code && !x->signal && x->exit_code == 0 && x->done)
        return CLASS(CLEAN);
    if (x->killed_by_us)
        return CLASS(KILLED);
    if (x->signal)
        return x->signal == 9 && !x->oom ? CLASS(INFRA) : CLASS(APPLICATION);
    switch (x->exit_code) {
    case RANK_EXIT_SPEC:
        return CLASS(SPEC);
    case RANK_EXIT_PEER:
        return CLASS(PEER_LOST);
    case RANK_EXIT_INFRA:
        return CLASS(INFRA);
    default:
        return CLASS(APPLICATION); /* 0 without DONE too: it left in the middle */
    }
}

static bool is_failure(const struct rank_end *e)
{
    return e && e->class != CLASS(CLEAN) && e->class != CLASS(KILLED);
}

/* Whether x comes before y as the cause: a lost peer behind all others; then the keeper's order on one
 * node, arrival between nodes. */
static bool is_before(const struct attempt *a, int x, int y)
{
    const struct rank_end *ex = a->ranks[x].end, *ey = a->ranks[y].end;
    bool px = ex->class == CLASS(PEER_LOST), py = ey->class == CLASS(PEER_LOST);
    if (px != py)
        return py;
    if (a->ranks[x].part == a->ranks[y].part)
        return ex->seq < ey->seq;
    return ex->arrival < ey->arrival;
}

int attempt_cause(const struct attempt *a, bool *certain)
{
    int first = -1;
    *certain = false;
    /* The first of each node, then the first of those: the two orders do not mix. */
    for (int p = 0; p < a->n_parts; p++) {
        int best = -1;
        for (int i = 0; i < a->parts[p].n_ranks; i++) {
            int r = a->parts[p].ranks[i];
            if (is_failure(a->ranks[r].end) && (best < 0 || is_before(a, r, best)))
                best = r;
        }
        if (best >= 0 && (first < 0 || is_before(a, best, first)))
            first = best;
    }
    if (first < 0 || a->ranks[first].end->class == CLASS(PEER_LOST))
        return first;
    const struct attempt_part *part = &a->parts[a->ranks[first].part];
    int64_t earlier = 0;
    for (int i = 0; i < part->n_ranks; i++) {
        const struct rank_end *e = a->ranks[part->ranks[i]].end;
        earlier += e && e->seq < a->ranks[first].end->seq;
    }
    *certain = earlier >= a->ranks[first].end->seq - 1;
    return first;
}

/* Whether the worker's words are about the data: exit 64 stands for both. */
static bool speaks_of_data(const struct job *job, const char *error)
{
    const Boost__Data *d = job->resolved->data;
    if (!error)
        return false;
    for (size_t i = 0; d && i < d->n_train; i++)
        if (d->train[i]->path && *d->train[i]->path && strstr(error, d->train[i]->path))
            return true;
    for (size_t i = 0; d && i < d->n_eval; i++)
        if (d->eval[i]->path && *d->eval[i]->path && strstr(error, d->eval[i]->path))
            return true;
    return strstr(error, "token") != NULL || strncmp(error, "data", 4) == 0;
}

Boost__Reason__Value cause_reason(const struct job *job, const struct attempt *a, int rank)
{
    const struct rank_end *e = a->ranks[rank].end;
    if (e->class == CLASS(SPEC))
        return speaks_of_data(job, e->error) ? REASON(DataError) : REASON(SpecError);
    if (e->lost)
        return REASON(NodeLost);
    return e->signal ? REASON(RankSignal) : REASON(RankExit);
}

/* Bytes of a rank are shown as they are where they are text; the rest as '?', so that a row stays UTF-8. */
static void append_text(struct buffer *b, const uint8_t *s, size_t len)
{
    for (size_t i = 0; i < len;) {
        size_t n = utf8_length(s + i, len - i);
        bool control = n == 1 && (s[i] < 0x20 || s[i] == 0x7F);
        if (n && !control)
            buffer_append(b, s + i, n);
        else
            buffer_append(b, s[i] == '\t' || s[i] == '\n' ? " " : "?", 1);
        i += n ? n : 1;
    }
}

static void append_tail(struct buffer *b, const struct rank_end *e)
{
    size_t end = e->log_tail_len;
    while (end > 0 && (e->log_tail[end - 1] == '\n' || e->log_tail[end - 1] == '\r'))
        end--;
    size_t start = end;
    for (int lines = 0; start > 0; start--)
        if (e->log_tail[start - 1] == '\n' && ++lines == TAIL_LINES)
            break;
    if (start == end)
        return;
    buffer_append_str(b, "\nlast log lines:");
    while (start < end) {
        const uint8_t *nl = memchr(e->log_tail + start, '\n', end - start);
        size_t len = nl ? (size_t)(nl - (e->log_tail + start)) : end - start;
        size_t show = len > TAIL_LINE_BYTES ? TAIL_LINE_BYTES : len;
        /* Not through the middle of a character. */
        while (show < len && show > 0 && (e->log_tail[start + show] & 0xC0) == 0x80)
            show--;
        buffer_append_str(b, "\n  ");
        append_text(b, e->log_tail + start, show);
        if (show < len)
            buffer_append_str(b, "...");
        start += len + 1;
    }
}

static void append_end(struct buffer *b, const struct rank_end *e)
{
    bool disk = e->error && !strncmp(e->error, RANK_FINAL_CHECKPOINT, strlen(RANK_FINAL_CHECKPOINT));
    if (e->lost)
        buffer_append_str(b, "its end was not seen (the processes are gone, exit code unknown)");
    else if (e->signal) {
        const char *abbrev = sigabbrev_np(e->signal);
        buffer_printf(b, "signal %d (SIG%s)%s%s", e->signal, abbrev ? abbrev : "?", e->oom ? ", out of memory" : "",
                      e->core_dumped ? ", core dumped" : "");
    } else if (e->exit_code == 0)
        buffer_append_str(b, "exit code 0 without its DONE record");
    else
        buffer_printf(b, "exit code %d%s", e->exit_code,
                      e->class == CLASS(SPEC)        ? " (spec or data error)"
                      : e->class == CLASS(PEER_LOST) ? " (lost a peer)"
                      : e->class != CLASS(INFRA)     ? ""
                      : disk                         ? " (disk)"
                                                     : " (device or driver)");
    if (e->device && *e->device && !disk) {
        buffer_append_str(b, " on ");
        append_text(b, (const uint8_t *)e->device, strlen(e->device));
    }
    if (e->error && *e->error) {
        buffer_append_str(b, ": ");
        append_text(b, (const uint8_t *)e->error, strlen(e->error));
    }
}

static void append_collective(struct buffer *b, const struct rank_end *e)
{
    if (!e->collective || !*e->collective)
        return;
    buffer_append_str(b, "\nlast collective: ");
    append_text(b, (const uint8_t *)e->collective, strlen(e->collective));
}

char *cause_text(const struct attempt *a, int rank, bool with_log)
{
    struct buffer b;
    const struct rank_end *e = a->ranks[rank].end;
    buffer_init(&b, 64 << 10);
    buffer_printf(&b, "rank %d on %s: ", rank, a->parts[a->ranks[rank].part].node);
    append_end(&b, e);
    if (with_log) {
        append_collective(&b, e);
        append_tail(&b, e);
    }
    char *text = strdup(b.data ? (const char *)b.data : "");
    buffer_free(&b);
    return text;
}

char *rank_list(const int *ranks, int n)
{
    struct buffer b;
    buffer_init(&b, 64 << 10);
    for (int i = 0; i < n;) {
        int last = i;
        while (last + 1 < n && ranks[last + 1] == ranks[last] + 1)
            last++;
        buffer_printf(&b, "%s%d", i ? ", " : "", ranks[i]);
        if (last > i)
            buffer_printf(&b, "%s%d", last == i + 1 ? ", " : "-", ranks[last]);
        i = last + 1;
    }
    char *text = strdup(b.data ? (const char *)b.data : "");
    buffer_free(&b);
    return text;
}
