/* The socket path rule, and a client against servers that are absent, silent, rude or refuse. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/base/clock.h"
#include "proto/client.h"
#include "proto/frame.h"
#include "proto/socket_path.h"

/* ---- socket path --------------------------------------------------------------- */

static void environment(const char *boost_socket, const char *runtime_dir)
{
    if (boost_socket)
        setenv("BOOST_SOCKET", boost_socket, 1);
    else
        unsetenv("BOOST_SOCKET");
    if (runtime_dir)
        setenv("XDG_RUNTIME_DIR", runtime_dir, 1);
    else
        unsetenv("XDG_RUNTIME_DIR");
}

static void expect_path(enum socket_side side, const char *option, const char *configured, const char *expected)
{
    char path[SOCKET_PATH_MAX];
    struct error err;
    assert_int_equal(socket_path_find(side, option, configured, path, &err), 0);
    assert_string_equal(path, expected);
}

static void the_first_that_is_set_wins(void **state)
{
    (void)state;
    environment("/env", "/xdg");
    expect_path(SOCKET_CONNECT, "/option", "/conf", "/option");
    expect_path(SOCKET_LISTEN, "/option", "/conf", "/option");
    expect_path(SOCKET_CONNECT, "", "/conf", "/conf"); /* what is said to this program beats what is around it */
    expect_path(SOCKET_LISTEN, NULL, "/conf", "/conf");
    expect_path(SOCKET_CONNECT, NULL, "", "/env");
    expect_path(SOCKET_LISTEN, "", NULL, "/env");
    environment("", "/xdg");
    expect_path(SOCKET_LISTEN, NULL, "/conf", "/conf");
    environment(NULL, NULL);
    expect_path(SOCKET_CONNECT, NULL, "", "/run/boost/boostd.sock");
    environment(NULL, "/nonexistent-xdg");
    expect_path(SOCKET_LISTEN, NULL, NULL,
                geteuid() == 0 ? "/run/boost/boostd.sock" : "/nonexistent-xdg/boost/boostd.sock");
    if (access("/run/boost/boostd.sock", F_OK) != 0)
        expect_path(SOCKET_CONNECT, NULL, NULL, "/nonexistent-xdg/boost/boostd.sock");
    environment(NULL, NULL);
}

static void too_long_a_path_says_so(void **state)
{
    (void)state;
    char long_path[SOCKET_PATH_MAX + 1], path[SOCKET_PATH_MAX];
    struct error err;
    memset(long_path, 'p', sizeof long_path);
    long_path[SOCKET_PATH_MAX - 1] = '\0'; /* 107 bytes: fits */
    expect_path(SOCKET_CONNECT, long_path, NULL, long_path);
    long_path[SOCKET_PATH_MAX - 1] = 'p';
    long_path[SOCKET_PATH_MAX] = '\0';
    assert_int_equal(socket_path_find(SOCKET_CONNECT, long_path, NULL, path, &err), ERR_INVALID);
    assert_non_null(strstr(err.message, "--socket"));
    assert_non_null(strstr(err.message, "107"));
    assert_true(*err.hint);
}

/* ---- client -------------------------------------------------------------------- */

/* A server for one connection: takes the hello, then sends these bytes; silent when there are none. */
struct rude_server {
    pthread_t thread;
    int fd;
    char path[64];
    struct buffer answer;
    bool hang_up; /* closes after the answer */
};

static void *serve(void *arg)
{
    struct rude_server *s = arg;
    int fd = accept(s->fd, NULL, NULL);
    char hello[256];
    if (fd >= 0 && read(fd, hello, sizeof hello) > 0) {
        if (s->answer.len && write(fd, s->answer.data, s->answer.len) < 0)
            perror("write");
        while (!s->hang_up && read(fd, hello, sizeof hello) > 0) /* until the client goes */
            continue;
    }
    close(fd);
    return NULL;
}

static void start_server(struct rude_server *s, bool hang_up)
{
    static int number;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(s->path, sizeof s->path, "c%ld.%d", (long)getpid(), number++);
    memcpy(address.sun_path, s->path, strlen(s->path) + 1);
    s->hang_up = hang_up;
    s->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(s->fd >= 0);
    assert_int_equal(bind(s->fd, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(listen(s->fd, 4), 0);
    assert_int_equal(pthread_create(&s->thread, NULL, serve, s), 0);
}

static void stop_server(struct rude_server *s)
{
    pthread_join(s->thread, NULL);
    close(s->fd);
    unlink(s->path);
    buffer_free(&s->answer);
}

static int open_client(struct client *c, const char *path, int timeout_ms, struct error *err)
{
    *c = (struct client)CLIENT_INIT;
    return client_open(c, path, BOOST__COMPONENT__VALUE__CTL, NULL, timeout_ms, err);
}

static void nobody_there_names_the_path_and_the_mend(void **state)
{
    (void)state;
    struct client c;
    struct error err;
    assert_int_equal(open_client(&c, "no-such-socket", 1000, &err), ERR_UNREACHABLE);
    assert_non_null(strstr(err.message, "no-such-socket"));
    assert_non_null(strstr(err.hint, "boostd"));
    assert_int_equal(c.fd, -1);

    struct rude_server s = {0};
    buffer_init(&s.answer, 1024);
    start_server(&s, true);
    int rc = open_client(&c, s.path, 5000, &err); /* closes without a word */
    assert_int_equal(rc, ERR_UNREACHABLE);
    assert_non_null(strstr(err.message, s.path));
    pthread_join(s.thread, NULL);
    close(s.fd); /* the file of a server that was killed stays */
    assert_int_equal(open_client(&c, s.path, 1000, &err), ERR_UNREACHABLE);
    assert_non_null(strstr(err.message, s.path));
    unlink(s.path);
}

static void silence_ends_at_the_timeout(void **state)
{
    (void)state;
    struct rude_server s = {0};
    struct client c;
    struct error err;
    buffer_init(&s.answer, 1024);
    start_server(&s, false);
    int64_t start = clock_mono_ns();
    assert_int_equal(open_client(&c, s.path, 100, &err), ERR_UNREACHABLE);
    int64_t took = clock_mono_ns() - start;
    assert_true(took >= 99 * NS_PER_MS);
    assert_true(took < 20 * NS_PER_S);
    stop_server(&s);
}

static void nonsense_is_a_protocol_error(void **state)
{
    (void)state;
    static const char *const answers[] = {"HTTP/1.1 400 Bad Request\r\n", "\0\0\0\2\xff\xff"};
    static const size_t lengths[] = {26, 6};
    for (size_t i = 0; i < 2; i++) {
        struct rude_server s = {0};
        struct client c;
        struct error err;
        buffer_init(&s.answer, 1024);
        assert_int_equal(buffer_append(&s.answer, answers[i], lengths[i]), 0);
        start_server(&s, false);
        assert_int_equal(open_client(&c, s.path, 5000, &err), ERR_PROTOCOL);
        assert_non_null(strstr(err.message, s.path));
        stop_server(&s);
    }
}

static void put_hello(struct rude_server *s, int protocol, int protocol_min, Boost__Failure *refused)
{
    struct error err;
    Boost__Hello hello = BOOST__HELLO__INIT;
    hello.has_protocol = hello.has_protocol_min = 1;
    hello.protocol = protocol;
    hello.protocol_min = protocol_min;
    hello.version = (char *)"9.9";
    hello.refused = refused;
    buffer_init(&s->answer, 1 << 16);
    assert_int_equal(frame_append(&s->answer, &hello.base, &err), 0);
}

static void a_refusal_comes_through_whole(void **state)
{
    (void)state;
    struct rude_server s = {0};
    struct client c;
    struct error err;
    Boost__Failure failure = BOOST__FAILURE__INIT;
    failure.has_code = 1;
    failure.code = ERR_REFUSED;
    failure.message = (char *)"not today";
    failure.hint = (char *)"come tomorrow";
    put_hello(&s, 1, 1, &failure);
    start_server(&s, false);
    assert_int_equal(open_client(&c, s.path, 5000, &err), ERR_REFUSED);
    assert_string_equal(err.message, "not today");
    assert_string_equal(err.hint, "come tomorrow");
    stop_server(&s);

    struct rude_server newer = {0};
    put_hello(&newer, 9, 8, NULL);
    start_server(&newer, false);
    assert_int_equal(open_client(&c, newer.path, 5000, &err), ERR_PROTOCOL);
    assert_non_null(strstr(err.hint, "9.9"));
    stop_server(&newer);
}

static void put_reply(struct rude_server *s, uint64_t id, int code)
{
    struct error err;
    Boost__Reply reply = BOOST__REPLY__INIT;
    Boost__Failure failure = BOOST__FAILURE__INIT;
    Boost__PingReply ping = BOOST__PING_REPLY__INIT;
    reply.has_id = 1;
    reply.id = id;
    failure.has_code = 1;
    failure.code = code;
    failure.message = (char *)"no";
    ping.version = (char *)"x";
    reply.body_case = code ? BOOST__REPLY__BODY_FAILURE : BOOST__REPLY__BODY_PING;
    if (code)
        reply.failure = &failure;
    else
        reply.ping = &ping;
    assert_int_equal(frame_append(&s->answer, &reply.base, &err), 0);
}

static void replies_are_matched_by_id(void **state)
{
    (void)state;
    struct rude_server s = {0};
    struct client c;
    struct error err;
    put_hello(&s, 1, 1, NULL);
    put_reply(&s, 77, 0); /* of nothing that was asked */
    put_reply(&s, 1, 0);
    put_reply(&s, 2, ERR_NOT_FOUND);
    put_reply(&s, 3, 9999); /* a code that this build does not know */
    start_server(&s, false);
    assert_int_equal(open_client(&c, s.path, 5000, &err), 0);
    assert_string_equal(c.peer_version, "9.9");
    struct arena a;
    arena_init(&a, 1 << 20);
    Boost__Request request = BOOST__REQUEST__INIT;
    Boost__PingRequest ping = BOOST__PING_REQUEST__INIT;
    request.body_case = BOOST__REQUEST__BODY_PING;
    request.ping = &ping;
    Boost__Reply *reply = NULL;
    assert_int_equal(client_call(&c, &request, 5000, &a, &reply, &err), 0);
    assert_int_equal(reply->id, 1);
    assert_int_equal(client_call(&c, &request, 5000, &a, &reply, &err), ERR_NOT_FOUND);
    assert_string_equal(err.message, "no");
    assert_int_equal(client_call(&c, &request, 5000, &a, &reply, &err), ERR_INTERNAL);
    assert_int_equal(client_call(&c, &request, 50, &a, &reply, &err), ERR_UNREACHABLE);
    arena_free(&a);
    client_close(&c);
    client_close(&c); /* twice is fine */
    stop_server(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_first_that_is_set_wins),
        cmocka_unit_test(too_long_a_path_says_so),
        cmocka_unit_test(nobody_there_names_the_path_and_the_mend),
        cmocka_unit_test(silence_ends_at_the_timeout),
        cmocka_unit_test(nonsense_is_a_protocol_error),
        cmocka_unit_test(a_refusal_comes_through_whole),
        cmocka_unit_test(replies_are_matched_by_id),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
