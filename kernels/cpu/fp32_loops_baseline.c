/* fp32_loops.h for the instruction set that the build targets (SSE2 on x86-64, NEON on AArch64). */
#include <math.h>

#include "kernels/cpu/fp32_loops.h"

#define LOOPS        fp32_loops_baseline
#define ISA          "baseline"
#define TILE_ROWS    4
#define TILE_VECTORS 2
#define VECTOR       4
#include "kernels/cpu/fp32_loops.inc"
