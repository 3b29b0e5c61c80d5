/* Private to checkpoint.c and restore.c: what a shard's parts are called. */
#ifndef BOOST_WORKER_CHECKPOINT_INTERNAL_H
#define BOOST_WORKER_CHECKPOINT_INTERNAL_H

#include "proto/base/number.h"
#include "worker/checkpoint.h"

enum {
    SHARD_KINDS = 3,
    SHARD_NAME_BYTES = PLAN_NAME_MAX + 2,
    SHARD_VALUE_BYTES = 128, /* of a metadata value, but for the choices and the data */
    SHARD_CONSTANTS = 4,
};
extern const enum state_kind shard_kinds[SHARD_KINDS];

/* What of the model no shape tells: the metadata "model.rope_theta" = "10000" and the like. */
struct shard_constant {
    const char *key;
    char value[NUMBER_TEXT];
};
/* The count of them. */
int shard_constants(const struct plan *p, struct shard_constant out[SHARD_CONSTANTS]);
/* Of the file that a rank writes. */
void shard_file_name(char out[64], int rank, int world);
/* Of a parameter's entry of the given kind: name, name.m, name.v. */
void shard_entry_name(char out[SHARD_NAME_BYTES], const char *name, int kind);
/* Where a slice lies: "rows,cols,row0,col0". */
void shard_slice_text(char *out, size_t cap, const struct plan_tensor *t);

#endif
