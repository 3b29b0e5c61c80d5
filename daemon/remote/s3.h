/* An S3-compatible store: objects up, down, listed, deleted. Blocking; a client belongs to one thread at a time. Every
 * request is tried again with back-off where that may help (HTTP_TRIES times).
 *
 * Errors: ERR_NOT_FOUND (the object), ERR_REFUSED (access denied, wrong credentials, no such bucket), ERR_INVALID,
 * ERR_UNREACHABLE and ERR_TIMEOUT (given up after all tries), ERR_CORRUPT, ERR_CANCELLED; messages name bucket and key,
 * and what the store said. */
#ifndef BOOST_DAEMON_REMOTE_S3_H
#define BOOST_DAEMON_REMOTE_S3_H

#include "daemon/remote/credentials.h"
#include "daemon/remote/http.h"

enum { S3_URL = 1200 };
struct s3_url {
    char bucket[64];
    char key[1100]; /* without '/' before and behind; may be empty */
};
/* "s3://bucket/a/b"; ERR_INVALID says what is wrong. */
MUST_USE int s3_url_parse(const char *url, struct s3_url *out, struct error *err);

struct s3_options {
    struct http_options http;
    const char *endpoint;  /* "https://host:port"; "": the public one of the region, over https */
    const char *region;
    bool path_style;       /* https://host/bucket/key, else https://bucket.host/key */
    int64_t part_bytes;    /* 0: 8 MiB; larger where an object would have too many */
    struct s3_credentials credentials;
};

struct s3;
/* Copies the options; ca_file and stop have to outlive it. */
MUST_USE int s3_open(const struct s3_options *options, struct s3 **out, struct error *err);
void s3_close(struct s3 *s);

struct s3_object {
    int64_t bytes;
    char crc32c[16]; /* as it was given to s3_upload(), "" = not by us */
    char etag[128];
};
MUST_USE int s3_head(struct s3 *s, const struct s3_url *at, struct s3_object *out, struct error *err);
MUST_USE int s3_put(struct s3 *s, const struct s3_url *at, const void *data, size_t len, const char *crc32c,
                    struct error *err);
/* Writes the object's bytes from *from on, which is the size of the file behind fd. `expect`: its whole size, anything
 * else is ERR_CORRUPT; -1: not known. Goes on where it was cut. *from is how far it came, whatever the result. `etag`:
 * ERR_BUSY where what would be gone on with has another one; NULL or "": it may have any. */
MUST_USE int s3_get(struct s3 *s, const struct s3_url *at, int fd, int64_t *from, int64_t expect, const char *etag,
                    struct error *err);
/* The whole of a small object. */
MUST_USE int s3_get_text(struct s3 *s, const struct s3_url *at, struct buffer *out, struct error *err);
/* One that is not there is fine. */
MUST_USE int s3_delete(struct s3 *s, const struct s3_url *at, struct error *err);
/* Calls `each` with every key below the prefix; it may not use `s`, and ends the walk with an error. */
typedef int (*s3_each_fn)(void *arg, const char *key, int64_t bytes, struct error *err);
MUST_USE int s3_list(struct s3 *s, const struct s3_url *prefix, s3_each_fn each, void *arg, struct error *err);

/* Uploads the file behind fd (of `bytes`), in parts where it is larger than one. An unfinished upload of this key goes
 * on with the parts that are missing. The file is read once, whole: one that does not have this CRC-32C is ERR_CORRUPT
 * and does not become an object. An object that is there with this size and checksum is left alone. *sent counts what
 * really travelled. */
MUST_USE int s3_upload(struct s3 *s, const struct s3_url *at, int fd, int64_t bytes, uint32_t crc32c, int64_t *sent,
                       struct error *err);
/* Gives up the unfinished uploads below `prefix` whose keys do not begin with `keep` (NULL: all); *count of them. */
MUST_USE int s3_abort_uploads(struct s3 *s, const struct s3_url *prefix, const char *keep, int *count,
                              struct error *err);

#endif
