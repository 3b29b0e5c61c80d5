/* Private to worker/plan: arithmetic on sizes. Factors are fields of a job or small constants; what is above 2^63 is
 * more than any machine has, and stays there. */
#ifndef BOOST_WORKER_PLAN_SATURATE_H
#define BOOST_WORKER_PLAN_SATURATE_H

#include <stdint.h>

#include "worker/plan/internal.h"

static inline int64_t mul(int64_t a, int64_t b)
{
    int64_t out;
    return __builtin_mul_overflow(a, b, &out) ? INT64_MAX : out;
}

static inline int64_t add(int64_t a, int64_t b)
{
    int64_t out;
    return __builtin_add_overflow(a, b, &out) ? INT64_MAX : out;
}

static inline int64_t round_up_size(int64_t bytes, int64_t multiple)
{
    return bytes > INT64_MAX - multiple ? INT64_MAX : round_up(bytes, multiple);
}

static inline int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

#endif
