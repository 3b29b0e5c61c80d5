/* data_order.h */
#include "worker/data_order.h"

/* Finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014). */
static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

int64_t data_permute(uint64_t seed, int64_t epoch, int64_t n, int64_t i)
{
    enum { ROUNDS = 6 };
    uint64_t key = mix(seed + UINT64_C(0x9e3779b97f4a7c15));
    key = mix(key ^ mix((uint64_t)epoch + UINT64_C(0x3c6ef372fe94f82b)));
    int half = 1; /* bits of each half */
    while (half < 31 && INT64_C(1) << 2 * half < n)
        half++;
    uint64_t mask = (UINT64_C(1) << half) - 1, x = (uint64_t)i;
    do {
        uint64_t left = x >> half, right = x & mask;
        for (uint64_t round = 0; round < ROUNDS; round++) {
            uint64_t next = left ^ (mix(right ^ mix(key + round)) & mask);
            left = right;
            right = next;
        }
        x = left << half | right;
    } while (x >= (uint64_t)n);
    return (int64_t)x;
}
