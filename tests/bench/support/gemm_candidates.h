/* The algorithms that cuBLASLt's heuristic offers for a matrix product, to time each beside the one that the engine
 * runs (kernels/cuda/gemm.c). The library is found by the dynamic loader; builds without its header have none. */
#ifndef BOOST_TESTS_BENCH_GEMM_CANDIDATES_H
#define BOOST_TESTS_BENCH_GEMM_CANDIDATES_H

#include "kernels/kernels.h"

enum { CANDIDATES_MAX = 8 };
struct gemm_candidates;
struct gemm_candidate {
    int id, tile, stages, split_k;
    const char *reduction; /* "NONE", "INPLACE", "COMPUTE_TYPE", "OUTPUT_TYPE" */
    size_t workspace;
    bool reproducible; /* nothing is added up by atomics */
};
/* For operands aligned to 16 bytes, within the engine's workspace, any reduction. ERR_UNSUPPORTED: no cuBLASLt here. */
MUST_USE int gemm_candidates_find(const struct gemm *g, struct gemm_candidates **out, struct error *err);
void gemm_candidates_free(struct gemm_candidates *c);
int gemm_candidates_count(const struct gemm_candidates *c);
struct gemm_candidate gemm_candidates_at(const struct gemm_candidates *c, int i);
/* The algorithm that the stream chose for this product, as its table's choices_save() tells; false: it does not. Its
 * workspace is not told (0). *index: its place among the candidates, -1: none. */
MUST_USE bool gemm_candidates_chosen(const struct gemm_candidates *c, const struct kernels *k, struct kstream *ks,
                                     const struct gemm *g, struct gemm_candidate *out, int *index);
size_t gemm_candidates_workspace(void);
/* Enqueues candidate i on a CUDA stream of the kernels' table; false: the library refused. */
MUST_USE bool gemm_candidates_run(const struct gemm_candidates *c, int i, struct kstream *ks,
                                  const struct gemm *g, const void *a, const void *b, void *out, void *workspace);

#endif
