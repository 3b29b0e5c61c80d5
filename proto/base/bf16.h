/* bf16 as the upper half of a float: exact to fp32, and back rounded to nearest, ties to even. */
#ifndef BOOST_PROTO_BASE_BF16_H
#define BOOST_PROTO_BASE_BF16_H

#include <stdint.h>
#include <string.h>

static inline float from_bf16(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline uint16_t to_bf16(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) /* stay a NaN */
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#endif
