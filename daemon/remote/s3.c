/* s3.h: requests, and all that is one of them. */
#include "daemon/remote/s3.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/remote/s3_internal.h"
#include "proto/base/clock.h"

enum { PART_BYTES = 8 << 20, URL_MAX = 16 << 10, KEY_TEXT = 1100, SKEW_S = 900 };
static const char no_store_hint[] = "what answers there is no object store: set s3_endpoint of agent.conf to one";

/* ---- names ---- */

static bool bucket_name(const char *s, size_t len)
{
    for (size_t i = 0; i < len; i++) {
        bool plain = (s[i] >= 'a' && s[i] <= 'z') || (s[i] >= '0' && s[i] <= '9');
        if (!plain && (i == 0 || i + 1 == len || (s[i] != '-' && s[i] != '.')))
            return false;
    }
    return len >= 3 && len <= 63;
}

int s3_url_parse(const char *url, struct s3_url *out, struct error *err)
{
    static const char scheme[] = "s3://";
    const char *bucket = url + sizeof scheme - 1;
    if (strncmp(url, scheme, sizeof scheme - 1) != 0 || !bucket_name(bucket, strcspn(bucket, "/"))) {
        error_set(err, ERR_INVALID, "\"%.200s\" is not the URL of an object store", url);
        return error_hint(err, "write s3://bucket/prefix; a bucket is of a-z, 0-9, '-' and '.', 3 to 63 bytes");
    }
    size_t len = strcspn(bucket, "/");
    memcpy(out->bucket, bucket, len);
    out->bucket[len] = '\0';
    const char *key = bucket + len;
    while (*key == '/')
        key++;
    size_t n = strlen(key);
    while (n && key[n - 1] == '/')
        n--;
    if (n > 1024)
        return error_set(err, ERR_INVALID, "the key of %.100s... is longer than 1024 bytes", url);
    memcpy(out->key, key, n);
    out->key[n] = '\0';
    return ERR_OK;
}

/* "https://host:port" into scheme and host; a port that is the scheme's own is left out, as in the Host header. */
static int parse_endpoint(struct s3 *s, const char *endpoint, struct error *err)
{
    const char *colon = strstr(endpoint, "://");
    size_t scheme = colon ? (size_t)(colon - endpoint) : 0;
    const char *host = colon ? colon + 3 : "";
    size_t len = strcspn(host, "/?#@");
    bool http = scheme == 4 && !strncmp(endpoint, "http", 4), https = scheme == 5 && !strncmp(endpoint, "https", 5);
    if ((!http && !https) || !len || len >= sizeof s->host || host[len + strspn(host + len, "/")]) {
        error_set(err, ERR_INVALID, "s3_endpoint \"%.200s\" is not the address of an object store", endpoint);
        return error_hint(err, "write https://host or https://host:port");
    }
    snprintf(s->scheme, sizeof s->scheme, "%s", http ? "http" : "https");
    const char *own = http ? ":80" : ":443";
    size_t n = strlen(own);
    if (len > n && !strncmp(host + len - n, own, n))
        len -= n;
    memcpy(s->host, host, len);
    s->host[len] = '\0';
    return ERR_OK;
}

int s3_open(const struct s3_options *o, struct s3 **out, struct error *err)
{
    struct s3 *s = calloc(1, sizeof *s);
    if (!s)
        return error_set(err, ERR_NOMEM, "no memory for an object store");
    buffer_init(&s->text, S3_ANSWER);
    s->path_style = o->path_style;
    s->part_bytes = o->part_bytes ? o->part_bytes : PART_BYTES;
    s->credentials = o->credentials;
    snprintf(s->region, sizeof s->region, "%s", o->region && *o->region ? o->region : "us-east-1");
    int rc = ERR_OK;
    if (o->endpoint && *o->endpoint) {
        rc = parse_endpoint(s, o->endpoint, err);
    } else {
        s->amazon = true;
        snprintf(s->scheme, sizeof s->scheme, "https");
        snprintf(s->host, sizeof s->host, "s3.%s.amazonaws.com", s->region);
    }
    if (!rc)
        rc = http_open(&o->http, &s->http, err);
    if (rc)
        s3_close(s);
    else
        *out = s;
    return rc;
}

void s3_close(struct s3 *s)
{
    if (!s)
        return;
    http_close(s->http);
    buffer_free(&s->text);
    s3_credentials_wipe(&s->credentials);
    free(s);
}

struct xml_span s3_answer(const struct s3 *s)
{
    const char *text = s->text.data ? (const char *)s->text.data : "";
    return (struct xml_span){text, text + s->text.len};
}

/* ---- one request ---- */

struct signed_request {
    struct buffer url, authorization;
    char lines[6][4200];
    const char *headers[6];
    size_t n;
};

static int add_header(struct signed_request *r, const char *name, const char *value)
{
    int used = snprintf(r->lines[r->n], sizeof r->lines[0], "%s: %s", name, value);
    r->headers[r->n] = r->lines[r->n];
    r->n++;
    return used < 0 || (size_t)used >= sizeof r->lines[0] ? ERR_INVALID : ERR_OK;
}

static int write_url(const struct s3 *s, const struct s3_url *at, const struct sigv4_pair *query, size_t n,
                     struct buffer *url, char host[400], struct buffer *path)
{
    snprintf(host, 400, "%s%s%s", s->path_style ? "" : at->bucket, s->path_style ? "" : ".", s->host);
    if (s->path_style)
        buffer_printf(path, "/%s", at->bucket);
    if (!s->path_style || *at->key)
        buffer_append_str(path, "/");
    int rc = sigv4_encode(path, at->key, true);
    buffer_printf(url, "%s://%s%s", s->scheme, host, path->data ? (char *)path->data : "");
    if (n)
        buffer_append_str(url, "?");
    if (!rc && n)
        rc = sigv4_query(url, query, n);
    return rc || url->failed || path->failed ? ERR_NOMEM : ERR_OK;
}

/* Headers are signed in the order of their names. */
static int sign(struct s3 *s, const struct s3_url *at, const struct sigv4_pair *query, size_t n_query,
                const char *crc32c, const struct http_call *call, struct signed_request *r, struct error *err)
{
    char hash[SIGV4_HASH], date[SIGV4_DATE], host[400];
    struct sigv4_pair headers[6];
    struct buffer path;
    size_t n = 0;
    buffer_init(&path, URL_MAX);
    buffer_clear(&r->url);
    buffer_clear(&r->authorization);
    r->n = 0;
    sigv4_hash(call->body, call->body_len, hash);
    sigv4_date(clock_wall_ns() / NS_PER_S, date);
    int rc = write_url(s, at, query, n_query, &r->url, host, &path);
    headers[n++] = (struct sigv4_pair){"host", host};
    headers[n++] = (struct sigv4_pair){"x-amz-content-sha256", hash};
    headers[n++] = (struct sigv4_pair){"x-amz-date", date};
    if (crc32c && *crc32c)
        headers[n++] = (struct sigv4_pair){"x-amz-meta-boost-crc32c", crc32c};
    if (*s->credentials.token)
        headers[n++] = (struct sigv4_pair){"x-amz-security-token", s->credentials.token};
    for (size_t i = 1; i < n && !rc; i++)
        rc = add_header(r, headers[i].name, headers[i].value);
    struct sigv4_request request = {
        .method = call->method, .path = (char *)path.data, .query = query, .n_query = n_query, .headers = headers,
        .n_headers = n, .payload_hash = hash, .date = date, .region = s->region, .service = "s3",
        .access_key = s->credentials.access_key, .secret_key = s->credentials.secret_key};
    if (!rc)
        rc = sigv4_authorization(&request, &r->authorization, err);
    else
        rc = error_set(err, (enum error_code)rc, "a request to the object store cannot be made");
    if (!rc)
        rc = add_header(r, "Authorization", (char *)r->authorization.data);
    buffer_free(&path);
    return rc;
}

/* Of the bucket, as a refused request was told; "": not. */
static void region_told(const struct s3 *s, const struct http_call *call, char out[64])
{
    snprintf(out, 64, "%s", call->region);
    if (!*out && !xml_text(s3_answer(s), "Region", out, 64))
        out[0] = '\0';
    if (out[strspn(out, "abcdefghijklmnopqrstuvwxyz0123456789-")])
        out[0] = '\0';
}

/* The same request may do under the bucket's own region. */
static bool learn_region(struct s3 *s, const struct http_call *call)
{
    char region[64];
    bool moved = call->status == 301 || call->status == 307;
    region_told(s, call, region);
    if (s->region_learnt || !*region || !strcmp(region, s->region) || (call->status != 400 && !(moved && s->amazon)))
        return false;
    s->region_learnt = true;
    snprintf(s->region, sizeof s->region, "%s", region);
    if (s->amazon)
        snprintf(s->host, sizeof s->host, "s3.%s.amazonaws.com", s->region);
    return true;
}

/* A bucket that is not there says nothing about what is in it. */
static bool no_bucket(const struct s3_url *at, const struct http_call *call, const char *code)
{
    return call->status == 404 && (!strcmp(code, "NoSuchBucket") || !*at->key);
}

/* Nor does a server that is no object store: those say why. To HEAD nothing can be said. */
static bool no_store(const struct http_call *call, const char *code)
{
    return call->status == 404 && !*code && strcmp(call->method, "HEAD") != 0;
}

static void hint_of_refusal(const struct s3 *s, const struct s3_url *at, const struct http_call *call, const char *code,
                            struct error *err)
{
    char region[64];
    int64_t ahead = call->date_s < 0 ? 0 : clock_wall_ns() / NS_PER_S - call->date_s;
    bool skewed = ahead > SKEW_S || ahead < -SKEW_S;
    int status = call->status;
    region_told(s, call, region);
    if (!strcmp(code, "RequestTimeTooSkewed") || ((status == 400 || status == 403) && skewed))
        error_hint(err, "this machine's clock is %" PRId64 " s %s the store's: set it", ahead < 0 ? -ahead : ahead,
                   ahead < 0 ? "behind" : "ahead of");
    else if (*region && (status == 400 || status == 301 || status == 307))
        error_hint(err, "set s3_region of agent.conf to %s, and s3_endpoint to an address there", region);
    else if (status == 301 || status == 307)
        error_hint(err, "set s3_endpoint and s3_region of agent.conf to the bucket's");
    else if (status == 401 || status == 403)
        error_hint(err, "check the keys in the file of s3_credentials, and what they may do with this bucket");
    else if (no_bucket(at, call, code))
        error_hint(err, "make the bucket %s, or set s3_endpoint and s3_region of agent.conf to where it is",
                   at->bucket);
    else if (no_store(call, code))
        error_hint(err, "%s", no_store_hint);
}

/* What the store said, as an error. Only code and message of its answer: others repeat parts of the request. */
static int refusal(const struct s3 *s, const struct s3_url *at, const struct http_call *call, struct error *err)
{
    int status = call->status;
    char code[80] = "", message[200] = "";
    xml_text(s3_answer(s), "Code", code, sizeof code);
    xml_text(s3_answer(s), "Message", message, sizeof message);
    for (char *p = message; *p; p++)
        if ((unsigned char)*p < ' ' || *p == 127)
            *p = ' ';
    bool elsewhere = no_bucket(at, call, code) || no_store(call, code);
    enum error_code rc = elsewhere                        ? ERR_REFUSED
                         : status == 404                  ? ERR_NOT_FOUND
                         : status == 401 || status == 403 ? ERR_REFUSED
                         : http_transient(ERR_OK, status) ? ERR_UNREACHABLE
                                                          : ERR_INVALID;
    error_set(err, rc, "status %d%s%s%s%s", status, *code ? " " : "", code, *message ? ": " : "", message);
    hint_of_refusal(s, at, call, code, err);
    return rc;
}

int s3_answer_of(const struct s3 *s, const char *name, struct xml_span *out, struct error *err)
{
    struct xml_span all = s3_answer(s);
    if (xml_next(&all, name, out))
        return ERR_OK;
    error_set(err, ERR_REFUSED, "the answer is no %s", name);
    return error_hint(err, "%s", no_store_hint);
}

int s3_request(struct s3 *s, const struct s3_url *at, const struct sigv4_pair *query, size_t n_query,
               const char *crc32c, struct http_call *call, struct error *err)
{
    struct signed_request *r = calloc(1, sizeof *r);
    int rc = r ? ERR_OK : error_set(err, ERR_NOMEM, "no memory for a request");
    if (r) {
        buffer_init(&r->url, URL_MAX);
        buffer_init(&r->authorization, URL_MAX);
    }
    for (int tries = 1; !rc; tries++) {
        int64_t before = call->at;
        buffer_clear(&s->text);
        rc = sign(s, at, query, n_query, crc32c, call, r, err);
        if (rc)
            break;
        call->url = (char *)r->url.data;
        call->headers = r->headers;
        call->n_headers = r->n;
        call->text = &s->text;
        rc = http_do(s->http, call, err);
        if (!rc && call->status >= 200 && call->status < 300)
            break;
        bool again = http_transient(rc, call->status);
        if (!rc && learn_region(s, call))
            continue;
        if (!rc)
            rc = refusal(s, at, call, err);
        if (call->at - before >= HTTP_CAME_ON)
            tries = 0;
        if (!again || tries >= http_tries(s->http))
            break;
        if (!http_pause(s->http, http_backoff_ms(tries, call->retry_after_s)))
            rc = error_set(err, ERR_CANCELLED, "the agent is ending");
        else
            rc = ERR_OK;
    }
    if (r) {
        buffer_free(&r->url);
        buffer_free(&r->authorization);
    }
    free(r);
    return rc ? error_context(err, "%s s3://%s/%s", call->method, at->bucket, at->key) : ERR_OK;
}

/* ---- objects ---- */

int s3_head(struct s3 *s, const struct s3_url *at, struct s3_object *out, struct error *err)
{
    struct http_call call = {.method = "HEAD", .fd = -1};
    int rc = s3_request(s, at, NULL, 0, NULL, &call, err);
    if (rc)
        return rc;
    out->bytes = call.length;
    memcpy(out->crc32c, call.crc32c, sizeof out->crc32c);
    memcpy(out->etag, call.etag, sizeof out->etag);
    return ERR_OK;
}

int s3_put(struct s3 *s, const struct s3_url *at, const void *data, size_t len, const char *crc32c, struct error *err)
{
    struct http_call call = {.method = "PUT", .fd = -1, .body = data, .body_len = len, .counts = true};
    return s3_request(s, at, NULL, 0, crc32c, &call, err);
}

int s3_get(struct s3 *s, const struct s3_url *at, int fd, int64_t *from, int64_t expect, const char *etag,
           struct error *err)
{
    struct http_call call = {.method = "GET", .fd = fd, .at = *from, .most = expect < 0 ? INT64_MAX : expect,
                             .only_etag = etag};
    int rc = ERR_OK;
    if (expect < 0 || *from < expect)
        rc = s3_request(s, at, NULL, 0, NULL, &call, err);
    *from = call.at;
    if (!rc && expect >= 0 && call.at != expect)
        rc = error_set(err, ERR_CORRUPT, "s3://%s/%s has %" PRId64 " bytes, not %" PRId64, at->bucket, at->key, call.at,
                       expect);
    return rc;
}

int s3_get_text(struct s3 *s, const struct s3_url *at, struct buffer *out, struct error *err)
{
    struct http_call call = {.method = "GET", .fd = -1};
    int rc = s3_request(s, at, NULL, 0, NULL, &call, err);
    if (!rc && buffer_append(out, s->text.data, s->text.len))
        rc = error_set(err, ERR_NOMEM, "s3://%s/%s is too large", at->bucket, at->key);
    return rc;
}

int s3_delete(struct s3 *s, const struct s3_url *at, struct error *err)
{
    struct http_call call = {.method = "DELETE", .fd = -1};
    int rc = s3_request(s, at, NULL, 0, NULL, &call, err);
    return rc == ERR_NOT_FOUND ? ERR_OK : rc;
}

int s3_list(struct s3 *s, const struct s3_url *prefix, s3_each_fn each, void *arg, struct error *err)
{
    struct s3_url bucket = *prefix;
    char token[1100] = "", more[8] = "", key[KEY_TEXT];
    int rc = ERR_OK;
    bucket.key[0] = '\0';
    do {
        struct sigv4_pair query[3] = {{"list-type", "2"}, {"prefix", prefix->key}, {"continuation-token", token}};
        struct http_call call = {.method = "GET", .fd = -1};
        struct xml_span at, one;
        rc = s3_request(s, &bucket, query, *token ? 3 : 2, NULL, &call, err);
        if (!rc && (rc = s3_answer_of(s, "ListBucketResult", &at, err)))
            rc = error_context(err, "GET s3://%s/", prefix->bucket);
        if (rc)
            return rc;
        while (!rc && xml_next(&at, "Contents", &one)) {
            if (xml_text(one, "Key", key, sizeof key))
                rc = each(arg, key, xml_number(one, "Size"), err);
        }
        more[0] = '\0';
        xml_text(s3_answer(s), "IsTruncated", more, sizeof more);
        if (strcmp(more, "true") != 0 || !xml_text(s3_answer(s), "NextContinuationToken", token, sizeof token))
            more[0] = '\0';
    } while (!rc && *more);
    return rc;
}
