/* What s3.c and s3_upload.c share. */
#ifndef BOOST_DAEMON_REMOTE_S3_INTERNAL_H
#define BOOST_DAEMON_REMOTE_S3_INTERNAL_H

#include "daemon/remote/s3.h"
#include "daemon/remote/sigv4.h"
#include "daemon/remote/xml.h"

/* Of an answer that goes into no file: a page of a list, or an object that is read whole, as a manifest is. */
enum { S3_ANSWER = 16 << 20 };

struct s3 {
    struct http *http;
    struct buffer text; /* of the last answer that went into no file */
    char scheme[8], host[300], region[64];
    bool path_style;
    bool amazon;        /* no endpoint was given: host goes by region */
    bool region_learnt; /* from the store, once */
    int64_t part_bytes;
    struct s3_credentials credentials;
};

/* One request, again and again where that may help. `call` has method, and fd with its place or body; the rest is
 * filled in. Any status but 2xx is an error. `crc32c`: becomes the object's, "" or NULL: none. */
MUST_USE int s3_request(struct s3 *s, const struct s3_url *at, const struct sigv4_pair *query, size_t n_query,
                        const char *crc32c, struct http_call *call, struct error *err);
/* Of s->text. */
struct xml_span s3_answer(const struct s3 *s);
/* The content of its outermost element. ERR_REFUSED: it is not called so, whoever has answered. */
MUST_USE int s3_answer_of(const struct s3 *s, const char *name, struct xml_span *out, struct error *err);

#endif
