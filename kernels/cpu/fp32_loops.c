/* fp32_loops.h: which set of loops this processor gets. */
#include "kernels/cpu/fp32_loops.h"

#include <stdlib.h>
#include <string.h>

static bool supported(const struct fp32_loops *l)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (l == &fp32_loops_avx512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("fma");
    if (l == &fp32_loops_avx2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return l == &fp32_loops_baseline;
}

int fp32_loops_choose(const struct fp32_loops **out, struct error *err)
{
    static const struct fp32_loops *const widest_first[] = {
#if defined(__x86_64__)
        &fp32_loops_avx512,
        &fp32_loops_avx2,
#endif
        &fp32_loops_baseline,
    };
    const char *wanted = getenv("BOOST_CPU_ISA");
    if (wanted && !*wanted)
        wanted = NULL;
    for (size_t i = 0; i < sizeof widest_first / sizeof *widest_first; i++) {
        const struct fp32_loops *l = widest_first[i];
        if (supported(l) && (!wanted || strcmp(wanted, l->isa) == 0)) {
            *out = l;
            return ERR_OK;
        }
    }
    error_set(err, ERR_INVALID, "BOOST_CPU_ISA=%s: this processor has no such instruction set", wanted);
    return error_hint(err, "unset it, or use baseline, avx2 or avx512");
}
