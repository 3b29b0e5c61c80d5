/* credentials.h */
#include "daemon/remote/credentials.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/crypto.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FILE_MAX = 16 << 10 };

void s3_credentials_wipe(struct s3_credentials *c)
{
    OPENSSL_cleanse(c, sizeof *c);
}

static bool put(char *out, size_t cap, const char *value, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if (value[i] <= ' ' || value[i] > '~')
            return false;
    if (len >= cap)
        return false;
    memcpy(out, value, len);
    out[len] = '\0';
    return true;
}

static bool take_line(struct s3_credentials *c, const char *line, size_t len)
{
    static const char blanks[] = " \t\r";
    const struct {
        const char *name;
        char *out;
        size_t cap;
    } fields[] = {{"aws_access_key_id", c->access_key, sizeof c->access_key},
                  {"aws_secret_access_key", c->secret_key, sizeof c->secret_key},
                  {"aws_session_token", c->token, sizeof c->token}};
    while (len && strchr(blanks, *line))
        line++, len--;
    while (len && strchr(blanks, line[len - 1]))
        len--;
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        size_t n = strlen(fields[i].name);
        if (len <= n || strncmp(line, fields[i].name, n) != 0)
            continue;
        size_t at = n;
        while (at < len && strchr(blanks, line[at]))
            at++;
        if (at == len || line[at] != '=')
            continue;
        for (at++; at < len && strchr(blanks, line[at]);)
            at++;
        return put(fields[i].out, fields[i].cap, line + at, len - at);
    }
    return true;
}

static int read_keys(const char *path, char *text, size_t len, struct s3_credentials *out, struct error *err)
{
    int row = 1;
    for (size_t at = 0; at < len; row++) {
        size_t n = strcspn(text + at, "\n");
        if (!take_line(out, text + at, n))
            return error_set(err, ERR_INVALID, "%s: line %d is no key of a store", path, row);
        at += n + 1;
    }
    if (*out->access_key && *out->secret_key)
        return ERR_OK;
    error_set(err, ERR_INVALID, "%s has no %s", path, *out->access_key ? "aws_secret_access_key" : "aws_access_key_id");
    return error_hint(err, "write lines aws_access_key_id = ... and aws_secret_access_key = ...");
}

int s3_credentials_file(const char *path, uid_t owner, struct s3_credentials *out, struct error *err)
{
    struct stat st;
    char text[FILE_MAX + 1];
    memset(out, 0, sizeof *out);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0 || fstat(fd, &st) < 0) {
        int rc = error_errno(err, errno, "credentials %s cannot be read", path);
        if (fd >= 0)
            close(fd);
        return rc;
    }
    ssize_t n = -1;
    int rc = ERR_OK;
    if (!S_ISREG(st.st_mode) || (st.st_mode & 077) || (st.st_uid != owner && st.st_uid != 0)) {
        error_set(err, ERR_REFUSED, "credentials %s are not a file that only uid %u can read", path, (unsigned)owner);
        rc = error_hint(err, "chown %u %s; chmod 600 %s", (unsigned)owner, path, path);
    } else if ((n = read(fd, text, FILE_MAX)) < 0) {
        rc = error_errno(err, errno, "credentials %s cannot be read", path);
    }
    close(fd);
    if (!rc) {
        text[n > 0 ? n : 0] = '\0';
        rc = read_keys(path, text, strlen(text), out, err);
    }
    OPENSSL_cleanse(text, sizeof text);
    if (rc)
        s3_credentials_wipe(out);
    return rc;
}

int s3_credentials_environment(struct s3_credentials *out, struct error *err)
{
    const char *key = getenv("AWS_ACCESS_KEY_ID"), *secret = getenv("AWS_SECRET_ACCESS_KEY");
    const char *token = getenv("AWS_SESSION_TOKEN");
    memset(out, 0, sizeof *out);
    if (!key || !*key || !secret || !*secret) {
        error_set(err, ERR_NOT_FOUND, "there are no credentials for the object store");
        return error_hint(err, "write aws_access_key_id and aws_secret_access_key into a file with mode 0600, named by "
                               "s3_credentials of agent.conf");
    }
    if (put(out->access_key, sizeof out->access_key, key, strlen(key)) &&
        put(out->secret_key, sizeof out->secret_key, secret, strlen(secret)) &&
        (!token || put(out->token, sizeof out->token, token, strlen(token))))
        return ERR_OK;
    s3_credentials_wipe(out);
    return error_set(err, ERR_INVALID, "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY or AWS_SESSION_TOKEN is no key");
}
