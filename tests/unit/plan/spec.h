/* A small valid job for the tests of this folder, to be changed field by field. */
#ifndef BOOST_TESTS_PLAN_SPEC_H
#define BOOST_TESTS_PLAN_SPEC_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

#include "proto/text.h"
#include "worker/plan/plan.h"

static const char minimal_job[] =
    "spec_version: 1 name: \"plan\"\n"
    "model { factorization: COLA hidden: 24 layers: 3 heads: 6 kv_heads: 2 intermediate: 36 rank: 5 vocab: 300 }\n"
    "parallel { tp: 2 global_batch: 12 }\n"
    "data { train { path: \"/d/train.txt\" } seq_len: 10 }\n"
    "optimizer { lr: 0.001 }\n"
    "run { steps: 10 }\n"
    "checkpoint { dir: \"/d/ckpt\" }\n";

struct job {
    struct arena arena;
    Boost__JobSpec *spec;
};

static inline void job_open_text(struct job *j, const char *text)
{
    struct error err = {0};
    arena_init(&j->arena, 1 << 20);
    j->spec = (Boost__JobSpec *)reflect_new(&j->arena, &boost__job_spec__descriptor);
    assert_non_null(j->spec);
    if (text_read(&j->spec->base, &j->arena, "job", text, strlen(text), NULL, &err))
        fail_msg("%s", err.message);
}

static inline void job_open(struct job *j)
{
    job_open_text(j, minimal_job);
}

static inline void job_close(struct job *j)
{
    arena_free(&j->arena);
}

/* Resolved for a machine of unknown memory, and its plan. */
static inline void job_plan(struct job *j, struct plan *p)
{
    struct error err = {0};
    Boost__JobSpec *resolved;
    struct plan_machine machine = {0};
    if (plan_resolve(j->spec, &machine, &resolved, &err) || plan_make(resolved, p, &err))
        fail_msg("%s (%s)", err.message, err.hint);
    boost__job_spec__free_unpacked(resolved, NULL);
}

#endif
