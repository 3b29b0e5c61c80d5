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

#endif
