/* An engine at work for a benchmark: what it computes with, a model and its steps, and the lines that say what came
 * out. One thread, one device a process. */
#ifndef BOOST_TESTS_BENCH_RUN_H
#define BOOST_TESTS_BENCH_RUN_H

#include "tests/bench/support/bench_job.h"
#include "tests/bench/support/device_log.h"

struct options {
    const char *mode, *name;
    double warm, seconds, gib;
    bool cpu, plain, layers;
    struct bench_job job;
};
/* [OPTION...] MODE SIZE,KIND [FIELD=VALUE...]; false: not so. Options: --name NAME, --warm, --seconds and --gib NUMBER,
 * --cpu, --plain, --layers. The strings stay argv's. seconds: without --seconds. */
MUST_USE bool options_read(int argc, char **argv, double seconds, struct options *o);

/* ---- what is computed with ---- */

struct device {
    const struct cuda_library *cuda; /* NULL: the CPU */
    struct local_world *world;
    struct comms alone;      /* of a layout of one rank */
    struct kernels *kernels; /* what engines are made with; may be changed before the first */
};

/* no_update: steps end with the gradients. */
MUST_USE int device_open(struct device *d, const struct options *o, bool no_update, struct error *err);
void device_close(struct device *d);
/* Free on the device before there is a model: a stream comes and goes, so that what the context itself takes is not
 * counted as the engine's. 0 on the CPU. */
MUST_USE int device_free_before(const struct options *o, int64_t *bytes, struct error *err);

/* ---- a model at work ---- */

struct model {
    struct plan plan;
    struct comms *comms, null; /* null: those of a rank without the others */
    struct engine *engine;
    struct micro_batch *micro;
    int32_t *tokens;
    int64_t step, arena;
    double loss;
    double *ms; /* [MOST_STEPS] of the steps measured */
    int64_t measured;
};

/* plan and comms are there. Makes the engine and does three steps: the first runs plainly, the second is captured. */
MUST_USE int model_start(struct model *m, const struct options *o, struct error *err);
/* Rank 0 of tp, this many of the model's layers (0: all), the other ranks not there. */
MUST_USE int model_start_layers(struct model *m, const struct options *o, const struct device *d, int layers,
                                struct error *err);
void model_stop(struct model *m);
MUST_USE int model_step(struct model *m, double *ms, struct error *err);
/* Steps for so long, at least one; their times are kept when `measure`. */
MUST_USE int model_run_for(struct model *m, double seconds, bool measure, struct error *err);
/* Of the times kept, which it sorts; NaN when there are none. */
double model_quantile(struct model *m, double q);
double model_mean(const struct model *m);

/* ---- a line of standard output ---- */

void line_begin(const char *name, double value, const char *unit);
void line_put(const char *key, double value);                               /* null when it is not finite */
void line_end_plain(const struct options *o, const struct device_log *log); /* of no model */
void line_end(const struct options *o, const struct plan *p, const struct device_log *log);

#endif
