/* SIGKILL at any moment: what was answered is there after the next start, whole, in order. */
#include "tests/unit/store/fixture.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>

enum { ROUNDS = 50, IN_FLIGHT = 8 };

static const char *const loss_name[] = {"loss"};

/* ---- the process that is killed -------------------------------------------------- */

struct child {
    struct store *s;
    int fd;
    int64_t next;
    int in_flight;
};
struct promise { /* what goes over the pipe */
    int64_t kind; /* 0 transaction, 1 metric */
    int64_t id;
};
struct pending {
    struct child *c;
    struct promise p;
};

static void report(void *arg, int rc, const struct error *err)
{
    struct pending *pending = arg;
    (void)err;
    if (rc || write(pending->c->fd, &pending->p, sizeof pending->p) != (ssize_t)sizeof pending->p)
        _exit(1);
    pending->c->in_flight--;
    free(pending);
}

static struct pending *promise(struct child *c, int64_t kind, int64_t id)
{
    struct pending *p = malloc(sizeof *p);
    if (!p)
        _exit(1);
    *p = (struct pending){c, {kind, id}};
    c->in_flight++;
    return p;
}

/* A job, its attempt and an event under one number: there together or not at all. */
static void submit(struct child *c, int64_t id)
{
    struct store_txn *t = store_begin(c->s);
    struct store_job job = sample_job(id);
    struct store_attempt attempt = {.job = id, .attempt = 1};
    struct store_event event = sample_event(id, id);
    store_put_job(t, &job);
    store_put_attempt(t, &attempt);
    store_add_event(t, &event);
    store_commit(t, report, promise(c, 0, id));
    double value = (double)id;
    struct store_metric metric = {id, id, 1, 1, loss_name, &value};
    store_add_metrics(c->s, 1, 1, 0, &metric, 1, report, promise(c, 1, id));
}

static void run_child(const char *dir, int fd)
{
    struct child c = {.fd = fd};
    struct error err;
    if (store_open(dir, &c.s, &err))
        _exit(1);
    c.next = store_max_event_id(c.s) + 1;
    for (;;) {
        while (c.in_flight < IN_FLIGHT)
            submit(&c, c.next++);
        struct pollfd p = {store_fd(c.s), POLLIN, 0};
        poll(&p, 1, -1);
        store_dispatch(c.s);
    }
}

/* ---- the one that looks ----------------------------------------------------------- */

static void count_job(void *arg, const struct store_job *row)
{
    assert_int_equal(row->id, ++*(int64_t *)arg);
}

static void count_attempt(void *arg, const struct store_attempt *row)
{
    assert_int_equal(row->job, ++*(int64_t *)arg);
}

static void keep_seq(void *arg, int64_t job, int attempt, int rank, int64_t seq)
{
    assert_true(job == 1 && attempt == 1 && rank == 0);
    *(int64_t *)arg = seq;
}

static void answered_is_there_after_sigkill(void **state)
{
    (void)state;
    char dir[PATH_MAX];
    struct error err;
    unsigned seed = 20261129;
    int64_t answered[2] = {0, 0};
    int unanswered = 0;
    new_dir(dir);
    for (int round = 0; round < ROUNDS; round++) {
        int fds[2];
        assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0)
            run_child(dir, fds[1]);
        close(fds[1]);
        int wanted = 1 + rand_r(&seed) % 60, got = 0;
        struct promise p;
        ssize_t n;
        while ((n = read(fds[0], &p, sizeof p)) == (ssize_t)sizeof p) {
            /* answers of one file come in order, without a gap */
            assert_int_equal(p.id, answered[p.kind] + 1);
            answered[p.kind] = p.id;
            if (++got == wanted)
                kill(child, SIGKILL);
        }
        assert_int_equal(n, 0);
        assert_true(got >= wanted);
        close(fds[0]);
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);

        struct store *s = open_store(dir);
        int64_t jobs = 0, attempts = 0, seq = 0;
        assert_int_equal(store_load_jobs(s, count_job, &jobs, &err), ERR_OK);
        assert_int_equal(store_load_attempts(s, count_attempt, &attempts, &err), ERR_OK);
        assert_int_equal(store_load_metric_seqs(s, keep_seq, &seq, &err), ERR_OK);
        assert_true(jobs >= answered[0] && seq >= answered[1]);
        assert_true(jobs == attempts && jobs == store_max_event_id(s) && jobs == store_max_job_id(s));
        unanswered += jobs > answered[0];
        answered[0] = jobs; /* the next child goes on behind what is there */
        /* one number serves both files: metrics that were not kept are sent again */
        for (int64_t id = seq + 1; id <= jobs; id++) {
            struct outcome o = {0};
            double value = (double)id;
            struct store_metric metric = {id, id, 1, 1, loss_name, &value};
            store_add_metrics(s, 1, 1, 0, &metric, 1, on_done, &o);
            wait_for(s, &o.count, 1);
        }
        answered[1] = jobs;
        store_close(s);
    }
    print_message("# %d rounds, %lld transactions, in %d rounds one was kept that had not been answered yet\n", ROUNDS,
                  (long long)answered[0], unanswered);
    drop_dir(dir);
}

/* ---- speed: printed, not judged ------------------------------------------------------- */

static double rate(struct store *s, int64_t *id, int total, int in_flight, int rows)
{
    struct outcome o = {0};
    int64_t start = clock_mono_ns();
    for (int sent = 0; sent < total;) {
        while (sent < total && sent - o.count < in_flight) {
            struct store_txn *t = begin(s);
            for (int i = 0; i < rows; i++) {
                struct store_event e = sample_event(++*id, 1);
                store_add_event(t, &e);
            }
            store_commit(t, on_done, &o);
            sent++;
        }
        wait_for(s, &o.count, sent - in_flight + 1);
    }
    wait_for(s, &o.count, total);
    assert_int_equal(o.rc, ERR_OK);
    return total / ((double)(clock_mono_ns() - start) / NS_PER_S);
}

static void speed(void **state)
{
    (void)state;
    char dir[PATH_MAX];
    int64_t id = 0;
    new_dir(dir);
    struct store *s = open_store(dir);
    print_message("# state.db: %.0f commits/s one at a time\n", rate(s, &id, 1000, 1, 1));
    print_message("# state.db: %.0f commits/s with 64 waiting\n", rate(s, &id, 20000, 64, 1));
    print_message("# state.db: %.0f commits/s with 1,000 waiting\n", rate(s, &id, 50000, 1000, 1));
    print_message("# state.db: %.0f rows/s at 100 rows a transaction, 8 waiting\n", 100 * rate(s, &id, 1000, 8, 100));
    struct outcome o = {0};
    enum { BATCHES = 1000, ROWS = 100, NAMES = 10 };
    const char *const names[NAMES] = {"loss", "lr", "grad_norm", "tokens", "tokens_per_s",
                                      "step_ms", "comm_ms", "data_ms", "mfu", "skipped"};
    double values[NAMES] = {0};
    struct store_metric rows[ROWS];
    int64_t seq = 0, start = clock_mono_ns();
    for (int b = 0; b < BATCHES; b++) {
        for (int i = 0; i < ROWS; i++) {
            seq++;
            rows[i] = (struct store_metric){seq, seq, seq, NAMES, names, values};
        }
        store_add_metrics(s, 1, 1, 0, rows, ROWS, on_done, &o);
    }
    wait_for(s, &o.count, BATCHES);
    print_message("# metrics.db: %.0f rows/s of %d values, in batches of %d\n",
                  seq / ((double)(clock_mono_ns() - start) / NS_PER_S), NAMES, ROWS);
    store_close(s);
    drop_dir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answered_is_there_after_sigkill),
        cmocka_unit_test(speed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
