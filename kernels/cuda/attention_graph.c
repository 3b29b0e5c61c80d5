/* attention_graph.h.
 *
 * Tensors are token-major with any leading dimension, so nothing is copied; k and v enter transposed where a product
 * wants them so, by their strides. P and dS are bf16 as operands of the second product. cuDNN knows the pattern of
 * operations: an equivalent tree in another shape falls back to slower engines, or to none. */
#include "kernels/cuda/attention_graph.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

typedef cudnnBackendDescriptor_t descriptor;

/* Names of the tensors that are in memory or by value; all others are virtual and live in the kernel. */
enum tensor_id {
    ID_NONE,
    ID_Q,
    ID_K,
    ID_V,
    ID_O,
    ID_LSE,
    ID_DO,
    ID_DQ,
    ID_DK,
    ID_DV,
    ID_ROWS,
    ID_SUMS,
    ID_SCALE,
    ID_HIDDEN,
    ID_ONE,
    ID_VIRTUAL /* the first of the rest */
};

enum { MAX_OPERATIONS = 32, MAX_CONFIGURATIONS = 8, ALIGNMENT = 16 };

static const cudnnDataType_t BF16 = CUDNN_DATA_BFLOAT16, FP32 = CUDNN_DATA_FLOAT;

/* Once rc is set the rest of the building does nothing. */
struct builder {
    struct attention_plan *p;
    const struct attention *a;
    descriptor operations[MAX_OPERATIONS];
    int count;
    int64_t next_id;
    int rc;
    struct error *err;
};

static const char *pass_name(bool backward)
{
    return backward ? "attention's backward" : "attention's forward";
}

static void note(struct builder *g, cudnnStatus_t status)
{
    if (!g->rc && status != CUDNN_STATUS_SUCCESS)
        g->rc = cudnn_failed(g->p->lib, status, pass_name(g->p->backward), g->err);
}

static descriptor make(struct builder *g, cudnnBackendDescriptorType_t type)
{
    descriptor d = NULL;
    if (!g->rc && g->p->count == ATTENTION_DESCRIPTORS)
        g->rc = error_set(g->err, ERR_INTERNAL, "attention's graph has more than %d descriptors", g->p->count);
    if (g->rc)
        return NULL;
    note(g, g->p->lib->make(type, &d));
    if (!g->rc)
        g->p->all[g->p->count++] = d;
    return d;
}

static void set(struct builder *g, descriptor d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                int64_t count, const void *values)
{
    if (!g->rc)
        note(g, g->p->lib->set(d, name, type, count, values));
}

static void set_descriptor(struct builder *g, descriptor d, cudnnBackendAttributeName_t name, descriptor value)
{
    set(g, d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}

static void set_type(struct builder *g, descriptor d, cudnnBackendAttributeName_t name, cudnnDataType_t value)
{
    set(g, d, name, CUDNN_TYPE_DATA_TYPE, 1, &value);
}

static void get(struct builder *g, descriptor d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                int64_t room, int64_t *count, void *values)
{
    if (!g->rc)
        note(g, g->p->lib->get(d, name, type, room, count, values));
}

static descriptor finished(struct builder *g, descriptor d)
{
    if (!g->rc)
        note(g, g->p->lib->finalize(d));
    return d;
}

static void operation(struct builder *g, descriptor d)
{
    finished(g, d);
    if (!g->rc && g->count == MAX_OPERATIONS)
        g->rc = error_set(g->err, ERR_INTERNAL, "attention's graph has more than %d operations", g->count);
    if (!g->rc)
        g->operations[g->count++] = d;
}

/* ---- tensors: [b, heads, s, e] or [b, heads, s, s] in cuDNN's eyes -------------------- */

static descriptor tensor(struct builder *g, cudnnDataType_t type, enum tensor_id id, const int64_t dims[4],
                         const int64_t strides[4])
{
    descriptor d = make(g, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    const int64_t alignment = ALIGNMENT, unique = id == ID_NONE ? g->next_id++ : (int64_t)id;
    const bool is_virtual = id == ID_NONE, by_value = id == ID_SCALE || id == ID_HIDDEN || id == ID_ONE;
    set_type(g, d, CUDNN_ATTR_TENSOR_DATA_TYPE, type);
    set(g, d, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, dims);
    set(g, d, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, strides);
    set(g, d, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &unique);
    set(g, d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &alignment);
    set(g, d, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &is_virtual);
    set(g, d, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &by_value);
    return finished(g, d);
}

static descriptor scalar(struct builder *g, enum tensor_id id)
{
    static const int64_t ones[4] = {1, 1, 1, 1};
    return tensor(g, FP32, id, ones, ones);
}

/* A number for each pair of query and key. */
static descriptor scores(struct builder *g, cudnnDataType_t type)
{
    int64_t h = g->a->h, s = g->a->s;
    return tensor(g, type, ID_NONE, (const int64_t[]){g->a->b, h, s, s}, (const int64_t[]){h * s * s, s * s, s, 1});
}

static descriptor scores_transposed(struct builder *g)
{
    int64_t h = g->a->h, s = g->a->s;
    return tensor(g, BF16, ID_NONE, (const int64_t[]){g->a->b, h, s, s}, (const int64_t[]){h * s * s, s * s, 1, s});
}

/* A number for each query. */
static descriptor row(struct builder *g, enum tensor_id id)
{
    int64_t h = g->a->h, s = g->a->s;
    return tensor(g, FP32, id, (const int64_t[]){g->a->b, h, s, 1}, (const int64_t[]){h * s, s, 1, 1});
}

static descriptor tokens(struct builder *g, enum tensor_id id, int64_t heads, int64_t ld)
{
    int64_t s = g->a->s, e = g->a->e;
    return tensor(g, BF16, id, (const int64_t[]){g->a->b, heads, s, e}, (const int64_t[]){s * ld, e, ld, 1});
}

static descriptor tokens_transposed(struct builder *g, enum tensor_id id, int64_t heads, int64_t ld)
{
    int64_t s = g->a->s, e = g->a->e;
    return tensor(g, BF16, id, (const int64_t[]){g->a->b, heads, e, s}, (const int64_t[]){s * ld, e, 1, ld});
}

/* Of all query heads, dense, head by head. */
static descriptor head_major(struct builder *g, cudnnDataType_t type, enum tensor_id id)
{
    int64_t h = g->a->h, s = g->a->s, e = g->a->e;
    return tensor(g, type, id, (const int64_t[]){g->a->b, h, s, e}, (const int64_t[]){h * s * e, s * e, e, 1});
}

/* ---- operations: the result is returned ------------------------------------------- */

static descriptor matmul(struct builder *g, descriptor a, descriptor b, descriptor c)
{
    descriptor kind = make(g, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    set_type(g, kind, CUDNN_ATTR_MATMUL_COMP_TYPE, FP32);
    finished(g, kind);
    descriptor op = make(g, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    set_descriptor(g, op, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
    set_descriptor(g, op, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
    set_descriptor(g, op, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c);
    set_descriptor(g, op, CUDNN_ATTR_OPERATION_MATMUL_DESC, kind);
    operation(g, op);
    return c;
}

/* y = mode(x, b, t), where b and t may be NULL; axis >= 0: GEN_INDEX's. */
static descriptor pointwise(struct builder *g, cudnnPointwiseMode_t mode, cudnnDataType_t compute, descriptor x,
                            descriptor b, descriptor t, int64_t axis, descriptor y)
{
    descriptor kind = make(g, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    set(g, kind, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
    set_type(g, kind, CUDNN_ATTR_POINTWISE_MATH_PREC, compute);
    if (axis >= 0)
        set(g, kind, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, &axis);
    finished(g, kind);
    descriptor op = make(g, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    set_descriptor(g, op, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, kind);
    set_descriptor(g, op, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
    if (b)
        set_descriptor(g, op, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b);
    if (t)
        set_descriptor(g, op, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t);
    set_descriptor(g, op, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    operation(g, op);
    return y;
}

static descriptor unary(struct builder *g, cudnnPointwiseMode_t mode, descriptor x, descriptor y)
{
    return pointwise(g, mode, FP32, x, NULL, NULL, -1, y);
}

static descriptor binary(struct builder *g, cudnnPointwiseMode_t mode, descriptor x, descriptor b, descriptor y)
{
    return pointwise(g, mode, FP32, x, b, NULL, -1, y);
}

/* Over the dimensions that y has 1 of, or fewer of. */
static descriptor reduction(struct builder *g, cudnnReduceTensorOp_t how, descriptor x, descriptor y)
{
    descriptor kind = make(g, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    set(g, kind, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &how);
    set_type(g, kind, CUDNN_ATTR_REDUCTION_COMP_TYPE, FP32);
    finished(g, kind);
    descriptor op = make(g, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    set_descriptor(g, op, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    set_descriptor(g, op, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
    set_descriptor(g, op, CUDNN_ATTR_OPERATION_REDUCTION_DESC, kind);
    operation(g, op);
    return y;
}

static descriptor reshape(struct builder *g, descriptor x, descriptor y)
{
    descriptor op = make(g, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    set_descriptor(g, op, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x);
    set_descriptor(g, op, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y);
    operation(g, op);
    return y;
}

/* Scores of keys behind their query become -infinity. */
static descriptor causal(struct builder *g, descriptor x)
{
    descriptor query = scores(g, CUDNN_DATA_INT32), key = scores(g, CUDNN_DATA_INT32);
    descriptor seen = scores(g, CUDNN_DATA_BOOLEAN);
    pointwise(g, CUDNN_POINTWISE_GEN_INDEX, FP32, x, NULL, NULL, 2, query);
    pointwise(g, CUDNN_POINTWISE_GEN_INDEX, FP32, x, NULL, NULL, 3, key);
    pointwise(g, CUDNN_POINTWISE_CMP_GE, CUDNN_DATA_BOOLEAN, query, key, NULL, -1, seen);
    return pointwise(g, CUDNN_POINTWISE_BINARY_SELECT, FP32, x, scalar(g, ID_HIDDEN), seen, -1, scores(g, FP32));
}

/* ---- the two graphs --------------------------------------------------------------- */

static void forward_graph(struct builder *g)
{
    const struct attention *a = g->a;
    descriptor q = tokens(g, ID_Q, a->h, a->ldq), kt = tokens_transposed(g, ID_K, a->hk, a->ldk);
    descriptor v = tokens(g, ID_V, a->hk, a->ldv), o = tokens(g, ID_O, a->h, a->ldo);
    descriptor x = matmul(g, q, kt, scores(g, FP32));
    x = binary(g, CUDNN_POINTWISE_MUL, x, scalar(g, ID_SCALE), scores(g, FP32));
    x = causal(g, x);
    descriptor top = reduction(g, CUDNN_REDUCE_TENSOR_MAX, x, row(g, ID_NONE));
    x = binary(g, CUDNN_POINTWISE_SUB, x, top, scores(g, FP32));
    x = unary(g, CUDNN_POINTWISE_EXP, x, scores(g, FP32));
    descriptor sum = reduction(g, CUDNN_REDUCE_TENSOR_ADD, x, row(g, ID_NONE));
    descriptor log_sum = unary(g, CUDNN_POINTWISE_LOG, sum, row(g, ID_NONE));
    binary(g, CUDNN_POINTWISE_ADD, top, log_sum, row(g, ID_LSE));
    descriptor p = binary(g, CUDNN_POINTWISE_DIV, x, sum, scores(g, BF16));
    matmul(g, p, v, o);
}

/* out := a^T b of each query head, summed over the heads that share a key-value head. */
static void matmul_to_keys(struct builder *g, descriptor a, descriptor b, descriptor out)
{
    descriptor transposed = reshape(g, a, scores_transposed(g));
    if (g->a->h == g->a->hk) {
        matmul(g, transposed, b, out);
        return;
    }
    descriptor heads = matmul(g, transposed, b, head_major(g, BF16, ID_NONE));
    reduction(g, CUDNN_REDUCE_TENSOR_ADD, heads, out);
}

static void backward_graph(struct builder *g)
{
    const struct attention *a = g->a;
    descriptor q = tokens(g, ID_Q, a->h, a->ldq), kt = tokens_transposed(g, ID_K, a->hk, a->ldk);
    descriptor vt = tokens_transposed(g, ID_V, a->hk, a->ldv), o = tokens(g, ID_O, a->h, a->ldo);
    descriptor d_o = tokens(g, ID_DO, a->h, a->ldo), scale = scalar(g, ID_SCALE);

    /* <dO, O>; the product with one stands where dropout would be. */
    descriptor products = binary(g, CUDNN_POINTWISE_MUL, d_o, o, head_major(g, FP32, ID_NONE));
    descriptor sum = reduction(g, CUDNN_REDUCE_TENSOR_ADD, products, row(g, ID_NONE));
    descriptor rows = binary(g, CUDNN_POINTWISE_MUL, sum, scalar(g, ID_ONE), row(g, ID_ROWS));

    descriptor p = matmul(g, q, kt, scores(g, FP32));
    p = binary(g, CUDNN_POINTWISE_MUL, p, scale, scores(g, FP32));
    p = binary(g, CUDNN_POINTWISE_SUB, p, row(g, ID_LSE), scores(g, FP32));
    p = causal(g, p);
    p = unary(g, CUDNN_POINTWISE_EXP, p, scores(g, FP32));
    matmul_to_keys(g, p, d_o, tokens(g, ID_DV, a->hk, a->ldv));

    descriptor ds = matmul(g, d_o, vt, scores(g, FP32));
    ds = binary(g, CUDNN_POINTWISE_SUB, ds, rows, scores(g, FP32));
    ds = binary(g, CUDNN_POINTWISE_MUL, ds, p, scores(g, FP32));
    ds = binary(g, CUDNN_POINTWISE_MUL, ds, scale, scores(g, BF16));
    matmul_to_keys(g, ds, q, tokens(g, ID_DK, a->hk, a->ldk));

    descriptor k = reshape(g, kt, tokens(g, ID_NONE, a->hk, a->ldk)), dq = tokens(g, ID_DQ, a->h, a->ldq);
    if (a->accumulate)
        unary(g, CUDNN_POINTWISE_IDENTITY, matmul(g, ds, k, head_major(g, FP32, ID_SUMS)), dq);
    else
        matmul(g, ds, k, dq); /* dq straight from the product is summed in a fixed order */
}

/* ---- from a graph to a plan --------------------------------------------------------- */

/* Older libraries want the handle; newer headers call the attribute deprecated. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
static void set_handle(struct builder *g, descriptor graph)
{
    set(g, graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &g->p->handle);
}
#pragma GCC diagnostic pop

/* The first configuration that the heuristic names and that can be built: also the fastest, by measurement. */
static void choose(struct builder *g, descriptor heuristic)
{
    const struct cudnn *lib = g->p->lib;
    descriptor configurations[MAX_CONFIGURATIONS];
    for (int i = 0; i < MAX_CONFIGURATIONS; i++)
        configurations[i] = make(g, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    int64_t count = 0, one = 0;
    get(g, heuristic, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, MAX_CONFIGURATIONS, &count,
        configurations);
    if (count > MAX_CONFIGURATIONS)
        count = MAX_CONFIGURATIONS;
    struct error why = {.message = "its heuristic names no engine"};
    for (int64_t i = 0; i < count && !g->rc && !g->p->plan; i++) {
        descriptor plan = make(g, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
        set_descriptor(g, plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configurations[i]);
        set(g, plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &g->p->handle);
        if (g->rc)
            return;
        cudnnStatus_t status = lib->finalize(plan);
        if (status == CUDNN_STATUS_SUCCESS || !cudnn_failed(lib, status, pass_name(g->p->backward), &why))
            g->p->plan = plan;
    }
    if (g->rc)
        return;
    if (!g->p->plan) {
        g->rc = error_set(g->err, ERR_UNSUPPORTED,
                          "cuDNN %zu.%zu.%zu has no %s for %lld and %lld heads of %lld columns, %lld tokens: %.400s",
                          lib->version / 10000, lib->version / 100 % 100, lib->version % 100, pass_name(g->p->backward),
                          (long long)g->a->h, (long long)g->a->hk, (long long)g->a->e, (long long)g->a->s, why.message);
        return;
    }
    get(g, g->p->plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &one, &g->p->workspace);
}

static void build(struct builder *g)
{
    if (g->p->backward)
        backward_graph(g);
    else
        forward_graph(g);
    descriptor graph = make(g, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    set(g, graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, g->count, g->operations);
    set_handle(g, graph);
    finished(g, graph);
    descriptor heuristic = make(g, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    const cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
    set_descriptor(g, heuristic, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
    set(g, heuristic, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
    finished(g, heuristic);
    choose(g, heuristic);
}

int attention_plan_create(const struct cudnn *lib, cudnnHandle_t handle, const struct attention *a, bool backward,
                          struct attention_plan **out, struct error *err)
{
    enum { MINUS_INFINITY_SINCE = 91000 }; /* older ones want a large number as the mask */
    *out = NULL;
    struct attention_plan *p = calloc(1, sizeof *p);
    if (!p)
        return error_set(err, ERR_NOMEM, "no memory for %s", pass_name(backward));
    p->lib = lib;
    p->handle = handle;
    p->backward = backward;
    p->accumulate = a->accumulate;
    p->scale = (float)(1 / sqrt((double)a->e));
    p->hidden = lib->version < MINUS_INFINITY_SINCE ? -FLT_MAX : -INFINITY;
    p->one = 1;
    struct builder g = {.p = p, .a = a, .next_id = ID_VIRTUAL, .err = err};
    build(&g);
    if (g.rc) {
        attention_plan_destroy(p);
        return g.rc;
    }
    *out = p;
    return ERR_OK;
}

void attention_plan_destroy(struct attention_plan *p)
{
    if (!p)
        return;
    while (p->count > 0)
        (void)p->lib->release(p->all[--p->count]);
    free(p);
}

/* ---- running ------------------------------------------------------------------------ */

struct binding {
    int64_t ids[ID_VIRTUAL];
    void *pointers[ID_VIRTUAL];
    int count;
};

static void bind(struct binding *b, enum tensor_id id, const void *pointer)
{
    b->ids[b->count] = id;
    b->pointers[b->count++] = (void *)pointer; /* cuDNN's array has no const; inputs are only read */
}

static void bind_all(struct attention_plan *p, const struct attention_tensors *t, float *rows, float *sums,
                     struct binding *b)
{
    bind(b, ID_Q, t->q);
    bind(b, ID_K, t->k);
    bind(b, ID_V, t->v);
    bind(b, ID_O, t->o);
    bind(b, ID_LSE, t->lse);
    bind(b, ID_SCALE, &p->scale);
    bind(b, ID_HIDDEN, &p->hidden);
    if (!p->backward)
        return;
    bind(b, ID_DO, t->d_o);
    bind(b, ID_DQ, t->dq);
    bind(b, ID_DK, t->dk);
    bind(b, ID_DV, t->dv);
    bind(b, ID_ROWS, rows);
    bind(b, ID_ONE, &p->one);
    if (p->accumulate)
        bind(b, ID_SUMS, sums);
}

int attention_plan_run(struct attention_plan *p, const struct attention_tensors *t, float *rows, float *sums,
                       void *workspace, struct error *err)
{
    const struct cudnn *lib = p->lib;
    struct binding b = {.count = 0};
    bind_all(p, t, rows, sums, &b);
    descriptor pack = NULL;
    cudnnStatus_t status = lib->make(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack);
    if (status)
        return cudnn_failed(lib, status, pass_name(p->backward), err);
    status = lib->set(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, b.count, b.ids);
    if (!status)
        status = lib->set(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, b.count, b.pointers);
    if (!status)
        status = lib->set(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace);
    if (!status)
        status = lib->finalize(pack);
    if (!status)
        status = lib->execute(p->handle, p->plan, pack);
    int rc = status ? cudnn_failed(lib, status, pass_name(p->backward), err) : ERR_OK;
    (void)lib->release(pack);
    return rc;
}
