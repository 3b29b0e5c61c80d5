/* s3.h: uploads in parts, and going on with those that were cut. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/remote/s3_internal.h"
#include "proto/base/crc32c.h"

enum { PARTS_MAX = 9000, PART_ROUND = 1 << 20, UPLOAD_ID = 1024, COMPLETE_MAX = 4 << 20, BEGINNINGS = 2 };

struct part {
    int64_t bytes; /* 0: not there */
    char etag[128];
};

struct upload {
    struct s3 *s;
    const struct s3_url *at;
    int fd;
    int64_t bytes, part_bytes;
    int n;
    char id[UPLOAD_ID];
    char crc[16];
    struct part *parts;
    uint8_t *data; /* of one part */
    uint32_t sum;
    int64_t *sent;
};

static int64_t size_of(const struct upload *u, int part)
{
    int64_t left = u->bytes - part * u->part_bytes;
    return left < u->part_bytes ? left : u->part_bytes;
}

static int read_part(struct upload *u, int64_t at, int64_t len, struct error *err)
{
    for (int64_t done = 0; done < len;) {
        ssize_t n = pread(u->fd, u->data + done, (size_t)(len - done), at + done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return error_errno(err, errno, "what is to be s3://%s/%s cannot be read", u->at->bucket, u->at->key);
        if (n == 0)
            return error_set(err, ERR_CORRUPT, "what is to be s3://%s/%s has become shorter", u->at->bucket,
                             u->at->key);
        done += n;
    }
    u->sum = crc32c(u->sum, u->data, (size_t)len);
    return ERR_OK;
}

static int check_sum(const struct upload *u, uint32_t crc, struct error *err)
{
    if (u->sum == crc)
        return ERR_OK;
    return error_set(err, ERR_CORRUPT, "what is to be s3://%s/%s is damaged: its CRC-32C is %08x, %08x was written",
                     u->at->bucket, u->at->key, u->sum, crc);
}

/* ---- unfinished uploads ---- */

static int abort_upload(struct s3 *s, const struct s3_url *at, const char *id, struct error *err)
{
    struct sigv4_pair query[] = {{"uploadId", id}};
    struct http_call call = {.method = "DELETE", .fd = -1};
    int rc = s3_request(s, at, query, 1, NULL, &call, err);
    return rc == ERR_NOT_FOUND ? ERR_OK : rc;
}

typedef int (*upload_fn)(void *arg, const char *key, const char *id, struct error *err);

/* Calls `each`, which may use `s`, with every unfinished upload below the prefix. */
static int each_upload(struct s3 *s, const struct s3_url *prefix, upload_fn each, void *arg, struct error *err)
{
    struct s3_url bucket = *prefix;
    char key_marker[1100] = "", id_marker[UPLOAD_ID] = "", more[8], key[1100], id[UPLOAD_ID];
    struct buffer page;
    int rc;
    bucket.key[0] = '\0';
    buffer_init(&page, S3_ANSWER);
    do {
        struct sigv4_pair query[] = {{"uploads", ""}, {"prefix", prefix->key}, {"key-marker", key_marker},
                                     {"upload-id-marker", id_marker}};
        struct http_call call = {.method = "GET", .fd = -1};
        struct xml_span answer;
        rc = s3_request(s, &bucket, query, *key_marker ? 4 : 2, NULL, &call, err);
        if (!rc && (rc = s3_answer_of(s, "ListMultipartUploadsResult", &answer, err)))
            rc = error_context(err, "GET s3://%s/?uploads", bucket.bucket);
        buffer_clear(&page);
        if (!rc && buffer_append(&page, s->text.data, s->text.len))
            rc = error_set(err, ERR_NOMEM, "no memory for a list of uploads");
        struct xml_span all = {(char *)page.data, (char *)page.data + page.len}, at = all, one;
        while (!rc && xml_next(&at, "Upload", &one)) {
            if (xml_text(one, "Key", key, sizeof key) && xml_text(one, "UploadId", id, sizeof id))
                rc = each(arg, key, id, err);
        }
        more[0] = '\0';
        if (!rc && (!xml_text(all, "IsTruncated", more, sizeof more) || strcmp(more, "true") != 0 ||
                    !xml_text(all, "NextKeyMarker", key_marker, sizeof key_marker) ||
                    !xml_text(all, "NextUploadIdMarker", id_marker, sizeof id_marker)))
            more[0] = '\0';
    } while (!rc && *more);
    buffer_free(&page);
    return rc;
}

struct aborting {
    struct s3 *s;
    const char *bucket, *keep;
    int *count;
};

static int abort_one(void *arg, const char *key, const char *id, struct error *err)
{
    const struct aborting *x = arg;
    struct s3_url at;
    if (x->keep && !strncmp(key, x->keep, strlen(x->keep)))
        return ERR_OK;
    snprintf(at.bucket, sizeof at.bucket, "%s", x->bucket);
    snprintf(at.key, sizeof at.key, "%s", key);
    int rc = abort_upload(x->s, &at, id, err);
    *x->count += rc == ERR_OK;
    return rc;
}

int s3_abort_uploads(struct s3 *s, const struct s3_url *prefix, const char *keep, int *count, struct error *err)
{
    struct aborting x = {s, prefix->bucket, keep, count};
    *count = 0;
    return each_upload(s, prefix, abort_one, &x, err);
}

/* The first one of this key is gone on with, others are given up. */
static int find_one(void *arg, const char *key, const char *id, struct error *err)
{
    struct upload *u = arg;
    if (strcmp(key, u->at->key) != 0)
        return ERR_OK;
    if (*u->id)
        return abort_upload(u->s, u->at, id, err);
    snprintf(u->id, sizeof u->id, "%s", id);
    return ERR_OK;
}

static int list_parts(struct upload *u, struct error *err)
{
    char marker[24] = "", more[8];
    int rc;
    memset(u->parts, 0, (size_t)u->n * sizeof *u->parts);
    do {
        struct sigv4_pair query[] = {{"uploadId", u->id}, {"part-number-marker", marker}};
        struct http_call call = {.method = "GET", .fd = -1};
        rc = s3_request(u->s, u->at, query, *marker ? 2 : 1, NULL, &call, err);
        if (rc)
            return rc;
        struct xml_span at = s3_answer(u->s), one;
        while (xml_next(&at, "Part", &one)) {
            int64_t number = xml_number(one, "PartNumber"), bytes = xml_number(one, "Size");
            if (number < 1 || number > u->n || bytes != size_of(u, (int)number - 1))
                continue;
            struct part *part = &u->parts[number - 1];
            part->bytes = xml_text(one, "ETag", part->etag, sizeof part->etag) ? bytes : 0;
        }
        more[0] = '\0';
        xml_text(s3_answer(u->s), "IsTruncated", more, sizeof more);
        if (strcmp(more, "true") != 0 ||
            !xml_text(s3_answer(u->s), "NextPartNumberMarker", marker, sizeof marker))
            more[0] = '\0';
    } while (*more);
    return ERR_OK;
}

/* ---- one upload ---- */

static int begin(struct upload *u, struct error *err)
{
    u->id[0] = '\0';
    int rc = each_upload(u->s, u->at, find_one, u, err);
    if (!rc && *u->id)
        return list_parts(u, err);
    struct sigv4_pair query[] = {{"uploads", ""}};
    struct http_call call = {.method = "POST", .fd = -1};
    memset(u->parts, 0, (size_t)u->n * sizeof *u->parts);
    if (!rc)
        rc = s3_request(u->s, u->at, query, 1, u->crc, &call, err);
    if (!rc && !xml_text(s3_answer(u->s), "UploadId", u->id, sizeof u->id))
        rc = error_set(err, ERR_INVALID, "s3://%s/%s: the store gave no id for an upload", u->at->bucket, u->at->key);
    return rc;
}

static int send_part(struct upload *u, int i, struct error *err)
{
    char number[16];
    int64_t len = size_of(u, i);
    int rc = read_part(u, i * u->part_bytes, len, err);
    if (!rc && u->parts[i].bytes)
        http_progress_at(u->s->http, i * u->part_bytes + len);
    if (rc || u->parts[i].bytes)
        return rc;
    snprintf(number, sizeof number, "%d", i + 1);
    struct sigv4_pair query[] = {{"partNumber", number}, {"uploadId", u->id}};
    struct http_call call = {.method = "PUT", .fd = -1, .body = u->data, .body_len = (size_t)len, .counts = true,
                             .body_at = i * u->part_bytes};
    rc = s3_request(u->s, u->at, query, 2, NULL, &call, err);
    if (!rc && !*call.etag)
        rc = error_set(err, ERR_INVALID, "s3://%s/%s: the store gave no ETag for part %d", u->at->bucket, u->at->key,
                       i + 1);
    if (rc)
        return rc;
    u->parts[i].bytes = len;
    memcpy(u->parts[i].etag, call.etag, sizeof call.etag);
    *u->sent += len;
    return ERR_OK;
}

static bool there(struct upload *u)
{
    struct s3_object o;
    return !s3_head(u->s, u->at, &o, NULL) && o.bytes == u->bytes && !strcmp(o.crc32c, u->crc);
}

static int complete(struct upload *u, struct error *err)
{
    struct buffer body;
    char code[80] = "";
    buffer_init(&body, COMPLETE_MAX);
    buffer_append_str(&body, "<CompleteMultipartUpload>");
    for (int i = 0; i < u->n; i++)
        buffer_printf(&body, "<Part><PartNumber>%d</PartNumber><ETag>%s</ETag></Part>", i + 1, u->parts[i].etag);
    int rc = buffer_append_str(&body, "</CompleteMultipartUpload>");
    if (rc)
        error_set(err, ERR_NOMEM, "no memory for a list of parts");
    struct sigv4_pair query[] = {{"uploadId", u->id}};
    struct http_call call = {.method = "POST", .fd = -1, .body = body.data, .body_len = body.len};
    if (!rc)
        rc = s3_request(u->s, u->at, query, 1, NULL, &call, err);
    /* Begun with 200, so that the way stays open, it may still say that it failed. */
    struct xml_span all = s3_answer(u->s), error;
    if (!rc && xml_next(&all, "Error", &error)) {
        xml_text(error, "Code", code, sizeof code);
        rc = error_set(err, ERR_UNREACHABLE, "POST s3://%s/%s: %s", u->at->bucket, u->at->key, code);
    }
    buffer_free(&body);
    /* The answer to a try before may have been lost. */
    return rc == ERR_NOT_FOUND && there(u) ? ERR_OK : rc;
}

static int send_parts(struct upload *u, uint32_t crc, struct error *err)
{
    struct error ignored;
    int rc = begin(u, err);
    u->sum = 0;
    for (int i = 0; i < u->n && !rc; i++)
        rc = send_part(u, i, err);
    if (!rc && (rc = check_sum(u, crc, err)) && abort_upload(u->s, u->at, u->id, &ignored))
        error_hint(err, "an unfinished upload of it stays behind: %.200s", ignored.message);
    return rc ? rc : complete(u, err);
}

static int send_whole(struct upload *u, uint32_t crc, struct error *err)
{
    int rc = read_part(u, 0, u->bytes, err);
    if (!rc)
        rc = check_sum(u, crc, err);
    if (!rc)
        rc = s3_put(u->s, u->at, u->data, (size_t)u->bytes, u->crc, err);
    *u->sent += rc ? 0 : u->bytes;
    return rc;
}

int s3_upload(struct s3 *s, const struct s3_url *at, int fd, int64_t bytes, uint32_t crc32c, int64_t *sent,
              struct error *err)
{
    struct upload *u = calloc(1, sizeof *u);
    if (!u)
        return error_set(err, ERR_NOMEM, "no memory for an upload");
    int64_t least = (bytes / PARTS_MAX / PART_ROUND + 1) * PART_ROUND;
    *u = (struct upload){.s = s, .at = at, .fd = fd, .bytes = bytes, .sent = sent};
    u->part_bytes = s->part_bytes > least || bytes <= s->part_bytes * PARTS_MAX ? s->part_bytes : least;
    u->n = (int)((bytes + u->part_bytes - 1) / u->part_bytes);
    snprintf(u->crc, sizeof u->crc, "%08x", crc32c);
    int64_t room = bytes < u->part_bytes ? bytes : u->part_bytes;
    u->data = malloc((size_t)room + 1);
    u->parts = calloc((size_t)u->n + 1, sizeof *u->parts);
    int rc = u->data && u->parts ? ERR_OK : error_set(err, ERR_NOMEM, "no memory for an upload");
    if (!rc && there(u))
        goto out;
    if (!rc && u->n <= 1)
        rc = send_whole(u, crc32c, err);
    else if (!rc) {
        rc = send_parts(u, crc32c, err);
        /* Somebody has given it up meanwhile: once more, from its beginning. */
        for (int i = 1; rc == ERR_NOT_FOUND && i < BEGINNINGS; i++)
            rc = send_parts(u, crc32c, err);
    }
out:
    free(u->data);
    free(u->parts);
    free(u);
    return rc;
}
