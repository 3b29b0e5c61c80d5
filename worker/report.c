/* report.h */
#include "worker/report.h"

#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/clock.h"
#include "proto/base/fs.h"
#include "proto/base/utf8.h"
#include "worker/comm/comm.h"

static int terminated; /* atomic */

void report_terminate(void)
{
    __atomic_store_n(&terminated, 1, __ATOMIC_RELAXED);
}

/* ---- opening ------------------------------------------------------------------- */

/* The number of the last record of an earlier run in the same directory. */
static int last_seq(const char *path, int64_t *seq, struct error *err)
{
    struct buffer record;
    buffer_init(&record, RECLOG_MAX_RECORD);
    uint64_t offset = 0;
    bool got = true;
    *seq = 0;
    int rc = ERR_OK;
    while (!rc && got) {
        rc = reclog_read(path, &offset, &record, &got, err);
        Boost__MetricRecord *m = !rc && got ? boost__metric_record__unpack(NULL, record.len, record.data) : NULL;
        if (m) {
            *seq = m->seq;
            boost__metric_record__free_unpacked(m, NULL);
        }
    }
    buffer_free(&record);
    return rc;
}

static void close_board(struct report *r, const struct error *why)
{
    report_line(r, "rank %d: TensorBoard files are not written any more: %s", r->rank, why->message);
    tbevents_close(&r->board);
}

/* A file for each attempt; it tells that what earlier ones wrote of its steps is outdated. */
static void open_board(struct report *r)
{
    const Boost__AttemptStart *s = r->start;
    const char *dir = s->spec && s->spec->run ? s->spec->run->tensorboard_dir : NULL;
    char name[64];
    struct error err;
    int64_t now = clock_wall_ns(), from = s->resume ? s->resume->step : 0;
    if (r->rank != 0 || !dir || !*dir)
        return;
    snprintf(name, sizeof name, "%.16s-%" PRId64 ".%d", s->store_id ? s->store_id : "boost", s->job, s->attempt);
    if (tbevents_open(&r->board, dir, s->job, "", name, now, &err) ||
        (s->resume && tbevents_restart(&r->board, from + 1, now, &err)))
        close_board(r, &err);
}

int report_open(struct report *r, const Boost__AttemptStart *start, int rank, bool create_pages, FILE *log,
                struct error *err)
{
    *r = (struct report){.start = start, .rank = rank, .log = log, .metrics.fd = -1, .board.fd = -1};
    char path[PATH_MAX];
    int rc = rank_file_path(path, sizeof path, start->run_dir, rank, "metrics", err);
    if (!rc)
        rc = reclog_open(&r->metrics, path, err);
    if (!rc)
        rc = last_seq(path, &r->seq, err);
    if (!rc && !(r->status = rank_file_map(start->run_dir, rank, "status", RANK_STATUS_MAGIC, create_pages, err)))
        rc = ERR_IO;
    if (!rc && !(r->control = rank_file_map(start->run_dir, rank, "control", RANK_CONTROL_MAGIC, create_pages, err)))
        rc = ERR_IO;
    if (rc) {
        report_close(r);
        return rc;
    }
    if (create_pages) { /* what an earlier run in this directory was told is not for us */
        *r->status = (struct rank_status){.magic = RANK_STATUS_MAGIC};
        *r->control = (struct rank_control){.magic = RANK_CONTROL_MAGIC};
    }
    open_board(r);
    return ERR_OK;
}

void report_close(struct report *r)
{
    reclog_close(&r->metrics);
    tbevents_close(&r->board);
    rank_file_unmap(r->status);
    rank_file_unmap(r->control);
    r->status = NULL;
    r->control = NULL;
}

/* ---- status and control ---------------------------------------------------------- */

void report_phase(struct report *r, Boost__RankUpdate__Phase phase)
{
    __atomic_store_n(&r->status->phase, (uint32_t)phase, __ATOMIC_RELAXED);
}

void report_doing(struct report *r, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(r->status->doing, sizeof r->status->doing, fmt, ap);
    va_end(ap);
}

void report_step_done(struct report *r, int64_t step)
{
    __atomic_store_n(&r->status->step, step, __ATOMIC_RELEASE);
}

void report_progress(void *arg)
{
    struct report *r = arg;
    __atomic_fetch_add(&r->status->progress, 1, __ATOMIC_RELAXED);
}

static void put(char *to, size_t room, const char *text)
{
    size_t len = strnlen(text, room - 1);
    memcpy(to, text, len);
    to[len] = '\0';
}

static void note_collective(struct rank_status *page, const struct comm_call *call, uint64_t seq, uint32_t inside)
{
    struct rank_collective *c = &page->groups[call->group];
    _Static_assert((int)RANK_GROUPS == (int)GROUP_COUNT, "a place on the page for each group");
    put(c->group, sizeof c->group, comm_group_name(call->group));
    put(c->kind, sizeof c->kind, call->kind);
    put(c->what, sizeof c->what, call->what);
    c->bytes = (uint64_t)call->bytes;
    __atomic_store_n(&c->inside, inside, __ATOMIC_RELAXED);
    __atomic_store_n(&c->seq, seq, __ATOMIC_RELAXED);
    __atomic_store_n(&page->group, (uint32_t)call->group, __ATOMIC_RELAXED);
    put(page->collective, sizeof page->collective, call->what);
    __atomic_fetch_add(&page->collective_seq, 1, __ATOMIC_RELAXED);
}

void report_collective(void *arg, const struct comm_call *call, bool entered)
{
    struct report *r = arg;
    if (entered)
        note_collective(r->status, call, r->status->groups[call->group].seq + 1, RANK_INSIDE);
    else
        __atomic_store_n(&r->status->groups[call->group].inside, RANK_LEFT, __ATOMIC_RELAXED);
}

void report_reached(struct report *r, const struct comm_call *call, uint64_t seq)
{
    note_collective(r->status, call, seq, RANK_REACHED);
}

void report_line(struct report *r, const char *fmt, ...)
{
    char text[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    fprintf(r->log, "%s\n", text);
    fflush(r->log);
}

bool report_stop_asked(const struct report *r)
{
    return __atomic_load_n(&r->control->stop, __ATOMIC_RELAXED) || __atomic_load_n(&terminated, __ATOMIC_RELAXED);
}

uint32_t report_checkpoints_asked(const struct report *r)
{
    return __atomic_load_n(&r->control->checkpoint, __ATOMIC_RELAXED);
}

/* ---- metrics ----------------------------------------------------------------------- */

void metrics_add(struct metrics *m, const char *name, double value)
{
    if (!isfinite(value) || m->n == METRICS_MAX)
        return;
    Boost__Metric *x = &m->values[m->n];
    boost__metric__init(x);
    x->name = (char *)(uintptr_t)name;
    x->has_value = true;
    x->value = value;
    m->list[m->n++] = x;
}

static void report_board(struct report *r, int64_t step, int64_t wall_ns, const struct metrics *m)
{
    const char *names[METRICS_MAX];
    double values[METRICS_MAX];
    struct error err;
    for (size_t i = 0; i < m->n; i++) {
        names[i] = m->list[i]->name;
        values[i] = m->list[i]->value;
    }
    if (tbevents_scalars(&r->board, step, wall_ns, names, values, m->n, &err))
        close_board(r, &err);
}

enum { WARNING_MAX = 1024 };

static void append_record(struct report *r, int64_t step, struct metrics *m, const char *warning)
{
    Boost__MetricRecord record = BOOST__METRIC_RECORD__INIT;
    record.has_seq = record.has_step = record.has_wall_ns = true;
    record.seq = r->seq + 1;
    record.step = step;
    record.wall_ns = clock_wall_ns();
    record.n_values = m->n;
    record.values = m->list;
    record.warning = (char *)(uintptr_t)warning;
    uint8_t packed[METRICS_MAX * 64 + 64 + WARNING_MAX];
    size_t len = boost__metric_record__get_packed_size(&record);
    struct error err;
    int rc = len > sizeof packed ? error_set(&err, ERR_INTERNAL, "metric record of %zu bytes", len) : ERR_OK;
    if (!rc) {
        boost__metric_record__pack(&record, packed);
        rc = reclog_append(&r->metrics, packed, len, false, &err);
    }
    if (!rc)
        r->seq = record.seq; /* a lost record leaves no gap */
    else if (!r->metrics_failing)
        report_line(r, "rank %d: metrics are being lost from step %" PRId64 " on: %s", r->rank, step, err.message);
    r->metrics_failing = rc != 0;
    if (r->board.fd >= 0)
        report_board(r, step, record.wall_ns, m);
}

void report_metrics(struct report *r, int64_t step, struct metrics *m)
{
    append_record(r, step, m, NULL);
}

void report_warn(struct report *r, int64_t step, const char *name, double value, const char *fmt, ...)
{
    char text[WARNING_MAX];
    struct metrics m = {.n = 0};
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    text[utf8_whole(text, strlen(text))] = '\0';
    report_line(r, "warning: %s", text);
    metrics_add(&m, name, value);
    append_record(r, step, &m, text);
}

/* ---- the end ------------------------------------------------------------------------- */

int report_done(const char *run_dir, int64_t job, int attempt, int rank, Boost__DoneRecord__Why why, int64_t step,
                double eval_loss, const struct error *failure, struct error *err)
{
    Boost__DoneRecord d = BOOST__DONE_RECORD__INIT;
    d.has_job = d.has_attempt = d.has_rank = d.has_why = d.has_step = true;
    d.job = job;
    d.attempt = attempt;
    d.rank = rank;
    d.why = why;
    d.step = step;
    d.has_eval_loss = isfinite(eval_loss);
    d.eval_loss = eval_loss;
    d.error = failure ? (char *)(uintptr_t)failure->message : NULL;
    d.hint = failure && failure->hint[0] ? (char *)(uintptr_t)failure->hint : NULL;
    char path[PATH_MAX];
    int rc = rank_file_path(path, sizeof path, run_dir, rank, "done", err);
    if (rc)
        return rc;
    size_t len = boost__done_record__get_packed_size(&d);
    uint8_t *packed = malloc(len ? len : 1);
    if (!packed)
        return error_set(err, ERR_NOMEM, "out of memory");
    boost__done_record__pack(&d, packed);
    rc = fs_write_durable(path, packed, len, 0644, err);
    free(packed);
    return rc;
}

char *report_count(double x, char *out, size_t cap)
{
    static const char units[] = " kMGT";
    int u = 0;
    while (fabs(x) >= 999.5 && u < 4) {
        x /= 1000;
        u++;
    }
    int decimals = fabs(x) >= 99.95 || u == 0 ? 0 : fabs(x) >= 9.995 ? 1 : 2;
    int used = snprintf(out, cap, "%.*f", decimals, x);
    if (u && used > 0 && (size_t)used + 1 < cap) {
        out[used] = units[u];
        out[used + 1] = '\0';
    }
    return out;
}
