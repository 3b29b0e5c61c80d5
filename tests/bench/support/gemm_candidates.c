/* gemm_candidates.h; matrices change places as kernels/cuda/gemm.c says. */
#include "tests/bench/support/gemm_candidates.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#if __has_include(<cublasLt.h>)
#include "kernels/cuda/cuda.h"
#include "proto/base/buffer.h"

/* ---- the library ---- */

static struct {
    void *library;
    cublasLtHandle_t handle;
    cublasStatus_t (*create)(cublasLtHandle_t *);
    cublasStatus_t (*desc_create)(cublasLtMatmulDesc_t *, cublasComputeType_t, cudaDataType_t);
    cublasStatus_t (*desc_set)(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, const void *, size_t);
    cublasStatus_t (*desc_destroy)(cublasLtMatmulDesc_t);
    cublasStatus_t (*layout_create)(cublasLtMatrixLayout_t *, cudaDataType_t, uint64_t, uint64_t, int64_t);
    cublasStatus_t (*layout_set)(cublasLtMatrixLayout_t, cublasLtMatrixLayoutAttribute_t, const void *, size_t);
    cublasStatus_t (*layout_destroy)(cublasLtMatrixLayout_t);
    cublasStatus_t (*prefer_create)(cublasLtMatmulPreference_t *);
    cublasStatus_t (*prefer_set)(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, const void *,
                                 size_t);
    cublasStatus_t (*prefer_destroy)(cublasLtMatmulPreference_t);
    cublasStatus_t (*heuristic)(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
                                cublasLtMatmulHeuristicResult_t *, int *);
    cublasStatus_t (*algo_get)(const cublasLtMatmulAlgo_t *, cublasLtMatmulAlgoConfigAttributes_t, void *, size_t,
                               size_t *);
    cublasStatus_t (*matmul)(cublasLtHandle_t, cublasLtMatmulDesc_t, const void *, const void *, cublasLtMatrixLayout_t,
                             const void *, cublasLtMatrixLayout_t, const void *, const void *, cublasLtMatrixLayout_t,
                             void *, cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t *, void *, size_t,
                             cudaStream_t);
} lt;

static bool symbol(const char *name, void *out)
{
    void *found = dlsym(lt.library, name);
    memcpy(out, &found, sizeof found);
    return found != NULL;
}

static int open_library(struct error *err)
{
    if (lt.handle)
        return ERR_OK;
    if (!(lt.library = dlopen("libcublasLt.so.13", RTLD_NOW)) && !(lt.library = dlopen("libcublasLt.so.12", RTLD_NOW)))
        return error_set(err, ERR_UNSUPPORTED, "cuBLASLt cannot be loaded: %s", dlerror());
    if (!symbol("cublasLtCreate", &lt.create) || !symbol("cublasLtMatmulDescCreate", &lt.desc_create) ||
        !symbol("cublasLtMatmulDescSetAttribute", &lt.desc_set) ||
        !symbol("cublasLtMatmulDescDestroy", &lt.desc_destroy) ||
        !symbol("cublasLtMatrixLayoutCreate", &lt.layout_create) ||
        !symbol("cublasLtMatrixLayoutSetAttribute", &lt.layout_set) ||
        !symbol("cublasLtMatrixLayoutDestroy", &lt.layout_destroy) ||
        !symbol("cublasLtMatmulPreferenceCreate", &lt.prefer_create) ||
        !symbol("cublasLtMatmulPreferenceSetAttribute", &lt.prefer_set) ||
        !symbol("cublasLtMatmulPreferenceDestroy", &lt.prefer_destroy) ||
        !symbol("cublasLtMatmulAlgoGetHeuristic", &lt.heuristic) ||
        !symbol("cublasLtMatmulAlgoConfigGetAttribute", &lt.algo_get) || !symbol("cublasLtMatmul", &lt.matmul))
        return error_set(err, ERR_UNSUPPORTED, "cuBLASLt lacks a function: %s", dlerror());
    cublasStatus_t rc = lt.create(&lt.handle);
    return rc ? error_set(err, ERR_DEVICE, "cuBLASLt: no handle (%d)", (int)rc) : ERR_OK;
}

/* ---- one product ---- */

struct gemm_candidates {
    cublasLtMatmulDesc_t product;
    cublasLtMatrixLayout_t first, second, c;
    cublasLtMatmulHeuristicResult_t found[CANDIDATES_MAX];
    int n;
};

static cublasStatus_t layout(cublasLtMatrixLayout_t *out, cudaDataType_t type, int64_t rows, int64_t columns,
                             int64_t ld, int32_t batch, int64_t stride)
{
    cublasStatus_t rc = lt.layout_create(out, type, (uint64_t)rows, (uint64_t)columns, ld);
    if (!rc && batch > 1)
        rc = lt.layout_set(*out, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch);
    if (!rc && batch > 1)
        rc = lt.layout_set(*out, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride);
    return rc;
}

static cublasStatus_t describe(struct gemm_candidates *p, const struct gemm *g)
{
    bool ta = g->trans_a, tb = g->trans_b;
    cublasOperation_t first = tb ? CUBLAS_OP_T : CUBLAS_OP_N, second = ta ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasStatus_t rc = lt.desc_create(&p->product, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    if (!rc)
        rc = lt.desc_set(p->product, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first);
    if (!rc)
        rc = lt.desc_set(p->product, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second);
    if (!rc)
        rc = layout(&p->first, CUDA_R_16BF, tb ? g->k : g->n, tb ? g->n : g->k, g->ldb, g->batch, g->stride_b);
    if (!rc)
        rc = layout(&p->second, CUDA_R_16BF, ta ? g->m : g->k, ta ? g->k : g->m, g->lda, g->batch, g->stride_a);
    if (!rc)
        rc = layout(&p->c, g->c_grad ? CUDA_R_32F : CUDA_R_16BF, g->n, g->m, g->ldc, g->batch, g->stride_c);
    return rc;
}

static cublasStatus_t find(struct gemm_candidates *p)
{
    const uint64_t workspace = CUDA_GEMM_WORKSPACE;
    cublasLtMatmulPreference_t preference = NULL;
    cublasStatus_t rc = lt.prefer_create(&preference);
    if (!rc)
        rc = lt.prefer_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace);
    if (!rc)
        rc = lt.heuristic(lt.handle, p->product, p->first, p->second, p->c, p->c, preference, CANDIDATES_MAX, p->found,
                          &p->n);
    if (preference)
        lt.prefer_destroy(preference);
    return rc;
}

int gemm_candidates_find(const struct gemm *g, struct gemm_candidates **out, struct error *err)
{
    int rc = open_library(err);
    if (rc)
        return rc;
    if (!(*out = calloc(1, sizeof **out)))
        return error_set(err, ERR_NOMEM, "no memory for the candidates of a product");
    cublasStatus_t status = describe(*out, g);
    if (!status)
        status = find(*out);
    if (!status)
        return ERR_OK;
    gemm_candidates_free(*out);
    *out = NULL;
    return error_set(err, ERR_DEVICE, "cuBLASLt: no candidates (%d)", (int)status);
}

void gemm_candidates_free(struct gemm_candidates *p)
{
    if (!p)
        return;
    cublasLtMatrixLayout_t const layouts[] = {p->first, p->second, p->c};
    for (int i = 0; i < 3; i++)
        if (layouts[i])
            lt.layout_destroy(layouts[i]);
    if (p->product)
        lt.desc_destroy(p->product);
    free(p);
}

int gemm_candidates_count(const struct gemm_candidates *p)
{
    return p->n;
}

static int attribute(const cublasLtMatmulAlgo_t *algo, cublasLtMatmulAlgoConfigAttributes_t which)
{
    int32_t value = 0;
    size_t written;
    return lt.algo_get(algo, which, &value, sizeof value, &written) ? -1 : value;
}

static struct gemm_candidate described(const cublasLtMatmulAlgo_t *algo, size_t workspace)
{
    int scheme = attribute(algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME);
    return (struct gemm_candidate){
        .id = attribute(algo, CUBLASLT_ALGO_CONFIG_ID),
        .tile = attribute(algo, CUBLASLT_ALGO_CONFIG_TILE_ID),
        .stages = attribute(algo, CUBLASLT_ALGO_CONFIG_STAGES_ID),
        .split_k = attribute(algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM),
        .reduction = scheme == CUBLASLT_REDUCTION_SCHEME_NONE           ? "NONE"
                     : scheme == CUBLASLT_REDUCTION_SCHEME_INPLACE      ? "INPLACE"
                     : scheme == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE ? "COMPUTE_TYPE"
                     : scheme == CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE  ? "OUTPUT_TYPE"
                                                                        : "unknown",
        .workspace = workspace,
        .reproducible = scheme == CUBLASLT_REDUCTION_SCHEME_NONE || scheme == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE ||
                        scheme == CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE,
    };
}

struct gemm_candidate gemm_candidates_at(const struct gemm_candidates *p, int i)
{
    return described(&p->found[i].algo, p->found[i].workspaceSize);
}

/* A line of the choices: m n k lda ldb ldc batch, three strides, flags, the algorithm's words in hex. */
enum { NUMBERS = 11, FLAG_BITS = 4, WORDS = sizeof(cublasLtMatmulAlgo_t) / sizeof(uint64_t) };

static bool chosen_here(const char *line, const struct gemm *g, cublasLtMatmulAlgo_t *algo)
{
    bool many = g->batch > 1;
    const int64_t flags = g->trans_a | g->trans_b << 1 | g->c_grad << 2 | (g->beta != 0) << 3;
    const int64_t wanted[NUMBERS] = {g->m,
                                     g->n,
                                     g->k,
                                     g->lda,
                                     g->ldb,
                                     g->ldc,
                                     g->batch,
                                     many ? g->stride_a : 0,
                                     many ? g->stride_b : 0,
                                     many ? g->stride_c : 0,
                                     flags};
    char *end;
    for (int i = 0; i < NUMBERS; i++, line = end) {
        int64_t number = strtoll(line, &end, 10);
        if (end == line || (i + 1 < NUMBERS ? number : number & ((1 << FLAG_BITS) - 1)) != wanted[i])
            return false;
    }
    for (int i = 0; i < WORDS; i++, line = end) {
        algo->data[i] = strtoull(line, &end, 16);
        if (end == line)
            return false;
    }
    return true;
}

bool gemm_candidates_chosen(const struct gemm_candidates *p, const struct kernels *k, struct kstream *ks,
                            const struct gemm *g, struct gemm_candidate *out, int *index)
{
    struct buffer text;
    struct error unused;
    cublasLtMatmulAlgo_t algo;
    bool found = false;
    buffer_init(&text, 1 << 20);
    if (k->choices_save && !k->choices_save(ks, &text, &unused))
        for (const char *line = (const char *)text.data; line && !found; line = strchr(line, '\n')) {
            line += *line == '\n';
            found = chosen_here(line, g, &algo);
        }
    buffer_free(&text);
    *index = -1;
    if (!found)
        return false;
    *out = described(&algo, 0);
    for (int i = 0; i < p->n; i++)
        if (!memcmp(&algo, &p->found[i].algo, sizeof algo))
            *index = i;
    return true;
}

size_t gemm_candidates_workspace(void)
{
    return CUDA_GEMM_WORKSPACE;
}

bool gemm_candidates_run(const struct gemm_candidates *p, int i, struct kstream *ks, const struct gemm *g,
                         const void *a, const void *b, void *out, void *workspace)
{
    const float one = 1, times = (float)g->beta;
    return p->found[i].state == CUBLAS_STATUS_SUCCESS &&
           !lt.matmul(lt.handle, p->product, &one, b, p->first, a, p->second, &times, g->add ? g->add : out, p->c, out,
                      p->c, &p->found[i].algo, workspace, p->found[i].workspaceSize, ks->stream);
}

#else

int gemm_candidates_find(const struct gemm *g, struct gemm_candidates **out, struct error *err)
{
    (void)g, (void)out;
    return error_set(err, ERR_UNSUPPORTED, "this build has no header of cuBLASLt");
}
void gemm_candidates_free(struct gemm_candidates *c)
{
    (void)c;
}
int gemm_candidates_count(const struct gemm_candidates *c)
{
    return (void)c, 0;
}
struct gemm_candidate gemm_candidates_at(const struct gemm_candidates *c, int i)
{
    (void)c, (void)i;
    return (struct gemm_candidate){.reduction = "unknown"};
}
bool gemm_candidates_chosen(const struct gemm_candidates *c, const struct kernels *k, struct kstream *ks,
                            const struct gemm *g, struct gemm_candidate *out, int *index)
{
    (void)c, (void)k, (void)ks, (void)g, (void)out, (void)index;
    return false;
}
size_t gemm_candidates_workspace(void)
{
    return 0;
}
bool gemm_candidates_run(const struct gemm_candidates *c, int i, struct kstream *ks, const struct gemm *g,
                         const void *a, const void *b, void *out, void *workspace)
{
    (void)c, (void)i, (void)ks, (void)g, (void)a, (void)b, (void)out, (void)workspace;
    return false;
}

#endif
