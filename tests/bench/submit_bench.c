/* How fast a running boostd takes jobs: latency of a submit, whose answer comes after
 * its commit is durable, and the rate over all clients.
 *
 *   submit_bench SOCKET JOB.pbtxt CLIENTS SUBMITS
 *
 * Each client is a thread with its own connection and one submit at a time. Prints one
 * JSON object. The agentless boostd keeps all of them QUEUED. */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/clock.h"
#include "proto/client.h"
#include "proto/jobfile.h"

enum { TIMEOUT_MS = 60000, WARM_UP = 20 };

struct bench_client {
    pthread_t thread;
    const char *socket;
    Boost__JobSpec *spec;
    int submits;
    int64_t *latency_ns; /* [submits] */
    int64_t first_ns, last_ns;
    int rc;
    struct error err;
};

static int submit(struct client *c, Boost__JobSpec *spec, struct error *err)
{
    Boost__SubmitRequest submit_request = BOOST__SUBMIT_REQUEST__INIT;
    Boost__Request request = BOOST__REQUEST__INIT;
    submit_request.spec = spec;
    request.body_case = BOOST__REQUEST__BODY_SUBMIT;
    request.submit = &submit_request;
    struct arena a;
    arena_init(&a, 1 << 20);
    Boost__Reply *reply = NULL;
    int rc = client_call(c, &request, TIMEOUT_MS, &a, &reply, err);
    if (!rc && (reply->body_case != BOOST__REPLY__BODY_SUBMIT || !reply->submit->has_job))
        rc = error_set(err, ERR_PROTOCOL, "the answer to a submit holds no job");
    arena_free(&a);
    return rc;
}

static void *run(void *arg)
{
    struct bench_client *b = arg;
    struct client c = CLIENT_INIT;
    b->rc = client_open(&c, b->socket, BOOST__COMPONENT__VALUE__CTL, NULL, TIMEOUT_MS, &b->err);
    for (int i = 0; !b->rc && i < WARM_UP; i++)
        b->rc = submit(&c, b->spec, &b->err);
    b->first_ns = clock_mono_ns();
    int64_t before = b->first_ns;
    for (int i = 0; !b->rc && i < b->submits; i++) {
        b->rc = submit(&c, b->spec, &b->err);
        int64_t now = clock_mono_ns();
        b->latency_ns[i] = now - before;
        before = now;
    }
    b->last_ns = before;
    client_close(&c);
    return NULL;
}

static int ascending(const void *x, const void *y)
{
    int64_t a = *(const int64_t *)x, b = *(const int64_t *)y;
    return (a > b) - (a < b);
}

static int report(struct bench_client *clients, int n, int submits)
{
    size_t total = (size_t)n * (size_t)submits;
    int64_t *all = malloc(total * sizeof *all);
    if (!all)
        return 1;
    int64_t first = clients[0].first_ns, last = clients[0].last_ns;
    for (int i = 0; i < n; i++) {
        memcpy(all + (size_t)i * (size_t)submits, clients[i].latency_ns, (size_t)submits * sizeof *all);
        first = clients[i].first_ns < first ? clients[i].first_ns : first;
        last = clients[i].last_ns > last ? clients[i].last_ns : last;
    }
    qsort(all, total, sizeof *all, ascending);
    printf("{\"clients\":%d,\"submits\":%zu,\"p50_ms\":%.4f,\"p99_ms\":%.4f,\"max_ms\":%.4f,\"per_s\":%.1f}\n", n,
           total, (double)all[total / 2] / NS_PER_MS, (double)all[total * 99 / 100] / NS_PER_MS,
           (double)all[total - 1] / NS_PER_MS, (double)total * NS_PER_S / (double)(last - first));
    free(all);
    return 0;
}

static int number(const char *text, int max)
{
    char *end;
    errno = 0;
    long v = strtol(text, &end, 10);
    return errno || *end || v < 1 || v > max ? 0 : (int)v;
}

int main(int argc, char **argv)
{
    int n = argc == 5 ? number(argv[3], 64) : 0, submits = argc == 5 ? number(argv[4], 1000000) : 0;
    if (!n || !submits) {
        fprintf(stderr, "usage: submit_bench SOCKET JOB.pbtxt CLIENTS SUBMITS\n");
        return 2;
    }
    struct job_file file;
    struct error err;
    int rc = jobfile_load(&file, argv[2], JOB_FORMAT_AUTO, false, &err);
    struct bench_client *clients = calloc((size_t)n, sizeof *clients);
    for (int i = 0; !rc && clients && i < n; i++) {
        clients[i].socket = argv[1];
        clients[i].spec = file.spec;
        clients[i].submits = submits;
        clients[i].latency_ns = calloc((size_t)submits, sizeof(int64_t));
        if (!clients[i].latency_ns || pthread_create(&clients[i].thread, NULL, run, &clients[i])) {
            fprintf(stderr, "submit_bench: out of memory or threads\n");
            return 1;
        }
    }
    for (int i = 0; !rc && clients && i < n; i++) {
        pthread_join(clients[i].thread, NULL);
        if (clients[i].rc)
            err = clients[i].err;
        rc = clients[i].rc ? clients[i].rc : rc;
    }
    if (rc)
        fprintf(stderr, "submit_bench: %s\n", err.message);
    else if (clients)
        rc = report(clients, n, submits);
    for (int i = 0; clients && i < n; i++)
        free(clients[i].latency_ns);
    free(clients);
    jobfile_free(&file);
    return rc ? 1 : 0;
}
