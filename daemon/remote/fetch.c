/* fetch.h */
#include "daemon/remote/fetch.h"

#include <inttypes.h>
#include <string.h>

static int refusal(int status, struct error *err)
{
    enum error_code rc = status == 404 || status == 410   ? ERR_NOT_FOUND
                         : status == 401 || status == 403 ? ERR_REFUSED
                         : http_transient(ERR_OK, status) ? ERR_UNREACHABLE
                                                          : ERR_INVALID;
    error_set(err, rc, "status %d%s", status,
              rc == ERR_NOT_FOUND ? ", there is no such file"
              : rc == ERR_REFUSED ? ", access is refused"
                                  : "");
    return rc;
}

/* It has told of more bytes than it has: Content-Length of its HEAD, or the file was cut since. */
static int not_so_long(int64_t has, struct error *err)
{
    error_set(err, ERR_INVALID, "the file ends at byte %" PRId64 " (status 416), and the server says that it is longer",
              has);
    return error_hint(err, "mend the Content-Length that it answers HEAD with, or the file");
}

/* Again and again where that may help. Any status but 2xx is an error, and *status has it. */
static int request(const struct fetch_source *f, struct http_call *call, struct error *err)
{
    int rc;
    call->url = f->url;
    call->redirects = true;
    for (int tries = 1;; tries++) {
        int64_t before = call->at;
        if (call->text)
            buffer_clear(call->text);
        rc = http_do(f->http, call, err);
        if (!rc && call->status >= 200 && call->status < 300)
            return ERR_OK;
        bool again = http_transient(rc, call->status);
        if (!rc && call->status == 416 && before > 0)
            rc = not_so_long(before, err);
        else if (!rc)
            rc = refusal(call->status, err);
        if (call->at - before >= HTTP_CAME_ON)
            tries = 0;
        if (!again || tries >= http_tries(f->http))
            return rc;
        if (!http_pause(f->http, http_backoff_ms(tries, call->retry_after_s)))
            return error_set(err, ERR_CANCELLED, "the agent is ending");
    }
}

static int look_web(const struct fetch_source *f, struct fetch_info *out, struct error *err)
{
    struct http_call call = {.method = "HEAD", .fd = -1};
    int rc = request(f, &call, err);
    if (rc && (call.status == 405 || call.status == 501))
        return ERR_OK; /* a server without HEAD: what GET brings is what there is */
    if (!rc) {
        out->bytes = call.length;
        memcpy(out->etag, call.etag, sizeof out->etag);
    }
    return rc;
}

int fetch_look(const struct fetch_source *f, struct fetch_info *out, struct error *err)
{
    struct s3_object object;
    struct s3_url at;
    *out = (struct fetch_info){.bytes = -1};
    int rc = ERR_OK;
    if (!f->s3) {
        rc = look_web(f, out, err);
    } else if (!(rc = s3_url_parse(f->url, &at, err)) && !(rc = s3_head(f->s3, &at, &object, err))) {
        out->bytes = object.bytes;
        memcpy(out->etag, object.etag, sizeof out->etag);
    }
    if (out->etag[0] != '"')
        out->etag[0] = '\0';
    return rc;
}

int fetch_rest(const struct fetch_source *f, int fd, int64_t *from, int64_t bytes, int64_t most, const char *etag,
               struct error *err)
{
    struct s3_url at;
    int rc = f->s3 ? s3_url_parse(f->url, &at, err) : ERR_OK;
    if (rc)
        return rc;
    if (f->s3)
        return s3_get(f->s3, &at, fd, from, bytes, etag, err);
    struct http_call call = {.method = "GET", .fd = fd, .at = *from, .most = bytes < 0 ? most : bytes,
                             .only_etag = etag};
    if (bytes < 0 || *from < bytes)
        rc = request(f, &call, err);
    *from = call.at;
    if (!rc && bytes >= 0 && call.at != bytes)
        rc = error_set(err, ERR_CORRUPT, "it has %" PRId64 " bytes, not %" PRId64, call.at, bytes);
    return rc;
}

int fetch_text(const struct fetch_source *f, struct buffer *out, struct error *err)
{
    struct s3_url at;
    if (!f->s3) {
        struct http_call call = {.method = "GET", .fd = -1, .text = out};
        return request(f, &call, err);
    }
    int rc = s3_url_parse(f->url, &at, err);
    return rc ? rc : s3_get_text(f->s3, &at, out, err);
}
