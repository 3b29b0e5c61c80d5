/* A checkpoint's weights in another form: what tensors that has, and how their rows are made. One thread. */
#ifndef BOOST_WORKER_CKPT_WEIGHTS_H
#define BOOST_WORKER_CKPT_WEIGHTS_H

#include <stdint.h>

#include "worker/ckpt_dir.h"
#include "worker/tensor_file.h"

/* How an item is made of tensors of the plan. */
enum weights_how {
    WEIGHTS_COPY,      /* source[0] */
    WEIGHTS_TRANSPOSE, /* source[0], transposed */
    WEIGHTS_REPEAT,    /* the same, with the columns of each key-value head once for every query head that reads it */
    WEIGHTS_MERGE,     /* the product B A of source[0] (B) and source[1] (A) */
    WEIGHTS_DOWN,      /* A of the truncated source[0] */
    WEIGHTS_UP,        /* B of it; asked for behind its A */
};

/* The numbers of a layer's projection: its A and B, or W in a. -1: there is none. */
struct weights_pair {
    int64_t a, b;
};

struct weights {
    struct ckpt_dir *dir;
    int64_t rank; /* of DOWN and UP */
    float *merge_a; /* A of the pair that is being merged */
    int64_t merge_of;
    struct weights_factor {
        int64_t of; /* W; -1: none */
        float *a, *b;
    } factors[PLAN_NAME_MAX];
};
void weights_init(struct weights *w, struct ckpt_dir *dir, int64_t rank);
void weights_free(struct weights *w);
/* A tensor_rows_fn with a struct weights. */
int weights_rows(void *arg, const struct tensor_item *item, int64_t row0, int64_t nrows, float *out, struct error *err);

/* ---- Hugging Face's layout (hf_export.c, hf_import.c) ---- */

/* Writes the directory `to` (not there, or empty): model-*.safetensors with index, config.json. FULL_RANK and SVD become
 * a LlamaForCausalLM, SVD with its pairs multiplied; COLA a ColaForCausalLM of the public CoLA code (hf.h), which has no
 * grouped key-value heads: those are written once for each query head. ERR_UNSUPPORTED: LAX. dtype: F32 or BF16.
 * max_file: bytes of a file's data, more only for one tensor that is larger. */
MUST_USE int hf_export(const char *from, const char *to, enum dtype dtype, int64_t max_file, struct error *err);
/* The other way: a checkpoint of weights alone, <to>/step-0.a1; its path into out. What it takes: hf_open(). */
MUST_USE int hf_import(const char *from, const char *to, char *out, size_t cap, struct error *err);

/* ---- our own (ckpt_convert.c) ---- */

/* A checkpoint of weights alone, <to>/step-<n>.a1, with n of `from`. rank 0: SVD to FULL_RANK, else FULL_RANK to SVD. */
MUST_USE int ckpt_convert(const char *from, const char *to, int64_t rank, char *out, size_t cap, struct error *err);

/* Writes <to>/step-<n>.a1: weights alone, in one shard, with its manifest last. `spec` is resolved, `items` have the
 * names of its plan's tensors. */
MUST_USE int ckpt_write_weights(const char *to, int64_t step, const Boost__JobSpec *spec,
                                const struct tensor_item *items, size_t n, tensor_rows_fn rows, void *arg, char *out,
                                size_t cap, struct error *err);
/* The resolved job for such a checkpoint's manifest: the model, and nothing that weights do not need. The caller's. */
MUST_USE int weights_spec(const Boost__Model *model, int64_t seq_len, Boost__JobSpec **out, struct error *err);
/* An item for each tensor of the plan, with its name and shape; the caller's to free. */
MUST_USE int plan_items(const struct plan *plan, struct tensor_item **items, size_t *n, struct error *err);

#endif
