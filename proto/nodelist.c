/* nodelist.h */
#include "proto/nodelist.h"

#include <stdint.h>
#include <string.h>

enum { MAX_BRACKETS = 4, MAX_DIGITS = 18 };

static const char digits[] = "0123456789";
static const char name_bytes[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";

static int64_t value_of(const char *s, size_t len)
{
    int64_t v = 0;
    for (size_t i = 0; i < len; i++)
        v = v * 10 + (s[i] - '0');
    return v;
}

/* One "3" or "01-12": its two numbers' texts; NULL when there is none at *s, which moves behind it. */
static bool read_range(const char **s, const char **low, size_t *low_len, const char **high, size_t *high_len)
{
    *low = *s;
    *low_len = strspn(*s, digits);
    *s += *low_len;
    *high = *low;
    *high_len = *low_len;
    if (**s == '-') {
        *high = ++*s;
        *high_len = strspn(*s, digits);
        *s += *high_len;
    }
    return *low_len > 0 && *high_len > 0 && *low_len <= MAX_DIGITS && *high_len <= MAX_DIGITS;
}

static int bad(const char *list, const char *at, const char *what, struct error *err)
{
    error_set(err, ERR_INVALID, "'%.200s' is not a list of nodes: %s at character %zu", list, what,
              (size_t)(at - list) + 1);
    return error_hint(err, "write names separated by commas, with ranges in brackets: gpu[01-04,07],login");
}

int nodelist_check(const char *list, struct error *err)
{
    const char *s = list, *low, *high;
    size_t low_len, high_len;
    int brackets = 0;
    if (strlen(list) > NODELIST_MAX)
        return error_set(err, ERR_INVALID, "a list of nodes has %zu bytes, the limit is %d", strlen(list),
                         NODELIST_MAX);
    if (!*list)
        return ERR_OK;
    for (const char *name = s;;) {
        s += strspn(s, name_bytes);
        if (*s == '[') {
            if (++brackets > MAX_BRACKETS)
                return bad(list, s, "more than 4 brackets in a name", err);
            do {
                const char *at = ++s;
                if (!read_range(&s, &low, &low_len, &high, &high_len))
                    return bad(list, at, "no number", err);
                if (value_of(low, low_len) > value_of(high, high_len) || high_len < low_len)
                    return bad(list, at, "a range that goes down", err);
            } while (*s == ',');
            if (*s++ != ']')
                return bad(list, s - 1, "a bracket that does not close", err);
            continue;
        }
        if (s == name)
            return bad(list, s, "no name", err);
        if (!*s)
            return ERR_OK;
        if (*s != ',')
            return bad(list, s, "a character that no name has", err);
        name = ++s;
        brackets = 0;
    }
}

/* Whether the number of `len` digits at `node` is in the brackets that begin behind `s`. */
static bool in_brackets(const char *s, const char *node, size_t len)
{
    const char *low, *high;
    size_t low_len, high_len;
    int64_t v = value_of(node, len);
    do {
        if (!read_range(&s, &low, &low_len, &high, &high_len))
            return false;
        /* As wide as it is written: without a leading zero the width grows with the number. */
        bool wide = len == low_len || (len > low_len && len <= high_len && node[0] != '0');
        if (wide && v >= value_of(low, low_len) && v <= value_of(high, high_len))
            return true;
    } while (*s++ == ',');
    return false;
}

/* One name of the list, up to its end, against the rest of the node's. Backtracks over how many digits a bracket
 * takes, as there may be digits behind it. */
static bool name_is(const char *s, const char *end, const char *node)
{
    while (s < end && *s != '[') {
        if (*s++ != *node++)
            return false;
    }
    if (s == end)
        return *node == '\0';
    const char *close = strchr(s, ']');
    size_t most = strspn(node, digits);
    for (size_t len = most < MAX_DIGITS ? most : MAX_DIGITS; close && len > 0; len--)
        if (in_brackets(s + 1, node, len) && name_is(close + 1, end, node + len))
            return true;
    return false;
}

bool nodelist_has(const char *list, const char *node)
{
    const char *s = list;
    while (*s) {
        const char *end = s;
        for (bool inside = false; *end && (inside || *end != ','); end++)
            inside = *end == '[' || (inside && *end != ']');
        if (end > s && name_is(s, end, node))
            return true;
        s = *end ? end + 1 : end;
    }
    return false;
}
