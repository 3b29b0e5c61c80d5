/* The z-score of a loss against closed forms; and what it must not be moved by. */
#include <math.h>

#include "tests/unit/worker/tiny_job.h"
#include "worker/data_order.h"
#include "worker/safetensors.h"
#include "worker/spike.h"

static void near(double got, double want, double relative)
{
    if (!(fabs(got - want) <= relative * fabs(want)))
        fail_msg("%.17g instead of %.17g", got, want);
}

/* Numbers between 2 and 3 without a trend, so that nothing is farther off than six deviations (0.29). */
static double noise(int k)
{
    return 2 + fmod(k * 0.6180339887498949, 1);
}

/* The sums written out: weights by pow(), two passes. */
static void sums_written_out(void **state)
{
    (void)state;
    static const double fades[] = {0, SPIKE_FADE, 0.3};
    for (int f = 0; f < 3; f++) {
        struct spike s;
        spike_init(&s, fades[f]);
        for (int n = 1; n <= 400; n++) {
            double before = s.mean, deviation = sqrt(spike_variance(&s)), z = spike_z(&s, noise(n));
            spike_add(&s, noise(n));
            double W = 0, Q = 0, mean = 0, sum = 0;
            for (int k = 1; k <= n; k++) {
                double w = pow(1 - fades[f], n - k);
                W += w;
                Q += w * w;
                mean += w * noise(k);
            }
            mean /= W;
            for (int k = 1; k <= n; k++)
                sum += pow(1 - fades[f], n - k) * (noise(k) - mean) * (noise(k) - mean);
            near(s.mean, mean, 1e-12);
            if (n > 1)
                near(spike_variance(&s), sum / (W - Q / W), 1e-9);
            if (n > SPIKE_AFTER)
                near(z, (noise(n) - before) / deviation, 1e-12);
            else
                assert_true(isnan(z));
        }
    }
}

/* Without fading, of +1, -1, +1, ...: after n = 2m the mean is 0 and the variance n / (n - 1). */
static void without_fading_it_is_the_usual_one(void **state)
{
    (void)state;
    struct spike s;
    spike_init(&s, 0);
    for (int n = 1; n <= 100; n++)
        spike_add(&s, n % 2 ? 1 : -1);
    assert_true(fabs(s.mean) < 1e-15);
    near(spike_variance(&s), 100.0 / 99, 1e-13);
    near(spike_z(&s, 3), 3 / sqrt(100.0 / 99), 1e-13);
    near(spike_z(&s, -3), -3 / sqrt(100.0 / 99), 1e-13);
}

/* In the long run of +1, -1, ...: W = 1/a, Q = 1/(1-b^2) with b = 1-a, and behind a +1 the mean is
 * a/(1+b), so that the sum of squares is W (1 - mean^2). */
static void the_limit_with_fading(void **state)
{
    (void)state;
    struct spike s;
    double a = SPIKE_FADE, b = 1 - a;
    spike_init(&s, a);
    for (int n = 1; n <= 4001; n++)
        spike_add(&s, n % 2 ? 1 : -1);
    double mean = a / (1 + b), W = 1 / a, Q = 1 / (1 - b * b);
    near(s.mean, mean, 1e-11);
    near(spike_variance(&s), W * (1 - mean * mean) / (W - Q / W), 1e-11);
}

static void what_is_not_finite_adds_nothing(void **state)
{
    (void)state;
    static const double bad[] = {NAN, -NAN, INFINITY, -INFINITY, 1e300, -1e300};
    struct spike clean, dirty;
    spike_init(&clean, SPIKE_FADE);
    spike_init(&dirty, SPIKE_FADE);
    for (int n = 0; n < 200; n++) {
        spike_add(&dirty, bad[n % 6]); /* also before the first good one */
        spike_add(&clean, noise(n));
        spike_add(&dirty, noise(n));
        assert_memory_equal(&clean, &dirty, sizeof clean);
    }
    assert_true(isnan(spike_z(&dirty, NAN)) && isnan(spike_z(&dirty, INFINITY)));
    assert_true(spike_z(&dirty, 10) > SPIKE_BOUND);
}

/* A spike adds what SPIKE_BOUND deviations would, whatever its height: the next one shows as well. */
static void one_spike_does_not_hide_the_next(void **state)
{
    (void)state;
    struct spike s, high, low;
    spike_init(&s, SPIKE_FADE);
    for (int n = 0; n < 200; n++)
        spike_add(&s, noise(n));
    double mean = s.mean, unit = sqrt(spike_variance(&s)), kept = (1 - SPIKE_FADE) * s.weight;
    high = low = s;
    spike_add(&high, 1e50);
    spike_add(&low, 9);
    assert_memory_equal(&high, &low, sizeof high);
    near(high.mean, mean + SPIKE_BOUND * unit / (kept + 1), 1e-13);
    near(high.deviations, (1 - SPIKE_FADE) * s.deviations + kept / (kept + 1) * 36 * unit * unit, 1e-13);
    assert_true(spike_z(&high, 9) > SPIKE_BOUND);
    for (int n = 0; n < 40; n++) /* a level that stays becomes the usual one */
        spike_add(&high, 9);
    assert_true(spike_z(&high, 9) < SPIKE_BOUND);
}

static void a_flat_loss_has_no_spikes_in_its_last_digits(void **state)
{
    (void)state;
    struct spike s;
    spike_init(&s, SPIKE_FADE);
    for (int n = 0; n < 100; n++)
        spike_add(&s, 4);
    assert_true(spike_z(&s, 4) == 0);
    near(spike_z(&s, 4.001), 0.001 / (4 * SPIKE_FLOOR), 1e-9);
    spike_init(&s, SPIKE_FADE);
    for (int n = 0; n < 100; n++)
        spike_add(&s, 0);
    assert_true(spike_z(&s, 0) == 0);
    assert_true(isnan(spike_z(&s, 1))); /* no unit to tell it in */
}

/* ---- in a job ------------------------------------------------------------------------------- */

/* 800 windows of one letter but for one of many, which comes late in the first epoch: only the step that takes
 * it is told, with its samples, although no record is due there. */
static void the_step_of_an_odd_window_is_told(void **state)
{
    (void)state;
    enum { WINDOWS = 800, SEQ = 16, BATCH = 4, SAMPLE = 602, STEP = SAMPLE / BATCH + 1, STEPS = 156 };
    char dir[64], run[96], path[96], text[1 << 15], line[128], tokens[WINDOWS * SEQ + 1];
    struct error err;
    snprintf(dir, sizeof dir, "/tmp/boost-spike-XXXXXX");
    assert_non_null(mkdtemp(dir));
    tiny_job_write(dir, 1, STEPS, "", "");
    memset(tokens, 'a', sizeof tokens);
    for (int i = 1; i < SEQ; i++)
        tokens[data_permute(1, 0, WINDOWS, SAMPLE) * SEQ + i] = (char)('b' + i);
    snprintf(path, sizeof path, "%s/train.txt", dir);
    assert_int_equal(fs_write_atomic(path, tokens, sizeof tokens, 0644, &err), 0);
    for (int every = 1; every <= 1000; every += 999) {
        char set_every[32];
        snprintf(set_every, sizeof set_every, "run.log_every=%d", every);
        snprintf(run, sizeof run, "%s/run-%d", dir, every);
        const char *set[] = {set_every};
        int out;
        pid_t pid = tiny_job_start(dir, run, NULL, set, 1, &out);
        size_t len = 0;
        for (ssize_t n; len < sizeof text - 1 && (n = read(out, text + len, sizeof text - 1 - len)) > 0;)
            len += (size_t)n;
        text[len] = '\0';
        close(out);
        assert_int_equal(tiny_job_end(pid), 0);
        double z[STEPS + 1] = {0};
        bool have[STEPS + 1] = {false};
        tiny_job_metric(run, "loss_z", z, have, STEPS);
        assert_true(have[STEP] && z[STEP] > SPIKE_BOUND);
        for (int n = 0; n < STEP; n++) {
            assert_true(!have[n] || z[n] <= SPIKE_BOUND);
            assert_int_equal(have[n], n > SPIKE_AFTER && every == 1);
        }
        const char *first = strstr(text, "standard deviations above its mean of late");
        assert_non_null(first);
        while (first > text && first[-1] != '\n')
            first--;
        snprintf(line, sizeof line, "step %d: loss ", STEP);
        assert_int_equal(strncmp(first, line, strlen(line)), 0);
        snprintf(line, sizeof line, "(samples %d to %d)", (STEP - 1) * BATCH, STEP * BATCH - 1);
        assert_non_null(strstr(first, line));
    }
    assert_int_equal(fs_remove_tree(dir, NULL), 0);
}

/* Puts `to` in the place of the first `from` in the headers of both shards; they are of the same length. */
static void change_headers(const char *checkpoint, const char *from, const char *to)
{
    assert_int_equal(strlen(from), strlen(to));
    for (int rank = 0; rank < 2; rank++) {
        char path[400];
        struct buffer b;
        struct error err;
        snprintf(path, sizeof path, "%s/rank-%05d-of-00002.safetensors", checkpoint, rank);
        buffer_init(&b, 1 << 24);
        assert_int_equal(fs_read_file(path, &b, &err), 0);
        char *at = memmem(b.data, b.len, from, strlen(from));
        assert_non_null(at);
        memcpy(at, to, strlen(to));
        assert_int_equal(fs_write_atomic(path, b.data, b.len, 0644, &err), 0);
        buffer_free(&b);
    }
}

static int resume(const char *dir, const char *run, const char *from, char *text, size_t cap)
{
    int out;
    pid_t pid = tiny_job_start(dir, run, from, NULL, 0, &out);
    size_t len = 0;
    for (ssize_t n; len < cap - 1 && (n = read(out, text + len, cap - 1 - len)) > 0;)
        len += (size_t)n;
    text[len] = '\0';
    close(out);
    return tiny_job_end(pid);
}

/* A checkpoint has what the losses before it were like (that a resume goes on with it to the bit is resume_test.c's).
 * One from before that was so is taken, and z starts anew; one that says what cannot be is refused. */
static void checkpoints_with_and_without_it(void **state)
{
    (void)state;
    enum { STEPS = 60, FROM = 30 };
    static const char *const impossible[] = {"-1 1 1 1 1",   "30 nan 1 1 1", "30 1 1 inf 1",
                                             "30 1 1 nan 1", "30 1 -1 1 1",  "30 1 1 1"};
    static char text[1 << 15];
    char dir[64], run[96], from[320], shard[400], kept[128], other[128];
    struct safetensors_file f;
    struct error err;
    snprintf(dir, sizeof dir, "/tmp/boost-spike-XXXXXX");
    assert_non_null(mkdtemp(dir));
    tiny_job_write(dir, 2, STEPS, "", "every_steps: 30");
    snprintf(run, sizeof run, "%s/run", dir);
    assert_int_equal(resume(dir, run, NULL, text, sizeof text), 0);
    assert_true(tiny_job_newest(dir, 2, STEPS - 1, from, sizeof from));
    snprintf(shard, sizeof shard, "%s/rank-00001-of-00002.safetensors", from);
    assert_int_equal(safetensors_open(&f, shard, &err), 0);
    snprintf(kept, sizeof kept, "%s", safetensors_meta(&f, "spike"));
    safetensors_close(&f);
    assert_int_equal(strtoll(kept, NULL, 10), FROM);

    for (size_t i = 0; i < sizeof impossible / sizeof *impossible; i++) {
        size_t used = strlen(impossible[i]), spare = strlen(kept) - used;
        snprintf(other, sizeof other, "%.*s%0*d", (int)used - 1, impossible[i], (int)spare + 1, 1);
        change_headers(from, kept, other);
        snprintf(run, sizeof run, "%s/bad-%zu", dir, i);
        int code = resume(dir, run, from, text, sizeof text);
        if (code == 0 || !strstr(text, "metadata 'spike' is impossible"))
            fail_msg("'%s': exit %d, %s", other, code, text);
        change_headers(from, other, kept);
    }
    change_headers(from, "\"spike\"", "\"other\"");
    snprintf(run, sizeof run, "%s/older", dir);
    assert_int_equal(resume(dir, run, from, text, sizeof text), 0);
    double z[STEPS + 1];
    bool have[STEPS + 1] = {false};
    tiny_job_metric(run, "loss_z", z, have, STEPS);
    for (int n = 0; n <= STEPS; n++)
        assert_int_equal(have[n], n > FROM + SPIKE_AFTER);
    assert_int_equal(fs_remove_tree(dir, NULL), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_written_out),
        cmocka_unit_test(without_fading_it_is_the_usual_one),
        cmocka_unit_test(the_limit_with_fading),
        cmocka_unit_test(what_is_not_finite_adds_nothing),
        cmocka_unit_test(one_spike_does_not_hide_the_next),
        cmocka_unit_test(a_flat_loss_has_no_spikes_in_its_last_digits),
        cmocka_unit_test(the_step_of_an_odd_window_is_told),
        cmocka_unit_test(checkpoints_with_and_without_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
