/* Sessions against a peer in the same thread: hello, frames in pieces, bad input,
 * back-pressure both ways, and that one bad session leaves the others alone. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/listener.h"
#include "daemon/log.h"
#include "daemon/session.h"
#include "proto/base/arena.h"
#include "proto/frame.h"

enum { GUARD_MS = 10000 };

struct fixture {
    uv_loop_t loop;
    uv_pipe_t pipe;
    uv_timer_t guard;
    struct listener listener;
    struct session_set set;
    /* what the handler saw */
    size_t opened, frames, drained, closed, bytes;
    struct session *last;
    /* what the handler does */
    int answer_bytes; /* > 0: a Failure with a message of this length for each frame */
    bool hold;        /* begins a request for each frame and never ends it           */
    bool refuse_frame;
    bool refuse_opening;
    bool close_on_frame;
};

static int on_opened(void *arg, struct session *s, struct error *err)
{
    struct fixture *f = arg;
    f->last = s;
    if (f->refuse_opening)
        return error_set(err, ERR_REFUSED, "not you");
    f->opened++;
    return ERR_OK;
}

static int on_frame(void *arg, struct session *s, const uint8_t *payload, size_t len, struct error *err)
{
    struct fixture *f = arg;
    (void)payload;
    f->frames++;
    f->bytes += len;
    if (f->close_on_frame)
        session_close(s);
    if (f->refuse_frame)
        return error_set(err, ERR_PROTOCOL, "not this");
    if (f->hold)
        session_request_begin(s);
    if (f->answer_bytes) {
        char *text = malloc((size_t)f->answer_bytes + 1);
        assert_non_null(text);
        memset(text, 'x', (size_t)f->answer_bytes);
        text[f->answer_bytes] = '\0';
        Boost__Failure failure = BOOST__FAILURE__INIT;
        failure.message = text;
        struct error ignored;
        int rc = session_send(s, &failure.base, &ignored);
        assert_true(rc == 0 || s->closing);
        free(text);
    }
    return ERR_OK;
}

static void on_drained(void *arg, struct session *s)
{
    (void)s;
    ((struct fixture *)arg)->drained++;
}

static void on_closed(void *arg, struct session *s)
{
    struct fixture *f = arg;
    f->closed++;
    if (f->last == s)
        f->last = NULL;
}

static void on_connection(uv_stream_t *listener, int status)
{
    struct fixture *f = listener->data;
    struct error err;
    assert_int_equal(status, 0);
    assert_int_equal(session_accept(&f->set, listener, &err), 0);
}

static void on_guard(uv_timer_t *timer)
{
    (void)timer;
    fprintf(stderr, "nothing happened for %d ms\n", GUARD_MS);
    abort();
}

static int setup(void **state)
{
    static int number;
    struct fixture *f = calloc(1, sizeof *f);
    struct error err;
    char path[64];
    if (!f || uv_loop_init(&f->loop))
        return -1;
    log_set_level(LOG_ERROR);
    snprintf(path, sizeof path, "s%ld.%d", (long)getpid(), number++);
    if (listener_open(&f->listener, path, &err))
        return -1;
    const struct session_handler handler = {
        .arg = f, .opened = on_opened, .frame = on_frame, .drained = on_drained, .closed = on_closed};
    session_set_init(&f->set, &f->loop, &handler);
    uv_timer_init(&f->loop, &f->guard);
    uv_timer_start(&f->guard, on_guard, GUARD_MS, 0);
    uv_pipe_init(&f->loop, &f->pipe, 0);
    f->pipe.data = f;
    if (uv_pipe_open(&f->pipe, f->listener.fd) || uv_listen((uv_stream_t *)&f->pipe, 128, on_connection))
        return -1;
    f->listener.fd = -1;
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    listener_close(&f->listener);
    session_set_close(&f->set);
    uv_close((uv_handle_t *)&f->guard, NULL);
    uv_close((uv_handle_t *)&f->pipe, NULL);
    uv_run(&f->loop, UV_RUN_DEFAULT);
    int rc = uv_loop_close(&f->loop); /* no handle is left */
    free(f);
    return rc;
}

/* ---- the peer ------------------------------------------------------------------ */

static void turn(struct fixture *f)
{
    uv_timer_again(&f->guard);
    uv_run(&f->loop, UV_RUN_NOWAIT);
}

static int dial(struct fixture *f)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, f->listener.path, strlen(f->listener.path) + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&address, sizeof address), 0);
    return fd;
}

/* Sends what fits while the loop runs; stops early when nothing moves any more. Bytes taken. */
static size_t offer(struct fixture *f, int fd, const void *data, size_t len)
{
    size_t sent = 0;
    for (int idle = 0; sent < len && idle < 50;) {
        ssize_t n = send(fd, (const char *)data + sent, len - sent, MSG_NOSIGNAL);
        if (n > 0) {
            sent += (size_t)n;
            idle = 0;
        } else if (errno == EAGAIN) {
            idle++;
        } else {
            break;
        }
        turn(f);
    }
    return sent;
}

static void put(struct fixture *f, int fd, const void *data, size_t len)
{
    assert_int_equal(offer(f, fd, data, len), len);
}

static void put_message(struct fixture *f, int fd, const ProtobufCMessage *m)
{
    struct buffer out;
    struct error err;
    buffer_init(&out, LIMIT_FRAME + FRAME_HEADER);
    assert_int_equal(frame_append(&out, m, &err), 0);
    put(f, fd, out.data, out.len);
    buffer_free(&out);
}

/* One frame into buf; 0 at the end of the stream. */
static size_t take(struct fixture *f, int fd, uint8_t *buf, size_t cap)
{
    size_t have = 0, need = FRAME_HEADER;
    for (int spins = 0; have < need && spins < 2000000; spins++) {
        ssize_t n = recv(fd, buf + have, need - have, 0);
        if (n == 0)
            return 0;
        if (n < 0) {
            assert_true(errno == EAGAIN || errno == ECONNRESET);
            if (errno == ECONNRESET)
                return 0;
            turn(f);
            continue;
        }
        have += (size_t)n;
        if (have == FRAME_HEADER && need == FRAME_HEADER)
            need += (size_t)buf[0] << 24 | (size_t)buf[1] << 16 | (size_t)buf[2] << 8 | buf[3];
        assert_true(need <= cap);
    }
    assert_int_equal(have, need);
    return have;
}

static void expect_end(struct fixture *f, int fd)
{
    uint8_t buf[64];
    assert_int_equal(take(f, fd, buf, sizeof buf), 0);
}

static Boost__Hello *take_hello(struct fixture *f, int fd)
{
    uint8_t buf[4096];
    size_t n = take(f, fd, buf, sizeof buf);
    assert_true(n >= FRAME_HEADER);
    Boost__Hello *hello = boost__hello__unpack(NULL, n - FRAME_HEADER, buf + FRAME_HEADER);
    assert_non_null(hello);
    return hello;
}

static void put_hello(struct fixture *f, int fd, int protocol, int protocol_min)
{
    Boost__Hello hello = BOOST__HELLO__INIT;
    hello.has_protocol = hello.has_protocol_min = hello.has_component = 1;
    hello.protocol = protocol;
    hello.protocol_min = protocol_min;
    hello.component = BOOST__COMPONENT__VALUE__CTL;
    put_message(f, fd, &hello.base);
}

static int greet(struct fixture *f)
{
    int fd = dial(f);
    put_hello(f, fd, FRAME_PROTOCOL_VERSION, FRAME_PROTOCOL_MIN);
    Boost__Hello *hello = take_hello(f, fd);
    assert_null(hello->refused);
    assert_int_equal(hello->component, BOOST__COMPONENT__VALUE__CONTROLLER);
    boost__hello__free_unpacked(hello, NULL);
    return fd;
}

static void put_request(struct fixture *f, int fd)
{
    Boost__Request request = BOOST__REQUEST__INIT;
    request.has_id = 1;
    request.id = 7;
    put_message(f, fd, &request.base);
}

/* ---- tests --------------------------------------------------------------------- */

static void the_kernel_says_who_it_is(void **state)
{
    struct fixture *f = *state;
    int fd = greet(f);
    assert_int_equal(f->opened, 1);
    assert_non_null(f->last);
    assert_int_equal(f->last->uid, geteuid());
    assert_int_equal(f->last->gid, getegid());
    char pid[32];
    snprintf(pid, sizeof pid, "pid %d", (int)getpid());
    assert_non_null(strstr(f->last->who, pid));
    close(fd);
    while (!f->closed)
        turn(f);
    assert_int_equal(f->set.count, 0);
}

static void frames_may_come_in_any_pieces(void **state)
{
    struct fixture *f = *state;
    f->answer_bytes = 3;
    int fd = greet(f);
    struct buffer out;
    struct error err;
    buffer_init(&out, 1 << 20);
    Boost__Request request = BOOST__REQUEST__INIT;
    request.has_id = 1;
    for (unsigned i = 0; i < 20; i++) {
        request.id = i;
        assert_int_equal(frame_append(&out, &request.base, &err), 0);
    }
    for (size_t i = 0; i < out.len; i++) /* byte by byte */
        put(f, fd, out.data + i, 1);
    put(f, fd, out.data, out.len); /* all at once */
    for (int i = 0; i < 40; i++) {
        uint8_t buf[256];
        assert_true(take(f, fd, buf, sizeof buf) > 0);
    }
    assert_int_equal(f->frames, 40);
    assert_int_equal(f->bytes, 2 * (out.len - 20 * FRAME_HEADER));
    buffer_free(&out);
    close(fd);
}

static void other_versions_are_refused_with_a_reason(void **state)
{
    struct fixture *f = *state;
    static const int versions[][2] = {{99, 99}, {0, 0}};
    for (size_t i = 0; i < 2; i++) {
        int fd = dial(f);
        put_hello(f, fd, versions[i][0], versions[i][1]);
        Boost__Hello *hello = take_hello(f, fd);
        assert_non_null(hello->refused);
        assert_int_equal(hello->refused->code, ERR_PROTOCOL);
        assert_true(*hello->refused->hint);
        boost__hello__free_unpacked(hello, NULL);
        expect_end(f, fd);
        close(fd);
    }
    int fd = dial(f); /* newer, but it still speaks ours */
    put_hello(f, fd, 99, FRAME_PROTOCOL_VERSION);
    Boost__Hello *hello = take_hello(f, fd);
    assert_null(hello->refused);
    boost__hello__free_unpacked(hello, NULL);
    assert_int_equal(f->opened, 1);
    close(fd);
}

static void garbage_before_the_hello_is_refused(void **state)
{
    struct fixture *f = *state;
    static const uint8_t http[] = "GET / HTTP/1.1\r\n\r\n"; /* a length of over a gigabyte */
    static const uint8_t noise[] = {0, 0, 0, 4, 0xff, 0xff, 0xff, 0xff};
    static const uint8_t empty[] = {0, 0, 0, 0};
    const struct {
        const uint8_t *data;
        size_t len;
    } inputs[] = {{http, sizeof http - 1}, {noise, sizeof noise}, {empty, sizeof empty}};
    int good = greet(f);
    for (size_t i = 0; i < 3; i++) {
        int fd = dial(f);
        put(f, fd, inputs[i].data, inputs[i].len);
        Boost__Hello *hello = take_hello(f, fd);
        assert_non_null(hello->refused);
        assert_int_equal(hello->refused->code, ERR_PROTOCOL);
        boost__hello__free_unpacked(hello, NULL);
        expect_end(f, fd);
        close(fd);
    }
    assert_int_equal(f->opened, 1);
    put_request(f, good); /* the others are not disturbed */
    while (f->frames < 1)
        turn(f);
    close(good);
}

static void a_handler_that_refuses_the_opening(void **state)
{
    struct fixture *f = *state;
    f->refuse_opening = true;
    int fd = dial(f);
    put_hello(f, fd, FRAME_PROTOCOL_VERSION, FRAME_PROTOCOL_MIN);
    Boost__Hello *hello = take_hello(f, fd);
    assert_non_null(hello->refused);
    assert_int_equal(hello->refused->code, ERR_REFUSED);
    assert_string_equal(hello->refused->message, "not you");
    boost__hello__free_unpacked(hello, NULL);
    expect_end(f, fd);
    close(fd);
}

static void a_bad_frame_is_answered_then_the_session_ends(void **state)
{
    struct fixture *f = *state;
    int fd = greet(f), other = greet(f);
    f->refuse_frame = true;
    put_request(f, fd);
    uint8_t buf[1024];
    size_t n = take(f, fd, buf, sizeof buf);
    Boost__Reply *reply = boost__reply__unpack(NULL, n - FRAME_HEADER, buf + FRAME_HEADER);
    assert_non_null(reply);
    assert_int_equal(reply->body_case, BOOST__REPLY__BODY_FAILURE);
    assert_false(reply->has_id);
    assert_int_equal(reply->failure->code, ERR_PROTOCOL);
    assert_string_equal(reply->failure->message, "not this");
    boost__reply__free_unpacked(reply, NULL);
    expect_end(f, fd);
    f->refuse_frame = false;
    put_request(f, other);
    while (f->frames < 2)
        turn(f);
    close(fd);
    close(other);
}

static void a_slow_reader_stops_its_own_requests_only(void **state)
{
    struct fixture *f = *state;
    enum { ANSWER = 64 << 10, REQUESTS = 200 };
    f->answer_bytes = ANSWER;
    int slow = greet(f);
    for (int i = 0; i < REQUESTS; i++)
        put_request(f, slow);
    for (int i = 0; i < 100; i++)
        turn(f);
    /* The mark, one answer over it, and what the kernel holds for the peer. */
    int kernel = 0;
    socklen_t len = sizeof kernel;
    assert_int_equal(getsockopt(slow, SOL_SOCKET, SO_SNDBUF, &kernel, &len), 0);
    size_t stopped_at = f->frames;
    assert_in_range(stopped_at, SESSION_HIGH_WATER / ANSWER, (SESSION_HIGH_WATER + 4 * kernel) / ANSWER + 2);

    int quick = greet(f);
    put_request(f, quick);
    static uint8_t buf[ANSWER + 64];
    assert_true(take(f, quick, buf, sizeof buf) > ANSWER);
    for (int i = 0; i < REQUESTS; i++)
        assert_true(take(f, slow, buf, sizeof buf) > ANSWER);
    assert_int_equal(f->frames, REQUESTS + 1);
    assert_true(f->drained > 0);
    assert_int_equal(f->closed, 0);
    close(slow);
    close(quick);
}

static void a_peer_that_never_reads_is_dropped_at_the_limit(void **state)
{
    struct fixture *f = *state;
    int fd = greet(f);
    struct session *s = f->last;
    static char text[1 << 20];
    memset(text, 'x', sizeof text - 1);
    Boost__Failure failure = BOOST__FAILURE__INIT;
    failure.message = text;
    struct error err;
    int sent = 0;
    while (!session_send(s, &failure.base, &err) && sent < 100)
        sent++;
    assert_in_range(sent, SESSION_MAX_OUT >> 20, (SESSION_MAX_OUT >> 20) + 3);
    assert_int_equal(err.code, ERR_NOMEM);
    int other = greet(f);
    while (!f->closed)
        turn(f);
    put_request(f, other);
    while (!f->frames)
        turn(f);
    close(fd);
    close(other);
}

static void a_message_over_the_frame_limit_is_the_senders_error(void **state)
{
    struct fixture *f = *state;
    int fd = greet(f);
    char *text = malloc(LIMIT_FRAME + 2);
    assert_non_null(text);
    memset(text, 'x', LIMIT_FRAME + 1);
    text[LIMIT_FRAME + 1] = '\0';
    Boost__Failure failure = BOOST__FAILURE__INIT;
    failure.message = text;
    struct error err;
    assert_int_equal(session_send(f->last, &failure.base, &err), ERR_INVALID);
    text[10] = '\0';
    assert_int_equal(session_send(f->last, &failure.base, &err), 0);
    uint8_t buf[64];
    assert_int_equal(take(f, fd, buf, sizeof buf), FRAME_HEADER + 12);
    free(text);
    close(fd);
}

static void open_requests_are_limited(void **state)
{
    struct fixture *f = *state;
    f->hold = true;
    int fd = greet(f);
    for (int i = 0; i < SESSION_MAX_PENDING + 40; i++)
        put_request(f, fd);
    for (int i = 0; i < 100; i++)
        turn(f);
    assert_int_equal(f->frames, SESSION_MAX_PENDING);
    for (int i = 1; i <= 40; i++) { /* each end lets one more in */
        session_request_end(f->last);
        while (f->frames < (size_t)SESSION_MAX_PENDING + i)
            turn(f);
        turn(f);
        assert_int_equal(f->frames, SESSION_MAX_PENDING + i);
    }
    session_request_end(f->last);
    put_request(f, fd);
    while (f->frames < SESSION_MAX_PENDING + 41)
        turn(f);
    close(fd);
}

static void a_handler_may_close_from_inside(void **state)
{
    struct fixture *f = *state;
    f->close_on_frame = true;
    f->answer_bytes = 10;
    int fd = greet(f);
    struct buffer out;
    struct error err;
    buffer_init(&out, 1 << 16);
    Boost__Request request = BOOST__REQUEST__INIT;
    request.has_id = 1;
    for (int i = 0; i < 5; i++)
        assert_int_equal(frame_append(&out, &request.base, &err), 0);
    offer(f, fd, out.data, out.len);
    buffer_free(&out);
    expect_end(f, fd);
    assert_int_equal(f->frames, 1);
    while (!f->closed)
        turn(f);
    close(fd);
}

static void a_peer_without_a_hello_is_let_go(void **state)
{
    struct fixture *f = *state;
    int good = greet(f), fd = dial(f);
    while (f->set.count < 2)
        turn(f);
    struct session *silent = f->set.first;
    assert_false(silent->greeted);
    assert_true(silent->deadline_ms > 0);
    assert_int_equal(f->last->deadline_ms, 0); /* a greeted one may be idle for ever */
    silent->deadline_ms = 1;                   /* long past */
    while (!f->closed) {
        uv_timer_again(&f->guard);
        uv_run(&f->loop, UV_RUN_ONCE);
    }
    expect_end(f, fd);
    put_request(f, good);
    while (!f->frames)
        turn(f);
    close(fd);
    close(good);
}

static void the_socket_file_is_replaced_only_when_stale(void **state)
{
    struct fixture *f = *state;
    struct listener second;
    struct error err;
    assert_int_equal(listener_open(&second, f->listener.path, &err), ERR_BUSY);
    assert_non_null(strstr(err.message, f->listener.path));
    turn(f);

    char path[64];
    snprintf(path, sizeof path, "stale%ld", (long)getpid());
    struct listener first;
    assert_int_equal(listener_open(&first, path, &err), 0);
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 07777, 0666);
    close(first.fd); /* as a killed daemon leaves it */
    first.fd = -1;
    assert_int_equal(listener_open(&second, path, &err), 0);
    listener_close(&first); /* not its file any more */
    assert_int_equal(access(path, F_OK), 0);
    listener_close(&second);
    assert_int_equal(access(path, F_OK), -1);

    FILE *file = fopen(path, "we");
    assert_non_null(file);
    fclose(file);
    assert_int_equal(listener_open(&second, path, &err), ERR_INVALID);
    assert_int_equal(access(path, F_OK), 0);
    unlink(path);

    char long_path[160];
    memset(long_path, 'p', sizeof long_path - 1);
    long_path[sizeof long_path - 1] = '\0';
    assert_int_equal(listener_open(&second, long_path, &err), ERR_INVALID);
    assert_non_null(strstr(err.message, "107"));
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(the_kernel_says_who_it_is),
        T(frames_may_come_in_any_pieces),
        T(other_versions_are_refused_with_a_reason),
        T(garbage_before_the_hello_is_refused),
        T(a_handler_that_refuses_the_opening),
        T(a_bad_frame_is_answered_then_the_session_ends),
        T(a_slow_reader_stops_its_own_requests_only),
        T(a_peer_that_never_reads_is_dropped_at_the_limit),
        T(a_message_over_the_frame_limit_is_the_senders_error),
        T(open_requests_are_limited),
        T(a_handler_may_close_from_inside),
        T(a_peer_without_a_hello_is_let_go),
        T(the_socket_file_is_replaced_only_when_stale),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
