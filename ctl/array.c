/* array.h */
#include "ctl/array.h"

#include <stdlib.h>
#include <string.h>

#include "proto/base/buffer.h"

static int bad(const char *text, const char *what, struct error *err)
{
    error_set(err, ERR_USAGE, "--array '%.80s': %s", text, what);
    return error_hint(err,
                      "write numbers and ranges that ascend, and how many at once: 0-9, 1,3,5-7, 0-100:10, 0-99%%4");
}

/* A number at *s, which moves behind it; -1: there is none, or it is too large. */
static int32_t read_number(const char **s)
{
    size_t digits = strspn(*s, "0123456789");
    int32_t v = 0;
    if (!digits || digits > 6)
        return -1;
    for (size_t i = 0; i < digits; i++)
        v = v * 10 + ((*s)[i] - '0');
    *s += digits;
    return v;
}

int array_parse(const char *text, struct array *out, struct error *err)
{
    const char *s = text;
    out->n = 0;
    out->limit = 0;
    for (;;) {
        int32_t low = read_number(&s), high = low, step = 1;
        if (low < 0)
            return bad(text, "no number from 0 to 999999 where one is expected", err);
        if (*s == '-') {
            s++;
            high = read_number(&s);
            if (high < low)
                return bad(text, "a range that has no end, or goes down", err);
        }
        if (*s == ':') {
            s++;
            step = read_number(&s);
            if (step < 1)
                return bad(text, "a step that is not 1 or more", err);
        }
        for (int32_t i = low; i <= high; i += step) {
            if (out->n && i <= out->index[out->n - 1])
                return bad(text, "numbers that do not ascend", err);
            if (out->n == ARRAY_TASKS)
                return bad(text, "more than 1000 tasks", err);
            out->index[out->n++] = i;
        }
        if (*s != ',')
            break;
        s++;
    }
    if (*s == '%') {
        s++;
        out->limit = read_number(&s);
        if (out->limit < 1)
            return bad(text, "no number of 1 or more behind the %", err);
    }
    return *s ? bad(text, "something that does not belong there", err) : ERR_OK;
}

/* The k-th of the alternatives between braces; false: there are not as many as tasks. */
static bool take_alternative(const char *s, const char *end, int tasks, int k, const char **from, const char **to)
{
    int n = 0;
    for (const char *at = s;; n++) {
        const char *bar = memchr(at, '|', (size_t)(end - at));
        const char *stop = bar ? bar : end;
        if (n == k) {
            *from = at;
            *to = stop;
        }
        if (!bar)
            break;
        at = bar + 1;
    }
    return n + 1 == tasks;
}

int array_substitute(const struct array *a, int k, const char *assignment, char **out, struct error *err)
{
    struct buffer b;
    int rc = ERR_OK;
    buffer_init(&b, LIMIT_JOB_FILE);
    *out = NULL;
    for (const char *s = assignment; !rc && *s;) {
        const char *open = strchr(s, '{'), *close = open ? strpbrk(open + 1, "{}") : NULL, *from = NULL, *to = NULL;
        if (!close || *close != '}') {
            size_t len = open ? (size_t)(open - s) + 1 : strlen(s);
            buffer_append(&b, s, len);
            s += len;
            continue;
        }
        buffer_append(&b, s, (size_t)(open - s));
        s = close + 1;
        if (close == open + 2 && open[1] == 'i') {
            buffer_printf(&b, "%d", a->index[k]);
        } else if (!memchr(open, '|', (size_t)(close - open))) {
            buffer_append(&b, open, (size_t)(s - open));
        } else if (take_alternative(open + 1, close, a->n, k, &from, &to)) {
            buffer_append(&b, from, (size_t)(to - from));
        } else {
            rc = error_set(err, ERR_USAGE, "--set %.80s: the alternatives in {} are not as many as the %d tasks",
                           assignment, a->n);
        }
    }
    if (!rc && (b.failed || !(*out = strndup(b.len ? (const char *)b.data : "", b.len))))
        rc = error_set(err, ERR_NOMEM, "out of memory");
    buffer_free(&b);
    return rc;
}
