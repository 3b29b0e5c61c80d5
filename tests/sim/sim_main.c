/* simulator [--seeds FIRST COUNT] [--seed N [--trace]] [--catch] [--quiet]
 * Exit status: 0 every invariant held, 1 one did not, 2 usage. With --catch (a bug was planted) the other way round. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/sim/sim.h"

static struct sim sim;

struct totals {
    long seeds, events, submitted, completed, faults, boots, attempts, resumes;
    double simulated_s;
};

static bool one(uint64_t seed, bool trace_it, const char *program, bool quiet, struct totals *t)
{
    bool ok = sim_run(&sim, seed, trace_it);
    t->seeds++;
    t->events += (long)sim.happened;
    t->submitted += sim.submitted;
    t->completed += sim.completed;
    t->faults += sim.faults;
    t->boots += sim.boots;
    t->attempts += sim.attempts;
    t->resumes += sim.resumes;
    t->simulated_s += (double)sim.now / (double)S;
    if (!ok && !quiet)
        printf("seed %llu: \"%s\" does not hold at %.4f s: %s\n  replay: %s --seed %llu --trace\n",
               (unsigned long long)seed, sim.failure, (double)sim.now / (double)S, sim.why, program,
               (unsigned long long)seed);
    return ok;
}

static int usage(const char *program)
{
    fprintf(stderr,
            "usage: %s [--seeds FIRST COUNT] [--seed N [--trace]] [--keep-going] [--digest] [--quiet]\n"
            "  --seeds FIRST COUNT  so many seeds from FIRST on (default 1 100)\n"
            "  --seed N             one\n"
            "  --trace              everything that happens in it\n"
            "  --keep-going         to the last seed, whatever fails\n"
            "  --digest             a number for each seed that stands for all that happened in it\n",
            program);
    return 2;
}

int main(int argc, char **argv)
{
    unsigned long long first = 1, count = 100;
    bool trace_it = false, keep_going = false, digests = false, quiet = false;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--seeds") == 0 && i + 2 < argc) {
            first = strtoull(argv[++i], NULL, 10);
            count = strtoull(argv[++i], NULL, 10);
        } else if (strcmp(argv[i], "--seed") == 0 && i + 1 < argc) {
            first = strtoull(argv[++i], NULL, 10);
            count = 1;
        } else if (strcmp(argv[i], "--trace") == 0) {
            trace_it = true;
        } else if (strcmp(argv[i], "--keep-going") == 0) {
            keep_going = true;
        } else if (strcmp(argv[i], "--digest") == 0) {
            digests = true;
        } else if (strcmp(argv[i], "--quiet") == 0) {
            quiet = true;
        } else {
            return usage(argv[0]);
        }
    }
    struct totals t = {0};
    long failed = 0;
    clock_t began = clock();
    for (unsigned long long k = 0; k < count; k++) {
        bool ok = one(first + k, trace_it, argv[0], quiet, &t);
        if (digests)
            printf("%llu %016llx %s\n", first + k, (unsigned long long)sim.digest, ok ? "holds" : sim.failure);
        sim_free(&sim);
        failed += !ok;
        if (!ok && !keep_going)
            break;
    }
    double took = (double)(clock() - began) / CLOCKS_PER_SEC;
    if (!quiet)
        printf("%ld seeds, %ld failed, %.1f s of processor (%.0f a second): %.0f h simulated, %ld events, %ld jobs "
               "submitted, %ld completed, %ld attempts, %ld from a checkpoint, %ld faults, %ld controllers\n",
               t.seeds, failed, took, took > 0 ? (double)t.seeds / took : 0, t.simulated_s / 3600, t.events,
               t.submitted, t.completed, t.attempts, t.resumes, t.faults, t.boots);
    return failed ? 1 : 0;
}
