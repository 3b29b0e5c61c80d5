/* boostctl top: jobs and nodes on the whole screen, again and again; without a terminal once, as plain tables. */
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include "ctl/ctl.h"
#include "ctl/format.h"
#include "ctl/options.h"
#include "ctl/out.h"
#include "proto/base/clock.h"

enum { REPLIES_BYTES = 256 << 20 };

struct top {
    struct ctl *ctl;
    bool drawn;
    char trouble[512]; /* why the picture is not the newest; "" */
};

/* ---- one picture ---- */

/* Running ones first, then what will run, then by number. */
static int place(const Boost__JobSummary *s)
{
    switch (s->state) {
    case BOOST__JOB_STATE__VALUE__RUNNING:
        return 0;
    case BOOST__JOB_STATE__VALUE__STARTING:
        return 1;
    case BOOST__JOB_STATE__VALUE__RECOVERING:
        return 2;
    case BOOST__JOB_STATE__VALUE__STOPPING:
        return 3;
    case BOOST__JOB_STATE__VALUE__QUEUED:
        return 4;
    default:
        return 5;
    }
}

static int by_place(const void *x, const void *y)
{
    const Boost__JobSummary *a = *(const Boost__JobSummary *const *)x, *b = *(const Boost__JobSummary *const *)y;
    int pa = place(a), pb = place(b);
    return pa != pb ? pa - pb : (a->id > b->id) - (a->id < b->id);
}

/* Every page of the list of jobs that have not ended; the array is the caller's. */
static int read_jobs(struct ctl *ctl, struct arena *arena, const Boost__JobSummary ***out, size_t *n,
                     const Boost__Totals **totals, struct error *err)
{
    Boost__ListRequest body = BOOST__LIST_REQUEST__INIT;
    Boost__Request request = BOOST__REQUEST__INIT;
    request.body_case = BOOST__REQUEST__BODY_LIST;
    request.list = &body;
    Boost__Reply *reply = ctl_call(ctl, &request, arena, err);
    for (;; reply = ctl_more(ctl, arena, err)) {
        if (!reply)
            return err->code;
        if (reply->body_case != BOOST__REPLY__BODY_LIST)
            return error_set(err, ERR_PROTOCOL, "boostd answered something else");
        const Boost__JobSummary **more = realloc(*out, (*n + reply->list->n_jobs + 1) * sizeof *more);
        if (!more)
            return error_set(err, ERR_NOMEM, "out of memory");
        *out = more;
        for (size_t i = 0; i < reply->list->n_jobs; i++)
            more[(*n)++] = reply->list->jobs[i];
        *totals = reply->list->totals;
        if (!reply->more)
            break;
    }
    if (*n)
        qsort(*out, *n, sizeof **out, by_place);
    return ERR_OK;
}

static int read_nodes(struct ctl *ctl, struct arena *arena, const Boost__NodesReply **out, struct error *err)
{
    Boost__NodesRequest body = BOOST__NODES_REQUEST__INIT;
    Boost__Request request = BOOST__REQUEST__INIT;
    request.body_case = BOOST__REQUEST__BODY_NODES;
    request.nodes = &body;
    Boost__Reply *reply = ctl_call(ctl, &request, arena, err);
    if (!reply)
        return err->code;
    if (reply->body_case != BOOST__REPLY__BODY_NODES)
        return error_set(err, ERR_PROTOCOL, "boostd answered something else");
    *out = reply->nodes;
    return ERR_OK;
}

static void print_nodes(FILE *out, const Boost__NodesReply *r, bool color)
{
    static const char *const headers[] = {"NODE", "STATE", "ADMIN", "DEVICES", "KIND", "JOBS"};
    struct table *t = table_new(6, headers, "lllrll");
    for (size_t i = 0; i < r->n_nodes; i++) {
        const Boost__NodeInfo *n = r->nodes[i];
        char jobs[128] = "";
        size_t used = 0;
        table_cell(t, "%s", n->name ? n->name : "");
        table_cell(t, "%s", enum_name(&boost__node_liveness__value__descriptor, (int)n->liveness));
        table_cell(t, "%s", n->admin ? enum_name(&boost__node_admin__value__descriptor, (int)n->admin) : "-");
        table_cell(t, "%d/%d", n->devices_busy, n->devices);
        table_cell(t, "%s", n->device_kind ? n->device_kind : "");
        for (size_t k = 0; k < n->n_jobs && used + 24 < sizeof jobs; k++)
            used += (size_t)snprintf(jobs + used, sizeof jobs - used, "%s%lld", k ? "," : "", (long long)n->jobs[k]);
        table_cell(t, "%s", jobs);
    }
    table_print(t, out, color, 1);
    table_free(t);
}

static int print_picture(struct ctl *ctl, FILE *out, struct error *err)
{
    struct arena arena;
    const Boost__JobSummary **jobs = NULL;
    const Boost__Totals *totals = NULL;
    const Boost__NodesReply *nodes = NULL;
    size_t n = 0;
    arena_init(&arena, REPLIES_BYTES);
    int rc = read_jobs(ctl, &arena, &jobs, &n, &totals, err);
    if (!rc)
        rc = read_nodes(ctl, &arena, &nodes, err);
    if (rc)
        goto out;
    if (totals)
        totals_print(out, totals);
    putc('\n', out);
    bool wide = ctl->output == OUTPUT_WIDE;
    struct table *t = job_table_new(wide);
    for (size_t i = 0; i < n; i++)
        job_table_row(t, jobs[i], wide);
    table_print(t, out, ctl->color, 1);
    table_free(t);
    putc('\n', out);
    print_nodes(out, nodes, ctl->color);
out:
    free(jobs);
    arena_free(&arena);
    return rc;
}

/* ---- the screen ---- */

static struct termios before;
static bool raw;
static volatile sig_atomic_t stop;

/* Its own screen, so that what stood there comes back; keys come at once and are not shown. */
static void take_screen(void)
{
    fputs("\033[?1049h\033[?25l", stdout);
    out_flush();
    raw = isatty(STDIN_FILENO) && tcgetattr(STDIN_FILENO, &before) == 0;
    if (!raw)
        return;
    struct termios t = before;
    t.c_lflag &= ~(tcflag_t)(ICANON | ECHO);
    t.c_cc[VMIN] = 0;
    t.c_cc[VTIME] = 0;
    t.c_cc[VSUSP] = t.c_cc[VQUIT] = _POSIX_VDISABLE; /* they would leave the terminal as it is now */
    tcsetattr(STDIN_FILENO, TCSANOW, &t);
}

static void leave_screen(void)
{
    if (raw)
        tcsetattr(STDIN_FILENO, TCSAFLUSH, &before);
    fputs("\033[?25h\033[?1049l", stdout);
    out_flush();
}

/* At the next look; at once when it comes again, while boostd is waited for. */
static void on_stop(int signum)
{
    static const char leave[] = "\033[?25h\033[?1049l";
    if (stop) {
        if (raw)
            tcsetattr(STDIN_FILENO, TCSANOW, &before);
        (void)!write(STDOUT_FILENO, leave, sizeof leave - 1);
        _exit(128 + signum);
    }
    stop = 1;
}

static void catch_stop(void)
{
    struct sigaction action = {.sa_handler = on_stop}; /* no SA_RESTART: a wait has to end */
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGHUP, &action, NULL);
}

/* A line up to the terminal's width: escape sequences take no room, nor do the later bytes of a character. */
static void put_line(const char *line, size_t len, int width)
{
    int column = 0;
    for (size_t i = 0; i < len; i++) {
        unsigned char c = (unsigned char)line[i];
        if (c == 0x1B) {
            do
                putchar(line[i]);
            while (line[i] != 'm' && ++i < len);
            continue;
        }
        if ((c & 0xC0) != 0x80 && ++column > width) {
            fputs("\033[0m", stdout);
            break;
        }
        putchar(c);
    }
    fputs("\033[K\n", stdout);
}

static void draw(const struct top *top, const char *text)
{
    struct winsize size = {.ws_row = 24, .ws_col = 80};
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) < 0 || !size.ws_row || !size.ws_col)
        size = (struct winsize){.ws_row = 24, .ws_col = 80};
    int left = size.ws_row - 2;
    fputs("\033[H", stdout);
    for (const char *at = text; *at && left > 0; left--) {
        const char *end = strchrnul(at, '\n');
        put_line(at, (size_t)(end - at), size.ws_col);
        at = *end ? end + 1 : end;
    }
    fputs("\033[J", stdout);
    printf("\033[%d;1H", size.ws_row);
    if (top->trouble[0])
        print_safe(stdout, top->trouble);
    else
        printf("q quits");
    fputs("\033[K", stdout);
    out_flush();
}

static bool wants_to_quit(int wait_ms)
{
    struct pollfd in = {.fd = raw ? STDIN_FILENO : -1, .events = POLLIN};
    int64_t end = clock_mono_ns() + wait_ms * NS_PER_MS;
    while (!stop && clock_mono_ns() < end) {
        char key;
        if (poll(&in, 1, clock_left_ms(end)) <= 0)
            continue;
        if (read(STDIN_FILENO, &key, 1) <= 0)
            return true; /* the terminal is gone */
        if (key == 'q' || key == 'Q')
            return true;
    }
    return stop;
}

/* The last picture stays when boostd does not answer, with the reason below. */
static int look_again(struct top *top, char **picture, struct error *err)
{
    char *text = NULL;
    size_t len = 0;
    FILE *out = open_memstream(&text, &len);
    if (!out)
        return error_set(err, ERR_NOMEM, "out of memory");
    int rc = print_picture(top->ctl, out, err);
    fclose(out);
    if (!rc || !*picture) {
        free(*picture);
        *picture = text;
    } else {
        free(text);
    }
    snprintf(top->trouble, sizeof top->trouble, "%s", rc ? err->message : "");
    if (rc && (!top->drawn || err->code != ERR_UNREACHABLE))
        return rc;
    top->drawn = true;
    return ERR_OK;
}

static int live(struct ctl *ctl, double seconds)
{
    struct top top = {.ctl = ctl};
    struct error err;
    char *picture = NULL;
    int rc = look_again(&top, &picture, &err);
    if (!rc) { /* an error at the start belongs onto the ordinary screen */
        catch_stop();
        take_screen();
        do {
            draw(&top, picture);
            if (wants_to_quit((int)(seconds * 1e3)))
                break;
            rc = look_again(&top, &picture, &err);
        } while (!rc);
        leave_screen();
    }
    free(picture);
    return rc ? ctl_fail(&err) : EXIT_OK;
}

int verb_top(struct ctl *ctl, int argc, char **argv)
{
    bool help = false;
    const char *delay = NULL;
    double seconds = 2;
    const struct option_row rows[] = {
        {'d', "delay", "SEC", "seconds between two looks (2)", NULL, &delay, NULL},
        {'h', "help", NULL, "this text", &help, NULL, NULL},
        {0, NULL, NULL, NULL, NULL, NULL, NULL},
    };
    int first = options_parse("top", argc, argv, rows);
    if (first < 0)
        return EXIT_USAGE;
    if (help) {
        printf("usage: boostctl top [-d SEC]\n");
        options_help(rows);
        return EXIT_OK;
    }
    if (first < argc)
        return ctl_usage("top", "takes no operand");
    if (ctl->output > OUTPUT_WIDE)
        return ctl_usage("top", "is for people; boostctl -o json status is for programs");
    if (delay && (!parse_duration(delay, &seconds) || seconds < 0.1 || seconds > 3600))
        return ctl_usage("top", "-d takes seconds from 0.1 to an hour, not '%s'", delay);
    if (ctl->tty)
        return live(ctl, seconds);
    struct error err;
    return print_picture(ctl, stdout, &err) ? ctl_fail(&err) : EXIT_OK;
}
