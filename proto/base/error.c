/* error.h: filling, wrapping and naming errors. */
#include "proto/base/error.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

static const char *const code_names[ERR_CODE_COUNT] = {
    "OK",          "INVALID",   "USAGE",   "NOT_FOUND", "AMBIGUOUS", "REFUSED", "UNREACHABLE",
    "TIMEOUT",     "IO",        "NOSPACE", "CORRUPT",   "PROTOCOL",  "UNSUPPORTED", "PEER_LOST",
    "DEVICE",      "NOMEM",     "CANCELLED", "BUSY",    "INTERNAL",
};

const char *error_code_name(enum error_code code)
{
    if ((unsigned)code >= ERR_CODE_COUNT)
        return "UNKNOWN";
    return code_names[code];
}

void error_clear(struct error *err)
{
    if (!err)
        return;
    err->code = ERR_OK;
    err->message[0] = '\0';
    err->hint[0] = '\0';
}

/* Texts are made beside the error and put in last: an argument may be its own message or hint. */
int error_set(struct error *err, enum error_code code, const char *fmt, ...)
{
    if (!err)
        return (int)code;
    char text[sizeof err->message] = "";
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    err->code = code;
    err->hint[0] = '\0';
    memcpy(err->message, text, sizeof text);
    return (int)code;
}

static enum error_code code_of_errno(int errnum)
{
    switch (errnum) {
    case ENOSPC:
    case EDQUOT:
        return ERR_NOSPACE;
    case ENOENT:
        return ERR_NOT_FOUND;
    case ENOMEM:
        return ERR_NOMEM;
    default:
        return ERR_IO;
    }
}

int error_errno(struct error *err, int errnum, const char *fmt, ...)
{
    enum error_code code = code_of_errno(errnum);
    if (!err)
        return (int)code;
    char text[sizeof err->message] = "";
    va_list ap;
    va_start(ap, fmt);
    int used = vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (used >= 0 && (size_t)used < sizeof text)
        snprintf(text + used, sizeof text - (size_t)used, ": %s", strerror(errnum));
    memcpy(err->message, text, sizeof text);
    err->code = code;
    err->hint[0] = '\0';
    return (int)code;
}

int error_hint(struct error *err, const char *fmt, ...)
{
    if (!err)
        return ERR_OK;
    char text[sizeof err->hint] = "";
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    memcpy(err->hint, text, sizeof text);
    return (int)err->code;
}

int error_context(struct error *err, const char *fmt, ...)
{
    if (!err)
        return ERR_OK;
    char text[sizeof err->message] = "";
    va_list ap;
    va_start(ap, fmt);
    int used = vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (used >= 0 && (size_t)used < sizeof text)
        snprintf(text + used, sizeof text - (size_t)used, ": %s", err->message);
    memcpy(err->message, text, sizeof text);
    return (int)err->code;
}
