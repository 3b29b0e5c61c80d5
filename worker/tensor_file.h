/* Safetensors files of any size, written in blocks of rows. One thread. */
#ifndef BOOST_WORKER_TENSOR_FILE_H
#define BOOST_WORKER_TENSOR_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "proto/base/dtype.h"
#include "proto/base/error.h"
#include "worker/safetensors.h"

enum { TENSOR_NAME = 160 };
/* A matrix [rows, cols], or with dims 1 a vector [cols] (rows 1). */
struct tensor_item {
    char name[TENSOR_NAME];
    int dims;
    int64_t rows, cols;
    int64_t source[2]; /* the maker's own: what it is made of */
    int how;           /* likewise */
};
/* Makes rows [row0, row0 + nrows) of items[i], row-major. Rows are asked for in ascending order. */
typedef int (*tensor_rows_fn)(void *arg, const struct tensor_item *item, int64_t row0, int64_t nrows, float *out,
                              struct error *err);

struct tensor_written {
    int64_t bytes;
    uint32_t crc32c;
};
/* A durable file with these tensors in their order, F32 or BF16 (rounded to nearest). ERR_NOSPACE and others leave none
 * of that name. Memory: some 32 MiB, or one row. */
MUST_USE int tensor_file_write(const char *path, const struct tensor_item *items, size_t n, enum dtype dtype,
                               const struct safetensors_meta *meta, size_t n_meta, tensor_rows_fn rows, void *arg,
                               struct tensor_written *out, struct error *err);

#endif
