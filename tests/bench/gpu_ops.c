/* Single operations of a training step on a GPU, at the shapes that the engine calls them with, and the step's floor:
 * what is left when nothing is done but its products, its attention and as many copies as it has passes over memory.
 * Sustained, on random data that go round memory larger than the cache. For tests/bench/gpu_bench.py, and by hand:
 * --help has the modes. With --cpu the program is tried out: emulated bf16, figures of no meaning. */
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

static const char usage[] =
    "usage: gpu_ops [--name NAME] [--warm S] [--seconds S] [--gib GIB] [--cpu] MODE SIZE,KIND [FIELD=VALUE...]\n"
    "       gpu_ops [--name NAME] [--warm S] [--seconds S] [--cpu] attention B,H,HK,S,E...\n"
    "  gemm       each product of a layer and the head, beside every candidate of cuBLASLt's heuristic\n"
    "  attention  forward and backward at these shapes, by cuDNN and by the own kernel\n"
    "  kernel     every other operation inside whole steps, by shape, beside a device copy\n"
    "  floor      whole steps of products, with attention, with copies of --gib GIB a step\n"
    "  hfu        one projection of attention and one of the MLP: full-rank, vanilla and BTP\n"
    "SIZE,KIND is 1b,cola or the like (tiny 60m 350m 1b 3b 7b 13b 30b; full svd cola lax). --warm: seconds of large\n"
    "products first (2). --seconds: of a line (0.3). --cpu: a trial without a GPU. One JSON object a line.\n";

int main(int argc, char **argv)
{
    struct options o;
    struct device d = {.cuda = NULL};
    struct error err = {.code = ERR_OK};
    const struct mode *mode = NULL;
    if (argc > 1 && !strcmp(argv[1], "--help")) {
        fputs(usage, stdout);
        return 0;
    }
    if (options_read(argc, argv, 0.3, &o))
        for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
            if (!strcmp(modes[i].name, o.mode))
                mode = &modes[i];
    if (!mode) {
        fputs(usage, stderr);
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
