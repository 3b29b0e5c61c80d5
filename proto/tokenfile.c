/* tokenfile.h */
#include "proto/tokenfile.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/tokenfile_formats.h"

/* ---- names ------------------------------------------------------------------- */

static bool ends_with(const char *path, const char *suffix)
{
    size_t len = path ? strlen(path) : 0, n = strlen(suffix);
    return len > n && !strcmp(path + len - n, suffix);
}

Boost__Format__Value token_format_of_name(const char *path)
{
    if (ends_with(path, ".u16"))
        return BOOST__FORMAT__VALUE__U16;
    if (ends_with(path, ".u32"))
        return BOOST__FORMAT__VALUE__U32;
    return ends_with(path, ".bin") || ends_with(path, ".idx") ? BOOST__FORMAT__VALUE__AUTO : BOOST__FORMAT__VALUE__TEXT;
}

/* X, X.bin or X.idx -> X + suffix. */
static int sibling(const char *path, const char *suffix, char out[PATH_MAX], struct error *err)
{
    size_t len = strlen(path);
    if (ends_with(path, ".bin") || ends_with(path, ".idx"))
        len -= 4;
    int used = snprintf(out, PATH_MAX, "%.*s%s", len < PATH_MAX ? (int)len : PATH_MAX, path, suffix);
    if (used < 0 || used >= PATH_MAX)
        return error_set(err, ERR_INVALID, "path too long: %s", path);
    return ERR_OK;
}

static int decide(const char *path, Boost__Format__Value *format, struct error *err)
{
    char index[PATH_MAX];
    if (*format == BOOST__FORMAT__VALUE__AUTO)
        *format = token_format_of_name(path);
    if (*format != BOOST__FORMAT__VALUE__AUTO)
        return ERR_OK;
    struct stat st; /* not access(): an agent that acts for a user has only the file system's identity of him */
    int rc = sibling(path, ".idx", index, err);
    if (!rc)
        *format = stat(index, &st) == 0 ? BOOST__FORMAT__VALUE__MEGATRON : BOOST__FORMAT__VALUE__LLMC;
    return rc;
}

/* ---- opening ------------------------------------------------------------------- */

int tokenfile_open_regular(const char *path, int *fd, int64_t *bytes, struct error *err)
{
    struct stat st;
    *fd = -1;
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode)) { /* opening a device may do something */
        error_set(err, ERR_INVALID, "%s is not a regular file", path);
        return error_hint(err, "name a file of tokens");
    }
    *fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (*fd < 0) {
        int errnum = errno, rc = error_errno(err, errnum, "token file %s cannot be read", path);
        error_hint(err, errnum == EACCES ? "give the job's user read permission"
                                         : "correct the path; it has to exist on the node that trains");
        return rc;
    }
    int rc = ERR_OK;
    if (fstat(*fd, &st) < 0)
        rc = error_errno(err, errno, "cannot read the size of %s", path);
    else if (!S_ISREG(st.st_mode))
        rc = error_set(err, ERR_INVALID, "%s is not a regular file", path);
    if (rc) {
        close(*fd);
        *fd = -1;
        return rc;
    }
    *bytes = st.st_size;
    return ERR_OK;
}

static int raw_ids(struct token_file *f, int width, struct error *err)
{
    f->token_bytes = width;
    if (f->bytes % width) {
        error_set(err, ERR_INVALID, "%s: %lld bytes are not a whole number of %d-byte tokens", f->path,
                  (long long)f->bytes, width);
        return error_hint(err, "the file is cut short, or data.format is not its format");
    }
    f->tokens = f->bytes / width;
    return ERR_OK;
}

static int count_windows(struct token_file *f, struct error *err)
{
    f->windows = f->tokens > f->s ? (f->tokens - 1) / f->s : 0;
    if (f->windows >= 1)
        return ERR_OK;
    error_set(err, ERR_INVALID, "%s: %lld tokens are fewer than one window of seq_len + 1 = %lld", f->path,
              (long long)f->tokens, (long long)f->s + 1);
    if (f->tokens < 2)
        return error_hint(err, "give a longer file");
    return error_hint(err, "give a longer file or set data.seq_len to at most %lld", (long long)f->tokens - 1);
}

static int find_ids(struct token_file *f, const char *index, struct error *err)
{
    switch (f->format) {
    case BOOST__FORMAT__VALUE__TEXT:
        return raw_ids(f, 1, err);
    case BOOST__FORMAT__VALUE__U16:
        return raw_ids(f, 2, err);
    case BOOST__FORMAT__VALUE__U32:
        return raw_ids(f, 4, err);
    case BOOST__FORMAT__VALUE__LLMC:
        return tokenfile_llmc(f, err);
    case BOOST__FORMAT__VALUE__MEGATRON:
        return tokenfile_megatron(f, index, err);
    default:
        error_set(err, ERR_UNSUPPORTED, "%s: token file format %d is not known to this version", f->path,
                  (int)f->format);
        return error_hint(err, "set data.format to TEXT, U16, U32, LLMC or MEGATRON");
    }
}

int token_file_open(struct token_file *f, const char *path, Boost__Format__Value format, int64_t s, int64_t vocab,
                    struct error *err)
{
    *f = (struct token_file){.fd = -1, .s = s, .vocab = vocab};
    char data[PATH_MAX], index[PATH_MAX];
    int rc = decide(path, &format, err);
    bool pair = format == BOOST__FORMAT__VALUE__MEGATRON;
    if (!rc && pair)
        rc = sibling(path, ".bin", data, err);
    if (!rc && pair)
        rc = sibling(path, ".idx", index, err);
    if (rc)
        return rc;
    f->format = format;
    f->path = strdup(pair ? data : path);
    if (!f->path)
        return error_set(err, ERR_NOMEM, "out of memory");
    rc = tokenfile_open_regular(f->path, &f->fd, &f->bytes, err);
    if (!rc)
        rc = find_ids(f, index, err);
    if (!rc)
        rc = count_windows(f, err);
    if (rc)
        token_file_close(f);
    return rc;
}

void token_file_rest(struct token_file *f)
{
    if (f->fd >= 0)
        close(f->fd);
    f->fd = -1;
}

void token_file_close(struct token_file *f)
{
    token_file_rest(f);
    free(f->path);
    f->path = NULL;
}

/* ---- reading ------------------------------------------------------------------- */

int tokenfile_read(int fd, const char *path, void *out, size_t bytes, int64_t offset, struct error *err)
{
    size_t done = 0;
    while (done < bytes) {
        ssize_t n = pread(fd, (char *)out + done, bytes - done, offset + (int64_t)done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return error_errno(err, errno, "cannot read %s at byte %lld", path, (long long)offset + (int64_t)done);
        if (n == 0) {
            error_set(err, ERR_INVALID, "%s ends before byte %lld, it was longer when it was opened", path,
                      (long long)offset + (int64_t)done);
            return error_hint(err, "token files must not change while a job uses them");
        }
        done += (size_t)n;
    }
    return ERR_OK;
}

static int wake(struct token_file *f, struct error *err)
{
    int64_t bytes;
    if (f->fd >= 0)
        return ERR_OK;
    int rc = tokenfile_open_regular(f->path, &f->fd, &bytes, err);
    if (rc || bytes == f->bytes)
        return rc;
    token_file_rest(f);
    error_set(err, ERR_INVALID, "%s has %lld bytes, and had %lld when training began", f->path, (long long)bytes,
              (long long)f->bytes);
    return error_hint(err, "token files must not change while a job uses them");
}

/* Widens in place, from the end, so that one buffer is enough. */
static void widen(int32_t *tokens, int64_t n, int token_bytes)
{
    const uint8_t *raw = (const uint8_t *)tokens;
    for (int64_t i = n - 1; i >= 0; i--) {
        const uint8_t *p = raw + i * token_bytes;
        uint32_t id = p[0];
        for (int b = 1; b < token_bytes; b++)
            id |= (uint32_t)p[b] << 8 * b;
        memcpy(&tokens[i], &id, sizeof id);
    }
}

int token_file_window(struct token_file *f, int64_t window, int32_t *out, struct error *err)
{
    int64_t n = f->s + 1, first = window * f->s;
    int rc = wake(f, err);
    if (!rc)
        rc = tokenfile_read(f->fd, f->path, out, (size_t)n * (size_t)f->token_bytes, f->start + first * f->token_bytes,
                            err);
    if (rc)
        return rc;
    widen(out, n, f->token_bytes);
    for (int64_t i = 0; i < n; i++) {
        if (out[i] >= 0 && out[i] < f->vocab)
            continue;
        long long id = f->is_signed ? (long long)out[i] : (long long)(uint32_t)out[i];
        error_set(err, ERR_INVALID, "%s: token id %lld at token %lld (byte %lld) is not %s %lld", f->path, id,
                  (long long)(first + i), (long long)(f->start + (first + i) * f->token_bytes),
                  id < 0 ? "one of the vocabulary of" : "below the vocabulary of", (long long)f->vocab);
        return error_hint(err, "set model.vocab above every id of the file, or check data.format");
    }
    return ERR_OK;
}
