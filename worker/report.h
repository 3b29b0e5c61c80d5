/* What a rank tells the world: the status page, the metrics file, one readable line per
 * step, the DONE record; and what the world tells it: the control page and SIGTERM. All
 * of it through the files of proto/rankfiles.h; nothing here can stop training. */
#ifndef BOOST_WORKER_REPORT_H
#define BOOST_WORKER_REPORT_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "proto/agent.pb-c.h"
#include "proto/base/error.h"
#include "proto/rankfiles.h"
#include "proto/reclog.h"
#include "proto/tbevents.h"
#include "proto/worker.pb-c.h"

/* Asks every rank of the process to stop, as SIGTERM does. Any thread. */
void report_terminate(void);

struct comm_call;

struct report {
    const Boost__AttemptStart *start; /* the caller's */
    int rank;
    FILE *log; /* readable lines; flushed after each */
    struct rank_status *status;
    struct rank_control *control;
    struct reclog_writer metrics;
    int64_t seq; /* of the last metric record */
    bool metrics_failing;
    struct tbevents board; /* of rank 0, where run.tensorboard_dir is set */
};

/* create_pages: there is no agent to make status and control page. Metric numbering goes on where a
 * file that is already there ends. */
MUST_USE int report_open(struct report *r, const Boost__AttemptStart *start, int rank, bool create_pages, FILE *log,
                         struct error *err);
void report_close(struct report *r);

void report_phase(struct report *r, Boost__RankUpdate__Phase phase);
void report_doing(struct report *r, const char *fmt, ...) PRINTF_LIKE(2, 3);
void report_step_done(struct report *r, int64_t step);
/* One micro-batch more; `arg` is a struct report (the engine's progress call). */
void report_progress(void *arg);
/* A collective was entered or left; `arg` is a struct report (struct comm's note). A group is one thread's at a time. */
void report_collective(void *arg, const struct comm_call *call, bool entered);
/* A device has come to the `seq`th collective of its group. */
void report_reached(struct report *r, const struct comm_call *call, uint64_t seq);
/* "rank 0: text" on the log. */
void report_line(struct report *r, const char *fmt, ...) PRINTF_LIKE(2, 3);

/* To stop after a checkpoint: from the control page or by SIGTERM. */
bool report_stop_asked(const struct report *r);
/* The counter of checkpoints asked for. */
uint32_t report_checkpoints_asked(const struct report *r);

/* ---- metrics: collect values, then append them as one record ---- */
enum { METRICS_MAX = 12 };
struct metrics {
    Boost__Metric values[METRICS_MAX];
    Boost__Metric *list[METRICS_MAX];
    size_t n;
};
/* `name` is a constant text. A value that is not finite is left out: it is not known. */
void metrics_add(struct metrics *m, const char *name, double value);
void report_metrics(struct report *r, int64_t step, struct metrics *m);

/* A line on the log, and a metric record that has it as its warning, which the controller makes an event. */
void report_warn(struct report *r, int64_t step, const char *name, double value, const char *fmt, ...)
    PRINTF_LIKE(5, 6);

/* Writes <run_dir>/rank-<r>.done. `failure` NULL unless why is FAILED; eval_loss NaN: none. */
MUST_USE int report_done(const char *run_dir, int64_t job, int attempt, int rank, Boost__DoneRecord__Why why,
                         int64_t step, double eval_loss, const struct error *failure, struct error *err);

/* 1234567 -> "1.23M", in `out`; returns out. */
char *report_count(double x, char *out, size_t cap);

#endif
