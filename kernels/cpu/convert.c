/* cpu.h: conversion between the element types of tensors. */
#include <string.h>

#include "kernels/cpu/cpu.h"

static double bf16_to_double(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Round to nearest, ties to even; NaN stays NaN (quiet, sign and leading payload kept). From double the
 * value must be rounded once, not first to float: x that lies within half an ulp of float of a bf16 tie
 * would be rounded twice. Rounding to odd in the first step makes the second one exact. */
static uint16_t bf16_from_double(double x)
{
    float f = (float)x;
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    if (f != f)
        return (uint16_t)(bits >> 16 | 0x40);
    if ((double)f != x && (bits & 0x7fffffff) != 0x7f800000) {
        /* Undo a rounding away from zero, then make the last bit say "inexact". */
        if (x > 0 ? (double)f > x : (double)f < x)
            bits--;
        bits |= 1;
    }
    bits += 0x7fff + (bits >> 16 & 1);
    return (uint16_t)(bits >> 16);
}

static double load(enum dtype t, const void *p, int64_t i)
{
    switch (t) {
    case DTYPE_F32:
        return ((const float *)p)[i];
    case DTYPE_F64:
        return ((const double *)p)[i];
    case DTYPE_BF16:
        return bf16_to_double(((const uint16_t *)p)[i]);
    default:
        return 0;
    }
}

static void store(enum dtype t, void *p, int64_t i, double value)
{
    switch (t) {
    case DTYPE_F32:
        ((float *)p)[i] = (float)value;
        break;
    case DTYPE_F64:
        ((double *)p)[i] = value;
        break;
    case DTYPE_BF16:
        ((uint16_t *)p)[i] = bf16_from_double(value);
        break;
    default:
        break;
    }
}

static bool is_float(enum dtype t)
{
    return t == DTYPE_F32 || t == DTYPE_F64 || t == DTYPE_BF16;
}

void cpu_cast(struct kstream *ks, enum dtype to, void *dst, enum dtype from, const void *src, int64_t n)
{
    if (!is_float(to) || !is_float(from)) {
        cpu_fault(ks, ERR_INTERNAL, "no cast from %s to %s", dtype_name(from), dtype_name(to));
        return;
    }
    if (to == from) {
        if (n)
            memcpy(dst, src, (size_t)n * dtype_size(to));
        return;
    }
    for (int64_t i = 0; i < n; i++)
        store(to, dst, i, load(from, src, i));
}
