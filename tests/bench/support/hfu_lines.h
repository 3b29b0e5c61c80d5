/* Lines of the products of one linear layer, or pair of low-rank ones, on a rank of several. */
#ifndef BOOST_TESTS_BENCH_HFU_LINES_H
#define BOOST_TESTS_BENCH_HFU_LINES_H

#include "tests/bench/support/bench_run.h"

/* Forward of one projection d -> d ("attn") and one d -> f ("mlp") of a low-rank model, as the full-rank layer cut by
 * columns ("full"), as a pair cut at the latent ("vanilla") and as a pair cut at the hidden ("btp"): per cent of the
 * H200's 989.4 dense TFLOP/s in bf16. */
MUST_USE int bench_hfu(const struct options *o, struct device *d, struct error *err);

#endif
