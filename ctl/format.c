/* format.h */
#include "ctl/format.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#include "proto/base/utf8.h"

static char *with_unit(double value, double step, const char *const *units, char out[FORMAT_TEXT])
{
    int unit = 0;
    while (fabs(value) >= step * 0.9995 && units[unit + 1]) {
        value /= step;
        unit++;
    }
    int digits = unit == 0 && value == floor(value) ? 0 : fabs(value) < 9.995 ? 2 : fabs(value) < 99.95 ? 1 : 0;
    snprintf(out, FORMAT_TEXT, "%.*f%s", digits, value, units[unit]);
    return out;
}

char *format_count(double value, char out[FORMAT_TEXT])
{
    static const char *const units[] = {"", "k", "M", "G", "T", NULL};
    return with_unit(value, 1000, units, out);
}

char *format_bytes(int64_t bytes, char out[FORMAT_TEXT])
{
    static const char *const units[] = {" B", " KiB", " MiB", " GiB", " TiB", NULL};
    return with_unit((double)bytes, 1024, units, out);
}

char *format_duration(double seconds, char out[FORMAT_TEXT])
{
    if (!(seconds >= 0))
        seconds = 0;
    if (seconds < 9.95) {
        snprintf(out, FORMAT_TEXT, "%.1fs", seconds);
        return out;
    }
    int64_t s = (int64_t)(seconds + 0.5);
    if (s < 60)
        snprintf(out, FORMAT_TEXT, "%llds", (long long)s);
    else if (s < 3600)
        snprintf(out, FORMAT_TEXT, "%lldm%llds", (long long)(s / 60), (long long)(s % 60));
    else if (s < 86400)
        snprintf(out, FORMAT_TEXT, "%lldh%lldm", (long long)(s / 3600), (long long)(s % 3600 / 60));
    else
        snprintf(out, FORMAT_TEXT, "%lldd%lldh", (long long)(s / 86400), (long long)(s % 86400 / 3600));
    return out;
}

static const double duration_max = 4e9; /* seconds: in nanoseconds, and added to a clock, it fits into 64 bits */

bool parse_duration(const char *text, double *seconds)
{
    char *end;
    double value = strtod(text, &end);
    if (end == text || !(value >= 0))
        return false;
    static const struct {
        const char *unit;
        double seconds;
    } units[] = {{"", 1}, {"s", 1}, {"m", 60}, {"h", 3600}, {"d", 86400}, {"ms", 1e-3}};
    for (size_t i = 0; i < sizeof units / sizeof *units; i++)
        if (!strcmp(end, units[i].unit)) {
            *seconds = value * units[i].seconds;
            return *seconds <= duration_max;
        }
    return false;
}

bool parse_age(const char *text, int64_t now_wall_ns, double *seconds)
{
    struct tm tm = {.tm_isdst = 0};
    if (parse_duration(text, seconds))
        return true;
    const char *rest = strptime(text, "%Y-%m-%dT%H:%M:%S", &tm);
    if (!rest)
        return false;
    double fraction = 0;
    if (*rest == '.') {
        char *end;
        double scale = 0.1;
        for (end = (char *)(uintptr_t)rest + 1; *end >= '0' && *end <= '9'; end++, scale /= 10)
            fraction += (*end - '0') * scale;
        if (end == rest + 1)
            return false;
        rest = end;
    }
    if (*rest && strcmp(rest, "Z") != 0)
        return false;
    double age = (double)now_wall_ns / 1e9 - (double)timegm(&tm) - fraction;
    *seconds = age > 0 ? age : 0;
    return true;
}

static const struct {
    Boost__JobState__Value state;
    const char *letters, *name, *color;
} states[] = {
    {BOOST__JOB_STATE__VALUE__QUEUED, "Q", "QUEUED", "\033[33m"},
    {BOOST__JOB_STATE__VALUE__HELD, "H", "HELD", "\033[35m"},
    {BOOST__JOB_STATE__VALUE__STARTING, "S", "STARTING", "\033[36m"},
    {BOOST__JOB_STATE__VALUE__RUNNING, "R", "RUNNING", "\033[32m"},
    {BOOST__JOB_STATE__VALUE__RECOVERING, "RC", "RECOVERING", "\033[33m"},
    {BOOST__JOB_STATE__VALUE__STOPPING, "SP", "STOPPING", "\033[36m"},
    {BOOST__JOB_STATE__VALUE__COMPLETED, "CD", "COMPLETED", "\033[32m"},
    {BOOST__JOB_STATE__VALUE__FAILED, "F", "FAILED", "\033[31m"},
    {BOOST__JOB_STATE__VALUE__CANCELLED, "CA", "CANCELLED", "\033[90m"},
    {BOOST__JOB_STATE__VALUE__TIMEOUT, "TO", "TIMEOUT", "\033[31m"},
};
enum { STATES = sizeof states / sizeof *states };

const char *state_letters(Boost__JobState__Value s)
{
    return (unsigned)s < STATES ? states[s].letters : "?";
}

const char *state_name(Boost__JobState__Value s)
{
    return (unsigned)s < STATES ? states[s].name : "UNKNOWN";
}

const char *state_color(Boost__JobState__Value s)
{
    return (unsigned)s < STATES ? states[s].color : "";
}

bool state_parse(const char *text, Boost__JobState__Value *out)
{
    for (int i = 0; i < STATES; i++)
        if (!strcasecmp(text, states[i].name) || !strcasecmp(text, states[i].letters)) {
            *out = states[i].state;
            return true;
        }
    return false;
}

const char *enum_name(const ProtobufCEnumDescriptor *type, int value)
{
    const ProtobufCEnumValue *v = protobuf_c_enum_descriptor_get_value(type, value);
    return v ? v->name : "UNKNOWN";
}

const char *reason_name(Boost__Reason__Value r)
{
    return r == BOOST__REASON__VALUE__NONE ? "" : enum_name(&boost__reason__value__descriptor, (int)r);
}

/* ---- tables ---------------------------------------------------------------- */

struct cell {
    char *text;
    const char *color;
};

struct table {
    int columns;
    const char *align;
    struct cell *cells; /* the headers first */
    size_t n, cap;
};

void print_safe(FILE *out, const char *text)
{
    for (size_t left = strlen(text); left;) {
        const unsigned char *s = (const unsigned char *)text;
        size_t len = utf8_length(s, left);
        bool control = len == 1 && (*s < 0x20 || *s == 0x7f) && *s != '\n' && *s != '\t';
        bool c1 = len == 2 && s[0] == 0xc2 && s[1] < 0xa0;
        if (!len || control || c1)
            putc('?', out);
        else
            fwrite(s, 1, len, out);
        text += len ? len : 1;
        left -= len ? len : 1;
    }
}

static int columns_of(const char *text)
{
    int n = 0;
    for (const unsigned char *s = (const unsigned char *)text; *s; s++)
        n += (*s & 0xc0) != 0x80;
    return n;
}

static void add_cell(struct table *t, char *text)
{
    if (t->n == t->cap) {
        size_t cap = t->cap ? t->cap * 2 : 64;
        struct cell *cells = realloc(t->cells, cap * sizeof *cells);
        if (!cells)
            abort(); /* a command-line tool out of memory while printing */
        t->cells = cells;
        t->cap = cap;
    }
    t->cells[t->n++] = (struct cell){text, NULL};
}

struct table *table_new(int columns, const char *const *headers, const char *align)
{
    struct table *t = calloc(1, sizeof *t);
    if (!t)
        abort();
    t->columns = columns;
    t->align = align;
    for (int i = 0; i < columns; i++)
        table_cell(t, "%s", headers[i]);
    return t;
}

void table_cell(struct table *t, const char *fmt, ...)
{
    char *text = NULL;
    va_list ap;
    va_start(ap, fmt);
    if (vasprintf(&text, fmt, ap) < 0)
        abort();
    va_end(ap);
    for (char *s = text; *s; s++)
        if (*s == '\n' || *s == '\t')
            *s = ' ';
    add_cell(t, text);
}

void table_color(struct table *t, const char *escape)
{
    if (t->n)
        t->cells[t->n - 1].color = escape;
}

void table_print(struct table *t, FILE *out, bool color, int indent)
{
    int columns = t->columns;
    int *width = calloc((size_t)columns, sizeof *width);
    if (!width)
        abort();
    for (size_t i = 0; i < t->n; i++) {
        int w = columns_of(t->cells[i].text);
        if (w > width[i % (size_t)columns])
            width[i % (size_t)columns] = w;
    }
    for (size_t i = 0; i < t->n; i++) {
        int column = (int)(i % (size_t)columns);
        bool last = column == columns - 1;
        const struct cell *cell = &t->cells[i];
        int pad = width[column] - columns_of(cell->text);
        if (!column)
            fprintf(out, "%*s", indent, "");
        if (t->align[column] == 'r')
            fprintf(out, "%*s", pad, "");
        if (color && cell->color)
            fputs(cell->color, out);
        print_safe(out, cell->text);
        if (color && cell->color)
            fputs("\033[0m", out);
        if (t->align[column] == 'l' && !last)
            fprintf(out, "%*s", pad, "");
        fputs(last ? "\n" : "  ", out);
    }
    free(width);
}

void table_free(struct table *t)
{
    for (size_t i = 0; i < t->n; i++)
        free(t->cells[i].text);
    free(t->cells);
    free(t);
}

void print_line(const char *label, const char *text)
{
    if (!text || !*text)
        return;
    printf("%-12s ", label);
    print_safe(stdout, text);
    putchar('\n');
}
