/* A whole small world around the controller's core, driven by hand: a store in memory
 * that commits when told to (and can lose what was not durable), agents, and a clock that
 * only moves when asked. CORE_TRACE in the environment shows the core's log. Whatever is
 * not as it should be fails the cmocka test that runs. */
#ifndef BOOST_TESTS_WORLD_H
#define BOOST_TESTS_WORLD_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/core.h"
#include "proto/base/clock.h"
#include "tests/world/agents.h"
#include "tests/world/mem_store.h"
#include "tests/world/spec.h"

#define STATE(s)  BOOST__JOB_STATE__VALUE__##s
#define REASON(r) BOOST__REASON__VALUE__##r
#define CKPT(s)   BOOST__CHECKPOINT_STATE__VALUE__##s

struct queued { /* a message on its way to the core */
    struct queued *next;
    char node[32];
    uint8_t *bytes;
    size_t len;
};

struct world {
    struct mem_store *store;
    struct store *real; /* instead of it, when not NULL */
    const char *store_id;
    struct core *core;
    struct core_store api;
    struct core_ops ops;
    Boost__BoostdConfig config;
    int64_t now, wall_offset;
    uint64_t seed;
    struct fake_agent agents[4];
    int n_agents;
    struct queued *queue, **tail;
    int changed;
    /* last answers */
    int reply_rc;
    int64_t reply_job;
    char reply_text[1024], reply_hint[512];
    int replies;
    char log[4096];
    int64_t kv_answers;
    char kv_text[256];
    bool kv_ok;
};

int64_t world_wall(void *arg);
void boot(struct world *w);
struct world *world_new(void);
void queue_drop(struct world *w);
void world_free(struct world *w);
void deliver_one(struct world *w);
/* Until nothing moves without time passing. */
void pump(struct world *w);
void advance(struct world *w, int64_t ms);
struct fake_agent *agent_add(struct world *w, const char *name, int slots);
/* Connects and registers, listing what it has. */
int try_register(struct world *w, struct fake_agent *a, struct error *err);
void join_world(struct world *w, struct fake_agent *a);
void disconnect(struct world *w, struct fake_agent *a);
/* kill -9 of boostd and a new one; agents stay, with what they have. `lost`: what was not durable. */
void controller_restart(struct world *w);
void on_submit(void *arg, int rc, const struct error *err, int64_t job);
void on_control(void *arg, int rc, const struct error *err, const char *text);
static const __attribute__((unused)) struct core_user user_ann = {.uid = 1000, .gid = 1000, .name = "ann"};
static const __attribute__((unused)) struct core_user user_bob = {.uid = 1001, .gid = 1001, .name = "bob"};

int64_t submit_spec(struct world *w, const Boost__JobSpec *spec, bool held);
int64_t submit(struct world *w);
int control(struct world *w, Boost__ControlRequest__Verb verb, int64_t job, bool now);
#define CANCEL     BOOST__CONTROL_REQUEST__VERB__CANCEL
#define HOLD       BOOST__CONTROL_REQUEST__VERB__HOLD
#define RELEASE    BOOST__CONTROL_REQUEST__VERB__RELEASE
#define CHECKPOINT BOOST__CONTROL_REQUEST__VERB__CHECKPOINT

struct job *job_of(struct world *w, int64_t id);
#define assert_state(w, id, s)                                                                      \
    do {                                                                                            \
        if (job_of(w, id)->state != STATE(s))                                                       \
            fail_msg("%s:%d: job %lld is %s, not " #s " (%s)", __FILE__, __LINE__, (long long)(id), \
                     job_state_name(job_of(w, id)->state), job_of(w, id)->reason_text);             \
    } while (0)

/* The newest durable event of that kind; NULL when there is none. */
const struct store_event *event_of(struct world *w, int64_t job, const char *kind);
int count_events(struct world *w, int64_t job, const char *kind);
#define assert_says(text, part)                                                                \
    do {                                                                                       \
        if (!strstr((text), (part)))                                                           \
            fail_msg("%s:%d: \"%s\" does not say \"%s\"", __FILE__, __LINE__, (text), (part)); \
    } while (0)

/* The job's newest attempt on the agent. */
struct fake_attempt *newest(struct world *w, struct fake_agent *a, int64_t job);
/* Submitted, placed, and every rank has made a step. */
struct fake_attempt *run_job(struct world *w, struct fake_agent *a, int64_t *id);
/* After a failure: back-off passes, the next attempt makes its first step. */
struct fake_attempt *recovered(struct world *w, struct fake_agent *a, int64_t id);

#endif
