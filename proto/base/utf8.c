/* utf8.h */
#include "proto/base/utf8.h"

size_t utf8_length(const void *s, size_t len)
{
    const uint8_t *p = s;
    if (!len)
        return 0;
    if (p[0] < 0x80)
        return 1;
    size_t n = p[0] >= 0xF0 ? 4 : p[0] >= 0xE0 ? 3 : 2;
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    if (p[0] < 0xC2 || p[0] > 0xF4 || n > len)
        return 0;
    uint32_t code = p[0] & (0x7Fu >> n);
    for (size_t i = 1; i < n; i++) {
        if ((p[i] & 0xC0) != 0x80)
            return 0;
        code = code << 6 | (p[i] & 0x3Fu);
    }
    if (code < least[n] || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF))
        return 0;
    return n;
}

size_t utf8_put(uint32_t code, char out[4])
{
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    size_t n = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    static const uint8_t lead[] = {0, 0, 0xC0, 0xE0, 0xF0};
    for (size_t i = n - 1; i > 0; i--, code >>= 6)
        out[i] = (char)(0x80 | (code & 0x3F));
    out[0] = (char)(lead[n] | code);
    return n;
}

size_t utf8_whole(const void *s, size_t len)
{
    const uint8_t *p = s;
    for (size_t back = 1; back <= 4 && back <= len; back++) {
        uint8_t byte = p[len - back];
        if ((byte & 0xC0) == 0x80)
            continue; /* of a character that begins further ahead */
        return byte < 0x80 || utf8_length(p + len - back, back) == back ? len : len - back;
    }
    return len;
}
