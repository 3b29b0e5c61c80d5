/* Frames: split anywhere, several at once, limits. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "proto/frame.h"
#include "proto/rpc.pb-c.h"

static struct error err;

static void append_hello(struct buffer *out, int protocol, char *node)
{
    Boost__Hello hello = BOOST__HELLO__INIT;
    hello.has_protocol = 1;
    hello.protocol = protocol;
    hello.node = node;
    assert_int_equal(frame_append(out, &hello.base, &err), 0);
}

/* Three frames (one of them with an empty payload) arrive in two pieces cut at every byte. */
static void test_every_split(void **state)
{
    (void)state;
    struct buffer stream;
    buffer_init(&stream, 1 << 20);
    append_hello(&stream, 1, "n1");
    Boost__PingRequest ping = BOOST__PING_REQUEST__INIT;
    assert_int_equal(frame_append(&stream, &ping.base, &err), 0);
    append_hello(&stream, 3, "n3");
    for (size_t cut = 0; cut <= stream.len; cut++) {
        struct buffer in;
        buffer_init(&in, 1 << 20);
        int frames = 0;
        for (int piece = 0; piece < 2; piece++) {
            assert_int_equal(buffer_append(&in, stream.data + (piece ? cut : 0), piece ? stream.len - cut : cut), 0);
            for (;;) {
                const uint8_t *payload;
                size_t len, used;
                assert_int_equal(frame_next(in.data, in.len, &payload, &len, &used, &err), 0);
                if (!used)
                    break;
                frames++;
                if (frames == 2) {
                    assert_int_equal(len, 0);
                } else {
                    Boost__Hello *hello = boost__hello__unpack(NULL, len, payload);
                    assert_non_null(hello);
                    assert_int_equal(hello->protocol, frames);
                    boost__hello__free_unpacked(hello, NULL);
                }
                buffer_consume(&in, used);
            }
        }
        assert_int_equal(frames, 3);
        assert_int_equal(in.len, 0);
        buffer_free(&in);
    }
    buffer_free(&stream);
}

static void test_header(void **state)
{
    (void)state;
    struct buffer out;
    buffer_init(&out, 1 << 20);
    append_hello(&out, 1, NULL);
    assert_memory_equal(out.data, "\x00\x00\x00\x02\x08\x01", 6); /* big-endian length, then protobuf */
    assert_int_equal(out.len, 6);
    buffer_free(&out);
}

static void test_limits(void **state)
{
    (void)state;
    const uint8_t *payload;
    size_t len, used;
    uint8_t header[4] = {0x00, 0x40, 0x00, 0x00}; /* 4 MiB exactly: wait for it */
    assert_int_equal(frame_next(header, 4, &payload, &len, &used, &err), 0);
    assert_int_equal(used, 0);
    header[3] = 1;
    assert_int_equal(frame_next(header, 4, &payload, &len, &used, &err), ERR_PROTOCOL);
    memset(header, 0xff, 4);
    assert_int_equal(frame_next(header, 4, &payload, &len, &used, &err), ERR_PROTOCOL);
    assert_int_equal(used, 0);

    struct buffer out;
    buffer_init(&out, 64 << 20);
    append_hello(&out, 1, NULL);
    Boost__KvOp op = BOOST__KV_OP__INIT;
    op.has_value = 1;
    op.value.len = LIMIT_FRAME;
    op.value.data = calloc(1, LIMIT_FRAME);
    assert_non_null(op.value.data);
    assert_int_equal(frame_append(&out, &op.base, &err), ERR_INVALID);
    assert_int_equal(out.len, 6);   /* as it was */
    op.value.len = LIMIT_FRAME - 5; /* tag 1, length 4 */
    assert_int_equal(frame_append(&out, &op.base, &err), 0);
    assert_int_equal(out.len, 6 + 4 + LIMIT_FRAME);
    assert_int_equal(frame_next(out.data + 6, out.len - 6, &payload, &len, &used, &err), 0);
    assert_int_equal(len, LIMIT_FRAME);
    buffer_free(&out);
    buffer_init(&out, 1 << 20); /* a send buffer that is full */
    assert_int_equal(frame_append(&out, &op.base, &err), ERR_NOMEM);
    assert_int_equal(out.len, 0);
    buffer_free(&out);
    free(op.value.data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_split),
        cmocka_unit_test(test_header),
        cmocka_unit_test(test_limits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
