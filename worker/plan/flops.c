/* flops.h */
#include "worker/plan/flops.h"

#include <ctype.h>
#include <math.h>
#include <string.h>

#include "worker/plan/intensity.h"

/* From NVIDIA's data sheets, "BFLOAT16 Tensor Core"; where they give the figure with sparsity only, half of it.
 * The first that is in the name counts: a longer one stands in front of its beginning. */
static const struct {
    const char *model;
    double tflops;
} peaks[] = {
    {"GB300", 2500},     /* GB300 NVL72: 360 PFLOPS sparse of 72 GPUs */
    {"GB200", 2500},     /* GB200 NVL72: 360 PFLOPS sparse of 72 GPUs */
    {"B300", 2250},      /* HGX B300: 36 PFLOPS sparse of 8 GPUs */
    {"B200", 2250},      /* HGX B200: 36 PFLOPS sparse of 8 GPUs */
    {"B100", 1750},      /* HGX B100: 28 PFLOPS sparse of 8 GPUs */
    {"GH200", 989.4},    /* Grace Hopper: that of H100 SXM */
    {"H200 NVL", 835.5}, /* H200: 1671 sparse */
    {"H200", 989.4},     /* H200: 1979 sparse */
    {"H100 PCIe", 756},  /* H100 PCIe: 1513 sparse */
    {"H100 NVL", 835.5}, /* H100 NVL: 1671 sparse */
    {"H100", 989.4},     /* H100 SXM, "NVIDIA H100 80GB HBM3": Hopper architecture paper, table 2 */
    {"H800 PCIe", 756},  /* as H100 PCIe */
    {"H800", 989.4},     /* as H100 SXM */
    {"H20", 148},        /* H20 */
    {"A100", 312},       /* A100, SXM4 and PCIe */
    {"A800", 312},       /* as A100 */
    {"A30", 165},        /* A30 */
    {"A40", 149.7},      /* A40 */
    {"A10", 125},        /* A10 */
    {"L40S", 362.05},    /* L40S: 733 sparse, 362.05 dense */
    {"L40", 181.05},     /* L40 */
    {"L4", 121},         /* L4: 242 sparse */
};

static bool ends_word(char c)
{
    return !isalnum((unsigned char)c);
}

/* As whole words: A10 is not in A100. */
static bool holds(const char *name, const char *model)
{
    size_t len = strlen(model);
    for (const char *at = name; (at = strstr(at, model)); at++)
        if ((at == name || ends_word(at[-1])) && ends_word(at[len]))
            return true;
    return false;
}

double plan_peak_flops(const char *device_name)
{
    for (size_t i = 0; device_name && i < sizeof peaks / sizeof peaks[0]; i++)
        if (holds(device_name, peaks[i].model))
            return peaks[i].tflops * 1e12;
    return 0;
}

double plan_mfu(const struct plan *p, double seconds, double peak_flops)
{
    if (!(peak_flops > 0) || !(seconds > 0))
        return NAN;
    return plan_model_flop(p) / (seconds * p->world * peak_flops);
}
