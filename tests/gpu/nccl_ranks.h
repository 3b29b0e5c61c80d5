/* Ranks as processes over NCCL; they share one GPU, unless `spread`. */
#ifndef BOOST_TESTS_GPU_NCCL_RANKS_H
#define BOOST_TESTS_GPU_NCCL_RANKS_H

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "proto/rankfiles.h"
#include "tests/gpu/device.h"
#include "tests/unit/worker/exact_sums.h"
#include "tests/unit/worker/processes.h"

enum { ALIVE_MS = 40000 /* with processes.h's 40 s: how long a rank may live */ };

static int to_parent; /* of a rank's process */

/* The test's; a rank has the value at its fork. */
static int connect_ms = 40000;

/* ---- ranks -------------------------------------------------------------------------- */

/* Tells the test and ends the rank; who comes first, the rank's thread or the watcher's. */
static inline void tell_and_end(const struct error *why)
{
    static atomic_bool told;
    if (atomic_exchange(&told, true))
        for (;;)
            pause();
    dprintf(to_parent, "%s %s", error_code_name(why->code), why->message);
    _exit(RANK_EXIT_PEER);
}

static inline void lost(void *arg, const struct error *why)
{
    (void)arg;
    tell_and_end(why);
}

static inline void say(void *arg, const char *line)
{
    (void)arg;
    fprintf(stderr, "# %s\n", line);
}

/* What the device was last said to have come to. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    const char *what;
    uint64_t seq; /* in its group */
} told = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, "", 0};

static inline void reached(void *arg, const struct comm_call *call, uint64_t seq)
{
    (void)arg;
    pthread_mutex_lock(&told.lock);
    told.what = call->what;
    told.seq = seq;
    pthread_cond_broadcast(&told.changed);
    pthread_mutex_unlock(&told.lock);
}

/* Whether that becomes `what`, within ten seconds. */
static inline bool comes_to(const char *what)
{
    struct timespec end;
    bool there;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += 10;
    pthread_mutex_lock(&told.lock);
    while (!(there = !strcmp(told.what, what)) && !pthread_cond_timedwait(&told.changed, &told.lock, &end))
        ;
    pthread_mutex_unlock(&told.lock);
    return there;
}

static const struct comms_watch watcher = {.lost = lost, .reached = reached, .say = say};

/* Ranks go round the devices that the process sees, so that none is shared where there are enough. */
static bool spread;

/* How many devices the process sees, and their names with commas between. */
static inline int devices(char list[256])
{
    const char *seen = getenv("CUDA_VISIBLE_DEVICES");
    int n = 0;
    list[0] = '\0';
    for (size_t len = 0; !seen && n < 16; n++) { /* all: the numbers of those that there are */
        char path[32];
        snprintf(path, sizeof path, "/dev/nvidia%d", n);
        if (access(path, F_OK))
            break;
        len += (size_t)snprintf(list + len, 256 - len, "%s%d", n ? "," : "", n);
    }
    if (seen) {
        snprintf(list, 256, "%s", seen);
        n = 1;
        for (const char *c = list; *c; c++)
            n += *c == ',';
    }
    return n;
}

static inline void take_device(int rank)
{
    char list[256], *rest = list, *mine = NULL;
    int n = devices(list);
    for (int i = 0; n > 1 && i <= rank % n; i++)
        mine = strsep(&rest, ",");
    if (mine)
        setenv("CUDA_VISIBLE_DEVICES", mine, 1);
}

static inline int connect_nccl(const struct world *w, int rank, const struct rendezvous *rv, int to_test,
                               struct comms *comms, struct error *err)
{
    to_parent = to_test;
    if (spread)
        take_device(rank);
    int rc = open_device(err);
    if (!rc)
        rc = library->comms_create(rank, &w->layout, "127.0.0.1", rv, connect_ms, &watcher, comms, err);
    if (rc)
        tell_and_end(err);
    return rc;
}

static inline void begin(struct world *w, int tp, int dp, int pp, rank_body *body)
{
    struct comm_layout layout = {.tp = tp, .dp = dp, .pp = pp, .ends = pp > 1};
    start_connected(w, tp * dp * pp, &layout, ALIVE_MS, connect_nccl, body);
}

/* Elements of `rank`'s numbers into device memory. */
static inline bool lay(enum dtype t, void *to, int64_t n, int rank)
{
    struct error err;
    size_t bytes = (size_t)n * dtype_size(t);
    void *host = malloc(bytes);
    for (int64_t i = 0; i < n; i++)
        put(t, host, i, value(rank, i));
    k->upload(ks, to, host, bytes);
    bool there = !k->stream_sync(ks, &err);
    free(host);
    return there;
}

/* Device memory holding them; NULL is a failure. */
static inline void *numbers(enum dtype t, int64_t n, int rank)
{
    struct error err;
    void *to = k->alloc((size_t)n * dtype_size(t), &err);
    return to && lay(t, to, n, rank) ? to : NULL;
}

/* Whether element i of device memory is times * want(i) for all of [0, n). */
static inline bool holds(enum dtype t, const void *data, int64_t n, enum comm_op op, int ranks, int first, int64_t from,
                         double times)
{
    struct error err;
    void *host = malloc((size_t)n * dtype_size(t));
    k->download(ks, host, data, (size_t)n * dtype_size(t));
    bool right = !k->stream_sync(ks, &err);
    if (!right)
        fprintf(stderr, "# %s\n", err.message);
    for (int64_t i = 0; i < n && right; i++) {
        double want = times * expected(op, ranks, first, from + i);
        right = get(t, host, i) == want;
        if (!right)
            fprintf(stderr, "# %s element %lld of %lld: %g, not %g\n", dtype_name(t), (long long)i, (long long)n,
                    get(t, host, i), want);
    }
    free(host);
    return right;
}

#endif
