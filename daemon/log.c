/* log.h */
#include "daemon/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "proto/base/clock.h"
#include "proto/base/fs.h"

enum { LOG_LINE = 2048 + CLOCK_TEXT + 96 };

static const char *const level_names[] = {"debug", "info", "warn", "error"};
static _Atomic int current_level = LOG_INFO;
static char prefix[80];

int log_level_by_name(const char *name, enum log_level *out, struct error *err)
{
    for (int i = LOG_DEBUG; i <= LOG_ERROR; i++) {
        if (!strcmp(name, level_names[i])) {
            *out = (enum log_level)i;
            return ERR_OK;
        }
    }
    error_set(err, ERR_INVALID, "unknown log level \"%s\"", name);
    return error_hint(err, "use debug, info, warn or error");
}

void log_set_level(enum log_level level)
{
    current_level = level;
}

void log_set_prefix(const char *text)
{
    snprintf(prefix, sizeof prefix, "%s%s", text, *text ? ": " : "");
}

bool log_enabled(enum log_level level)
{
    return (int)level >= current_level;
}

static void write_line(enum log_level level, const char *text)
{
    char time_text[CLOCK_TEXT], line[LOG_LINE];
    int n = snprintf(line, sizeof line - 1, "%s %-5s %s%s", clock_rfc3339(clock_wall_ns(), time_text),
                     level_names[level], prefix, text);
    size_t len = n < 0 ? 0 : (size_t)n < sizeof line - 1 ? (size_t)n : sizeof line - 2;
    for (size_t i = 0; i < len; i++) {
        if ((unsigned char)line[i] < ' ' || line[i] == 0x7f)
            line[i] = ' ';
    }
    line[len++] = '\n';
    /* A full disk or a closed terminal must not stop a daemon, and there is nowhere left to report it. */
    struct error ignored;
    if (fs_write_all(STDERR_FILENO, line, len, &ignored))
        return;
}

void log_line(enum log_level level, const char *fmt, ...)
{
    if (!log_enabled(level))
        return;
    char text[2048];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    write_line(level, text);
}

void log_error(enum log_level level, const struct error *err, const char *fmt, ...)
{
    if (!log_enabled(level))
        return;
    char text[2048];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    size_t used = n < 0 ? 0 : (size_t)n < sizeof text ? (size_t)n : sizeof text - 1;
    snprintf(text + used, sizeof text - used, "%s%s%s%s%s", used ? ": " : "", err->message, *err->hint ? " (" : "",
             err->hint, *err->hint ? ")" : "");
    write_line(level, text);
}
