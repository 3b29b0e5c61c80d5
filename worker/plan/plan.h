/* The parallel plan: what a resolved job means for each rank. Pure functions, no I/O,
 * no allocation beyond the caller's; used by the validator (boostd, boostctl), the
 * worker and, later, the planner, so that all three agree by construction.
 *
 * Letters as in kernels/kernels.h: d hidden, f intermediate, r rank, V vocabulary,
 * L layers, h heads, hk kv heads, e = d/h, t = tp, T = micro_batch * s. */
#ifndef BOOST_WORKER_PLAN_PLAN_H
#define BOOST_WORKER_PLAN_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/dtype.h"
#include "proto/base/error.h"
#include "proto/job.pb-c.h"

/* ---- from a job file to a plan -------------------------------------------- */

/* Everything that can be known of a spec without a node: proto/validate's presence and
 * ranges, then layout (divisibility, with the nearest legal values in the message), then
 * what this version has built (ERR_UNSUPPORTED with the mend). */
MUST_USE int plan_validate(const Boost__JobSpec *spec, struct error *err);

/* What AUTO needs to know of the machine. */
struct plan_machine {
    int64_t memory_bytes; /* a rank on the CPU may use; 0 = unknown, the largest micro-batch is then 8 */
    int64_t cuda_bytes;   /* the same of a rank on CUDA: of the smallest device less plan_cuda_reserve() */
    bool has_cuda;        /* AUTO is CUDA, where no option says otherwise */
};
/* Of a device's memory, what the arena of a rank cannot have: the context with the code of the libraries, NCCL's
 * buffers, and what cuBLASLt and cuDNN take by themselves. */
int64_t plan_cuda_reserve(void);
/* A copy of `spec` (packed and unpacked again, caller frees with boost__job_spec__free_unpacked)
 * with every default and every AUTO replaced by its value: validates first. (data.format stays AUTO where
 * only the node can tell: proto/tokenfile.h.) */
MUST_USE int plan_resolve(const Boost__JobSpec *spec, const struct plan_machine *machine, Boost__JobSpec **out,
                          struct error *err);

/* The replicas that `nodes` of the job's nodes hold; 0: none whole, or not so many that they share global_batch evenly. */
int plan_replicas_on(const Boost__JobSpec *resolved, int nodes);
/* A copy for that many nodes (the caller's to free): fewer replicas, the same global_batch by more accumulation, with
 * the largest micro_batch up to the job's own that divides it. ERR_INVALID where plan_replicas_on() is 0. */
MUST_USE int plan_on_fewer_nodes(const Boost__JobSpec *resolved, int nodes, Boost__JobSpec **out, struct error *err);
/* Whether a job of resolved spec `now` can take over the state of a checkpoint written under `was`: the same model in
 * every field that `was` has, and, but for the weights alone, the same position in the data. ERR_INVALID names every
 * field that differs, both values and the mend. The layout may differ. */
MUST_USE int plan_continues(const Boost__JobSpec *was, const Boost__JobSpec *now, bool weights_only, struct error *err);

/* The numbers of a resolved spec, so that no one walks protobuf in a step. */
struct plan {
    Boost__Factorization__Value factorization;
    Boost__Strategy__Value strategy;
    int64_t d, f, r, V, V_pad, L, h, hk, e, s;
    double rope_theta, norm_eps;
    bool tied;
    bool mlp_silu;    /* SiLU on the gate branch */
    bool latent_silu; /* activation on the latent: COLA yes, SVD no, LAX as its base */
    bool lax;         /* latents cross from block to block */
    Boost__LaxGate__Value lax_gate;
    bool grouped;
    bool norm_online; /* the norm's factor is applied behind the latent; else in front, as a plain norm */
    bool overlap;     /* all-reduces of one slice of the rows under the work on the other; tp > 1 only */
    bool published;   /* VANILLA: attention on all heads on every rank */
    Boost__Recompute__Value recompute;
    int tp, pp, dp, world;
    int64_t micro_batch, global_batch, accumulation; /* accumulation = global / (micro * dp) */
    int64_t T;
    int zero;             /* 1: moments and master weights are cut over dp */
    int64_t bucket_bytes; /* of gradients, dp > 1 */
    Boost__Precision__Value precision;
    bool cuda;            /* the resolved device; else the CPU */
    bool attention_own;   /* CUDA: the own kernel whatever cuDNN can */
    bool attention_cudnn; /* CUDA: cuDNN or nothing; neither: cuDNN where it is right, else the own */
    bool deterministic;   /* steps repeat bit for bit */
    int64_t head_bytes;   /* the head works on as many rows at a time as have this many bytes of logits; 0: on all */
    uint64_t init_seed, data_seed;
    double beta1, beta2, eps, weight_decay, grad_clip;
    bool decay_embeddings;
};
MUST_USE int plan_make(const Boost__JobSpec *resolved, struct plan *out, struct error *err);
/* rank = (pp_rank * dp + dp_rank) * tp + tp_rank */
int plan_tp_rank(const struct plan *p, int rank);
int plan_dp_rank(const struct plan *p, int rank);
int plan_pp_rank(const struct plan *p, int rank);
int plan_rank(const struct plan *p, int pp_rank, int dp_rank, int tp_rank);

/* ---- how a strategy cuts a block -------------------------------------------- */

/* Which widths are cut in t; the rest is whole on every rank. All else that a strategy means for
 * slices, buffers and divisibility follows from this. */
struct plan_cut {
    bool hidden; /* the residual stream and the norms' gains */
    bool heads;  /* q, k, v and the attention */
    bool mlp;    /* gate, up and their product */
    bool latent; /* the r-wide latents */
};
const struct plan_cut *plan_cut_of(Boost__Strategy__Value strategy, bool published);
const struct plan_cut *plan_cut(const struct plan *p);
/* Whether o's and down's outputs are complete on their rank, so that their products add the residual as well. */
bool plan_adds_residual(const struct plan *p);
/* Whether latents may be summed by the kernels that use them, where ranks reach each other's memory (kernels.h,
 * latent_sum_forward). */
bool plan_sums_in_kernels(const struct plan *p);

enum plan_projection { PROJ_Q, PROJ_K, PROJ_V, PROJ_O, PROJ_GATE, PROJ_UP, PROJ_DOWN, PROJ_COUNT };
/* The four places of a block where linear layers stand; the branches of a site share their input. */
enum plan_site { SITE_QKV, SITE_O, SITE_GU, SITE_DOWN, SITE_COUNT };
struct plan_branches {
    enum plan_projection first;
    int count;
};
struct plan_branches plan_branches(enum plan_site site);
enum plan_site plan_site_of(enum plan_projection projection);

/* Widths on one rank (any rank: equal). */
struct plan_widths {
    int64_t x;               /* residual stream */
    int64_t heads, kv_heads; /* of the attention on this rank */
    int64_t in[SITE_COUNT];  /* input of a site's layers */
    int64_t out[PROJ_COUNT]; /* what a projection gives to what follows */
    int64_t latent;          /* of one branch; 0 for FULL_RANK */
};
void plan_widths(const struct plan *p, struct plan_widths *out);
/* Rows of the first of two slices, whole sequences where there is more than one; all rows without overlap. */
enum { PLAN_SLICES = 2 };
int64_t plan_first_slice(const struct plan *p);
/* Rows of the micro-batch whose logits are kept at a time, a divisor of T: all of them unless head_bytes bounds them.
 * The head and its loss go through the micro-batch in T / rows chunks. */
int64_t plan_head_rows(const struct plan *p);
/* The dense layer that a projection stands for, uncut: [out, in]. */
int64_t plan_in_width(const struct plan *p, enum plan_projection projection);
int64_t plan_out_width(const struct plan *p, enum plan_projection projection);

/* ---- parameters ------------------------------------------------------------ */

enum { PLAN_NAME_MAX = 64 };
enum plan_role {
    ROLE_EMBEDDING,
    ROLE_HEAD,
    ROLE_GAIN,
    ROLE_DENSE, /* W */
    ROLE_DOWN,  /* A */
    ROLE_UP,    /* B */
    /* LAX, from the second layer on */
    ROLE_CROSS_GAIN, /* [1, r] of the latent's LayerNorm */
    ROLE_CROSS_BIAS, /* [1, r] */
    ROLE_GATE,       /* LINEAR [r, r]; TENSOR the right one, [n, n] */
    ROLE_GATE_BIAS,  /* LINEAR [1, r] */
    ROLE_GATE_LEFT,  /* TENSOR [m, m] */
};
enum plan_init { INIT_NORMAL, INIT_UNIFORM, INIT_ONE, INIT_ZERO };

/* One parameter tensor: its global shape and this rank's slice. Names do not depend on the
 * layout: "embedding", "layers.3.norm1", "layers.3.q.A" [r, d], "layers.3.q.B" [out, r] (FULL_RANK:
 * "layers.3.q.W" [out, d]), "layers.3.norm2", "layers.3.gate.A" ..., "norm", "head"; LAX adds
 * "layers.3.q.cross.gain", ".bias" and by gate ".W", ".b" or ".right", ".left". */
struct plan_tensor {
    char name[PLAN_NAME_MAX];
    enum plan_role role;
    int layer;          /* -1 outside the blocks */
    int projection;     /* enum plan_projection; of a gain the first one behind it (Q, GATE); -1 outside the blocks */
    int64_t rows, cols; /* global; a gain is [1, d] */
    int64_t row0, col0, nrows, ncols; /* this rank's slice; a rank with only padded vocabulary has no rows */
    int64_t offset;                   /* of the slice, in elements, in every parameter-shaped buffer of this rank */
    enum plan_init init;
    double init_std; /* of NORMAL and UNIFORM */
    bool decay;      /* weight decay applies */
    bool counted;    /* this rank counts it in the global norm and writes it in checkpoints */
};
/* Whether the embedding is cut along hidden; else along the vocabulary, as the head. */
bool plan_embedding_by_hidden(const struct plan *p);
int64_t plan_tensor_count(const struct plan *p);
/* i in canonical order: embedding; per layer norm1 q.A k.A v.A q.B k.B v.B o.A o.B norm2 gate.A up.A
 * gate.B up.B down.A down.B (FULL_RANK: norm1 q.W k.W v.W o.W norm2 gate.W up.W down.W); norm; head (absent
 * when tied). LAX adds to every layer but the first, kind by kind, the tensors of the seven crossings. Branches of a
 * group are neighbours, so that slices laid out in this order make [3r, d/t] and [2r, d/t] blocks. */
void plan_tensor_at(const struct plan *p, int rank, int64_t i, struct plan_tensor *out);
/* The latent as the matrix that a TENSOR gate works on: m * n = r, m <= n, as square as can be. */
void plan_gate_shape(int64_t r, int64_t *m, int64_t *n);
/* Elements of a parameter-shaped buffer of one rank (any rank: equal), vocabulary padding included. */
int64_t plan_parameter_elements(const struct plan *p);
/* Parameters without vocabulary padding. */
int64_t plan_parameters(const struct plan *p);

/* ---- pipeline stages and replicas (parallel.c) ------------------------------- */

/* A stage has a run of layers; with pp not dividing L the first L % pp stages have one more. The
 * functions above describe the whole model; a stage's buffers hold its own tensors only. */
struct plan_stage {
    int index;
    bool first, last;
    bool embedding; /* holds the embedding table: the first stage, and the last one when tied */
    int64_t layer0, layers;
    int64_t slots;    /* micro-batches between their forward and their backward at any time: what is saved */
    int64_t tensors;  /* of the stage, in canonical order */
    int64_t elements; /* of a parameter-shaped buffer, padding included; a multiple of dp under zero 1 */
    int64_t tensor0,
        shift; /* canonical number of its first tensor behind the table; whole-model offset less the stage's */
};
void plan_stage_at(const struct plan *p, int index, struct plan_stage *out);
/* Tensor i of the stage as `rank` holds it: offset in the stage's buffers; a tied table counts on the first stage. */
void plan_stage_tensor_at(const struct plan *p, const struct plan_stage *stage, int rank, int64_t i,
                          struct plan_tensor *out);
/* The rank that counts (and writes) replica `replica`'s part of what `rank` holds as tensor i. */
int plan_writer(const struct plan *p, const struct plan_stage *stage, int rank, int64_t i, int replica);

/* Gradients travel over dp in buckets: whole layers from the last one on until bucket_bytes are reached (with
 * them what follows the blocks), the embedding by itself. */
struct plan_bucket {
    int64_t first, elements; /* a range of a parameter-shaped buffer */
    int64_t after;           /* complete behind this layer's backward; L: the head's, -1: the embedding's */
};
/* In the order of the backward; at most layers + 2. out may be NULL: the count. */
int64_t plan_buckets(const struct plan *p, const struct plan_stage *stage, int64_t element_bytes,
                     struct plan_bucket *out);
/* A bucket is cut in dp pieces, one a replica (under zero 1 equal ones): whose it is to update
 * (zero 1), to count in the norm and to write in checkpoints. */
void plan_piece(const struct plan *p, const struct plan_bucket *bucket, int dp_rank, int64_t *first, int64_t *count);
/* The elements of slice t that replica dp_rank owns: one range, [first, first + count) of its nrows * ncols. */
void plan_owned(const struct plan *p, const struct plan_bucket *buckets, int64_t n, int dp_rank,
                const struct plan_tensor *t, int64_t *first, int64_t *count);

/* ---- communication: closed forms ------------------------------------------- */

struct plan_comm {
    int64_t calls;
    int64_t elements;
    int64_t statistics; /* of the elements, those of the backend's `stat` type; in the tp group only */
};
/* Bytes of them; as all counts here INT64_MAX where they are beyond it. */
int64_t plan_comm_bytes(const struct plan_comm *c, int64_t element_bytes, int64_t statistic_bytes);
/* [kind][pass] of a training step of one rank with `accumulation` micro-batches, and of one evaluation
 * micro-batch (PASS_EVAL), in the tp group; `world` gives the agreement. Formulas:
 * worker/plan/README.md. Indices are enum comm_kind, comm_pass of worker/comm/comm.h by number
 * (this library includes nothing above it; worker/step.c asserts that they agree). */
enum { PLAN_ALL_REDUCE, PLAN_REDUCE_SCATTER, PLAN_ALL_GATHER, PLAN_SEND, PLAN_RECV, PLAN_KINDS };
enum { PLAN_FORWARD, PLAN_BACKWARD, PLAN_RECOMPUTE, PLAN_STEP, PLAN_EVAL, PLAN_PASSES };
struct plan_comm_counts {
    struct plan_comm tp[PLAN_KINDS][PLAN_PASSES];
    struct plan_comm world[PLAN_KINDS][PLAN_PASSES];
    struct plan_comm pp[PLAN_KINDS][PLAN_PASSES]; /* a send or receive of each micro-batch over each border */
    struct plan_comm dp[PLAN_KINDS][PLAN_PASSES];
    struct plan_comm ends[PLAN_KINDS][PLAN_PASSES]; /* first and last stage of a tied model */
};
/* Of a rank of the given stage. An evaluation's sum over the world is not in: one all-reduce of 2 fp64 for all of it.
 */
void plan_stage_comm_counts(const struct plan *p, int stage, struct plan_comm_counts *out);
/* Of the first stage: of every rank when pp = 1. */
void plan_comm_counts(const struct plan *p, struct plan_comm_counts *out);
/* The part of pp, dp and ends (parallel.c). */
void plan_parallel_counts(const struct plan *p, const struct plan_stage *stage, struct plan_comm_counts *out);
/* Elements that cross the border of two stages for one micro-batch, each way. */
int64_t plan_boundary_elements(const struct plan *p);

/* ---- memory ------------------------------------------------------------------ */

enum plan_memory_category {
    MEM_WEIGHTS,
    MEM_MASTER,
    MEM_GRADS,
    MEM_MOMENTS,
    MEM_SAVED,
    MEM_SCRATCH,
    MEM_HEAD,
    MEM_COUNT
};
/* Bytes of one rank's arena by category: exactly what the engine lays out. */
struct plan_memory {
    int64_t bytes[MEM_COUNT];
    int64_t total;
};
/* What the figure depends on of a backend (kernels/kernels.h has the same words). */
struct plan_backend {
    enum dtype act, stat, grad;
    int64_t attention_workspace; /* bytes, the most of forward and backward and of every kernel that may be chosen */
    int64_t scratch;             /* bytes that operations want between their own launches; 0: none */
};
/* The largest shapes that operations with a scratch see on a rank. */
struct plan_largest {
    int64_t T;     /* rows */
    int64_t width; /* columns whose sums over rows or along them are taken: of the residual stream, of latents */
    int64_t vocab; /* rows of an embedding table */
};
void plan_largest(const struct plan *p, struct plan_largest *out);
/* Of the backend of the plan's device and precision, for who has no kernels to ask. */
void plan_backend_estimate(const struct plan *p, struct plan_backend *out);
/* attention_workspace of the CUDA backend for b sequences; kernels/cuda/attention_size.h has the reasons and the same
 * formula. */
struct plan_attention {
    int64_t b, s, h, hk, e;
    bool own;        /* the backend's own kernel */
    bool accumulate; /* dq in any order: not reproducible */
};
int64_t plan_cuda_attention(const struct plan_attention *a);
/* scratch of the CUDA backend; likewise kernels/cuda/scratch_size.h. */
int64_t plan_cuda_scratch(const struct plan_largest *l);
void plan_stage_memory(const struct plan *p, int stage, const struct plan_backend *b, struct plan_memory *out);
/* Of the stage that needs most. */
void plan_memory(const struct plan *p, const struct plan_backend *b, struct plan_memory *out);

#endif
