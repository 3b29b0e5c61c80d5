/* boostctl metrics: rows, CSV, a plot or TensorBoard files of what a rank reported. */
#include <locale.h>
#include <math.h>
#include <langinfo.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "ctl/ctl.h"
#include "ctl/format.h"
#include "ctl/json_out.h"
#include "ctl/options.h"
#include "ctl/out.h"
#include "ctl/plot.h"
#include "proto/tbevents.h"

enum { MAX_NAMES = 32, PLOT_HEIGHT = 16 };

struct metrics_view {
    struct ctl *ctl;
    const char *job;   /* as typed: boostd looks whether the attempt is there */
    long long attempt; /* 0: all */
    long long rank;
    char *names[MAX_NAMES]; /* empty: all */
    size_t n_names;
    bool follow, plot, csv, header_done;
    struct plot_point *points;
    size_t n_points, cap_points;
    double *marks;
    size_t n_marks;
    int at_attempt; /* of the last point */
    json_t *list;
    const char *board_dir; /* --tensorboard */
    struct tbevents board;
    int64_t board_job;
    long long board_attempt; /* of the event written last */
    struct error board_error;
    bool board_failed;
    bool any;              /* a row with a value has come */
    bool found[MAX_NAMES]; /* a value of this name has come; without --name found[0] is of the one to plot */
};

/* What --plot draws. */
static const char *plotted(const struct metrics_view *v)
{
    return v->n_names ? v->names[0] : "loss";
}

static const double *value_of(const Boost__MetricRow *row, const char *name)
{
    for (size_t i = 0; i < row->n_values; i++)
        if (!strcmp(row->values[i]->name, name))
            return &row->values[i]->value;
    return NULL;
}

static void add_point(struct metrics_view *v, const Boost__MetricRow *row)
{
    const double *y = value_of(row, plotted(v));
    if (!y)
        return;
    if (v->n_points == v->cap_points) {
        size_t cap = v->cap_points ? 2 * v->cap_points : 1024;
        struct plot_point *points = realloc(v->points, cap * sizeof *points);
        double *marks = realloc(v->marks, cap * sizeof *marks);
        if (!points || !marks)
            abort();
        v->points = points;
        v->marks = marks;
        v->cap_points = cap;
    }
    if (v->n_points && row->attempt != v->at_attempt)
        v->marks[v->n_marks++] = (double)row->step;
    v->at_attempt = row->attempt;
    v->points[v->n_points++] = (struct plot_point){(double)row->step, *y};
}

static void print_csv(struct metrics_view *v, const Boost__MetricRow *row)
{
    /* Without --name the columns are those of a training step: a CSV needs fixed ones. */
    static const char *const usual[] = {"loss", "eval_loss", "lr", "grad_norm", "tokens", "tokens_per_s",
                                        "step_ms", "comm_ms", "gemm_ms", "data_ms", "skipped"};
    size_t n = v->n_names ? v->n_names : sizeof usual / sizeof *usual;
    if (!v->header_done) {
        printf("attempt,step");
        for (size_t i = 0; i < n; i++)
            printf(",%s", v->n_names ? v->names[i] : usual[i]);
        putchar('\n');
        v->header_done = true;
    }
    printf("%d,%lld", row->attempt, (long long)row->step);
    for (size_t i = 0; i < n; i++) {
        const double *value = value_of(row, v->n_names ? v->names[i] : usual[i]);
        if (value)
            printf(",%.17g", *value);
        else
            putchar(',');
    }
    putchar('\n');
}

static void print_row(const Boost__MetricRow *row)
{
    printf("attempt %d  step %-8lld", row->attempt, (long long)row->step);
    for (size_t i = 0; i < row->n_values; i++)
        printf("  %s %.6g", row->values[i]->name, row->values[i]->value);
    putchar('\n');
}

/* One file a job and rank, always of the same name: to export again adds nothing twice. */
static int board_row(struct metrics_view *v, const Boost__MetricRow *row, struct error *err)
{
    const char *names[TBEVENTS_VALUES];
    double values[TBEVENTS_VALUES];
    char suffix[32] = "";
    size_t n = 0;
    int rc = ERR_OK;
    if (v->rank)
        snprintf(suffix, sizeof suffix, "-rank-%lld", v->rank);
    if (v->board.fd < 0)
        rc = tbevents_open(&v->board, v->board_dir, v->board_job, suffix, "boostctl", row->wall_ns, err);
    else if (row->attempt != v->board_attempt)
        rc = tbevents_restart(&v->board, row->step, row->wall_ns, err);
    v->board_attempt = row->attempt;
    for (; n < row->n_values && n < TBEVENTS_VALUES; n++) {
        names[n] = row->values[n]->name;
        values[n] = row->values[n]->value;
    }
    return rc ? rc : tbevents_scalars(&v->board, row->step, row->wall_ns, names, values, n, err);
}

static void take_row(struct metrics_view *v, const Boost__MetricRow *row)
{
    v->any = v->any || row->n_values;
    v->found[0] = v->found[0] || value_of(row, plotted(v));
    for (size_t i = 1; i < v->n_names; i++)
        v->found[i] = v->found[i] || value_of(row, v->names[i]);
    if (v->board_dir)
        v->board_failed = v->board_failed || board_row(v, row, &v->board_error);
    else if (v->plot)
        add_point(v, row);
    else if (v->csv)
        print_csv(v, row);
    else if (v->list)
        json_array_append_new(v->list, json_metric_row(row));
    else if (v->ctl->output == OUTPUT_JSON || v->ctl->output == OUTPUT_JSONL)
        json_emit(json_metric_row(row), true);
    else
        print_row(row);
}

/* All rows from the start; with follow until the job has ended. */
static int read_rows(struct metrics_view *v)
{
    int64_t after = 0;
    for (;;) {
        struct error err;
        struct arena arena;
        ctl_arena(&arena);
        Boost__MetricsRequest body = BOOST__METRICS_REQUEST__INIT;
        body.job = ctl_ref(&arena, v->job);
        body.n_names = v->n_names;
        body.names = v->names;
        body.has_rank = body.has_after_row = body.has_wait_ms = true;
        body.rank = (int32_t)v->rank;
        body.after_row = after;
        body.wait_ms = v->follow ? LONG_POLL_MS : 0;
        body.has_attempt = v->attempt > 0;
        body.attempt = (int32_t)v->attempt;
        Boost__Request request = BOOST__REQUEST__INIT;
        request.body_case = BOOST__REQUEST__BODY_METRICS;
        request.metrics = &body;
        Boost__Reply *reply = v->follow ? ctl_call_patient(v->ctl, &request, &arena, &err)
                                        : ctl_call(v->ctl, &request, &arena, &err);
        if (!reply || reply->body_case != BOOST__REPLY__BODY_METRICS) {
            int code = v->follow && !reply ? ctl_end_follow(v->job, &err) : ctl_fail(&err);
            arena_free(&arena);
            return code;
        }
        size_t n = reply->metrics->n_rows;
        bool ended = reply->metrics->job_ended;
        for (size_t i = 0; i < n; i++) {
            after = reply->metrics->rows[i]->row;
            take_row(v, reply->metrics->rows[i]);
        }
        out_flush();
        arena_free(&arena);
        if (v->board_failed)
            return ctl_fail(&v->board_error);
        if (!n && (!v->follow || ended))
            return EXIT_OK;
    }
}

/* An answer without rows, or without one of the names, would say nothing. It is no failure: a job that ended before its
 * first step has none. */
static void say_missing(const struct metrics_view *v)
{
    bool said = false;
    if (!v->any && !v->n_names)
        fprintf(stderr, "boostctl: rank %lld of job %s has reported no metrics\n", v->rank, v->job);
    else if (!v->n_names && v->plot && !v->found[0])
        fprintf(stderr, "boostctl: rank %lld of job %s has reported no %s\n", v->rank, v->job, plotted(v));
    for (size_t i = 0; i < (v->plot && v->n_names ? 1 : v->n_names); i++) {
        if (v->found[i])
            continue;
        fprintf(stderr, "boostctl: rank %lld of job %s has reported no %s\n", v->rank, v->job, v->names[i]);
        said = true;
    }
    if (said)
        fprintf(stderr, "  hint: boostctl metrics %s --rank %lld shows all that it has\n", v->job, v->rank);
}

static void print_plot(struct metrics_view *v)
{
    struct winsize size;
    int width = 72;
    if (v->ctl->tty && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 40)
        width = size.ws_col - 12 < 120 ? size.ws_col - 12 : 120;
    setlocale(LC_CTYPE, "");
    bool unicode = !strcmp(nl_langinfo(CODESET), "UTF-8");
    plot_print(stdout, plotted(v), v->points, v->n_points, v->marks, v->n_marks, width,
               PLOT_HEIGHT, unicode);
}

static bool split_names(struct metrics_view *v, char *list)
{
    char *word;
    while ((word = strsep(&list, ","))) {
        if (!*word)
            continue;
        if (v->n_names == MAX_NAMES) {
            ctl_usage("metrics", "--name takes at most %d names", MAX_NAMES);
            return false;
        }
        v->names[v->n_names++] = word;
    }
    return true;
}

/* The job's number, which names the folder. */
static int find_id(struct metrics_view *v)
{
    struct arena arena;
    int code;
    ctl_arena(&arena);
    Boost__WatchRequest body = BOOST__WATCH_REQUEST__INIT;
    body.job = ctl_ref(&arena, v->job);
    Boost__Request request = BOOST__REQUEST__INIT;
    request.body_case = BOOST__REQUEST__BODY_WATCH;
    request.watch = &body;
    Boost__Reply *reply = ctl_ask(v->ctl, &request, BOOST__REPLY__BODY_WATCH, &arena, &code);
    if (reply && reply->watch->summary)
        v->board_job = reply->watch->summary->id;
    arena_free(&arena);
    return code;
}

/* Of "17.2"; 0: none is named. */
static long long attempt_of(const char *text)
{
    char *copy = strdup(text);
    long long attempt = copy ? ctl_split_ref(copy).attempt : 0;
    free(copy);
    return attempt;
}

int verb_metrics(struct ctl *ctl, int argc, char **argv)
{
    struct metrics_view v = {.ctl = ctl, .board.fd = -1};
    bool help = false;
    const char *names = NULL, *rank = NULL, *output = NULL;
    const struct option_row rows[] = {
        {0, "name", "A,B", "only these: loss, eval_loss, lr, grad_norm, tokens_per_s, step_ms, comm_ms, ...", NULL,
         &names, NULL},
        {0, "rank", "R", "of this rank (0); others report timings only", NULL, &rank, NULL},
        {'f', "follow", NULL, "go on until the job has ended", &v.follow, NULL, NULL},
        {0, "plot", NULL, "draw the first name (loss) over the steps", &v.plot, NULL, NULL},
        {'o', "output", "csv", "comma-separated values", NULL, &output, NULL},
        {0, "tensorboard", "DIR", "write them as event files of TensorBoard, into DIR/job-<id>", NULL, &v.board_dir,
         NULL},
        {'h', "help", NULL, "this text", &help, NULL, NULL},
        {0, NULL, NULL, NULL, NULL, NULL, NULL},
    };
    int first = options_parse("metrics", argc, argv, rows);
    if (first < 0)
        return EXIT_USAGE;
    if (help) {
        printf("usage: boostctl metrics JOB [options]\n");
        options_help(rows);
        return EXIT_OK;
    }
    if (output && strcmp(output, "csv") != 0)
        return ctl_usage("metrics", "-o takes csv here, not '%s' (json goes before the command)", output);
    if (v.board_dir && (v.plot || output || ctl->output > OUTPUT_WIDE))
        return ctl_usage("metrics", "--tensorboard writes files, and takes no -o and no --plot");
    if (argc - first != 1)
        return ctl_usage("metrics", "takes one job");
    if (rank && !option_int("metrics", "--rank", rank, 0, 65535, &v.rank))
        return EXIT_USAGE;
    char *copy = names ? strdup(names) : NULL;
    if (names && (!copy || !split_names(&v, copy))) {
        free(copy);
        return EXIT_USAGE;
    }
    v.csv = output != NULL;
    v.job = argv[first];
    v.attempt = attempt_of(argv[first]);
    if (ctl->output == OUTPUT_JSON && !v.follow && !v.plot && !v.csv)
        v.list = json_array();
    if (v.follow)
        ctl_catch_interrupt();
    int code = v.board_dir ? find_id(&v) : EXIT_OK;
    if (!code)
        code = read_rows(&v);
    tbevents_close(&v.board);
    if (!code && v.plot && v.found[0])
        print_plot(&v);
    if (!code && !ctl->quiet)
        say_missing(&v);
    if (v.list && !code) {
        json_t *document = json_document("boost.metrics/1");
        json_put(document, "metrics", json_incref(v.list));
        json_emit(document, false);
    }
    json_decref(v.list);
    free(v.points);
    free(v.marks);
    free(copy);
    return code;
}
