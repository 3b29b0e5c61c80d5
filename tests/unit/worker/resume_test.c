/* A run that is killed at a random step and resumed, again and again, is the undisturbed run bit for bit:
 * every loss, its z and gradient norm of every attempt, and the final weights and moments (T1, T3, T4, T9). */
#include "tests/unit/worker/tiny_job.h"

#include "proto/rankfiles.h"
#include "worker/safetensors.h"
#include "worker/spike.h"

enum { STEPS = 150, TP = 2, TRIALS = 10 };

struct curve {
    double loss[STEPS + 1], norm[STEPS + 1], eval[STEPS + 1], z[STEPS + 1];
    bool have_loss[STEPS + 1], have_norm[STEPS + 1], have_eval[STEPS + 1], have_z[STEPS + 1];
};

static char dir[64];
static struct curve reference;

static int64_t read_curve(struct curve *c, const char *run_dir)
{
    tiny_job_metric(run_dir, "eval_loss", c->eval, c->have_eval, STEPS);
    tiny_job_metric(run_dir, "loss_z", c->z, c->have_z, STEPS);
    tiny_job_metric(run_dir, "grad_norm", c->norm, c->have_norm, STEPS);
    return tiny_job_metric(run_dir, "loss", c->loss, c->have_loss, STEPS);
}

static int set_up(void **state)
{
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/boost-resume-XXXXXX");
    if (!mkdtemp(dir))
        return -1;
    tiny_job_write(dir, TP, STEPS, "eval_every: 50 eval_tokens: 300", "every_steps: 7");
    char run[128];
    snprintf(run, sizeof run, "%s/ref", dir);
    const char *set[] = {"checkpoint.every_steps=0"};
    if (tiny_job_end(tiny_job_start(dir, run, NULL, set, 1, NULL)))
        return -1;
    read_curve(&reference, run);
    char from[160], to[160];
    snprintf(from, sizeof from, "%s/ckpt", dir);
    snprintf(to, sizeof to, "%s/ref-ckpt", dir);
    return rename(from, to);
}

static int tear_down(void **state)
{
    (void)state;
    return fs_remove_tree(dir, NULL);
}

/* Reads the child's lines until the given step has been told or it ends. */
static void wait_for_step(int out, int64_t step)
{
    FILE *f = fdopen(dup(out), "r");
    setvbuf(f, NULL, _IONBF, 0);
    char line[512], want[64];
    snprintf(want, sizeof want, "step %lld/", (long long)step);
    while (fgets(line, sizeof line, f))
        if (!strncmp(line, want, strlen(want)))
            break;
    fclose(f);
}

static void compare(const struct curve *got, const struct curve *want)
{
    for (int64_t n = 1; n <= STEPS; n++) {
        assert_true(got->have_loss[n] && got->have_norm[n]);
        assert_memory_equal(&got->loss[n], &want->loss[n], sizeof(double));
        assert_memory_equal(&got->norm[n], &want->norm[n], sizeof(double));
        assert_int_equal(got->have_z[n], n > SPIKE_AFTER); /* it does not start anew */
        if (got->have_z[n])
            assert_memory_equal(&got->z[n], &want->z[n], sizeof(double));
        assert_int_equal(got->have_eval[n], n % 50 == 0);
        if (got->have_eval[n])
            assert_memory_equal(&got->eval[n], &want->eval[n], sizeof(double));
    }
}

/* Weights and moments of the last step, to those in <dir>/<want>. */
static void compare_state(const char *checkpoint, const char *want)
{
    for (int r = 0; r < TP; r++) {
        char a[320], b[320];
        struct safetensors_file x, y;
        struct error err;
        snprintf(a, sizeof a, "%s/rank-%05d-of-%05d.safetensors", checkpoint, r, TP);
        snprintf(b, sizeof b, "%s/%s/step-%d.a1/rank-%05d-of-%05d.safetensors", dir, want, STEPS, r, TP);
        assert_int_equal(safetensors_open(&x, a, &err), 0);
        assert_int_equal(safetensors_open(&y, b, &err), 0);
        assert_int_equal(x.n, y.n);
        for (size_t i = 0; i < x.n; i++) {
            size_t bytes = x.entries[i].end - x.entries[i].begin;
            void *p = malloc(bytes), *q = malloc(bytes);
            assert_string_equal(x.entries[i].name, y.entries[i].name);
            assert_int_equal(x.entries[i].dtype, DTYPE_F32); /* in every precision but FP64 */
            assert_int_equal(safetensors_read(&x, &x.entries[i], p, &err), 0);
            assert_int_equal(safetensors_read(&y, &y.entries[i], q, &err), 0);
            assert_memory_equal(p, q, bytes);
            free(p);
            free(q);
        }
        static const char *const keys[] = {"step", "adam_t", "samples", "tokens", "skipped", "spike"};
        for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
            assert_string_equal(safetensors_meta(&x, keys[i]), safetensors_meta(&y, keys[i]));
        safetensors_close(&x);
        safetensors_close(&y);
    }
}

static void killed_and_resumed_is_undisturbed(void **state)
{
    (void)state;
    int kills = 0, from_start = 0;
    char path[160];
    for (unsigned trial = 1; trial <= TRIALS; trial++) {
        srand(trial);
        static struct curve got;
        memset(&got, 0, sizeof got);
        int64_t at = 0;
        for (int attempt = 1;; attempt++) {
            char run[160], newest[320];
            bool resumed = tiny_job_newest(dir, TP, STEPS, newest, sizeof newest);
            from_start += attempt > 1 && !resumed;
            snprintf(run, sizeof run, "%s/run-%u-%d", dir, trial, attempt);
            bool last = attempt == 4;
            int64_t kill_at = at + 1 + rand() % 45;
            int out;
            pid_t pid = tiny_job_start(dir, run, resumed ? newest : NULL, NULL, 0, &out);
            wait_for_step(out, last ? -1 : kill_at);
            if (!last)
                kill(pid, SIGKILL);
            close(out);
            int end = tiny_job_end(pid);
            assert_true(end == 0 || (!last && end == -SIGKILL)); /* it may have been faster than the kill */
            kills += end != 0;
            at = read_curve(&got, run);
            if (end == 0)
                break;
        }
        compare(&got, &reference);
        assert_true(tiny_job_newest(dir, TP, STEPS, path, sizeof path));
        compare_state(path, "ref-ckpt");
        snprintf(path, sizeof path, "%s/ckpt", dir);
        assert_int_equal(fs_remove_tree(path, NULL), 0);
    }
    assert_true(kills >= 2 * TRIALS);
    print_message("%d trials, %d kills, %d of them before a first checkpoint\n", TRIALS, kills, from_start);
}

/* T3: stop and resume twice; the second save holds the state of its own step. */
static void stopped_and_resumed_twice(void **state)
{
    (void)state;
    static struct curve got;
    memset(&got, 0, sizeof got);
    char run[160], newest[320], text[65536];
    const char *const set[] = {"checkpoint.every_steps=0"};
    int64_t stopped_at = 0;
    for (int attempt = 1; attempt <= 3; attempt++) {
        bool resumed = tiny_job_newest(dir, TP, STEPS, newest, sizeof newest);
        assert_int_equal(resumed, attempt > 1);
        snprintf(run, sizeof run, "%s/stop-%d", dir, attempt);
        int out;
        pid_t pid = tiny_job_start(dir, run, resumed ? newest : NULL, set, 1, &out);
        size_t len = 0;
        if (attempt < 3) {
            wait_for_step(out, stopped_at + 20);
            kill(pid, SIGTERM);
        }
        for (ssize_t n; len < sizeof text - 1 && (n = read(out, text + len, sizeof text - 1 - len)) > 0;)
            len += (size_t)n;
        close(out);
        assert_int_equal(tiny_job_end(pid), 0);
        int64_t at = read_curve(&got, run);
        assert_true(attempt == 3 ? at == STEPS : at > stopped_at && at < STEPS);
        stopped_at = at;
    }
    compare(&got, &reference);
    assert_true(tiny_job_newest(dir, TP, STEPS, newest, sizeof newest));
    compare_state(newest, "ref-ckpt");
}

static void remove_checkpoints(void)
{
    char path[160];
    snprintf(path, sizeof path, "%s/ckpt", dir);
    assert_int_equal(fs_remove_tree(path, NULL), 0);
}

/* A run with run.precision set so; stopped (it saves) at about a step when that is not 0, resumed when `resume`. Its
 * status. */
static int run_in(const char *precision, const char *name, bool resume, int64_t stop_at, struct curve *c)
{
    char run[160], newest[320], field[64];
    snprintf(field, sizeof field, "run.precision=%s", precision);
    const char *set[] = {field};
    snprintf(run, sizeof run, "%s/%s", dir, name);
    if (resume)
        assert_true(tiny_job_newest(dir, TP, STEPS, newest, sizeof newest));
    int out;
    pid_t pid = tiny_job_start(dir, run, resume ? newest : NULL, set, 1, &out);
    wait_for_step(out, stop_at ? stop_at : -1);
    if (stop_at)
        kill(pid, SIGTERM);
    char rest[4096];
    while (read(out, rest, sizeof rest) > 0)
        continue;
    close(out);
    int end = tiny_job_end(pid);
    if (c)
        read_curve(c, run);
    return end;
}

/* bf16 keeps master weights and moments in fp32, and a checkpoint holds these: so it goes on with the same bits, and
 * can take over from FP32 exactly; what FP64 keeps is of another type, which is refused. */
static void bf16_is_resumed(void **state)
{
    (void)state;
    static struct curve whole, got;
    char newest[320], from[160], to[160];
    memset(&whole, 0, sizeof whole);
    memset(&got, 0, sizeof got);
    remove_checkpoints();
    assert_int_equal(run_in("BF16", "bf16", false, 0, &whole), 0);
    snprintf(from, sizeof from, "%s/ckpt", dir);
    snprintf(to, sizeof to, "%s/bf16-ckpt", dir);
    assert_int_equal(rename(from, to), 0);
    assert_true(memcmp(whole.loss, reference.loss, sizeof whole.loss) != 0);
    for (int64_t n = 1; n <= STEPS; n++) /* on fp32's curve */
        assert_true(whole.loss[n] > 0.9 * reference.loss[n] && whole.loss[n] < 1.1 * reference.loss[n]);

    assert_int_equal(run_in("BF16", "bf16-1", false, 40, &got), 0);
    assert_false(got.have_loss[STEPS]);
    assert_int_equal(run_in("BF16", "bf16-2", true, 0, &got), 0);
    compare(&got, &whole);
    assert_true(tiny_job_newest(dir, TP, STEPS, newest, sizeof newest));
    compare_state(newest, "bf16-ckpt");

    remove_checkpoints();
    assert_int_equal(run_in("FP32", "fp32-1", false, 40, NULL), 0);
    assert_int_equal(run_in("FP64", "fp64-2", true, 0, NULL), RANK_EXIT_SPEC);
    assert_int_equal(run_in("BF16", "fp32-2", true, 0, NULL), 0);
    remove_checkpoints();
    assert_int_equal(run_in("BF16", "bf16-3", false, 40, NULL), 0);
    assert_int_equal(run_in("FP32", "bf16-4", true, 0, NULL), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(killed_and_resumed_is_undisturbed),
        cmocka_unit_test(stopped_and_resumed_twice),
        cmocka_unit_test(bf16_is_resumed),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
