/* AWS Signature Version 4, the header form ("Signature Version 4 signing process" of AWS's documentation). Pure: the
 * time is the caller's. Any thread. */
#ifndef BOOST_DAEMON_REMOTE_SIGV4_H
#define BOOST_DAEMON_REMOTE_SIGV4_H

#include <stdbool.h>
#include <stddef.h>

#include "proto/base/buffer.h"
#include "proto/base/error.h"

enum { SIGV4_HASH = 65 };  /* hex digits of a SHA-256, and a NUL */
enum { SIGV4_DATE = 17 };  /* "20150830T123600Z"                 */

struct sigv4_pair {
    const char *name, *value;
};

struct sigv4_request {
    const char *method;
    const char *path;                 /* encoded already, begins with '/' */
    const struct sigv4_pair *query;   /* not encoded, in any order        */
    size_t n_query;
    const struct sigv4_pair *headers; /* those to sign, names in lower case and ascending; host among them */
    size_t n_headers;
    const char *payload_hash;         /* hex SHA-256 of the body          */
    const char *date;                 /* SIGV4_DATE, UTC                  */
    const char *region, *service;
    const char *access_key, *secret_key;
};

void sigv4_hash(const void *data, size_t len, char out[SIGV4_HASH]);
void sigv4_date(long long unix_s, char out[SIGV4_DATE]);
/* Percent-encodes all but A-Z a-z 0-9 - . _ ~ (and '/', where `path`). ERR_NOMEM: out->max. */
MUST_USE int sigv4_encode(struct buffer *out, const char *text, bool path);
/* "a=1&b=" encoded and in the order that is signed; the same text belongs into the URL. */
MUST_USE int sigv4_query(struct buffer *out, const struct sigv4_pair *query, size_t n);
/* Appends the value of the Authorization header. */
MUST_USE int sigv4_authorization(const struct sigv4_request *r, struct buffer *out, struct error *err);

#endif
