/* Private to worker/plan. */
#ifndef BOOST_WORKER_PLAN_INTERNAL_H
#define BOOST_WORKER_PLAN_INTERNAL_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/error.h"
#include "proto/job.pb-c.h"

struct plan;

/* Collects every fault of a stage into one error: messages joined by "; ", and so their mends in the hint, each once. */
struct faults {
    struct error *err;
    enum error_code code; /* of every fault here */
    int count;
    int hidden;       /* faults that no longer fitted */
    int hidden_mends; /* as little */
};
void faults_add(struct faults *f, const char *mend, const char *fmt, ...) PRINTF_LIKE(3, 4);
/* ERR_OK without a fault, else the code; adds "and N more" to message and hint. */
int faults_end(struct faults *f);

/* The spec's sub-messages, with the defaults in place of absent ones. */
const Boost__Model *spec_model(const Boost__JobSpec *s);
const Boost__Parallel *spec_parallel(const Boost__JobSpec *s);
const Boost__Data *spec_data(const Boost__JobSpec *s);
const Boost__Resources *spec_resources(const Boost__JobSpec *s);

/* Defaults that depend on other fields. */
int64_t spec_kv_heads(const Boost__Model *m);
Boost__Strategy__Value spec_strategy(const Boost__JobSpec *s);
/* AUTO by the name of the first token file; stays AUTO for .bin and .idx, which the node decides. */
Boost__Format__Value spec_format(const Boost__Data *d);

/* What the job asks for, AUTO where a node may decide: options that only one device has decide alone. */
Boost__Device__Value spec_device(const Boost__JobSpec *s);

/* The stages of plan_validate after proto/validate. */
int layout_check(const Boost__JobSpec *spec, struct error *err); /* layout.c */
int built_check(const Boost__JobSpec *spec, struct error *err);  /* built.c */
/* device.c: whether all that is given applies to CPU or CUDA; spec_device() while that is AUTO. */
int device_check(const Boost__JobSpec *spec, Boost__Device__Value device, struct error *err);

int64_t round_up(int64_t n, int64_t multiple);

/* Groups of tensors start at multiples of this many elements; layers, and what comes before and behind
 * them, at multiples of plan_unit_align(). */
enum { PLAN_ELEMENT_ALIGN = 128 };
int64_t plan_unit_align(const struct plan *p);

#endif
