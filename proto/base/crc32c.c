/* crc32c.h: the SSE4.2 instruction where the processor has it, else slicing by 8. */
#include "proto/base/crc32c.h"

#include <pthread.h>
#include <string.h>

static uint32_t table[8][256];
static pthread_once_t table_once = PTHREAD_ONCE_INIT;

static void table_make(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int bit = 0; bit < 8; bit++)
            c = c & 1 ? c >> 1 ^ 0x82F63B78u : c >> 1;
        table[0][i] = c;
    }
    for (int slice = 1; slice < 8; slice++)
        for (int i = 0; i < 256; i++) {
            uint32_t c = table[slice - 1][i];
            table[slice][i] = c >> 8 ^ table[0][c & 0xff];
        }
}

static uint32_t crc_portable(uint32_t crc, const uint8_t *p, size_t len)
{
    pthread_once(&table_once, table_make);
    for (; len >= 8; p += 8, len -= 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        word ^= crc;
        crc = 0;
        for (int i = 0; i < 8; i++)
            crc ^= table[7 - i][word >> 8 * i & 0xff];
    }
    while (len--)
        crc = crc >> 8 ^ table[0][(crc ^ *p++) & 0xff];
    return crc;
}

#ifdef __x86_64__
/* The instruction takes three cycles and one can begin in each: three parts of a piece go side by side, and their
 * remainders become one as if each part stood in front of zeros. A remainder behind PART more zero bytes is linear in
 * its bits: shift[k][b] is what byte k of value b becomes. */
enum { PARTS = 3, PART = 2048 };
static uint32_t shift[4][256];
static pthread_once_t shift_once = PTHREAD_ONCE_INIT;

__attribute__((target("sse4.2"))) static void shift_make(void)
{
    for (int k = 0; k < 4; k++)
        for (int bit = 0; bit < 8; bit++) {
            uint64_t c = UINT64_C(1) << (8 * k + bit);
            for (int i = 0; i < PART / 8; i++)
                c = __builtin_ia32_crc32di(c, 0);
            for (int b = 0; b < 256; b++)
                shift[k][b] ^= b >> bit & 1 ? (uint32_t)c : 0;
        }
}

static uint64_t shifted(uint64_t c)
{
    return shift[0][c & 0xff] ^ shift[1][c >> 8 & 0xff] ^ shift[2][c >> 16 & 0xff] ^ shift[3][c >> 24 & 0xff];
}

__attribute__((target("sse4.2"))) static uint32_t crc_sse42(uint32_t crc, const uint8_t *p, size_t len)
{
    uint64_t c = crc;
    if (len >= PARTS * PART)
        pthread_once(&shift_once, shift_make);
    for (; len >= PARTS * PART; p += PARTS * PART, len -= PARTS * PART) {
        uint64_t second = 0, third = 0;
        for (int i = 0; i < PART; i += 8) {
            uint64_t word[PARTS];
            memcpy(&word[0], p + i, 8);
            memcpy(&word[1], p + PART + i, 8);
            memcpy(&word[2], p + 2 * PART + i, 8);
            c = __builtin_ia32_crc32di(c, word[0]);
            second = __builtin_ia32_crc32di(second, word[1]);
            third = __builtin_ia32_crc32di(third, word[2]);
        }
        c = shifted(shifted(c) ^ second) ^ third;
    }
    for (; len >= 8; p += 8, len -= 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        c = __builtin_ia32_crc32di(c, word);
    }
    uint32_t c32 = (uint32_t)c;
    while (len--)
        c32 = __builtin_ia32_crc32qi(c32, *p++);
    return c32;
}
#endif

uint32_t crc32c(uint32_t crc, const void *data, size_t len)
{
    crc = ~crc;
#ifdef __x86_64__
    if (__builtin_cpu_supports("sse4.2"))
        return ~crc_sse42(crc, data, len);
#endif
    return ~crc_portable(crc, data, len);
}
