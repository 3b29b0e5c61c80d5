/* Single operations of a training step on a GPU, at the shapes that the engine calls them with, and the step's floor:
 * what is left when nothing is done but its products, its attention and as many copies as it has passes over memory.
 * Sustained, on random data that go round memory larger than the cache. For tests/bench/gpu_bench.py, and by hand.
 *
 * Usage: gpu_ops [options] MODE SIZE,KIND [FIELD=VALUE of the job...]
 *   gemm     each product of a layer and of the head: the engine's choice beside every candidate of cuBLASLt's
 * heuristic Options: --name what names of lines start with, --warm SECONDS of large products before the first line (2),
 * --seconds SECONDS a line (0.3), --cpu (tries the program out: emulated bf16, figures of no meaning). Standard output:
 * one JSON object a line. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/bench/support/attention_lines.h"
#include "tests/bench/support/floor_lines.h"
#include "tests/bench/support/gemm_lines.h"
#include "tests/bench/support/hfu_lines.h"
#include "tests/bench/support/kernel_lines.h"

static const struct mode {
    const char *name;
    int (*run)(const struct options *o, struct device *d, struct error *err);
    bool updates; /* the engine's steps have them */
} modes[] = {{"gemm", bench_gemm, false},
             {"attention", bench_attention, false},
             {"kernel", bench_kernels, true},
             {"floor", bench_floor, true},
             {"hfu", bench_hfu, false}};

int main(int argc, char **argv)
{
    struct options o;
    struct device d = {.cuda = NULL};
    struct error err = {.code = ERR_OK};
    const struct mode *mode = NULL;
    if (options_read(argc, argv, &o))
        for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
            if (!strcmp(modes[i].name, o.mode))
                mode = &modes[i];
    if (!mode) {
        fprintf(
            stderr,
            "usage: gpu_ops [--name NAME] [--warm S] [--seconds S] [--gib GIB] [--cpu] gemm|kernel|floor|hfu SIZE,KIND "
            "[FIELD=VALUE...]\n");
        return 2;
    }
    int rc = device_open(&d, &o, !mode->updates, &err);
    if (!rc) {
        rc = mode->run(&o, &d, &err);
        device_close(&d);
    }
    if (rc)
        fprintf(stderr, "gpu_ops: %s%s%s%s\n", err.message, err.hint[0] ? " (" : "", err.hint, err.hint[0] ? ")" : "");
    return rc ? 1 : 0;
}
