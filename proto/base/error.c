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

int error_set(struct error *err, enum error_code code, const char *fmt, ...)
{
    if (!err)
        return (int)code;
    va_list ap;
    va_start(ap, fmt);
    err->code = code;
    err->hint[0] = '\0';
    vsnprintf(err->message, sizeof err->message, fmt, ap);
    va_end(ap);
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
    va_list ap;
    va_start(ap, fmt);
    int used = vsnprintf(err->message, sizeof err->message, fmt, ap);
    va_end(ap);
    if (used >= 0 && (size_t)used < sizeof err->message)
        snprintf(err->message + used, sizeof err->message - (size_t)used, ": %s", strerror(errnum));
    err->code = code;
    err->hint[0] = '\0';
    return (int)code;
}

int error_hint(struct error *err, const char *fmt, ...)
{
    if (!err)
        return ERR_OK;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(err->hint, sizeof err->hint, fmt, ap);
    va_end(ap);
    return (int)err->code;
}

int error_context(struct error *err, const char *fmt, ...)
{
    if (!err)
        return ERR_OK;
    char old[sizeof err->message];
    memcpy(old, err->message, sizeof old);
    va_list ap;
    va_start(ap, fmt);
    int used = vsnprintf(err->message, sizeof err->message, fmt, ap);
    va_end(ap);
    if (used >= 0 && (size_t)used < sizeof err->message)
        snprintf(err->message + used, sizeof err->message - (size_t)used, ": %s", old);
    return (int)err->code;
}
