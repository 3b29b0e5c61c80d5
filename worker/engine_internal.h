/* Private to the engine's files. */
#ifndef BOOST_WORKER_ENGINE_INTERNAL_H
#define BOOST_WORKER_ENGINE_INTERNAL_H

#include "worker/engine.h"
#include "worker/optimizer.h"
#include "worker/overlap.h"
#include "worker/plan/arena.h"

/* A parameter slice and its gradient, addresses in the arena. */
struct param {
    void *weight; /* act */
    void *grad;   /* grad */
};

/* What a block reads and adds to. Branches that share an input follow one another: a [c r, in] tensor of
 * their A, and their B or W one after the other. */
struct site_params {
    struct param down; /* A of the first branch; none in a dense model */
    struct param up;   /* its B, or its W */
    /* LAX, from the second layer on */
    struct param cross_gain, cross_bias, gate, gate_bias, gate_left;
};
struct layer {
    struct param norm1, norm2;
    struct site_params site[SITE_COUNT];
};

/* The branches of a site that go together through one A: all of them when grouped, else one. */
struct bundle {
    enum plan_site site;
    int first, count;
};

/* Rows of a micro-batch. */
struct rows {
    int64_t first, count;
};

/* What differs between FULL, VANILLA and BTP. Each call runs one micro-batch's part on this
 * rank; all may call collectives of the pass set in the comms. */
struct strategy {
    const char *name;

    /* ---- edges ---- */
    /* Tokens to BUF_X1 of layer 0; BUF_DX to the table's gradient. */
    int (*embed_forward)(struct engine *e, struct error *err);
    int (*embed_backward)(struct engine *e, struct error *err);
    /* From BUF_NF to head_input(), [T, d]. Backward: the product of these rows' logits' gradients (BUF_LOGITS) with the
     * head, and once all rows have it, its sum over ranks in BUF_DN. */
    int (*head_gather)(struct engine *e, struct error *err);
    void (*head_input_gradient)(struct engine *e, const struct rows *r);
    int (*head_scatter)(struct engine *e, struct error *err);

    /* ---- the linear layers of a site: x its input, y its branches' outputs, dx and dy their gradients. All begin at
     * row 0 of the micro-batch; only the rows at work (e->rows) are read and written ---- */
    /* The outputs are columns of one matrix, [T, sum of widths]; else each is a matrix of its own, one behind the
     * other. See site_output(). */
    bool joined;
    /* From x to the bottleneck, whose sums over ranks may be left under way. */
    int (*latent)(struct engine *e, enum plan_site site, int64_t layer, const void *x, struct error *err);
    /* From there to y, with the residual added unless that is NULL. It is given where the engine `adds`, and only to
     * sites of one layer (o, down). */
    int (*output)(struct engine *e, enum plan_site site, int64_t layer, const void *x, const void *residual, void *y,
                  struct error *err);
    /* In output()'s place where only complete latents are wanted; NULL where latent() leaves them complete. */
    int (*settle)(struct engine *e, enum plan_site site, int64_t layer, struct error *err);
    /* From dy (of all branches) back to the bottleneck of one bundle, whose sum over ranks may be left under way; NULL
     * where dinput() does that too. */
    int (*dlatent)(struct engine *e, const struct bundle *b, int64_t layer, const void *dy, struct error *err);
    /* From there to dx, of this bundle alone. Both together make the gradients of its weights; but with x NULL that of
     * the weight that x is multiplied with is left to dweight(). */
    int (*dinput)(struct engine *e, const struct bundle *b, int64_t layer, const void *x, const void *dy, void *dx,
                  struct error *err);
    /* That one, with the dy that dinput() had, before the next dlatent(). */
    void (*dweight)(struct engine *e, const struct bundle *b, int64_t layer, const void *x, const void *dy);
};
extern const struct strategy strategy_full, strategy_vanilla, strategy_btp;

/* Slices that follow one another in the buffers and are treated alike: elements [at, at + count) of weights and
 * gradients, which begin at `state` in moments and separate masters. */
struct span {
    int64_t at, state, count;
    bool decay;
};

/* A span and `times` - 1 more of its size, each `stride` elements behind the one before. */
struct spans {
    int64_t at, count, stride, times;
};

/* A part of the step that can be captured (sequence.c). */
struct sequence {
    const char *what; /* for who watches */
    int (*body)(struct engine *e, struct error *err);
    bool ran;
    struct kgraph *graph;          /* NULL: not captured */
    struct comm_counters counters; /* of one launch */
};

/* Host ends of a step's transfers, in memory that a transfer needs no host for. */
struct host_side {
    double votes[AGREE_ASKED - AGREE_STOP + 1];
    double lr, adam_t;
    struct step_block block;
    double eval[2];
    int32_t tokens[]; /* of each micro-batch of a step: inputs [T], targets [T] */
};

/* What this replica owns of a tensor: elements [first, first + count) of its slice, which under zero 1 begin
 * at `state` in the buffers that are cut over dp. */
struct owned {
    int64_t first, count, state;
};

struct engine {
    const struct plan *plan;
    const struct kernels *k;
    struct comms *comms;
    const struct strategy *strategy;
    const struct optimizer *optimizer;
    struct kstream *ks;
    int rank, tp_rank;
    struct plan_stage stage;
    int64_t slot;     /* of the micro-batch at work, among those that the stage holds */
    bool first_micro; /* it is the first of the step: its products write gradients of weights, others add to them */

    struct plan_backend backend;
    struct plan_arena places;
    char *arena;
    const struct plan_cut *cut;
    struct plan_widths w; /* on this rank */
    bool adds;            /* nothing is summed over ranks behind o and down: their products add the residual too */
    bool sums_latents;    /* over tp, in the kernels that use them (latent_sum()) */
    struct attention attention;
    int64_t head_rows;                      /* whose logits are kept at a time */
    struct rows rows;                       /* at work in a block: all, or a slice of them */
    int slice;                              /* which; 0: all */
    bool again;                             /* a re-forward with latents that were kept is at work */
    struct overlap *overlap;                /* NULL: all-reduces are waited for at once */
    int64_t calls[PLAN_SLICES][PROJ_COUNT]; /* its calls under way, by slice and a bundle's first branch in its site */

    int64_t tensor_count;
    struct plan_tensor *tensors;    /* of the stage, canonical order */
    struct owned *owned;            /* [tensor_count] */
    struct span *updates, *squares; /* what this replica updates; what it counts in the gradient norm */
    struct spans *zeroed;           /* of the gradients, before a step */
    int64_t update_count, square_count, zeroed_count;
    struct layer *layers; /* [L], this stage's are filled in */
    int64_t bucket_count, next_bucket;
    struct plan_bucket *buckets; /* of gradients, in the order of the backward */
    struct overlap *sums;        /* of the buckets, under the rest of the backward; NULL: dp = 1 */
    int64_t *bucket_calls;       /* of it, [bucket_count] */
    struct param embedding, norm, head;
    int64_t vocab_first, vocab_rows; /* valid vocabulary rows of the head on this rank */

    struct step_block *block; /* device */
    struct host_side *host;
    bool captures, capturing;            /* steps are to be; something is at this moment: nothing runs then */
    struct sequence gradients, updating; /* a step in two parts: the state may be copied until the second */
    struct kstream *copies;              /* copies of the state beside the steps; NULL: none yet, or not beside */
    bool copying;                        /* the next update is to wait for them */
    void (*watch)(void *arg, const char *doing);
    void *watch_arg;
    void (*progress)(void *arg); /* of the step under way */
    void *progress_arg;
    char note[512];
    bool noted; /* note is news */
};

/* Slots of the engine's stream. */
enum { MARK_STATE = OVERLAP_MARK + 1 };
/* And of `copies`. */
enum { MARK_COPIED };

/* ---- memory (engine.c) ---- */

/* A buffer of the arena; `layer` (of the model, in this stage) only for those of a block, which are the
 * micro-batch's at work; else 0. */
void *engine_buffer(const struct engine *e, enum plan_buffer buffer, int64_t layer);
/* The address `elements` further on. */
void *act_at(const struct engine *e, const void *base, int64_t elements);
/* The first row at work of a [T, ld] tensor. */
void *act_rows(const struct engine *e, const void *base, int64_t ld);
void *stat_rows(const struct engine *e, const void *base, int64_t ld);
struct param param_at(const struct engine *e, const struct param *p, int64_t elements);
/* What the collectives that follow are counted as. */
void engine_set_pass(struct engine *e, enum comm_pass pass);
/* A range for profilers. */
void engine_range(const struct engine *e, const char *fmt, ...) PRINTF_LIKE(2, 3);
void engine_range_end(const struct engine *e);

/* ---- captured sequences (sequence.c) ---- */

/* Runs the body, or launches what it was: the first time it runs, so that all that is made on the way exists; the
 * second time it is captured. The host's part of every call is the same, so the counters are too. */
int sequence_run(struct engine *e, struct sequence *s, struct error *err);
void sequence_destroy(struct engine *e, struct sequence *s);
/* The two of a step (step.c). */
int step_gradients(struct engine *e, struct error *err);
int step_update(struct engine *e, struct error *err);

/* ---- runs of tensors (optimizer.c) ---- */

/* Fills in e->updates and e->squares. */
int optimizer_prepare(struct engine *e, struct error *err);

/* ---- gradient buffers (gradients.c) ---- */

/* Fills in e->zeroed: all that no product writes, padding included. */
int gradients_prepare(struct engine *e, struct error *err);
/* Zeroes it. What stands in the rest is not read before it is written. */
void gradients_begin(struct engine *e);
/* beta of a product that makes a weight's gradient from rows [first_row, ...) of the micro-batch at work. Row 0 is
 * always in the first of the products that share one. */
double gradient_beta(const struct engine *e, int64_t first_row);

/* ---- a block (block.c) ---- */

/* What a block leaves: the residual behind it, here or at the next stage the next norm's input. y NULL: x is all of it;
 * else their sum, which that norm makes in passing. */
struct addends {
    void *x, *y;
};
struct addends block_sum(const struct engine *e, int64_t layer);
/* For all blocks of the stage in turn, upwards or downwards: each begins the next one too, and behind the last no sum
 * is under way. Backward BUF_DX goes from the gradient of a block's output to that of its input; behind block `layer`
 * nothing adds to gradients of its weights any more. */
int block_forward(struct engine *e, int64_t layer, struct error *err);
int block_backward(struct engine *e, int64_t layer, struct error *err);
/* Whether products of a slice, from here on, leave processors to a sum beside them. It goes by their place in the block
 * and not by what is under way, so that a re-forward makes the same bits; the block says it in front of each of its
 * parts, a strategy only where it begins a sum within one. */
void block_leaves_room(struct engine *e, bool room);
/* Shapes that the attention is called with, the first n of these. */
int block_attentions(const struct engine *e, struct attention out[PLAN_SLICES]);

/* ---- the ends of the network (edges.c; the strategies' parts in edges_sharded.c, edges_replicated.c) ---- */

/* The last norm, and its output at head_input(). */
int head_forward(struct engine *e, struct error *err);
/* Logits of these rows, in BUF_LOGITS. */
void head_logits(struct engine *e, const struct rows *r);
/* Of all rows, chunk by chunk. Adds loss sum and token count to sum[0], sum[1] (NULL: this rank does not report them);
 * gradient: the head's gradient too, and prepares head_backward(). */
int head_loss(struct engine *e, double *sum, bool gradient, struct error *err);
/* From there to BUF_DX. */
int head_backward(struct engine *e, struct error *err);
/* The last norm's output over all of d, [T, d]. */
void *head_input(const struct engine *e);

int sharded_embed_forward(struct engine *e, struct error *err);
int sharded_embed_backward(struct engine *e, struct error *err);
int sharded_head_gather(struct engine *e, struct error *err);
void sharded_head_input_gradient(struct engine *e, const struct rows *r);
int sharded_head_scatter(struct engine *e, struct error *err);
int replicated_embed_forward(struct engine *e, struct error *err);
int replicated_embed_backward(struct engine *e, struct error *err);
int replicated_head_gather(struct engine *e, struct error *err);
void replicated_head_input_gradient(struct engine *e, const struct rows *r);
int replicated_head_scatter(struct engine *e, struct error *err);

/* ---- norms (norm.c) ---- */

/* All of them of the rows at work. */

/* Whether a block's norms have a call of their own, for which they want all rows at once. */
bool norm_joins_rows(const struct engine *e);
/* x_out = x + y (y may be NULL) and its plain norm n; R [T] stat: from the first row at work. The hidden dimension may
 * be cut. */
int plain_norm_forward(struct engine *e, const void *x, const void *y, const struct param *gain, void *x_out, void *R,
                       void *n, struct error *err);
/* A block's norm, which is that in front of SITE_QKV or SITE_GU, of what it adds up. */
int norm_forward(struct engine *e, enum plan_site site, int64_t layer, const struct addends *sum, struct error *err);
/* The backward of a block's norm in two parts: from the bottleneck of the site behind it (dy: of that one's outputs) to
 * the norm's output n, and from there to x. What x gets is added to BUF_DX, where the norm is ONLINE by the first (the
 * second has nothing to do then), else by the second. */
int normed_dinput(struct engine *e, enum plan_site site, int64_t layer, const void *dy, struct error *err);
int norm_backward(struct engine *e, enum plan_site site, int64_t layer, struct error *err);
/* Input and output of a block's norm, and its factor (before it is known, its statistic). */
void *norm_x(const struct engine *e, enum plan_site site, int64_t layer);
void *norm_n(const struct engine *e, enum plan_site site, int64_t layer);
void *norm_factor(const struct engine *e, enum plan_site site, int64_t layer);

/* ---- bundles and latents (latent.c) ---- */

int bundle_count(const struct engine *e, enum plan_site site);
struct bundle bundle_at(const struct engine *e, enum plan_site site, int i);
/* Columns of a bundle's latent. */
int64_t bundle_columns(const struct engine *e, const struct bundle *b);
/* Its part of the buffer of its site, of the four that begin with `first`, with `width` columns a branch, from the
 * first row at work. */
void *bundle_part(const struct engine *e, enum plan_buffer first, const struct bundle *b, int64_t layer, int64_t width);
/* Parameters of a bundle, of which each branch of the site has `each` elements; none where the site has none. */
struct param bundle_param(const struct engine *e, const struct bundle *b, const struct param *p, int64_t each);
/* Its A: rows of the site's. */
struct param bundle_down(const struct engine *e, const struct bundle *b, int64_t layer);
/* Its part of the site's latents before and behind the activation: products H, and z, which is H's place where the two
 * differ by a factor alone. Where a block crosses H becomes Y. */
void *latent_h(const struct engine *e, const struct bundle *b, int64_t layer);
void *latent_z(const struct engine *e, const struct bundle *b, int64_t layer);
/* From complete products to R and z = activation(Y), Y = R H (ONLINE) or H. `again`: R is known, z is to be made. */
int latent_activate(struct engine *e, const struct bundle *b, int64_t layer, struct error *err);
/* Where the engine sums_latents: this rank's part of a site's latents or of their gradient, its place for the
 * statistic, and both functions above with the sum in front. Two places in turn (kernels.h): a block's sites alternate
 * both ways, and a backward begins at the site that a forward ends with. */
enum way { WAY_FORWARD, WAY_BACKWARD };
void *latent_part(const struct engine *e, enum plan_site site, enum way way);
void *latent_part_statistic(const struct engine *e, enum plan_site site);
void latent_sum(struct engine *e, const struct bundle *b, int64_t layer, const char *what);
void latent_gradient_sum(struct engine *e, const struct bundle *b, int64_t layer, void *dz, const char *what);
/* dz, complete, becomes dH; with ONLINE BUF_K becomes what the norm's backward wants of this bundle. */
int latent_gradient(struct engine *e, const struct bundle *b, int64_t layer, void *dz, struct error *err);
enum latent_act latent_activation(const struct engine *e);

/* ---- latent crossing (crossing.c; gate.c) ---- */

/* Whether a block's latents take in those of the block before. */
bool crosses(const struct engine *e, int64_t layer);
/* From Y to z, with the z of the block before. */
int crossing_forward(struct engine *e, const struct bundle *b, int64_t layer, struct error *err);
/* dz += what the block behind takes; then dz becomes dY, and BUF_CROSS what this block takes from the one before. */
int crossing_backward(struct engine *e, const struct bundle *b, int64_t layer, void *dz, struct error *err);

/* What a gate gives: row i (token, branch) of this rank's columns is at i * ld. */
struct gated {
    const void *G;
    int64_t ld;
};
/* `again`: its input is gathered already. */
int gate_forward(struct engine *e, const struct bundle *b, int64_t layer, struct gated *out, struct error *err);
/* Gradients of the gate's matrices; dp [T, c l] from du. */
int gate_backward(struct engine *e, const struct bundle *b, int64_t layer, const void *du, void *dp, struct error *err);

/* ---- products (linear.c) ---- */

/* Of the rows at work. What is given begins at the first of them; a fan's outputs are given whole. */

/* A down-projection, or several that share their input: weight [n, k]. */
void down_forward(struct engine *e, int64_t n, int64_t k, const struct param *a, const void *x, void *h);
/* grad = or += dh^T x (gradient_beta()). */
void down_weight(struct engine *e, int64_t n, int64_t k, const struct param *a, const void *x, const void *dh);
/* dx = dh A, as [parts][T, k/parts]. */
void down_input(struct engine *e, int64_t n, int64_t k, int parts, const struct param *a, const void *dh, void *dx);
/* Where output j of a site lies among them: its first element, and the distance of its rows. */
struct place {
    int64_t at, ld;
};
struct place site_output(const struct engine *e, enum plan_site site, int j);
/* `count` layers of one shape, weights [out, in] one after the other. Input j is at column j stride_x of a [T, ldx]
 * tensor; stride_x 0: one input for all. Output j, rows of `out` at a distance of ldy, begins at element j stride_y. */
struct up {
    int count;
    int64_t out, in, ldx, stride_x, ldy, stride_y;
};
/* residual: what y is added to, laid out like y; NULL: nothing. */
void up_forward(struct engine *e, const struct up *u, const struct param *w, const void *x, const void *residual,
                void *y);
/* grad = or += dy^T x. */
void up_weight(struct engine *e, const struct up *u, const struct param *w, const void *x, const void *dy);
/* dx = dy W, of a shared input the sum over layers. */
void up_input(struct engine *e, const struct up *u, const struct param *w, const void *dy, void *dx);
/* The same for layers of different widths and inputs of their own, whose outputs are columns of one matrix; those of
 * one width that are neighbours go as one batch. */
struct fan {
    int count;
    const int64_t *out;             /* [count] */
    int64_t in, ldx, stride_x, ldy; /* y's are columns of one matrix */
};
void fan_forward(struct engine *e, const struct fan *f, const struct param *w, const void *x, const void *residual,
                 void *y);
void fan_input(struct engine *e, const struct fan *f, const struct param *w, const void *dy, void *dx);
void fan_weight(struct engine *e, const struct fan *f, const struct param *w, const void *x, const void *dy);

/* One all-reduce over tp of n elements of act. */
int reduce_act(struct engine *e, void *data, int64_t n, const char *what, struct error *err);

#endif
