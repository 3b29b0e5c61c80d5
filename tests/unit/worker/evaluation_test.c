/* Evaluation: the same tokens and the same number whatever the layout, over several files and under masks. */
#include <math.h>

#include "tests/unit/worker/tiny_job.h"

/* Standard output of a whole job, which must succeed. */
static void run_job(const char *dir, const char *run, const char *const *set, size_t n, char *text, size_t cap)
{
    int out;
    size_t len = 0;
    pid_t pid = tiny_job_start(dir, run, NULL, set, n, &out);
    for (ssize_t got; len < cap - 1 && (got = read(out, text + len, cap - 1 - len)) > 0;)
        len += (size_t)got;
    text[len] = '\0';
    close(out);
    if (tiny_job_end(pid))
        fail_msg("%s", text);
}

static void one_number_for_every_layout(void **state)
{
    (void)state;
    /* 32 windows are 8 to 32 micro-batches; 3 leave a short one, and at dp 3 the replicas have unlike numbers of them.
     */
    static const struct {
        int tp, pp, dp, micro;
    } layouts[] = {{1, 1, 1, 4}, {1, 1, 1, 1}, {1, 1, 1, 2}, {2, 1, 1, 1}, {2, 1, 1, 4}, {2, 1, 1, 2},
                   {1, 1, 2, 1}, {1, 1, 2, 2}, {1, 1, 3, 1}, {1, 2, 1, 2}, {1, 2, 1, 1}, {1, 2, 2, 3},
                   {2, 1, 2, 3}, {2, 2, 1, 2}, {2, 2, 2, 1}, {2, 2, 2, 3}};
    enum { STEPS = 6, EVERY = 3 };
    char dir[64], run[96], text[1 << 14], numbers[4][40];
    double first[STEPS + 1] = {0}, first_tokens = 0;
    snprintf(dir, sizeof dir, "/tmp/boost-evaluation-XXXXXX");
    assert_non_null(mkdtemp(dir));
    tiny_job_write(dir, 1, STEPS, "eval_every: 3 eval_tokens: 500 precision: FP64", "");
    for (size_t k = 0; k < sizeof layouts / sizeof *layouts; k++) {
        /* val.txt has 43 windows of 16; 500 tokens are 32 of them; masked: ' ' and what follows 't'. */
        const char *set[] = {
            numbers[0],       numbers[1],        numbers[2],          numbers[3], "parallel.global_batch=12",
            "data.pad_id=32", "data.eod_id=116", "data.mask_eod=true"};
        snprintf(run, sizeof run, "%s/run-%zu", dir, k);
        snprintf(numbers[0], sizeof numbers[0], "parallel.tp=%d", layouts[k].tp);
        snprintf(numbers[1], sizeof numbers[1], "parallel.pp=%d", layouts[k].pp);
        snprintf(numbers[2], sizeof numbers[2], "parallel.dp=%d", layouts[k].dp);
        snprintf(numbers[3], sizeof numbers[3], "parallel.micro_batch=%d", layouts[k].micro);
        run_job(dir, run, set, sizeof set / sizeof *set, text, sizeof text);
        double loss[STEPS + 1] = {0};
        bool have[STEPS + 1] = {false};
        tiny_job_metric(run, "eval_loss", loss, have, STEPS);
        char said[64];
        double tokens = 0;
        const char *over = strstr(text, " over ");
        assert_non_null(over);
        tokens = strtod(over + strlen(" over "), NULL);
        assert_true(tokens > 300 && tokens < 512); /* of 512, without the masked ones */
        first_tokens = k ? first_tokens : tokens;
        assert_true(tokens == first_tokens);
        for (int n = 0; n <= STEPS; n += EVERY) {
            assert_true(have[n] && isfinite(loss[n]));
            if (k == 0)
                first[n] = loss[n];
            else if (!(fabs(loss[n] - first[n]) <= 1e-12 * first[n]))
                fail_msg("tp %d, pp %d, dp %d, micro_batch %d, step %d: %.17g is not %.17g", layouts[k].tp,
                         layouts[k].pp, layouts[k].dp, layouts[k].micro, n, loss[n], first[n]);
        }
        snprintf(said, sizeof said, "eval_loss %.4f over %.0f tokens", first[STEPS], tokens);
        assert_non_null(strstr(text, said));
    }
    assert_int_equal(fs_remove_tree(dir, NULL), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_number_for_every_layout),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
