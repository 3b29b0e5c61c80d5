/* IEEE 754 half precision to fp32, which holds every one of its values. */
#ifndef BOOST_PROTO_BASE_F16_H
#define BOOST_PROTO_BASE_F16_H

#include <stdint.h>
#include <string.h>

/* 1 sign, 5 exponent (bias 15) and 10 fraction bits; a NaN keeps its payload. */
static inline float from_f16(uint16_t x)
{
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, exponent = x >> 10 & 31, fraction = x & 0x3ff, bits;
    float f;
    if (exponent == 31) {
        bits = sign | 0x7f800000 | fraction << 13;
    } else if (exponent) {
        bits = sign | (exponent + 127 - 15) << 23 | fraction << 13;
    } else { /* zero, or a number below 2^-14: fraction units of 2^-24 */
        f = (float)fraction * 0x1p-24f;
        memcpy(&bits, &f, sizeof bits);
        bits |= sign;
    }
    memcpy(&f, &bits, sizeof f);
    return f;
}

#endif
