/* fp32_loops.h for AVX2 with fused multiply-add (x86-64-v3). */
#if defined(__x86_64__)
#include <math.h>

#include "kernels/cpu/fp32_loops.h"

#pragma GCC target("avx2,fma")
#define LOOPS        fp32_loops_avx2
#define ISA          "avx2"
#define TILE_ROWS    4
#define TILE_VECTORS 2
#define VECTOR       8
#include "kernels/cpu/fp32_loops.inc"
#else
typedef int no_avx2_here; /* a translation unit may not be empty */
#endif
