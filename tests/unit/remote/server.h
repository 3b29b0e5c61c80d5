/* Starts tests/e2e/s3server.py, which checks signatures and fails when it is told to. Each test program of this room includes
 * it once. */
#ifndef BOOST_TESTS_REMOTE_SERVER_H
#define BOOST_TESTS_REMOTE_SERVER_H

#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
/* after the standard headers */
#include <cmocka.h>

#include "daemon/remote/fetch.h"
#include "daemon/remote/s3.h"
#include "proto/base/clock.h"
#include "proto/base/crc32c.h"
#include "proto/base/fs.h"

#define HELPER static __attribute__((unused))

enum { PART = 64 << 10, BYTES = 5 * PART + 1234 };

static char endpoint[64], file[300];
static pid_t server;
static int server_in = -1;
static uint8_t data[BYTES]; /* of `file` */
static uint32_t sum;
static struct error err;
static atomic_bool stop;

/* Its port; 0: it did not start. `tls`: a directory for certificates; NULL: without TLS. */
HELPER int start_server(const char *tls, pid_t *pid, int *input)
{
    int in[2], out[2];
    char script[400], port[32] = "";
    const char *root = getenv("BOOST_ROOT");
    snprintf(script, sizeof script, "%s/tests/e2e/s3server.py", root ? root : ".");
    if (pipe2(in, O_CLOEXEC) < 0 || pipe2(out, O_CLOEXEC) < 0 || (*pid = fork()) < 0)
        return 0;
    if (*pid == 0) {
        dup2(in[0], 0);
        dup2(out[1], 1);
        execlp("python3", "python3", script, tls, (char *)NULL);
        _exit(127);
    }
    close(in[0]);
    close(out[1]);
    *input = in[1];
    /* the whole line: it may be written in pieces, the last of which would find nobody */
    ssize_t n = 1;
    for (size_t len = 0; n > 0 && !strchr(port, '\n') && len < sizeof port - 1; len += n > 0 ? (size_t)n : 0)
        n = read(out[0], port + len, sizeof port - 1 - len);
    close(out[0]);
    return strchr(port, '\n') ? (int)strtol(port, NULL, 10) : 0;
}

HELPER int start(void **state)
{
    (void)state;
    const char *dir = getenv("BOOST_TEST_DIR");
    int port = start_server(NULL, &server, &server_in);
    if (!port)
        return -1;
    snprintf(endpoint, sizeof endpoint, "http://127.0.0.1:%d", port);
    snprintf(file, sizeof file, "%s/object", dir ? dir : "/tmp");
    setenv("no_proxy", "*", 1);
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (uint8_t)(i * 2654435761u >> 13);
    sum = crc32c(0, data, sizeof data);
    return fs_write_atomic(file, data, sizeof data, 0600, &err);
}

HELPER int end(void **state)
{
    (void)state;
    close(server_in);
    waitpid(server, NULL, 0);
    unlink(file);
    return 0;
}

HELPER struct s3 *client_of(const char *secret, int stall_ms)
{
    struct s3 *s = NULL;
    struct s3_options o = {.http = {.stop = &stop, .stall_ms = stall_ms, .connect_ms = 2000}, .endpoint = endpoint,
                           .region = "us-east-1", .path_style = true, .part_bytes = PART};
    snprintf(o.credentials.access_key, sizeof o.credentials.access_key, "AKIDTEST");
    snprintf(o.credentials.secret_key, sizeof o.credentials.secret_key, "%s", secret);
    assert_int_equal(s3_open(&o, &s, &err), ERR_OK);
    return s;
}

HELPER struct s3 *client(void)
{
    return client_of("secret/of+tests", 5000);
}

/* Of the server, unsigned. */
HELPER void ask(const char *method, const char *path, const char *body, struct buffer *out)
{
    struct http *h = NULL;
    char url[200];
    struct http_options o = {.stall_ms = 5000, .connect_ms = 2000};
    snprintf(url, sizeof url, "%s%s", endpoint, path);
    assert_int_equal(http_open(&o, &h, &err), ERR_OK);
    struct http_call call = {.method = method, .url = url, .fd = -1, .body = body, .body_len = body ? strlen(body) : 0,
                             .text = out};
    assert_int_equal(http_do(h, &call, &err), ERR_OK);
    assert_int_equal(call.status, 200);
    http_close(h);
}

HELPER void faults(const char *json)
{
    ask("PUT", "/-/faults", json, NULL);
}

/* How many requests so far had `what`. */
HELPER int requests(const char *what)
{
    struct buffer text;
    int n = 0;
    buffer_init(&text, 1 << 20);
    ask("GET", "/-/requests", NULL, &text);
    for (const char *p = (char *)text.data; (p = strstr(p, what)); p++)
        n++;
    buffer_free(&text);
    return n;
}

#endif
