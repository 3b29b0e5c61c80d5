/* CRC-32C against the published vectors, and the processor's instruction against
 * the portable code. Includes the source to reach both. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "proto/base/crc32c.c"

static uint32_t portable(uint32_t crc, const void *data, size_t len)
{
    return ~crc_portable(~crc, data, len);
}

/* RFC 3720 appendix B.4 and the check value of the CRC catalogue; the first four are 32 bytes each. */
static void test_published_vectors(void **state)
{
    (void)state;
    uint8_t zeros[32] = {0}, ones[32], up[32], down[32];
    for (int i = 0; i < 32; i++) {
        ones[i] = 0xff;
        up[i] = (uint8_t)i;
        down[i] = (uint8_t)(31 - i);
    }
    static const uint8_t read_command[48] = {0x01, 0xc0, 0, 0, 0, 0, 0,    0, 0,    0, 0, 0,    0, 0, 0, 0,
                                             0x14, 0,    0, 0, 0, 0, 0x04, 0, 0,    0, 0, 0x14, 0, 0, 0, 0x18,
                                             0x28, 0,    0, 0, 0, 0, 0,    0, 0x02, 0, 0, 0,    0, 0, 0, 0};
    const struct {
        const void *data;
        size_t len;
        uint32_t crc;
    } vectors[] = {{zeros, 32, 0x8a9136aa},
                   {ones, 32, 0x62a8ab43},
                   {up, 32, 0x46dd794e},
                   {down, 32, 0x113fdb5c},
                   {read_command, 48, 0xd9963a56},
                   {"123456789", 9, 0xe3069283},
                   {"", 0, 0}};
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) {
        assert_int_equal(crc32c(0, vectors[i].data, vectors[i].len), vectors[i].crc);
        assert_int_equal(portable(0, vectors[i].data, vectors[i].len), vectors[i].crc);
    }
}

/* Bit by bit, straight from the polynomial. */
static uint32_t reference(uint32_t crc, const uint8_t *p, size_t len)
{
    crc = ~crc;
    while (len--) {
        crc ^= *p++;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? crc >> 1 ^ 0x82F63B78u : crc >> 1;
    }
    return ~crc;
}

/* Every length and alignment up to 200 bytes, continued at every split. */
static void test_both_agree_everywhere(void **state)
{
    (void)state;
    uint8_t data[256];
    uint32_t x = 1;
    for (size_t i = 0; i < sizeof data; i++) {
        x = x * 1664525u + 1013904223u;
        data[i] = (uint8_t)(x >> 24);
    }
    for (size_t start = 0; start < 9; start++)
        for (size_t len = 0; len < 200; len++) {
            uint32_t want = reference(0, data + start, len);
            assert_int_equal(crc32c(0, data + start, len), want);
            assert_int_equal(portable(0, data + start, len), want);
        }
    uint32_t want = reference(0, data, 200);
    for (size_t split = 0; split <= 200; split++) {
        assert_int_equal(crc32c(crc32c(0, data, split), data + split, 200 - split), want);
        assert_int_equal(portable(portable(0, data, split), data + split, 200 - split), want);
    }
}

/* Lengths around those that are worked on in parts side by side, at odd starts, and continued from any remainder. */
static void test_long_ones(void **state)
{
    (void)state;
    enum { LEN = 40000 };
    static uint8_t data[LEN + 16];
    uint32_t x = 3;
    for (size_t i = 0; i < sizeof data; i++) {
        x = x * 1664525u + 1013904223u;
        data[i] = (uint8_t)(x >> 24);
    }
    for (size_t start = 0; start < 9; start += 2)
        for (size_t len = 1000; len < LEN; len += 511 + len % 13) {
            uint32_t want = reference(x, data + start, len);
            assert_int_equal(crc32c(x, data + start, len), want);
            assert_int_equal(portable(x, data + start, len), want);
        }
    for (int near = -9; near <= 9; near++)
        for (size_t parts = 2048; parts <= 6 * 2048; parts += 2048)
            assert_int_equal(crc32c(0, data, parts + (size_t)near), reference(0, data, parts + (size_t)near));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_published_vectors),
        cmocka_unit_test(test_both_agree_everywhere),
        cmocka_unit_test(test_long_ones),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
