/* Ranks as processes, for tests: a fake agent for the rendezvous, a pipe from each rank. Over Gloo unless a test
 * connects them otherwise. */
#ifndef BOOST_TESTS_WORKER_PROCESSES_H
#define BOOST_TESTS_WORKER_PROCESSES_H

#include <errno.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/base/clock.h"
#include "tests/unit/support/fake_agent.h"
#include "worker/comm/comm.h"
#include "worker/rendezvous.h"

enum { MAX_PROCESSES = 32, CONNECT_MS = 60000, TIMED_OUT = 99 };

struct world;
/* Connects a rank, in its process. */
typedef int connect_rank(const struct world *w, int rank, const struct rendezvous *rv, int to_test, struct comms *comms,
                         struct error *err);
struct world {
    int size, op_timeout_ms;
    connect_rank *connect;
    struct comm_layout layout;
    char dir[64], socket[96];
    struct fake_agent *agent;
    pid_t pids[MAX_PROCESSES];
    int from[MAX_PROCESSES]; /* what a rank writes, read by the test */
};
typedef int rank_body(struct comms *comms, int to_test);

/* Complains and fails the rank; runs in a child, where cmocka must not be used. */
#define CHECK(condition)                                                                                  \
    do {                                                                                                  \
        if (!(condition)) {                                                                               \
            fprintf(stderr, "# rank %d: %s:%d: %s\n", comms->world.rank, __FILE__, __LINE__, #condition); \
            return 1;                                                                                     \
        }                                                                                                 \
    } while (0)

static inline int connect_gloo(const struct world *w, int rank, const struct rendezvous *rv, int to_test,
                               struct comms *comms, struct error *err)
{
    (void)to_test;
    return gloo_comms_create(rank, &w->layout, "127.0.0.1", rv, CONNECT_MS, w->op_timeout_ms, comms, err);
}

static inline void child(struct world *w, int rank, rank_body *body, int to_test)
{
    signal(SIGPIPE, SIG_IGN);
    alarm((unsigned)(40 + w->op_timeout_ms / 1000));
    struct rendezvous_client client;
    struct comms comms;
    struct error err;
    error_clear(&err);
    if (rendezvous_open(&client, w->socket, 1, 1, rank, CONNECT_MS, &err))
        _exit(10);
    struct rendezvous rv = rendezvous_table(&client);
    if (w->connect(w, rank, &rv, to_test, &comms, &err)) {
        fprintf(stderr, "# rank %d: %s\n", rank, err.message);
        _exit(11);
    }
    rendezvous_close(&client);
    int rc = body(&comms, to_test);
    comms_destroy(&comms);
    _exit(rc);
}

static inline void start_connected(struct world *w, int size, const struct comm_layout *layout, int op_timeout_ms,
                                   connect_rank *connect, rank_body *body)
{
    *w = (struct world){.size = size, .layout = *layout, .op_timeout_ms = op_timeout_ms, .connect = connect};
    snprintf(w->dir, sizeof w->dir, "/tmp/boost-ranks-XXXXXX");
    assert_non_null(mkdtemp(w->dir));
    snprintf(w->socket, sizeof w->socket, "%s/rv.sock", w->dir);
    w->agent = fake_agent_start(w->socket);
    assert_non_null(w->agent);
    fflush(NULL);
    for (int i = 0; i < size; i++) {
        int fds[2];
        assert_int_equal(pipe(fds), 0);
        w->pids[i] = fork();
        assert_true(w->pids[i] >= 0);
        if (!w->pids[i]) {
            close(fds[0]);
            child(w, i, body, fds[1]);
        }
        close(fds[1]);
        w->from[i] = fds[0];
    }
}

static inline void start_layout(struct world *w, int size, const struct comm_layout *layout, int op_timeout_ms,
                                rank_body *body)
{
    start_connected(w, size, layout, op_timeout_ms, connect_gloo, body);
}

static inline void start(struct world *w, int size, int tp, int op_timeout_ms, rank_body *body)
{
    struct comm_layout layout = {.tp = tp, .dp = size / tp, .pp = 1};
    start_layout(w, size, &layout, op_timeout_ms, body);
}

/* Everything that a rank wrote until its end. */
static inline void collect(struct world *w, int rank, char *out, size_t cap)
{
    size_t len = 0;
    for (ssize_t n; len < cap - 1 && (n = read(w->from[rank], out + len, cap - 1 - len)) > 0;)
        len += (size_t)n;
    out[len] = '\0';
}

static inline void await_text(struct world *w, int rank, const char *text)
{
    char got[64] = "";
    size_t len = strlen(text);
    assert_int_equal(read(w->from[rank], got, len), (ssize_t)len);
    assert_string_equal(got, text);
}

/* Exit status of a rank, its signal negated. */
static inline int ended(struct world *w, int rank)
{
    int status;
    assert_int_equal(waitpid(w->pids[rank], &status, 0), w->pids[rank]);
    w->pids[rank] = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static inline void stop(struct world *w)
{
    for (int i = 0; i < w->size; i++) {
        close(w->from[i]);
        if (w->pids[i] > 0) {
            kill(w->pids[i], SIGKILL);
            waitpid(w->pids[i], NULL, 0);
        }
    }
    fake_agent_stop(w->agent);
    unlink(w->socket);
    rmdir(w->dir);
}

static inline void all_end_well(struct world *w)
{
    int bad = 0;
    for (int i = 0; i < w->size; i++)
        bad += ended(w, i) != 0;
    stop(w);
    assert_int_equal(bad, 0);
}

#endif
