/* http.h */
#include "daemon/remote/http.h"

#include <curl/curl.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "proto/base/clock.h"
#include "proto/base/fs.h"

enum { PAUSE_MS = 50, BACKOFF_MS = 200, BACKOFF_MAX_MS = 20000, RETRY_AFTER_MAX_S = 60, REDIRECTS = 5 };
enum { LEAST_BYTES_S = 1024, BODY_SMALL = 64 << 10 }; /* what a file has to bring, and what is no file */

struct http {
    CURL *curl;
    struct http_options options;
    struct http_call *call;
    size_t sent;          /* of the body */
    int64_t moved, since; /* bytes both ways, and when that last changed */
    int rc;               /* why the transfer was broken off, with `err` */
    struct error err;
    bool stalled, slow;
    int64_t window_moved, window_since; /* the same, when the speed was last looked at */
    bool first; /* byte of the answer's body */
    char said[CURL_ERROR_SIZE]; /* why curl could not; "": only its code tells */
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static CURLcode global;

static void start_curl(void)
{
    global = curl_global_init(CURL_GLOBAL_DEFAULT);
}

void http_progress_total(struct http_progress *p, int64_t bytes)
{
    if (p)
        atomic_store(&p->total, bytes);
}

void http_progress_passed(struct http_progress *p, int64_t bytes)
{
    if (!p)
        return;
    p->before += bytes;
    atomic_store(&p->done, p->before);
}

void http_progress_at(const struct http *h, int64_t at)
{
    struct http_progress *p = h->options.progress;
    if (p)
        atomic_store(&p->done, p->before + at);
}

int http_tries(const struct http *h)
{
    return h->options.tries > 0 ? h->options.tries : HTTP_TRIES;
}

bool http_stopped(const struct http *h)
{
    return h->options.stop && atomic_load(h->options.stop);
}

bool http_pause(const struct http *h, int64_t ms)
{
    for (int64_t end = clock_mono_ns() + ms * NS_PER_MS; !http_stopped(h);) {
        int left = clock_left_ms(end), part = left < PAUSE_MS ? left : PAUSE_MS;
        if (!left)
            return true;
        nanosleep(&(struct timespec){.tv_nsec = part * NS_PER_MS}, NULL);
    }
    return false;
}

/* ---- what curl calls ---- */

static size_t give_body(char *to, size_t size, size_t n, void *arg)
{
    struct http *h = arg;
    size_t left = h->call->body_len - h->sent, some = size * n < left ? size * n : left;
    if (some)
        memcpy(to, (const char *)h->call->body + h->sent, some);
    h->sent += some;
    if (h->call->counts)
        http_progress_at(h, h->call->body_at + (int64_t)h->sent);
    return some;
}

static int again_from(void *arg, curl_off_t offset, int origin)
{
    struct http *h = arg;
    if (origin != SEEK_SET || offset < 0 || (size_t)offset > h->call->body_len)
        return CURL_SEEKFUNC_FAIL;
    h->sent = (size_t)offset;
    return CURL_SEEKFUNC_OK;
}

/* Where the first byte that comes belongs. */
static int place(struct http *h, long status)
{
    struct http_call *c = h->call;
    if (status == 200 && c->at > 0) {
        c->at = 0;
        if (ftruncate(c->fd, 0) < 0)
            return error_errno(&h->err, errno, "the part that came before cannot be dropped");
    }
    if (status == 206 && c->only_etag && *c->only_etag && *c->etag && strcmp(c->only_etag, c->etag) != 0)
        return error_set(&h->err, ERR_BUSY, "the file was changed while it was fetched");
    if (status == 206 && c->from != c->at)
        return error_set(&h->err, ERR_CORRUPT, "the server sent bytes from %lld on, not from %lld", (long long)c->from,
                         (long long)c->at);
    return lseek(c->fd, c->at, SEEK_SET) < 0 ? error_errno(&h->err, errno, "the file cannot be gone on with") : ERR_OK;
}

static size_t take(char *data, size_t size, size_t n, void *arg)
{
    struct http *h = arg;
    struct http_call *c = h->call;
    long status = 0;
    size_t len = size * n;
    curl_easy_getinfo(h->curl, CURLINFO_RESPONSE_CODE, &status);
    if (c->fd < 0 || (status != 200 && status != 206)) {
        if (c->text && buffer_append(c->text, data, len) && status < 300)
            h->rc = error_set(&h->err, ERR_CORRUPT, "the answer is longer than %zu bytes", c->text->max);
        return h->rc ? 0 : len;
    }
    if (h->first)
        h->rc = place(h, status);
    h->first = false;
    if (!h->rc && c->at + (int64_t)len > c->most)
        h->rc = error_set(&h->err, ERR_CORRUPT, "more came than the %lld bytes that were expected", (long long)c->most);
    else if (!h->rc)
        h->rc = fs_write_all(c->fd, data, len, &h->err);
    c->at += h->rc ? 0 : (int64_t)len;
    http_progress_at(h, c->at);
    return h->rc ? 0 : len;
}

static int64_t number(const char *text)
{
    char *end;
    errno = 0;
    long long v = strtoll(text, &end, 10);
    return errno || end == text || v < 0 ? -1 : v;
}

/* "120", or a date. */
static int64_t seconds_from_now(const char *text)
{
    int64_t s = number(text);
    time_t then = s < 0 ? curl_getdate(text, NULL) : -1;
    return then < 0 ? s : (int64_t)then - clock_wall_ns() / NS_PER_S;
}

static void keep(char *out, size_t cap, const char *value, size_t len)
{
    if (len < cap) {
        memcpy(out, value, len);
        out[len] = '\0';
    }
}

static size_t header(char *line, size_t size, size_t n, void *arg)
{
    struct http_call *c = ((struct http *)arg)->call;
    size_t len = size * n, end = len;
    char text[256];
    const char *colon = memchr(line, ':', len);
    if (len > 5 && !strncmp(line, "HTTP/", 5)) { /* of another answer: what came before is void */
        c->length = c->total = c->from = c->retry_after_s = -1;
        c->etag[0] = c->crc32c[0] = '\0';
    }
    if (!colon)
        return len;
    size_t name = (size_t)(colon - line), at = name + 1;
    while (at < len && (line[at] == ' ' || line[at] == '\t'))
        at++;
    while (end > at && (line[end - 1] == '\r' || line[end - 1] == '\n' || line[end - 1] == ' '))
        end--;
    text[0] = '\0';
    keep(text, sizeof text, line + at, end - at);
#define IS(x) (name == sizeof(x) - 1 && !strncasecmp(line, x, name))
    if (IS("content-length"))
        c->length = number(text);
    else if (IS("retry-after"))
        c->retry_after_s = seconds_from_now(text);
    else if (IS("date"))
        c->date_s = (int64_t)curl_getdate(text, NULL);
    else if (IS("x-amz-bucket-region"))
        keep(c->region, sizeof c->region, text, strlen(text));
    else if (IS("etag"))
        keep(c->etag, sizeof c->etag, text, strlen(text));
    else if (IS("x-amz-meta-boost-crc32c"))
        keep(c->crc32c, sizeof c->crc32c, text, strlen(text));
    else if (IS("content-range") && !strncasecmp(text, "bytes ", 6)) {
        const char *slash = strchr(text, '/');
        c->from = number(text + 6);
        c->total = slash ? number(slash + 1) : -1;
    }
#undef IS
    return len;
}

static bool moves_file(const struct http_call *c)
{
    return c->fd >= 0 || (c->counts && c->body_len > BODY_SMALL);
}

static int64_t least_bytes(const struct http *h)
{
    return (int64_t)LEAST_BYTES_S * h->options.stall_ms / 1000;
}

static int watch(void *arg, curl_off_t down_all, curl_off_t down, curl_off_t up_all, curl_off_t up)
{
    struct http *h = arg;
    (void)down_all;
    (void)up_all;
    int64_t now = clock_mono_ns();
    if (down + up != h->moved) {
        h->moved = down + up;
        h->since = now;
    }
    int64_t window = h->options.stall_ms * NS_PER_MS;
    if (now - h->window_since > window) { /* what drips would else go on for ever */
        h->slow = h->options.stall_ms > 0 && moves_file(h->call) && down + up - h->window_moved < least_bytes(h);
        h->window_since = now;
        h->window_moved = down + up;
    }
    h->stalled = h->options.stall_ms > 0 && now - h->since > window;
    return h->stalled || h->slow || http_stopped(h);
}

/* ---- a call ---- */

static int failed(struct http *h, CURLcode code, struct error *err)
{
    const char *said = *h->said ? h->said : curl_easy_strerror(code);
    if (h->rc) {
        if (err)
            *err = h->err;
        return h->rc;
    }
    if (http_stopped(h))
        return error_set(err, ERR_CANCELLED, "the agent is ending");
    if (h->stalled)
        return error_set(err, ERR_TIMEOUT, "no byte moved for %d ms", h->options.stall_ms);
    if (h->slow)
        return error_set(err, ERR_TIMEOUT, "less than %d bytes a second came for %d ms", LEAST_BYTES_S,
                         h->options.stall_ms);
    if (code == CURLE_UNSUPPORTED_PROTOCOL && !strncmp(h->call->url, "https://", 8)) {
        error_set(err, ERR_INVALID, "the server sends on to an address that is not https");
        return error_hint(err, "name the address itself, if what anybody on the way may change will do");
    }
    switch (code) {
    case CURLE_OPERATION_TIMEDOUT:
        return error_set(err, ERR_TIMEOUT, "%s", said);
    case CURLE_URL_MALFORMAT:
    case CURLE_UNSUPPORTED_PROTOCOL:
    case CURLE_TOO_MANY_REDIRECTS:
        return error_set(err, ERR_INVALID, "%s", said);
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CACERT_BADFILE:
        error_set(err, ERR_INVALID, "%s", said);
        return error_hint(err, "name the certificate of its authority in s3_ca of agent.conf, or mend the server's");
    case CURLE_OUT_OF_MEMORY:
        return error_set(err, ERR_NOMEM, "%s", said);
    default:
        return error_set(err, ERR_UNREACHABLE, "%s", said);
    }
}

static void set_up(struct http *h, struct curl_slist *headers)
{
    const struct http_call *c = h->call;
    CURL *curl = h->curl;
    curl_easy_reset(curl);
    curl_easy_setopt(curl, CURLOPT_URL, c->url);
    curl_easy_setopt(curl, CURLOPT_PATH_AS_IS, 1L);
    curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(curl, CURLOPT_ERRORBUFFER, h->said);
    curl_easy_setopt(curl, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(curl, CURLOPT_REDIR_PROTOCOLS_STR, strncmp(c->url, "https://", 8) ? "http,https" : "https");
    curl_easy_setopt(curl, CURLOPT_FOLLOWLOCATION, c->redirects ? 1L : 0L);
    curl_easy_setopt(curl, CURLOPT_MAXREDIRS, (long)REDIRECTS);
    curl_easy_setopt(curl, CURLOPT_CONNECTTIMEOUT_MS, (long)h->options.connect_ms);
    curl_easy_setopt(curl, CURLOPT_NOPROGRESS, 0L);
    curl_easy_setopt(curl, CURLOPT_XFERINFOFUNCTION, watch);
    curl_easy_setopt(curl, CURLOPT_XFERINFODATA, h);
    curl_easy_setopt(curl, CURLOPT_HTTPHEADER, headers);
    curl_easy_setopt(curl, CURLOPT_HEADERFUNCTION, header);
    curl_easy_setopt(curl, CURLOPT_HEADERDATA, h);
    curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, take);
    curl_easy_setopt(curl, CURLOPT_WRITEDATA, h);
    curl_easy_setopt(curl, CURLOPT_BUFFERSIZE, 256L << 10);
    curl_easy_setopt(curl, CURLOPT_UPLOAD_BUFFERSIZE, 256L << 10);
    if (h->options.ca_file && *h->options.ca_file)
        curl_easy_setopt(curl, CURLOPT_CAINFO, h->options.ca_file);
    if (!strcmp(c->method, "HEAD")) {
        curl_easy_setopt(curl, CURLOPT_NOBODY, 1L);
    } else if (!strcmp(c->method, "PUT") || !strcmp(c->method, "POST")) {
        curl_easy_setopt(curl, CURLOPT_UPLOAD, 1L);
        curl_easy_setopt(curl, CURLOPT_CUSTOMREQUEST, c->method);
        curl_easy_setopt(curl, CURLOPT_READFUNCTION, give_body);
        curl_easy_setopt(curl, CURLOPT_READDATA, h);
        curl_easy_setopt(curl, CURLOPT_SEEKFUNCTION, again_from);
        curl_easy_setopt(curl, CURLOPT_SEEKDATA, h);
        curl_easy_setopt(curl, CURLOPT_INFILESIZE_LARGE, (curl_off_t)c->body_len);
    } else if (strcmp(c->method, "GET") != 0) {
        curl_easy_setopt(curl, CURLOPT_CUSTOMREQUEST, c->method);
    }
}

int http_do(struct http *h, struct http_call *call, struct error *err)
{
    struct curl_slist *headers = curl_slist_append(NULL, "Expect:");
    long status = 0;
    char range[64];
    h->call = call;
    h->sent = 0;
    h->moved = 0;
    h->since = clock_mono_ns();
    h->stalled = h->slow = false;
    h->window_moved = 0;
    h->window_since = h->since;
    h->first = true;
    h->rc = ERR_OK;
    h->said[0] = '\0';
    call->status = 0;
    call->length = call->total = call->from = call->retry_after_s = call->date_s = -1;
    call->etag[0] = call->crc32c[0] = call->region[0] = '\0';
    for (size_t i = 0; i < call->n_headers && headers; i++) {
        struct curl_slist *more = curl_slist_append(headers, call->headers[i]);
        if (!more)
            curl_slist_free_all(headers);
        headers = more;
    }
    if (!headers)
        return error_set(err, ERR_NOMEM, "no memory for a request");
    set_up(h, headers);
    snprintf(range, sizeof range, "%lld-", (long long)call->at);
    if (call->fd >= 0 && call->at > 0)
        curl_easy_setopt(h->curl, CURLOPT_RANGE, range);
    CURLcode code = http_stopped(h) ? CURLE_ABORTED_BY_CALLBACK : curl_easy_perform(h->curl);
    curl_easy_getinfo(h->curl, CURLINFO_RESPONSE_CODE, &status);
    call->status = code == CURLE_OK ? (int)status : 0;
    curl_slist_free_all(headers);
    return code == CURLE_OK ? ERR_OK : failed(h, code, err);
}

int http_open(const struct http_options *options, struct http **out, struct error *err)
{
    pthread_once(&once, start_curl);
    struct http *h = global == CURLE_OK ? calloc(1, sizeof *h) : NULL;
    if (h)
        h->curl = curl_easy_init();
    if (!h || !h->curl) {
        free(h);
        return error_set(err, ERR_NOMEM, "libcurl cannot be started");
    }
    h->options = *options;
    *out = h;
    return ERR_OK;
}

void http_close(struct http *h)
{
    if (h)
        curl_easy_cleanup(h->curl);
    free(h);
}

bool http_transient(int rc, int status)
{
    if (rc)
        return rc == ERR_UNREACHABLE || rc == ERR_TIMEOUT;
    return status == 408 || status == 429 || status == 500 || status == 502 || status == 503 || status == 504;
}

int64_t http_backoff_ms(int tries, int64_t retry_after_s)
{
    int64_t ms = BACKOFF_MS, asked = retry_after_s < RETRY_AFTER_MAX_S ? retry_after_s : RETRY_AFTER_MAX_S;
    uint32_t random = 0;
    for (int i = 1; i < tries && ms < BACKOFF_MAX_MS; i++)
        ms *= 2;
    ms = ms < BACKOFF_MAX_MS ? ms : BACKOFF_MAX_MS;
    if (getrandom(&random, sizeof random, 0) < 0)
        random = 0;
    ms = ms / 2 + (int64_t)(random % (uint32_t)(ms / 2 + 1));
    return asked * 1000 > ms ? asked * 1000 : ms;
}
