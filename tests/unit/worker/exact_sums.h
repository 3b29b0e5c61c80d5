/* Numbers whose sums are exact in every type and in any order, for tests of collectives. */
#ifndef BOOST_TESTS_WORKER_EXACT_SUMS_H
#define BOOST_TESTS_WORKER_EXACT_SUMS_H

#include <stdint.h>
#include <string.h>

#include "worker/comm/comm.h"

/* Element i of rank r: small integers, so that every sum is exact in every type. */
static inline double value(int rank, int64_t i)
{
    return (double)((rank + 1) * (int)(i % 13) - 6);
}

static inline double get(enum dtype t, const void *data, int64_t i)
{
    switch (t) {
    case DTYPE_F64:
        return ((const double *)data)[i];
    case DTYPE_I32:
        return ((const int32_t *)data)[i];
    case DTYPE_BF16: {
        uint32_t bits = (uint32_t)((const uint16_t *)data)[i] << 16;
        float f;
        memcpy(&f, &bits, sizeof f);
        return (double)f;
    }
    default:
        return (double)((const float *)data)[i];
    }
}

static inline void put(enum dtype t, void *data, int64_t i, double v)
{
    float f = (float)v;
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    if (t == DTYPE_F64)
        ((double *)data)[i] = v;
    else if (t == DTYPE_I32)
        ((int32_t *)data)[i] = (int32_t)v;
    else if (t == DTYPE_BF16)
        ((uint16_t *)data)[i] = (uint16_t)(bits >> 16); /* these values are exact in bf16 */
    else
        ((float *)data)[i] = f;
}

static inline double expected(enum comm_op op, int ranks, int first, int64_t i)
{
    double v = value(first, i);
    for (int r = 1; r < ranks; r++) {
        double x = value(first + r, i);
        v = op == COMM_SUM ? v + x : x > v ? x : v;
    }
    return v;
}

#endif
