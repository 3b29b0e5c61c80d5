/* One file of a web server or an object store, by its URL: http://, https://, s3://. Blocking. Errors as of s3.h. */
#ifndef BOOST_DAEMON_REMOTE_FETCH_H
#define BOOST_DAEMON_REMOTE_FETCH_H

#include "daemon/remote/http.h"
#include "daemon/remote/s3.h"

struct fetch_source {
    const char *url; /* without a fragment */
    struct http *http;
    struct s3 *s3;   /* for s3:// alone    */
};
struct fetch_info {
    int64_t bytes;  /* -1: not told                                              */
    char etag[128]; /* of exactly this content; "": not told, or a weak one      */
};

MUST_USE int fetch_look(const struct fetch_source *f, struct fetch_info *out, struct error *err);
/* Writes the bytes from *from on, which is the size of the file behind fd. `bytes`: the whole size, -1: not known, then
 * `most` at most. *from is how far it came, whatever the result. ERR_BUSY: what is there has another ETag by now. */
MUST_USE int fetch_rest(const struct fetch_source *f, int fd, int64_t *from, int64_t bytes, int64_t most,
                        const char *etag, struct error *err);
/* The whole of a small file, into `out`, which is empty. */
MUST_USE int fetch_text(const struct fetch_source *f, struct buffer *out, struct error *err);

#endif
