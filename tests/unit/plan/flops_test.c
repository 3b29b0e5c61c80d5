/* Peaks by name, and utilisation against FLOP counted by hand. */
#include "tests/unit/plan/spec.h"

#include <math.h>

#include "worker/plan/flops.h"
#include "worker/plan/intensity.h"

static void peaks_by_name(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        double peak;
    } rows[] = {
        {"NVIDIA A100-SXM4-80GB", 312e12},
        {"NVIDIA A100-PCIE-40GB", 312e12},
        {"NVIDIA H100 80GB HBM3", 989.4e12},
        {"NVIDIA H100 PCIe", 756e12},
        {"NVIDIA H100 NVL", 835.5e12},
        {"NVIDIA H200", 989.4e12},
        {"NVIDIA GH200 480GB", 989.4e12},
        {"NVIDIA B200", 2250e12},
        {"NVIDIA GB200", 2500e12},
        {"NVIDIA A10", 125e12},
        {"NVIDIA L40S", 362.05e12},
        {"NVIDIA L4", 121e12},
        {"NVIDIA A1000 Laptop GPU", 0},
        {"Quadro RTX 6000", 0},
        {"NVIDIA A10G", 0},
        {"", 0},
        {"XH200", 0},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if (plan_peak_flops(rows[i].name) != rows[i].peak)
            fail_msg("%s: %g, not %g", rows[i].name, plan_peak_flops(rows[i].name), rows[i].peak);
    assert_true(plan_peak_flops(NULL) == 0);
}

/* d 24, L 3, h 6, hk 2 (kv width 8), f 36, V 300, s 10, global batch 12; every product's elements written out. */
static void utilisation_by_hand(void **state)
{
    (void)state;
    double dense_layer = 24 * 24 + 24 * 8 + 24 * 8 + 24 * 24 + 24 * 36 + 24 * 36 + 36 * 24;
    double pairs_layer = 5 * ((24 + 24) + (24 + 8) + (24 + 8) + (24 + 24) + (24 + 36) + (24 + 36) + (36 + 24));
    double head = 300 * 24;
    /* Scores and context: 2 products of 2 FLOP over 24 columns for each of the 10 * 11 / 2 pairs; with the backward
     * three times that. */
    double attention = 3 * 3 * (2 * 2 * 24 * 55.0);
    for (int dense = 0; dense < 2; dense++) {
        struct job j;
        struct plan p;
        job_open(&j);
        if (dense) {
            j.spec->model->factorization = BOOST__FACTORIZATION__VALUE__FULL_RANK;
            j.spec->model->has_rank = 0;
            j.spec->model->rank = 0;
        }
        job_plan(&j, &p);
        job_close(&j);
        double flop = 12 * (6 * 10 * (3 * (dense ? dense_layer : pairs_layer) + head) + attention);
        assert_true(plan_model_flop(&p) == flop); /* whole numbers below 2^53 */
        assert_true(p.world == 2);
        /* Half the peak of two devices for two seconds. */
        assert_true(plan_mfu(&p, 2, flop / 2) == 0.5);
        assert_true(isnan(plan_mfu(&p, 2, 0)) && isnan(plan_mfu(&p, 0, 1e12)));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(peaks_by_name), cmocka_unit_test(utilisation_by_hand)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
