/* sigv4.h */
#include "daemon/remote/sigv4.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { KEY_BYTES = 32, CANONICAL_MAX = 256 << 10, QUERY_MAX = 64 };

static void hex(const unsigned char *bytes, char out[SIGV4_HASH])
{
    for (int i = 0; i < KEY_BYTES; i++)
        snprintf(out + 2 * i, 3, "%02x", bytes[i]);
}

void sigv4_hash(const void *data, size_t len, char out[SIGV4_HASH])
{
    unsigned char sum[EVP_MAX_MD_SIZE] = {0};
    unsigned n = 0;
    EVP_Digest(len ? data : "", len, sum, &n, EVP_sha256(), NULL);
    hex(sum, out);
}

void sigv4_date(long long unix_s, char out[SIGV4_DATE])
{
    time_t t = (time_t)unix_s;
    struct tm tm;
    gmtime_r(&t, &tm);
    strftime(out, SIGV4_DATE, "%Y%m%dT%H%M%SZ", &tm);
}

int sigv4_encode(struct buffer *out, const char *text, bool path)
{
    for (const char *p = text; *p; p++) {
        bool plain = (*p >= 'A' && *p <= 'Z') || (*p >= 'a' && *p <= 'z') || (*p >= '0' && *p <= '9') || *p == '-' ||
                     *p == '.' || *p == '_' || *p == '~' || (path && *p == '/');
        if (plain)
            buffer_append(out, p, 1);
        else
            buffer_printf(out, "%%%02X", (unsigned char)*p);
    }
    return out->failed ? ERR_NOMEM : ERR_OK;
}

/* The order is of the encoded names, then of the encoded values. */
static int by_name(const void *a, const void *b)
{
    const struct buffer *x = a, *y = b;
    int order = strcmp((const char *)x[0].data, (const char *)y[0].data);
    return order ? order : strcmp((const char *)x[1].data, (const char *)y[1].data);
}

int sigv4_query(struct buffer *out, const struct sigv4_pair *query, size_t n)
{
    struct buffer encoded[QUERY_MAX][2];
    int rc = n > QUERY_MAX ? ERR_NOMEM : ERR_OK;
    n = rc ? 0 : n;
    for (size_t i = 0; i < n; i++) {
        const char *text[2] = {query[i].name, query[i].value};
        for (int k = 0; k < 2; k++) {
            buffer_init(&encoded[i][k], CANONICAL_MAX);
            if (!rc) /* an empty one too has to be a text */
                rc = buffer_append(&encoded[i][k], "", 0);
            if (!rc)
                rc = sigv4_encode(&encoded[i][k], text[k], false);
        }
    }
    if (!rc && n)
        qsort(encoded, n, sizeof encoded[0], by_name);
    for (size_t i = 0; i < n; i++) {
        if (!rc)
            buffer_printf(out, "%s%s=%s", i ? "&" : "", (char *)encoded[i][0].data, (char *)encoded[i][1].data);
        buffer_free(&encoded[i][0]);
        buffer_free(&encoded[i][1]);
    }
    return rc || out->failed ? ERR_NOMEM : ERR_OK;
}

static void names(struct buffer *out, const struct sigv4_request *r)
{
    for (size_t i = 0; i < r->n_headers; i++)
        buffer_printf(out, "%s%s", i ? ";" : "", r->headers[i].name);
}

/* Without blanks around it, and one where it has several. */
static void trimmed(struct buffer *out, const char *value)
{
    bool blank = false, any = false;
    for (const char *p = value; *p; p++) {
        if (*p == ' ' || *p == '\t') {
            blank = any;
            continue;
        }
        if (blank)
            buffer_append(out, " ", 1);
        buffer_append(out, p, 1);
        blank = false;
        any = true;
    }
}

static int canonical(const struct sigv4_request *r, struct buffer *out)
{
    buffer_printf(out, "%s\n%s\n", r->method, r->path);
    int rc = sigv4_query(out, r->query, r->n_query);
    buffer_append(out, "\n", 1);
    for (size_t i = 0; i < r->n_headers; i++) {
        buffer_printf(out, "%s:", r->headers[i].name);
        trimmed(out, r->headers[i].value);
        buffer_append(out, "\n", 1);
    }
    buffer_append(out, "\n", 1);
    names(out, r);
    buffer_printf(out, "\n%s", r->payload_hash);
    return rc || out->failed ? ERR_NOMEM : ERR_OK;
}

static void mac(const void *key, size_t key_len, const void *data, size_t len, unsigned char out[KEY_BYTES])
{
    unsigned n = KEY_BYTES;
    HMAC(EVP_sha256(), key, (int)key_len, data, len, out, &n);
}

static int sign(const struct sigv4_request *r, const char *text, size_t len, char out[SIGV4_HASH])
{
    unsigned char key[KEY_BYTES], next[KEY_BYTES];
    struct buffer first;
    const char *steps[] = {r->region, r->service, "aws4_request"};
    buffer_init(&first, 4096);
    if (buffer_printf(&first, "AWS4%s", r->secret_key))
        return ERR_NOMEM;
    mac(first.data, first.len, r->date, 8, key);
    for (int i = 0; i < 3; i++) {
        mac(key, sizeof key, steps[i], strlen(steps[i]), next);
        memcpy(key, next, sizeof key);
    }
    mac(key, sizeof key, text, len, next);
    hex(next, out);
    OPENSSL_cleanse(first.data, first.len);
    OPENSSL_cleanse(key, sizeof key);
    buffer_free(&first);
    return ERR_OK;
}

int sigv4_authorization(const struct sigv4_request *r, struct buffer *out, struct error *err)
{
    struct buffer text;
    char hash[SIGV4_HASH], signature[SIGV4_HASH], scope[160];
    buffer_init(&text, CANONICAL_MAX);
    int used = snprintf(scope, sizeof scope, "%.8s/%s/%s/aws4_request", r->date, r->region, r->service);
    int rc = used < 0 || (size_t)used >= sizeof scope ? ERR_INVALID : canonical(r, &text);
    if (!rc) {
        sigv4_hash(text.data, text.len, hash);
        buffer_clear(&text);
        rc = buffer_printf(&text, "AWS4-HMAC-SHA256\n%s\n%s\n%s", r->date, scope, hash);
    }
    if (!rc)
        rc = sign(r, (char *)text.data, text.len, signature);
    if (!rc) {
        buffer_printf(out, "AWS4-HMAC-SHA256 Credential=%s/%s, SignedHeaders=", r->access_key, scope);
        names(out, r);
        rc = buffer_printf(out, ", Signature=%s", signature);
    }
    buffer_free(&text);
    return rc ? error_set(err, (enum error_code)rc, "a request to the object store cannot be signed") : ERR_OK;
}
