/* fp32_loops.h for AVX-512 (x86-64-v4), in full-width vectors. */
#if defined(__x86_64__)
#include <math.h>

#include "kernels/cpu/fp32_loops.h"

#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#define LOOPS        fp32_loops_avx512
#define ISA          "avx512"
#define TILE_ROWS    8
#define TILE_VECTORS 2
#define VECTOR       16
#include "kernels/cpu/fp32_loops.inc"
#else
typedef int no_avx512_here; /* a translation unit may not be empty */
#endif
