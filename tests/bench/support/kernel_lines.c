/* kernel_lines.h */
#include "tests/bench/support/kernel_lines.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/bench/support/op_times.h"
#include "tests/bench/support/replay.h"

enum { STEPS = 5, COPY_MIB = 256, EMPTIES = 32 };

struct row {
    char label[64];
    enum trace_share share;
    double bytes, ms;
    int64_t calls;
};

/* ---- steps ---- */

static int time_steps(struct model *m, const struct options *o, struct device_log *log, struct error *err)
{
    double ms;
    struct op_times sums;
    FILE *none = fopen("/dev/null", "w");
    int rc = none ? model_run_for(m, o->warm, false, err) : error_set(err, ERR_IO, "/dev/null cannot be opened");
    for (int timed = 0; timed < 2 && !rc; timed++) { /* the first makes the events */
        op_times_begin();
        device_log_begin(log);
        for (int i = 0; i < STEPS && !rc; i++)
            rc = model_step(m, &ms, err);
        device_log_end(log);
    }
    if (!rc)
        rc = op_times_end(STEPS, none, &sums, err);
    if (none)
        fclose(none);
    return rc;
}

static int by_label(const void *a, const void *b)
{
    return strcmp(((const struct row *)a)->label, ((const struct row *)b)->label);
}

/* The operations that are no products, no attention; *rows is what to free. */
static int collect(struct row **rows, int64_t *n, struct error *err)
{
    struct row *all = calloc((size_t)op_times_count() + 1, sizeof *all);
    int64_t found = 0;
    *n = 0;
    if (!(*rows = all))
        return error_set(err, ERR_NOMEM, "no memory for the times of operations");
    for (int64_t i = 0; i < op_times_count(); i++) {
        struct op_call c;
        op_times_call(i, &c);
        if (c.kind != OP_OTHER)
            continue;
        struct row *r = &all[found++];
        *r = (struct row){.share = c.share, .bytes = c.bytes, .ms = c.ms, .calls = 1};
        snprintf(r->label, sizeof r->label, "%s", c.label);
    }
    qsort(all, (size_t)found, sizeof *all, by_label);
    for (int64_t i = 0; i < found; i++) {
        if (*n && !strcmp(all[*n - 1].label, all[i].label)) {
            all[*n - 1].bytes += all[i].bytes;
            all[*n - 1].ms += all[i].ms;
            all[*n - 1].calls++;
        } else {
            all[(*n)++] = all[i];
        }
    }
    return ERR_OK;
}

/* ---- what they are compared with ---- */

static void copy_once(struct replay *r, const void *arg)
{
    size_t bytes = r->captures ? (size_t)COPY_MIB << 20 : r->in.bytes / 4;
    const void *from = replay_in(r, bytes);
    void *to = replay_out(r, bytes);
    (void)arg;
    if (r->copy)
        r->copy(r->ks, to, from, bytes);
    else
        memcpy(to, from, bytes);
}

static int copy_speed(struct replay *r, const struct options *o, double *gb_s, struct error *err)
{
    struct repeated x = {.body = copy_once};
    double ms = NAN;
    int rc = repeated_make(r, &x, 5, err);
    for (int i = 0; i < 2 && !rc; i++) /* the first is not counted */
        rc = repeated_run(r, &x, o->seconds, &ms, err);
    repeated_free(r, &x);
    *gb_s = 2 * (r->captures ? (double)((size_t)COPY_MIB << 20) : (double)(r->in.bytes / 4)) / ms / 1e6;
    return rc;
}

/* The shortest time that two events leave between them. */
static int event_time(struct replay *r, double *us, struct error *err)
{
    struct op_times sums;
    FILE *none = fopen("/dev/null", "w");
    if (!none)
        return error_set(err, ERR_IO, "/dev/null cannot be opened");
    *us = INFINITY;
    op_times_begin();
    for (int i = 0; i < EMPTIES; i++)
        r->k->zero(r->ks, r->sums.base, 256);
    int rc = r->k->stream_sync(r->ks, err);
    if (!rc)
        rc = op_times_end(1, none, &sums, err);
    for (int i = 0; i < EMPTIES && !rc; i++) {
        struct op_call c;
        op_times_call(i, &c);
        *us = fmin(*us, c.ms * 1e3);
    }
    fclose(none);
    return rc;
}

/* ---- lines ---- */

struct about {
    const struct options *o;
    const struct plan *plan;
    const struct device_log *log;
    double copy_gb_s, event_us;
};

static void print_row(const struct about *a, const struct row *r)
{
    char name[160];
    size_t used = (size_t)snprintf(name, sizeof name, "%s_", a->o->name);
    for (const char *c = r->label; *c && *c != '(' && used + 1 < sizeof name; c++)
        name[used++] = isalnum((unsigned char)*c) ? *c : '_';
    while (used > 0 && name[used - 1] == '_')
        used--;
    name[used] = 0;
    line_begin(name, r->bytes / r->ms / 1e6, "GB/s");
    printf(", \"peer\": \"device copy\"");
    line_put("peer_value", a->copy_gb_s);
    line_put("us_each", r->ms * 1e3 / (double)r->calls);
    line_put("event_us", a->event_us);
    line_put("calls", (double)r->calls / STEPS);
    line_put("mb_each", r->bytes / 1e6 / (double)r->calls);
    line_put("ms_step", r->ms / STEPS);
    line_put("gb_step", r->bytes / 1e9 / STEPS);
    line_put("ms_step_as_copy", r->bytes / a->copy_gb_s / 1e6 / STEPS);
    printf(", \"share\": \"%s\"", trace_share_names[r->share]);
    if (a->plan->tp > 1)
        printf(", \"collectives\": \"NULL\"");
    line_end(a->o, a->plan, a->log);
}

int bench_kernels(const struct options *given, struct device *d, struct error *err)
{
    struct options o = *given;
    struct model m = {.measured = 0};
    struct replay r = {.k = NULL};
    struct device_log log;
    struct row *rows = NULL, all = {.label = "all", .share = SHARE_ELEMENT};
    struct about about = {.o = &o, .plan = &m.plan, .log = &log};
    int64_t n = 0;
    o.plain = true;
    int rc = op_times_open(d->kernels, !o.cpu, err);
    if (!rc)
        rc = model_start_layers(&m, &o, d, 0, err);
    if (!rc)
        rc = time_steps(&m, &o, &log, err);
    if (!rc)
        rc = collect(&rows, &n, err);
    model_stop(&m);
    if (!rc)
        rc = replay_open(&r, &o, d, 0, err);
    if (!rc)
        rc = copy_speed(&r, &o, &about.copy_gb_s, err);
    if (!rc)
        rc = event_time(&r, &about.event_us, err);
    for (int64_t i = 0; i < n && !rc; i++) {
        print_row(&about, &rows[i]);
        if (rows[i].share == SHARE_OPTIMIZER)
            continue;
        all.bytes += rows[i].bytes;
        all.ms += rows[i].ms;
        all.calls += rows[i].calls;
    }
    if (!rc)
        print_row(&about, &all);
    if (r.k)
        replay_close(&r);
    free(rows);
    return rc;
}
