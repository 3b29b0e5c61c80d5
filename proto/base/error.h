/* One error type for the whole product: what went wrong, and how to mend it.
 *
 * A function that can fail returns 0 or an enum error_code and fills *err where
 * the fault is; callers add context with error_context() on the way up.
 * `message` says what and where, `hint` how to mend it (may be empty).
 * Every function here accepts err == NULL (the caller only wants the code), and arguments that point into *err. */
#ifndef BOOST_PROTO_BASE_ERROR_H
#define BOOST_PROTO_BASE_ERROR_H

#include <stdarg.h>

#define MUST_USE __attribute__((warn_unused_result))
#define PRINTF_LIKE(fmt, args) __attribute__((format(printf, fmt, args)))

enum error_code {
    ERR_OK = 0,
    ERR_INVALID,     /* input breaks a rule: spec, config, argument          */
    ERR_USAGE,       /* the command line itself is wrong                     */
    ERR_NOT_FOUND,   /* no such job, node, file                              */
    ERR_AMBIGUOUS,   /* a name prefix that fits several                      */
    ERR_REFUSED,     /* valid, but not now or not by this user               */
    ERR_UNREACHABLE, /* no daemon, no agent at that address                  */
    ERR_TIMEOUT,     /* a named wait ran past its deadline                   */
    ERR_IO,          /* the operating system said no                         */
    ERR_NOSPACE,     /* ENOSPC, EDQUOT                                       */
    ERR_CORRUPT,     /* a checksum, magic or structure does not hold         */
    ERR_PROTOCOL,    /* a peer sent something the wire contract forbids      */
    ERR_UNSUPPORTED, /* a thing that this build does not have                */
    ERR_PEER_LOST,   /* another rank is gone; never the first cause          */
    ERR_DEVICE,      /* accelerator or driver fault                          */
    ERR_NOMEM,
    ERR_CANCELLED,
    ERR_BUSY,     /* held by another process, e.g. a state directory        */
    ERR_INTERNAL, /* a broken invariant: a bug of ours                      */
    ERR_CODE_COUNT
};

struct error {
    enum error_code code;
    char message[768];
    char hint[384];
};

/* Sets code and message, clears the hint; returns code, so that
 * `return error_set(err, ERR_IO, ...)` is the usual last line. */
int error_set(struct error *err, enum error_code code, const char *fmt, ...) PRINTF_LIKE(3, 4);
/* As error_set, from an errno value: appends ": strerror", maps ENOSPC/EDQUOT
 * to ERR_NOSPACE, ENOENT to ERR_NOT_FOUND, ENOMEM to ERR_NOMEM, else ERR_IO. */
int error_errno(struct error *err, int errnum, const char *fmt, ...) PRINTF_LIKE(3, 4);
/* Sets the mend. Returns err->code. */
int error_hint(struct error *err, const char *fmt, ...) PRINTF_LIKE(2, 3);
/* Puts "context: " in front of the message. Returns err->code. */
int error_context(struct error *err, const char *fmt, ...) PRINTF_LIKE(2, 3);
void error_clear(struct error *err);
/* Stable upper-case name without the prefix ("INVALID"), for logs and the wire. */
const char *error_code_name(enum error_code code);

#endif
