/* The products of a layer: published FLOP a byte of LLaMA-7B, every shape of a small model written out, and a sum
 * that no way of cutting changes. */
#include "tests/unit/plan/spec.h"

#include <math.h>
#include <stdio.h>

#include "worker/plan/intensity.h"

static const struct plan_backend bf16 = {.act = DTYPE_BF16, .stat = DTYPE_F32, .grad = DTYPE_F32};

/* Model and parallel options of a job in short. */
static void plan_text(const char *model, const char *parallel, int seq_len, struct plan *p)
{
    char text[1024];
    struct job j;
    snprintf(text, sizeof text,
             "spec_version: 1 name: \"plan\" model { %s } parallel { %s } data { train { path: \"/d/a.txt\" } "
             "seq_len: %d } optimizer { lr: 0.001 } run { steps: 10 } checkpoint { dir: \"/d/c\" }",
             model, parallel, seq_len);
    job_open_text(&j, text);
    job_plan(&j, p);
    job_close(&j);
}

/* FLOP a byte of the forward products that make up one projection. */
static double of_projection(const struct plan *p, const char *name)
{
    struct plan_gemm g[PLAN_GEMMS_MAX];
    int n = plan_gemms(p, &bf16, g), found = 0;
    double flop = 0, bytes = 0;
    size_t len = strlen(name);
    for (int i = 0; i < n; i++)
        if (g[i].pass == PLAN_FORWARD && !strncmp(g[i].what, name, len) && strlen(g[i].what) == len + 2) {
            flop += (double)g[i].calls * g[i].flop;
            bytes += (double)g[i].calls * g[i].bytes;
            found++;
        }
    assert_int_equal(found, p->r ? 2 : 1);
    return flop / bytes;
}

#define LLAMA_7B "hidden: 4096 layers: 32 heads: 32 intermediate: 11008 vocab: 32000 "

/* T = 16384, t = 4, r = d/4, bf16. Up alone and o: from d to f, from d to d. */
static void llama_7b(void **state)
{
    (void)state;
    static const struct {
        const char *factorization, *strategy;
        double to_f, to_d;
    } rows[] = {
        {"FULL_RANK", "FULL", 1496, 780},
        {"COLA rank: 1024", "VANILLA grouped: OFF", 244, 237},
        {"COLA rank: 1024", "BTP grouped: OFF", 638, 496},
    };
    for (int i = 0; i < 3; i++) {
        char model[200], parallel[200];
        struct plan p;
        snprintf(model, sizeof model, LLAMA_7B "factorization: %s", rows[i].factorization);
        snprintf(parallel, sizeof parallel, "strategy: %s tp: 4 micro_batch: 4 global_batch: 4", rows[i].strategy);
        plan_text(model, parallel, 4096, &p);
        assert_true(fabs(of_projection(&p, "o") - rows[i].to_d) < 0.5);
        if (i) {
            assert_true(fabs(of_projection(&p, "up") - rows[i].to_f) < 0.5);
            continue;
        }
        /* A dense model has gate and up in one batch, which shares its input: one product is what was published. */
        double m = 16384, n = 11008 / 4, k = 4096;
        struct plan_gemm g[PLAN_GEMMS_MAX];
        int count = plan_gemms(&p, &bf16, g), found = 0;
        for (int j = 0; j < count; j++)
            if (!strcmp(g[j].what, "gate up W") && g[j].pass == PLAN_FORWARD) {
                assert_true(g[j].flop == 2 * 2 * m * n * k && g[j].bytes == 2 * (m * k + 2 * (k * n + m * n)));
                assert_true(fabs(g[j].flop / (g[j].bytes + 2 * m * k) - rows[i].to_f) < 0.5);
                found++;
            }
        assert_int_equal(found, 1);
    }
    /* 6.61 and 2.69 milliards of elements that take part in products. */
    struct plan dense, low;
    plan_text(LLAMA_7B "factorization: FULL_RANK", "micro_batch: 1 global_batch: 2", 4096, &dense);
    plan_text(LLAMA_7B "factorization: COLA rank: 1024", "tp: 8 micro_batch: 1 global_batch: 2", 4096, &low);
    double attention = 6 * 2 * 32.0 * 4096 * 4097.0 * 4096;
    assert_true(plan_model_flop(&dense) == 6 * 8192.0 * 6607077376.0 + attention);
    assert_true(plan_model_flop(&low) == 6 * 8192.0 * 2689597440.0 + attention);
}

/* "what pass m n k batch calls", w: gradient of a weight, +: added. */
static void check_lines(const char *model, const char *parallel, const char *const *lines)
{
    struct plan p;
    struct plan_gemm g[PLAN_GEMMS_MAX];
    plan_text(model, parallel, 10, &p);
    int n = plan_gemms(&p, &bf16, g), i = 0;
    for (; i < n && lines[i]; i++) {
        char got[128];
        snprintf(got, sizeof got, "%s %s%s%s %lld %lld %lld x%lld *%lld", g[i].what,
                 g[i].pass == PLAN_FORWARD ? "f" : "b", g[i].weight ? "w" : "", g[i].adds ? "+" : "", (long long)g[i].m,
                 (long long)g[i].n, (long long)g[i].k, (long long)g[i].batch, (long long)g[i].calls);
        assert_string_equal(got, lines[i]);
    }
    assert_true(i == n && !lines[i]);
}

/* T 10, d 24, f 36, kv 8 (of two heads), r 4, V 300 (padded to 512 at t = 2), t = 2. */
#define SMALL "hidden: 24 layers: 3 heads: 6 kv_heads: 2 intermediate: 36 vocab: 300 factorization: "
#define TWO   " tp: 2 micro_batch: 1 global_batch: 2"

static void shapes(void **state)
{
    (void)state;
    static const char *const full[] = {"q W f 10 12 24 x1 *1",         "k v W f 10 4 24 x2 *1",
                                       "o W f 10 24 12 x1 *1",         "gate up W f 10 18 24 x2 *1",
                                       "down W f 10 24 18 x1 *1",      "head f 10 256 24 x1 *1",
                                       "head bw+ 256 24 10 x1 *1",     "head b 10 24 256 x1 *1",
                                       "down W bw+ 24 18 10 x1 *1",    "down W b 10 18 24 x1 *1",
                                       "gate up W bw+ 18 24 10 x2 *1", "gate up W b 10 24 18 x1 *1",
                                       "gate up W b+ 10 24 18 x1 *1",  "o W bw+ 24 12 10 x1 *1",
                                       "o W b 10 12 24 x1 *1",         "q W bw+ 12 24 10 x1 *1",
                                       "q W b 10 24 12 x1 *1",         "k v W bw+ 4 24 10 x2 *1",
                                       "k v W b+ 10 24 4 x1 *2",       NULL};
    static const char *const btp[] = {"q k v A f 10 12 12 x1 *1",
                                      "q B f 10 12 4 x1 *1",
                                      "k v B f 10 4 4 x2 *1",
                                      "o A f 10 4 12 x1 *1",
                                      "o B f 10 12 4 x1 *1",
                                      "gate up A f 10 8 12 x1 *1",
                                      "gate up B f 10 18 4 x2 *1",
                                      "down A f 10 4 18 x1 *1",
                                      "down B f 10 12 4 x1 *1",
                                      "head f 10 256 24 x1 *1",
                                      "head bw+ 256 24 10 x1 *1",
                                      "head b 10 12 256 x2 *1",
                                      "down B bw+ 12 4 10 x1 *1",
                                      "down B b 10 4 12 x1 *1",
                                      "down A bw+ 4 18 10 x1 *1",
                                      "down A b 10 18 4 x1 *1",
                                      "gate up B bw+ 18 4 10 x2 *1",
                                      "gate up B b 10 4 18 x2 *1",
                                      "gate up A bw+ 8 12 10 x1 *1",
                                      "gate up A b 10 12 8 x1 *1",
                                      "o B bw+ 12 4 10 x1 *1",
                                      "o B b 10 4 12 x1 *1",
                                      "o A bw+ 4 12 10 x1 *1",
                                      "o A b 10 12 4 x1 *1",
                                      "q B bw+ 12 4 10 x1 *1",
                                      "q B b 10 4 12 x1 *1",
                                      "k v B bw+ 4 4 10 x2 *1",
                                      "k v B b 10 4 4 x2 *1",
                                      "q k v A bw+ 12 12 10 x1 *1",
                                      "q k v A b 10 12 12 x1 *1",
                                      NULL};
    /* Ungrouped: q, k, v each have an A of their own; by heads q is two parts of 12, k and v two of 4. */
    static const char *const vanilla[] = {"q A f 10 2 24 x1 *1",
                                          "k A f 10 2 24 x1 *1",
                                          "v A f 10 2 24 x1 *1",
                                          "q B f 10 12 2 x2 *1",
                                          "k B f 10 4 2 x2 *1",
                                          "v B f 10 4 2 x2 *1",
                                          "o A f 10 2 24 x1 *1",
                                          "o B f 10 24 2 x1 *1",
                                          "gate A f 10 2 24 x1 *1",
                                          "up A f 10 2 24 x1 *1",
                                          "gate B f 10 36 2 x1 *1",
                                          "up B f 10 36 2 x1 *1",
                                          "down A f 10 2 36 x1 *1",
                                          "down B f 10 24 2 x1 *1",
                                          "head f 10 256 24 x1 *1",
                                          "head bw+ 256 24 10 x1 *1",
                                          "head b 10 24 256 x1 *1",
                                          "down B bw+ 24 2 10 x1 *1",
                                          "down B b 10 2 24 x1 *1",
                                          "down A bw+ 2 36 10 x1 *1",
                                          "down A b 10 36 2 x1 *1",
                                          "gate B bw+ 36 2 10 x1 *1",
                                          "gate B b 10 2 36 x1 *1",
                                          "gate A bw+ 2 24 10 x1 *1",
                                          "gate A b 10 24 2 x1 *1",
                                          "up B bw+ 36 2 10 x1 *1",
                                          "up B b 10 2 36 x1 *1",
                                          "up A bw+ 2 24 10 x1 *1",
                                          "up A b 10 24 2 x1 *1",
                                          "o B bw+ 24 2 10 x1 *1",
                                          "o B b 10 2 24 x1 *1",
                                          "o A bw+ 2 24 10 x1 *1",
                                          "o A b 10 12 2 x2 *1",
                                          "q B bw+ 12 2 10 x2 *1",
                                          "q B b 10 2 12 x1 *1",
                                          "q B b+ 10 2 12 x1 *1",
                                          "q A bw+ 2 24 10 x1 *1",
                                          "q A b 10 24 2 x1 *1",
                                          "k B bw+ 4 2 10 x2 *1",
                                          "k B b 10 2 4 x1 *1",
                                          "k B b+ 10 2 4 x1 *1",
                                          "k A bw+ 2 24 10 x1 *1",
                                          "k A b 10 24 2 x1 *1",
                                          "v B bw+ 4 2 10 x2 *1",
                                          "v B b 10 2 4 x1 *1",
                                          "v B b+ 10 2 4 x1 *1",
                                          "v A bw+ 2 24 10 x1 *1",
                                          "v A b 10 24 2 x1 *1",
                                          NULL};
    check_lines(SMALL "FULL_RANK", "strategy: FULL" TWO, full);
    check_lines(SMALL "COLA rank: 4", "strategy: BTP" TWO, btp);
    check_lines(SMALL "COLA rank: 4", "strategy: VANILLA grouped: OFF" TWO, vanilla);
}

/* All ranks together do the work of the whole matrices, however these are cut: 2 forward, 4 backward. A TENSOR gate is
 * done by every rank, under BTP a LINEAR one too; TENSOR has a product more, that with the right matrix again. */
static void no_cut_changes_the_sum(void **state)
{
    (void)state;
    static const char *const ways[] = {
        "FULL_RANK|strategy: FULL",
        "COLA rank: 12|strategy: BTP",
        "COLA rank: 12|strategy: BTP grouped: OFF",
        "SVD rank: 12|strategy: VANILLA",
        "SVD rank: 12|strategy: VANILLA vanilla_attention: PUBLISHED",
        "COLA rank: 12|strategy: VANILLA grouped: OFF",
        "LAX lax_gate: LINEAR rank: 12|strategy: VANILLA",
        "LAX lax_gate: LINEAR rank: 12|strategy: BTP grouped: OFF",
        "LAX lax_gate: TENSOR rank: 12|strategy: BTP",
        "LAX lax_gate: TENSOR rank: 12|strategy: VANILLA grouped: OFF",
    };
    for (int i = 0; i < 2 * (int)(sizeof ways / sizeof *ways); i++) {
        char model[200], parallel[200];
        const char *bar = strchr(ways[i / 2], '|');
        struct plan p;
        struct plan_gemm g[PLAN_GEMMS_MAX];
        snprintf(model, sizeof model, SMALL "%.*s", (int)(bar - ways[i / 2]), ways[i / 2]);
        snprintf(parallel, sizeof parallel, "%s tp: %d micro_batch: 1 global_batch: 2", bar + 1, 1 + i % 2);
        plan_text(model, parallel, 10, &p);
        double sum[3] = {0}, want[3] = {0};
        for (int n = plan_gemms(&p, &bf16, g), j = 0; j < n; j++)
            sum[g[j].place] += (double)(p.tp * g[j].calls) * g[j].flop;
        double d = 24, f = 36, kv = 8, r = 12, T = 10;
        want[GEMM_BLOCK] = p.r ? 6 * T * r * ((d + d) + 2 * (d + kv) + (d + d) + 3 * (d + f))
                               : 6 * T * (2 * d * d + 2 * d * kv + 3 * d * f);
        want[GEMM_HEAD] = 6 * T * d * 256 * (p.tp == 2 ? 2 : 1.5); /* 300 rows are 384, or 512 on two ranks */
        if (strstr(model, "LINEAR"))
            want[GEMM_CROSSING] = (strstr(parallel, "BTP") ? p.tp : 1) * 7 * 6 * T * r * r;
        if (strstr(model, "TENSOR")) /* [3, 4] */
            want[GEMM_CROSSING] = p.tp * 7 * (6 * T * r * (3 + 4) + 2 * T * r * 4);
        for (int k = 0; k < 3; k++)
            if (sum[k] != want[k])
                fail_msg("%s, tp %d, place %d: %.0f FLOP, expected %.0f", ways[i / 2], p.tp, k, sum[k], want[k]);
        double gates = strstr(model, "TENSOR") ? 7 * r * 7 : strstr(model, "LINEAR") ? 7 * r * r : 0;
        assert_true(plan_model_flop(&p) ==
                    2 * (3 * want[GEMM_BLOCK] + 6 * T * (2 * gates + 300 * d) + 6 * 3 * T * 11 * d));
    }
}

/* What a batch shares is read once; a sum is read and written; a gradient of weights is in its own type. */
static void bytes(void **state)
{
    (void)state;
    struct plan p;
    struct plan_gemm g[PLAN_GEMMS_MAX];
    plan_text(SMALL "FULL_RANK", "strategy: FULL" TWO, 10, &p);
    int n = plan_gemms(&p, &bf16, g), found = 0;
    for (int i = 0; i < n; i++) {
        double want = 0;
        if (strcmp(g[i].what, "k v W"))
            continue;
        if (g[i].pass == PLAN_FORWARD)
            want = 2 * (10 * 24 + 2 * (24 * 4 + 10 * 4));
        else if (g[i].weight)
            want = 2 * (2 * 10 * 4 + 10 * 24) + 4 * 2 * (2 * 4 * 24);
        else
            want = 2 * (10 * 4 + 4 * 24 + 2 * 10 * 24);
        assert_true(g[i].bytes == want);
        found++;
    }
    assert_int_equal(found, 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(llama_7b),
        cmocka_unit_test(shapes),
        cmocka_unit_test(no_cut_changes_the_sum),
        cmocka_unit_test(bytes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
