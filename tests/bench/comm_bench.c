/* Collectives by themselves: microseconds of a call between ranks that are processes, through the interface and the
 * backend that jobs use (NCCL, each rank on a GPU; Gloo on the CPU). For tests/bench/paper_table.py, and by hand.
 *
 * Usage: comm_bench [--cpu | --devices 0,1,...] RANKS KIND:BYTES[+BYTES]...
 * KIND: all_reduce, reduce_scatter, all_gather. BYTES: the payload as worker/comm/comm.h counts it, bf16 (on the CPU
 * fp32); behind the + those of a second segment of the same call, fp32, as the online norm's statistic.
 * --devices: rank r runs on the r-th; several may share one, which is correct and slow. Default: 0,1,...,RANKS-1.
 * Standard output: one JSON object a line. On a GPU 20 calls are captured and launched, as in a captured step, several
 * times; us is the median of the launches. */
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/base/clock.h"
#include "worker/comm/comm.h"
#include "worker/cuda.h"

enum { MOST_RANKS = 64, CALLS = 20, LAUNCHES_MOST = 40, LAUNCHES_LEAST = 5, CONNECT_MS = 60000 };

struct call {
    enum comm_kind kind;
    int64_t bytes, second; /* of the segments */
};

struct bench {
    int ranks, n;
    bool cpu, shared; /* several ranks on a device: no point in many calls */
    const char *devices[MOST_RANKS];
    struct call *calls;
    struct board *board;
};

/* ---- rendezvous: a board in memory that the processes share ---- */

enum { ENTRIES = 2048, VALUE_MOST = 4096, KEY_MOST = 192 };

struct board {
    pthread_mutex_t lock;
    int n;
    struct entry {
        char key[KEY_MOST];
        size_t len;
        unsigned char value[VALUE_MOST];
    } entries[ENTRIES];
};

static struct board *board_new(void)
{
    struct board *b = mmap(NULL, sizeof *b, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pthread_mutexattr_t attr;
    if (b == MAP_FAILED)
        return NULL;
    pthread_mutexattr_init(&attr);
    pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
    pthread_mutex_init(&b->lock, &attr);
    pthread_mutexattr_destroy(&attr);
    return b;
}

static int board_set(void *arg, const char *group, const char *key, const void *value, size_t len, struct error *err)
{
    struct board *b = arg;
    int rc = ERR_OK;
    pthread_mutex_lock(&b->lock);
    if (b->n == ENTRIES || len > VALUE_MOST) {
        rc = error_set(err, ERR_NOMEM, "no room on the board for %zu bytes of %s/%s", len, group, key);
    } else {
        struct entry *e = &b->entries[b->n++];
        snprintf(e->key, sizeof e->key, "%s/%s", group, key);
        memcpy(e->value, value, len);
        e->len = len;
    }
    pthread_mutex_unlock(&b->lock);
    return rc;
}

static bool board_take(struct board *b, const char *name, struct buffer *out)
{
    bool found = false;
    pthread_mutex_lock(&b->lock);
    for (int i = 0; i < b->n && !found; i++)
        if (!strcmp(b->entries[i].key, name)) {
            buffer_append(out, b->entries[i].value, b->entries[i].len);
            found = true;
        }
    pthread_mutex_unlock(&b->lock);
    return found;
}

static int board_get(void *arg, const char *group, const char *key, int timeout_ms, struct buffer *out,
                     struct error *err)
{
    char name[KEY_MOST];
    int64_t end = clock_mono_ns() + timeout_ms * NS_PER_MS;
    snprintf(name, sizeof name, "%s/%s", group, key);
    while (!board_take(arg, name, out)) {
        if (clock_mono_ns() > end)
            return error_set(err, ERR_TIMEOUT, "nobody put %s on the board within %d ms", name, timeout_ms);
        usleep(500);
    }
    return ERR_OK;
}

/* ---- a rank ---- */

struct rank {
    const struct bench *bench;
    const struct kernels *k;
    struct kstream *ks;
    struct comms comms;
    void *data, *out;
};

static void lost(void *arg, const struct error *why)
{
    (void)arg;
    fprintf(stderr, "comm_bench: %s\n", why->message);
    _exit(1);
}
static void reached(void *arg, const struct comm_call *call, uint64_t seq)
{
    (void)arg, (void)call, (void)seq;
}
static void say(void *arg, const char *line)
{
    (void)arg;
    fprintf(stderr, "comm_bench: %s\n", line);
}

static int connect_rank(struct rank *r, int rank, struct error *err)
{
    static const struct comms_watch watch = {.lost = lost, .reached = reached, .say = say};
    const struct comm_layout layout = {.tp = r->bench->ranks, .dp = 1, .pp = 1};
    const struct rendezvous rv = {.set = board_set, .get = board_get, .arg = r->bench->board};
    const struct cuda_library *cuda;
    int rc;
    if (r->bench->cpu) {
        r->k = kernels_cpu_fp32();
        rc = gloo_comms_create(rank, &layout, "127.0.0.1", &rv, CONNECT_MS, CONNECT_MS, &r->comms, err);
        return rc ? rc : r->k->stream_create(1, &r->ks, err);
    }
    rc = cuda_library_open(&cuda, err);
    if (rc)
        return rc;
    r->k = cuda->kernels();
    rc = r->k->stream_create(1, &r->ks, err);
    return rc ? rc : cuda->comms_create(rank, &layout, "127.0.0.1", &rv, CONNECT_MS, &watch, &r->comms, err);
}

static int make_room(struct rank *r, struct error *err)
{
    int64_t most = 0;
    for (int i = 0; i < r->bench->n; i++)
        if (r->bench->calls[i].bytes + r->bench->calls[i].second > most)
            most = r->bench->calls[i].bytes + r->bench->calls[i].second;
    size_t room = ((size_t)most + 1024 + 255) / 256 * 256, bytes = 2 * room;
    r->data = r->k->alloc(bytes, err);
    if (!r->data)
        return error_context(err, "%zu bytes for the calls' data", bytes);
    r->out = (char *)r->data + room;
    r->k->zero(r->ks, r->data, bytes);
    int rc = comms_share(&r->comms, r->data, bytes, err);
    return rc ? rc : r->k->stream_sync(r->ks, err);
}

static int make_call(struct rank *r, const struct call *c, struct error *err)
{
    enum dtype dtype = r->bench->cpu ? DTYPE_F32 : DTYPE_BF16;
    int64_t n = c->bytes / (int64_t)dtype_size(dtype), chunk = n / r->bench->ranks;
    struct comm_segment segments[2] = {
        {r->data, n, dtype},
        {(char *)r->data + (c->bytes + 255) / 256 * 256, c->second / (int64_t)sizeof(float), DTYPE_F32},
    };
    struct comm *tp = &r->comms.tp;
    if (c->kind == COMM_REDUCE_SCATTER)
        return comm_reduce_scatter(tp, r->ks, r->data, r->out, chunk, dtype, "bench", err);
    if (c->kind == COMM_ALL_GATHER)
        return comm_all_gather(tp, r->ks, r->data, r->out, chunk, dtype, "bench", err);
    return comm_all_reduce(tp, r->ks, segments, c->second ? 2 : 1, COMM_SUM, "bench", err);
}

static int make_calls(struct rank *r, const struct call *c, int times, struct error *err)
{
    int rc = ERR_OK;
    for (int i = 0; i < times && !rc; i++)
        rc = make_call(r, c, err);
    return rc;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* As many launches for every rank: they follow from the call alone. */
static int launches_of(const struct rank *r, const struct call *c)
{
    int64_t n = (INT64_C(6) << 30) / ((c->bytes + c->second) * CALLS + 1);
    return r->bench->shared || r->bench->cpu ? LAUNCHES_LEAST
           : n < LAUNCHES_LEAST              ? LAUNCHES_LEAST
           : n > LAUNCHES_MOST               ? LAUNCHES_MOST
                                             : (int)n;
}

static int time_call(struct rank *r, const struct call *c, double *us, int *calls, struct error *err)
{
    double times[LAUNCHES_MOST];
    struct kgraph *graph = NULL;
    int launches = launches_of(r, c);
    *calls = r->bench->shared || r->bench->cpu ? 2 : CALLS;
    int rc = make_calls(r, c, 3, err);
    if (!rc)
        rc = r->k->stream_sync(r->ks, err);
    if (!rc && r->k->capture_begin) {
        rc = r->k->capture_begin(r->ks, err);
        int made = rc ? rc : make_calls(r, c, *calls, err);
        if (!rc)
            rc = r->k->capture_end(r->ks, &graph, err);
        rc = rc ? rc : made;
    }
    for (int i = -2; i < launches && !rc; i++) {
        int64_t start = clock_mono_ns();
        if (graph)
            r->k->graph_launch(r->ks, graph);
        else
            rc = make_calls(r, c, *calls, err);
        if (!rc)
            rc = r->k->stream_sync(r->ks, err);
        if (i >= 0)
            times[i] = (double)(clock_mono_ns() - start) / 1e3 / *calls;
    }
    if (graph)
        r->k->graph_destroy(graph);
    if (rc)
        return rc;
    qsort(times, (size_t)launches, sizeof *times, ascending);
    *us = times[launches / 2];
    *calls *= launches;
    return ERR_OK;
}

static void print_call(const struct rank *r, const struct call *c, double us, int calls)
{
    int t = r->bench->ranks;
    double wire = (c->kind == COMM_ALL_REDUCE ? 2.0 : 1.0) * (t - 1) / t * (double)(c->bytes + c->second);
    printf("{\"kind\": \"%s\", \"bytes\": %" PRId64 ", \"second\": %" PRId64 ", \"ranks\": %d, \"us\": %.3f, "
           "\"busbw_gb_s\": %.4g, \"calls\": %d, \"backend\": \"%s\", \"shared\": %s}\n",
           comm_kind_name(c->kind), c->bytes, c->second, t, us, wire / us / 1e3, calls, r->comms.world.backend->name,
           r->bench->shared ? "true" : "false");
    fflush(stdout);
}

static int run_rank(const struct bench *b, int rank)
{
    struct rank r = {.bench = b};
    struct error err = {.code = ERR_OK};
    if (!b->cpu)
        setenv("CUDA_VISIBLE_DEVICES", b->devices[rank], 1);
    int rc = connect_rank(&r, rank, &err);
    if (!rc)
        rc = make_room(&r, &err);
    for (int i = 0; i < b->n && !rc; i++) {
        double us = NAN;
        int calls = 0;
        rc = time_call(&r, &b->calls[i], &us, &calls, &err);
        if (!rc && rank == 0)
            print_call(&r, &b->calls[i], us, calls);
    }
    if (rc) {
        fprintf(stderr, "comm_bench: rank %d: %s%s%s\n", rank, err.message, err.hint[0] ? "; " : "", err.hint);
        comms_abort(&r.comms, &err);
        return 1;
    }
    comms_destroy(&r.comms);
    return 0;
}

/* ---- the parent, which touches no device ---- */

static bool read_call(char *text, struct call *c)
{
    char *colon = strchr(text, ':'), *end;
    if (!colon)
        return false;
    *colon = '\0';
    *c = (struct call){.kind = COMM_KIND_COUNT};
    for (int k = COMM_ALL_REDUCE; k <= COMM_ALL_GATHER; k++)
        if (!strcmp(text, comm_kind_name((enum comm_kind)k)))
            c->kind = (enum comm_kind)k;
    c->bytes = strtoll(colon + 1, &end, 10);
    if (*end == '+')
        c->second = strtoll(end + 1, &end, 10);
    return c->kind != COMM_KIND_COUNT && c->bytes > 0 && c->second >= 0 && !*end &&
           (!c->second || c->kind == COMM_ALL_REDUCE);
}

static void read_devices(struct bench *b, char *list)
{
    static char numbers[MOST_RANKS][8];
    int n = 0;
    for (char *rest = list; rest && *rest && n < MOST_RANKS; n++) {
        char *comma = strchr(rest, ',');
        if (comma)
            *comma = '\0';
        b->devices[n] = rest;
        rest = comma ? comma + 1 : NULL;
    }
    for (int i = n; !list && i < MOST_RANKS; i++) {
        snprintf(numbers[i], sizeof numbers[i], "%d", i);
        b->devices[i] = numbers[i];
    }
    for (int i = n; list && n && i < MOST_RANKS; i++)
        b->devices[i] = b->devices[i % n];
    for (int i = 0; i < b->ranks && !b->cpu; i++)
        for (int j = 0; j < i; j++)
            b->shared = b->shared || !strcmp(b->devices[i], b->devices[j]);
}

static bool read_line(struct bench *b, int argc, char **argv)
{
    char *list = NULL;
    int i = 1;
    for (; i < argc && !strncmp(argv[i], "--", 2); i++) {
        if (!strcmp(argv[i], "--cpu"))
            b->cpu = true;
        else if (!strcmp(argv[i], "--devices") && i + 1 < argc && *argv[i + 1])
            list = argv[++i];
        else
            return false;
    }
    if (argc - i < 2)
        return false;
    b->ranks = (int)strtol(argv[i++], NULL, 10);
    b->n = argc - i;
    b->calls = calloc((size_t)b->n, sizeof *b->calls);
    for (int k = 0; k < b->n && b->calls; k++)
        if (!read_call(argv[i + k], &b->calls[k]))
            return false;
    read_devices(b, list);
    return b->calls && b->ranks >= 2 && b->ranks <= MOST_RANKS;
}

/* The first that fails takes the others with it. */
static int wait_for(const pid_t *pids, int n)
{
    int failed = 0;
    for (int left = n; left > 0; left--) {
        int status;
        if (wait(&status) < 0)
            return 1;
        if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
            continue;
        for (int i = 0; i < n && !failed; i++)
            kill(pids[i], SIGKILL);
        failed = 1;
    }
    return failed;
}

int main(int argc, char **argv)
{
    struct bench b = {.ranks = 0};
    pid_t pids[MOST_RANKS];
    int n = 0, failed;
    if (!read_line(&b, argc, argv)) {
        fprintf(stderr, "usage: comm_bench [--cpu | --devices 0,1,...] RANKS KIND:BYTES[+BYTES]...\n"
                        "  KIND: all_reduce reduce_scatter all_gather; RANKS: 2 to 64\n");
        free(b.calls);
        return 2;
    }
    b.board = board_new();
    for (; b.board && n < b.ranks; n++) {
        pids[n] = fork();
        if (pids[n] < 0)
            break;
        if (!pids[n]) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            _exit(run_rank(&b, n));
        }
    }
    if (n < b.ranks) {
        fprintf(stderr, "comm_bench: %d ranks cannot be started\n", b.ranks);
        for (int i = 0; i < n; i++)
            kill(pids[i], SIGKILL);
    }
    failed = wait_for(pids, n) || n < b.ranks;
    free(b.calls);
    return failed;
}
