/* data.h: what the order of samples follows from, as text that goes along with a checkpoint, and what has changed.
 *
 * "<seq_len> <period> <files>;" and of each file "<tokens>,<windows>,<share>,<sum>;". The sum, "-" where it was not
 * taken, is of a few windows: mostly enough to tell another file of the same size, and soon read. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/crc32c.h"
#include "worker/data.h"

enum { WINDOWS_SUMMED = 3 };

/* False: not known. A window that cannot be read is for the batch that needs it to tell. */
static bool sum_of(struct data *d, struct token_file *f, uint32_t *out)
{
    uint32_t sum = 0;
    if (f->fd < 0) /* one of so many that each read opens it anew */
        return false;
    for (int i = 0; i < WINDOWS_SUMMED; i++) {
        if (token_file_window(f, (f->windows - 1) / (WINDOWS_SUMMED - 1) * i, d->tokens, NULL))
            return false;
        sum = crc32c(sum, d->tokens, ((size_t)d->plan->s + 1) * sizeof *d->tokens);
    }
    *out = sum;
    return true;
}

int data_identity(struct data *d, struct buffer *out, struct error *err)
{
    buffer_printf(out, "%" PRId64 " %d %d;", d->plan->s, (int)d->mixture.period, d->train.n);
    for (int i = 0; i < d->train.n; i++) {
        struct token_file *f = &d->train.files[i];
        uint32_t sum;
        buffer_printf(out, "%" PRId64 ",%" PRId64 ",%d,", f->tokens, f->windows, (int)d->mixture.share[i]);
        if (sum_of(d, f, &sum))
            buffer_printf(out, "%08" PRIx32 ";", sum);
        else
            buffer_append_str(out, "-;");
    }
    return out->failed ? error_set(err, ERR_NOMEM, "no memory to describe %d token files", d->train.n) : ERR_OK;
}

/* ---- comparing ---- */

struct identity_file {
    int64_t tokens, windows, share;
    const char *sum; /* up to the ';' */
};

/* A number from 1, and behind it `end`; *text moves behind that. */
static bool take(const char **text, char end, int64_t *out)
{
    char *stop;
    errno = 0;
    *out = strtoll(*text, &stop, 10);
    bool good = !errno && stop > *text && *stop == end && *out > 0;
    *text = good ? stop + 1 : *text;
    return good;
}

static bool take_file(const char **text, struct identity_file *out)
{
    if (!take(text, ',', &out->tokens) || !take(text, ',', &out->windows) || !take(text, ',', &out->share))
        return false;
    const char *end = strchr(*text, ';');
    out->sum = *text;
    *text = end ? end + 1 : *text;
    return end && end > out->sum;
}

/* What has been found, as much as has room. */
struct changes {
    char *out;
    size_t cap;
    int n, hidden;
};
enum { ROOM_FOR_REST = 24 }; /* "; and N more" */

static void PRINTF_LIKE(2, 3) note(struct changes *c, const char *fmt, ...)
{
    char text[512];
    size_t used = strlen(c->out);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    c->n++;
    if (c->hidden || used + strlen(text) + 2 + ROOM_FOR_REST > c->cap)
        c->hidden++;
    else
        snprintf(c->out + used, c->cap - used, "%s%s", used ? "; " : "", text);
}

/* The samples of file i and which of them come when. */
static void compare_file(struct changes *c, struct data *d, int i, const struct identity_file *was, bool same_length)
{
    const struct token_file *f = &d->train.files[i];
    char sum[16];
    uint32_t now;
    if (same_length ? f->windows != was->windows : f->tokens != was->tokens)
        note(c, "data.train[%d] (%.200s) has %" PRId64 " tokens in %" PRId64 " windows, it had %" PRId64 " in %" PRId64,
             i, f->path, f->tokens, f->windows, was->tokens, was->windows);
    else if (same_length && *was->sum != '-' && sum_of(d, &d->train.files[i], &now)) {
        snprintf(sum, sizeof sum, "%08" PRIx32 ";", now);
        if (strncmp(sum, was->sum, strlen(sum)) != 0)
            note(c, "data.train[%d] (%.200s) has as many windows as it had, of other tokens", i, f->path);
    }
}

int data_changes(struct data *d, const char *was, char *out, size_t cap)
{
    struct changes c = {.out = out, .cap = cap};
    int64_t s, period, files;
    *out = '\0';
    if (!take(&was, ' ', &s) || !take(&was, ' ', &period) || !take(&was, ';', &files))
        return 0;
    if (s != d->plan->s)
        note(&c, "data.seq_len is %" PRId64 ", it was %" PRId64, d->plan->s, s);
    if (files != d->train.n)
        note(&c, "data.train has %d files, it had %" PRId64, d->train.n, files);
    for (int i = 0; i < d->train.n && i < files; i++) {
        struct identity_file f;
        if (!take_file(&was, &f))
            break;
        compare_file(&c, d, i, &f, s == d->plan->s);
        if (files == d->train.n && (f.share != d->mixture.share[i] || period != d->mixture.period))
            note(&c, "data.train[%d].weight gives %d of %d samples, it gave %" PRId64 " of %" PRId64, i,
                 (int)d->mixture.share[i], (int)d->mixture.period, f.share, period);
    }
    if (c.hidden)
        snprintf(out + strlen(out), cap - strlen(out), "; and %d more", c.hidden);
    return c.n;
}
