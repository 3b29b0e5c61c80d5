/* Hugging Face's layout, as hf_export.c writes it and hf_import.c reads it: names, and config.json. */
#ifndef BOOST_WORKER_HF_H
#define BOOST_WORKER_HF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/dtype.h"
#include "proto/base/error.h"
#include "proto/job.pb-c.h"
#include "worker/plan/plan.h"

struct json_t;

/* "model.layers.3.self_attn.q_proj.weight"; of a pair, in the public CoLA code's words, ".cola_a" [in, rank] and
 * ".cola_b" [rank, out], which are A and B transposed. */
void hf_name(const struct plan_tensor *t, char *out, size_t cap);

/* The config.json of a model; NULL: out of memory. The caller's. FULL_RANK, and SVD with its pairs multiplied, as a
 * LlamaForCausalLM, whose hidden_act is φ. COLA as a ColaForCausalLM: there hidden_act is the latents' σ, and
 * only_lr_act says that φ is the identity; it has as many key-value heads as query heads. */
struct json_t *hf_config_write(const struct plan *p, enum dtype dtype);
/* What config.json says: fields of m (no pointers), seq_len from the longest position; m->rank only where it is named
 * there. ERR_UNSUPPORTED and ERR_INVALID name the field. */
MUST_USE int hf_config_read(const struct json_t *config, Boost__Model *m, int64_t *seq_len, struct error *err);

/* ---- a directory to read (hf_source.c). One thread. ---- */

struct hf_source;
/* Whether it is one of these, and no checkpoint of ours. */
bool hf_is_dir(const char *dir);
/* Opens all files. Each tensor has to be one of the model, and each of the model there, of its shape; but a head beside tied
 * embeddings may be, if it is the same, and so may the rotary frequencies that older files hold. The messages name file,
 * tensor and mend. */
MUST_USE int hf_open(const char *dir, struct hf_source **out, struct error *err);
void hf_close(struct hf_source *s);
/* Its model as a resolved job, and the plan of that on one rank; the source's. */
const Boost__JobSpec *hf_spec(const struct hf_source *s);
const struct plan *hf_plan(const struct hf_source *s);
/* The slice [nrows, ncols] at (row0, col0) of a tensor, row-major, as fp32: F32, F16 and BF16 exactly. */
MUST_USE int hf_read(struct hf_source *s, const struct plan_tensor *slice, float *out, struct error *err);

#endif
