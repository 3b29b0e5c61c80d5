/* text_token.h: as protoc's tokenizer with '#' comments. */
#include "proto/text_token.h"

#include <stdio.h>
#include <string.h>

#include "proto/base/utf8.h"

static bool is_digit(int c)
{
    return c >= '0' && c <= '9';
}

static bool is_letter(int c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

static int hex_digit(int c)
{
    return is_digit(c) ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* The byte n places on, or -1 at the end. */
static int peek(const struct tokens *t, size_t n)
{
    return (size_t)(t->end - t->at) > n ? (unsigned char)t->at[n] : -1;
}

void token_prefix(const struct tokens *t, int line, int column, char *out, size_t cap)
{
    if (t->name)
        snprintf(out, cap, "%s:%d:%d: ", t->name, line, column);
    else
        snprintf(out, cap, "%s", "");
}

/* An error at the byte t->at. */
static int fail_here(struct tokens *t, const char *what)
{
    char prefix[REFLECT_PATH];
    token_prefix(t, t->line, (int)(t->at - t->line_start) + 1, prefix, sizeof prefix);
    return error_set(t->err, ERR_INVALID, "%s%s", prefix, what);
}

static void skip_space(struct tokens *t)
{
    for (; t->at < t->end; t->at++) {
        if (*t->at == '#')
            while (t->at + 1 < t->end && t->at[1] != '\n')
                t->at++;
        else if (*t->at == '\n') {
            t->line++;
            t->line_start = t->at + 1;
        } else if (!strchr(" \t\r\v\f", *t->at) || !*t->at) {
            return;
        }
    }
}

static void take_digits(struct tokens *t)
{
    while (is_digit(peek(t, 0)))
        t->at++;
}

static int take_decimal(struct tokens *t)
{
    take_digits(t);
    if (peek(t, 0) == '.') {
        t->now.kind = TOKEN_FLOAT;
        t->at++;
        take_digits(t);
    }
    if (peek(t, 0) == 'e' || peek(t, 0) == 'E') {
        t->now.kind = TOKEN_FLOAT;
        t->at++;
        if (peek(t, 0) == '-' || peek(t, 0) == '+')
            t->at++;
        if (!is_digit(peek(t, 0)))
            return fail_here(t, "expected the digits of an exponent");
        take_digits(t);
    }
    if (peek(t, 0) == 'f' || peek(t, 0) == 'F') {
        t->now.kind = TOKEN_FLOAT;
        t->at++;
    }
    return ERR_OK;
}

static int take_number(struct tokens *t)
{
    t->now.kind = TOKEN_INTEGER;
    if (peek(t, 0) == '0' && (peek(t, 1) == 'x' || peek(t, 1) == 'X')) {
        t->at += 2;
        if (hex_digit(peek(t, 0)) < 0)
            return fail_here(t, "expected hexadecimal digits after '0x'");
        while (hex_digit(peek(t, 0)) >= 0)
            t->at++;
    } else if (peek(t, 0) == '0' && is_digit(peek(t, 1))) {
        for (; is_digit(peek(t, 0)); t->at++)
            if (*t->at > '7')
                return fail_here(t, "a number that begins with 0 is octal: digits 0 to 7");
    } else {
        int rc = take_decimal(t);
        if (rc)
            return rc;
    }
    if (is_letter(peek(t, 0)))
        return fail_here(t, "expected a space between a number and a word");
    if (peek(t, 0) == '.')
        return fail_here(t, "a second '.' in a number");
    return ERR_OK;
}

static int take_string(struct tokens *t)
{
    char quote = *t->at++;
    while (t->at < t->end && *t->at != quote) {
        if (*t->at == '\n')
            return fail_here(t, "a string ends with its quote on the same line (write a line break as \\n)");
        t->at += *t->at == '\\' && t->at + 1 < t->end && t->at[1] != '\n' ? 2 : 1;
    }
    if (t->at == t->end)
        return fail_here(t, "the text ends inside a string");
    t->at++;
    t->now.kind = TOKEN_STRING;
    return ERR_OK;
}

int token_next(struct tokens *t)
{
    skip_space(t);
    t->now = (struct token){TOKEN_END, t->at, 0, t->line, (int)(t->at - t->line_start) + 1};
    int rc = ERR_OK;
    if (t->at == t->end)
        return ERR_OK;
    int c = peek(t, 0);
    if (is_letter(c)) {
        t->now.kind = TOKEN_WORD;
        while (is_letter(peek(t, 0)) || is_digit(peek(t, 0)))
            t->at++;
    } else if (is_digit(c) || (c == '.' && is_digit(peek(t, 1)))) {
        rc = take_number(t);
    } else if (c == '"' || c == '\'') {
        rc = take_string(t);
    } else if (c < ' ' || c >= 0x7f) {
        char what[64];
        snprintf(what, sizeof what, "byte 0x%02x outside a string", (unsigned)c);
        return fail_here(t, what);
    } else {
        t->now.kind = TOKEN_SYMBOL;
        t->at++;
    }
    t->now.len = (size_t)(t->at - t->now.start);
    return rc;
}

int token_start(struct tokens *t, const char *text, size_t len)
{
    bool mark = len >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0;
    t->at = mark ? text + 3 : text;
    t->end = text + len;
    t->line_start = t->at;
    t->line = 1;
    return token_next(t);
}

/* An error inside the string token, at byte p of it. */
static int bad_escape(struct tokens *t, const char *p, const char *what)
{
    char prefix[REFLECT_PATH];
    token_prefix(t, t->now.line, t->now.column + (int)(p - t->now.start), prefix, sizeof prefix);
    error_set(t->err, ERR_INVALID, "%s%s", prefix, what);
    error_hint(t->err, "escapes are \\n \\t \\r \\a \\b \\f \\v \\\\ \\' \\\" \\? \\123 \\x41 \\u00e9 \\U0001f600");
    return ERR_INVALID;
}

/* `digits` hexadecimal digits at p, none past `end`; -1 otherwise. */
static long hex_run(const char *p, const char *end, int digits)
{
    long value = 0;
    for (int i = 0; i < digits; i++) {
        int d = p + i < end ? hex_digit((unsigned char)p[i]) : -1;
        if (d < 0)
            return -1;
        value = value << 4 | d;
    }
    return value;
}

/* \u and \U; *p is after the letter. A \u pair of surrogates is one character. */
static int unescape_unicode(struct tokens *t, const char **p, const char *end, int digits, struct buffer *out)
{
    long code = hex_run(*p, end, digits);
    if (code < 0 || code > 0x10FFFF)
        return bad_escape(t, *p,
                          digits == 4 ? "\\u takes four hexadecimal digits"
                                      : "\\U takes eight hexadecimal digits, at most 0010ffff");
    *p += digits;
    if (code >= 0xD800 && code < 0xDC00 && end - *p >= 6 && (*p)[0] == '\\' && (*p)[1] == 'u') {
        long low = hex_run(*p + 2, end, 4);
        if (low >= 0xDC00 && low < 0xE000) {
            code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
            *p += 6;
        }
    }
    char bytes[4];
    return buffer_append(out, bytes, utf8_put((uint32_t)code, bytes));
}

/* *p is after the backslash. */
static int unescape(struct tokens *t, const char **p, const char *end, struct buffer *out)
{
    static const char from[] = "abfnrtv\\?'\"", to[] = "\a\b\f\n\r\t\v\\?'\"";
    char c = *(*p)++;
    const char *simple = c ? strchr(from, c) : NULL;
    unsigned value = 0;
    if (simple)
        return buffer_append(out, &to[simple - from], 1);
    if (c >= '0' && c <= '7') {
        value = (unsigned)(c - '0');
        for (int i = 0; i < 2 && *p < end && **p >= '0' && **p <= '7'; i++)
            value = value * 8 + (unsigned)(*(*p)++ - '0');
    } else if (c == 'x') {
        if (*p == end || hex_digit((unsigned char)**p) < 0)
            return bad_escape(t, *p, "\\x takes one or two hexadecimal digits");
        for (int i = 0; i < 2 && *p < end && hex_digit((unsigned char)**p) >= 0; i++)
            value = value << 4 | (unsigned)hex_digit((unsigned char)*(*p)++);
    } else if (c == 'u') {
        return unescape_unicode(t, p, end, 4, out);
    } else if (c == 'U') {
        return unescape_unicode(t, p, end, 8, out);
    } else {
        return bad_escape(t, *p - 2, "unknown escape in a string");
    }
    uint8_t byte = (uint8_t)value;
    return buffer_append(out, &byte, 1);
}

int token_unescape(struct tokens *t, struct buffer *out)
{
    const char *p = t->now.start + 1, *end = t->now.start + t->now.len - 1;
    while (p < end) {
        int rc = ERR_OK;
        if (*p == '\\') {
            p++;
            rc = unescape(t, &p, end, out);
        } else {
            const char *run = p;
            while (p < end && *p != '\\')
                p++;
            rc = buffer_append(out, run, (size_t)(p - run));
        }
        if (rc == ERR_NOMEM)
            return error_set(t->err, ERR_NOMEM, "no memory for a string of line %d", t->now.line);
        if (rc)
            return rc;
    }
    return ERR_OK;
}
