/* cuda.h: matrix products by cuBLASLt, one plan a shape.
 *
 * cuBLASLt's matrices are column-major: a row-major [m, n] of leading dimension ld is to it an [n, m] of the same one.
 * So C = op(A) op(B) is computed as C^T = op(B)^T op(A)^T: the operands change places and keep their transposes.
 *
 * The algorithm is the first that the library's heuristic names among those that need no workspace: one that has a few
 * bytes there, to count tiles by, has them zeroed in front of every product, a launch more. Where there is none, the
 * first of those that add in a fixed order: a k that is split over blocks is summed from partial sums in the scratch,
 * never by atomics. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda.h"
#include "proto/base/buffer.h"

/* All that the library may choose by; no padding, compared as memory. */
struct shape {
    int64_t m, n, k, lda, ldb, ldc, batch, stride_a, stride_b, stride_c;
    int64_t flags; /* see shape_of() */
};
enum { SHAPE_NUMBERS = sizeof(struct shape) / sizeof(int64_t), BUCKETS = 256, ALIGNMENT = 16 };
enum { TRANS_A = 1, TRANS_B = 2, C_GRAD = 4, C_READ = 8, ALIGN_SHIFT = 4, ALIGN_BITS = 3, PROCESSORS_SHIFT = 16 };

/* A choice read from a file has no descriptors until its shape is used. */
struct plan {
    struct plan *next;
    struct shape shape;
    cublasLtMatmulAlgo_t algo;
    bool chosen; /* algo is set */
    bool ready;  /* and all below is */
    cublasLtMatmulDesc_t product;
    cublasLtMatrixLayout_t first, second, c; /* first is B */
    size_t workspace;
};

struct cuda_gemms {
    struct plan *buckets[BUCKETS];
};

/* ---- shapes ------------------------------------------------------------------------- */

static bool valid(struct kstream *ks, const struct gemm *g)
{
    int64_t row_a = g->trans_a ? g->m : g->k, row_b = g->trans_b ? g->k : g->n;
    bool sizes = g->m >= 1 && g->n >= 1 && g->k >= 1 && g->batch >= 1;
    if (sizes && g->lda >= row_a && g->ldb >= row_b && g->ldc >= g->n && !(g->add && g->c_grad))
        return true;
    cuda_fault(ks, ERR_INTERNAL, "a matrix product with m=%lld n=%lld k=%lld batch=%d lda=%lld ldb=%lld ldc=%lld%s",
               (long long)g->m, (long long)g->n, (long long)g->k, g->batch, (long long)g->lda, (long long)g->ldb,
               (long long)g->ldc, g->add && g->c_grad ? ", a gradient to a matrix apart" : "");
    return false;
}

/* log2 of the largest power of two up to ALIGNMENT that divides the address: no kernel loads wider. */
static int64_t alignment_of(const void *p)
{
    int64_t log = 0;
    while ((1 << log) < ALIGNMENT && ((uintptr_t)p >> log & 1) == 0)
        log++;
    return log;
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* In place or from a matrix of its own, what C is added to makes no difference to the choice. */
static struct shape shape_of(const struct kstream *ks, const struct gemm *g, const void *a, const void *b,
                             const void *c)
{
    bool many = g->batch > 1;
    int64_t flags = (g->trans_a ? TRANS_A : 0) | (g->trans_b ? TRANS_B : 0) | (g->c_grad ? C_GRAD : 0) |
                    (g->beta != 0 ? C_READ : 0);
    const int64_t alignments[] = {alignment_of(a), alignment_of(b), least(alignment_of(c), alignment_of(g->add))};
    for (int i = 0; i < 3; i++)
        flags |= alignments[i] << (ALIGN_SHIFT + i * ALIGN_BITS);
    if (ks->spare > 0)
        flags |= (int64_t)(ks->sms - ks->spare) << PROCESSORS_SHIFT;
    return (struct shape){g->m,
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
}

static uint32_t alignment(const struct shape *s, int operand)
{
    return 1u << (s->flags >> (ALIGN_SHIFT + operand * ALIGN_BITS) & ((1 << ALIGN_BITS) - 1));
}

/* ---- the cache ------------------------------------------------------------------------- */

static unsigned bucket_of(const struct shape *s)
{
    const int64_t *numbers = (const int64_t *)s;
    uint64_t hash = 0;
    for (int i = 0; i < SHAPE_NUMBERS; i++)
        hash = (hash ^ (uint64_t)numbers[i]) * 0x9e3779b97f4a7c15u;
    return (unsigned)(hash >> 32) % BUCKETS;
}

/* The plan of the shape, empty when it is new; NULL and a fault out of memory. */
static struct plan *plan_of(struct kstream *ks, const struct shape *s)
{
    if (!ks->gemms)
        ks->gemms = calloc(1, sizeof *ks->gemms);
    struct plan **bucket = ks->gemms ? &ks->gemms->buckets[bucket_of(s)] : NULL, *p = bucket ? *bucket : NULL;
    while (p && memcmp(&p->shape, s, sizeof *s) != 0)
        p = p->next;
    if (!p && bucket && (p = calloc(1, sizeof *p))) {
        p->shape = *s;
        p->next = *bucket;
        *bucket = p;
    }
    if (!p)
        cuda_fault(ks, ERR_NOMEM, "out of memory for the plan of a matrix product");
    return p;
}

/* Its descriptors; the choice stays. */
static void plan_clear(struct plan *p)
{
    if (p->product)
        cublasLtMatmulDescDestroy(p->product);
    cublasLtMatrixLayout_t *const layouts[] = {&p->first, &p->second, &p->c};
    for (int i = 0; i < 3; i++) {
        if (*layouts[i])
            cublasLtMatrixLayoutDestroy(*layouts[i]);
        *layouts[i] = NULL;
    }
    p->product = NULL;
    p->ready = false;
}

void cuda_gemms_destroy(struct cuda_gemms *g)
{
    for (int i = 0; g && i < BUCKETS; i++)
        for (struct plan *p = g->buckets[i], *next; p; p = next) {
            next = p->next;
            plan_clear(p);
            free(p);
        }
    free(g);
}

/* ---- plans ---------------------------------------------------------------------------------- */

static cublasStatus_t layout(cublasLtMatrixLayout_t *out, cudaDataType_t type, int64_t rows, int64_t columns,
                             int64_t ld, int64_t batch, int64_t stride)
{
    int32_t count = (int32_t)batch;
    cublasStatus_t rc = cublasLtMatrixLayoutCreate(out, type, (uint64_t)rows, (uint64_t)columns, ld);
    if (!rc && count > 1)
        rc = cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count);
    if (!rc && count > 1)
        rc =
            cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride);
    return rc;
}

static cublasStatus_t describe(struct plan *p)
{
    const struct shape *s = &p->shape;
    bool ta = s->flags & TRANS_A, tb = s->flags & TRANS_B;
    cublasOperation_t first = tb ? CUBLAS_OP_T : CUBLAS_OP_N, second = ta ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasStatus_t rc = cublasLtMatmulDescCreate(&p->product, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    if (!rc)
        rc = cublasLtMatmulDescSetAttribute(p->product, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first);
    if (!rc)
        rc = cublasLtMatmulDescSetAttribute(p->product, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second);
    int32_t processors = (int32_t)(s->flags >> PROCESSORS_SHIFT);
    if (!rc && processors > 0)
        rc = cublasLtMatmulDescSetAttribute(p->product, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &processors,
                                            sizeof processors);
    if (!rc)
        rc = layout(&p->first, CUDA_R_16BF, tb ? s->k : s->n, tb ? s->n : s->k, s->ldb, s->batch, s->stride_b);
    if (!rc)
        rc = layout(&p->second, CUDA_R_16BF, ta ? s->m : s->k, ta ? s->k : s->m, s->lda, s->batch, s->stride_a);
    if (!rc)
        rc = layout(&p->c, s->flags & C_GRAD ? CUDA_R_32F : CUDA_R_16BF, s->n, s->m, s->ldc, s->batch, s->stride_c);
    return rc;
}

static cublasStatus_t prefer(cublasLtMatmulPreference_t preference, const struct shape *s, uint64_t workspace)
{
    const uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE; /* and none at all, always allowed */
    const uint32_t a = alignment(s, 0), b = alignment(s, 1), c = alignment(s, 2);
    const struct {
        cublasLtMatmulPreferenceAttributes_t name;
        const void *value;
        size_t size;
    } attributes[] = {
        {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace},
        {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions, sizeof reductions},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &b, sizeof b},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &a, sizeof a},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &c, sizeof c},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &c, sizeof c},
    };
    cublasStatus_t rc = CUBLAS_STATUS_SUCCESS;
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes && !rc; i++)
        rc = cublasLtMatmulPreferenceSetAttribute(preference, attributes[i].name, attributes[i].value,
                                                  attributes[i].size);
    return rc;
}

static cublasStatus_t find(struct kstream *ks, const struct plan *p, uint64_t workspace,
                           cublasLtMatmulHeuristicResult_t *found)
{
    cublasLtMatmulPreference_t preference = NULL;
    int n = 0;
    cublasStatus_t rc = cublasLtMatmulPreferenceCreate(&preference);
    if (!rc)
        rc = prefer(preference, &p->shape, workspace);
    if (!rc)
        rc = cublasLtMatmulAlgoGetHeuristic(ks->lt, p->product, p->first, p->second, p->c, p->c, preference, 1, found,
                                            &n);
    if (!rc)
        rc = n < 1 ? CUBLAS_STATUS_NOT_SUPPORTED : found->state;
    if (preference)
        cublasLtMatmulPreferenceDestroy(preference);
    return rc;
}

static cublasStatus_t choose(struct kstream *ks, struct plan *p)
{
    cublasLtMatmulHeuristicResult_t found;
    cublasStatus_t rc = find(ks, p, 0, &found);
    if (rc)
        rc = find(ks, p, CUDA_GEMM_WORKSPACE, &found);
    if (!rc) {
        p->algo = found.algo;
        p->workspace = found.workspaceSize;
        p->chosen = true;
    }
    return rc;
}

/* Whether cuBLASLt takes the algorithm of a file; its workspace then. It looks at little: the file has its own sum. */
static bool takes(struct kstream *ks, struct plan *p)
{
    cublasLtMatmulHeuristicResult_t checked;
    if (cublasLtMatmulAlgoCheck(ks->lt, p->product, p->first, p->second, p->c, p->c, &p->algo, &checked) ||
        checked.workspaceSize > CUDA_GEMM_WORKSPACE)
        return false;
    p->workspace = checked.workspaceSize;
    return true;
}

/* Descriptors, and the algorithm: the one of a file, if it fits, else the heuristic's. */
static bool make_ready(struct kstream *ks, struct plan *p)
{
    const struct shape *s = &p->shape;
    cublasStatus_t rc = describe(p);
    if (!rc && !(p->chosen && takes(ks, p)))
        rc = choose(ks, p);
    p->ready = !rc;
    if (rc)
        cuda_fault(ks, ERR_DEVICE,
                   "cuBLASLt: %s for a matrix product of m=%lld n=%lld k=%lld batch=%lld lda=%lld ldb=%lld ldc=%lld",
                   cublasLtGetStatusString(rc), (long long)s->m, (long long)s->n, (long long)s->k, (long long)s->batch,
                   (long long)s->lda, (long long)s->ldb, (long long)s->ldc);
    return p->ready;
}

void cuda_gemm(struct kstream *ks, const struct gemm *g, const void *a, const void *b, void *c)
{
    if (!valid(ks, g))
        return;
    if (!ks->lt) {
        cuda_fault(ks, ERR_INTERNAL, "a matrix product on a stream for copies");
        return;
    }
    struct shape s = shape_of(ks, g, a, b, c);
    struct plan *p = plan_of(ks, &s);
    if (!p)
        return;
    if (!p->ready && !make_ready(ks, p)) {
        plan_clear(p); /* described anew at the next call */
        return;
    }
    void *scratch = NULL;
    if (p->workspace > 0 && !(scratch = cuda_scratch(ks, p->workspace, "a matrix product")))
        return;
    const float alpha = 1, beta = (float)g->beta;
    cublasStatus_t rc = cublasLtMatmul(ks->lt, p->product, &alpha, b, p->first, a, p->second, &beta, g->add ? g->add : c,
                                       p->c, c, p->c, &p->algo, scratch, p->workspace, ks->stream);
    if (rc)
        cuda_fault(ks, ERR_DEVICE, "cuBLASLt: %s in a matrix product of m=%lld n=%lld k=%lld batch=%d",
                   cublasLtGetStatusString(rc), (long long)g->m, (long long)g->n, (long long)g->k, g->batch);
}

/* ---- choices ------------------------------------------------------------------------------------ */

enum { ALGO_WORDS = sizeof(cublasLtMatmulAlgo_t) / sizeof(uint64_t), CHOICES_MAX = 4 << 20 };

/* What results depend on besides: with another cuDNN, attention has other bits though the products have not. */
static int header(const struct kstream *ks, char *out, size_t size, struct error *err)
{
    struct cudaDeviceProp device;
    cudaError_t status = cudaGetDeviceProperties(&device, 0);
    if (status != cudaSuccess)
        return error_set(err, ERR_DEVICE, "CUDA: the device's name: %s", cudaGetErrorString(status));
    snprintf(out, size, "gemm-algorithms 1, %s, %d multiprocessors, cuBLASLt %zu, cuDNN %zu", device.name,
             device.multiProcessorCount, cublasLtGetVersion(), cuda_attention_version(ks));
    return ERR_OK;
}

int cuda_choices_save(struct kstream *ks, struct buffer *out, struct error *err)
{
    char first[512];
    int rc = header(ks, first, sizeof first, err);
    if (rc)
        return rc;
    buffer_printf(out, "%s\n", first);
    for (int i = 0; ks->gemms && i < BUCKETS; i++)
        for (const struct plan *p = ks->gemms->buckets[i]; p; p = p->next) {
            if (!p->chosen)
                continue;
            const int64_t *numbers = (const int64_t *)&p->shape;
            for (int j = 0; j < SHAPE_NUMBERS; j++)
                buffer_printf(out, "%" PRId64 " ", numbers[j]);
            for (int j = 0; j < ALGO_WORDS; j++)
                buffer_printf(out, "%016" PRIx64 "%s", p->algo.data[j], j + 1 < ALGO_WORDS ? " " : "\n");
        }
    return out->failed ? error_set(err, ERR_NOMEM, "out of memory for the algorithms of matrix products") : ERR_OK;
}

/* One line of a shape and its algorithm; *end behind it. */
static bool parse(char *line, struct shape *s, cublasLtMatmulAlgo_t *algo, char **end)
{
    int64_t *numbers = (int64_t *)s;
    char *at = line;
    for (int i = 0; i < SHAPE_NUMBERS + ALGO_WORDS; i++) {
        char *next;
        if (i < SHAPE_NUMBERS)
            numbers[i] = strtoll(at, &next, 10);
        else
            algo->data[i - SHAPE_NUMBERS] = strtoull(at, &next, 16);
        if (next == at || *next != (i + 1 < SHAPE_NUMBERS + ALGO_WORDS ? ' ' : '\n'))
            return false;
        at = next + 1;
    }
    *end = at;
    return true;
}

static int load(struct kstream *ks, char *text, struct error *err)
{
    char first[512], *at = strchr(text, '\n');
    int rc = header(ks, first, sizeof first, err);
    if (rc)
        return rc;
    if (at)
        *at++ = 0;
    if (!at || strcmp(text, first) != 0)
        return error_set(err, ERR_UNSUPPORTED,
                         "the algorithms of matrix products were chosen for \"%.200s\", this is "
                         "\"%.200s\"",
                         text, first);
    /* Plans made before would go on computing other bits. */
    cuda_gemms_destroy(ks->gemms);
    ks->gemms = NULL;
    for (int line = 2; *at; line++) {
        struct shape s;
        cublasLtMatmulAlgo_t algo;
        if (!parse(at, &s, &algo, &at))
            return error_set(err, ERR_CORRUPT, "line %d of the algorithms of matrix products cannot be read", line);
        struct plan *p = plan_of(ks, &s);
        if (!p)
            return error_set(err, ERR_NOMEM, "out of memory for the algorithms of matrix products");
        p->algo = algo;
        p->chosen = true;
    }
    return ERR_OK;
}

int cuda_choices_load(struct kstream *ks, const char *text, size_t len, struct error *err)
{
    if (len > CHOICES_MAX)
        return error_set(err, ERR_CORRUPT, "%zu bytes of algorithms of matrix products", len);
    char *copy = malloc(len + 1);
    if (!copy)
        return error_set(err, ERR_NOMEM, "out of memory for the algorithms of matrix products");
    memcpy(copy, text, len);
    copy[len] = 0;
    int rc = load(ks, copy, err);
    free(copy);
    return rc;
}
