/* The safetensors container: u64 little-endian header length, a JSON header
 * ({"name": {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {text: text}}),
 * then the data, tensors row-major without holes. Offsets count from the end of the header.
 * https://github.com/huggingface/safetensors (format description). */
#ifndef BOOST_WORKER_SAFETENSORS_H
#define BOOST_WORKER_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "proto/base/buffer.h"
#include "proto/base/dtype.h"
#include "proto/base/error.h"

enum {
    SAFETENSORS_ALIGN = 64, /* data begins at a multiple of this in files written here */
    SAFETENSORS_MAX_HEADER = 100 << 20,
    SAFETENSORS_MAX_DIMS = 8,
};

struct safetensors_entry {
    const char *name;
    enum dtype dtype;
    int dims;
    int64_t shape[SAFETENSORS_MAX_DIMS];
    uint64_t begin, end;
};
struct safetensors_meta {
    const char *key;
    const char *value;
};

/* Appends length prefix and header, padded with spaces so that together they are a multiple of
 * SAFETENSORS_ALIGN and at least `min_bytes`. Names and keys are printable ASCII without quote and backslash, values
 * any ASCII (ERR_INVALID). Offsets are the caller's. */
MUST_USE int safetensors_header(struct buffer *out, const struct safetensors_entry *entries, size_t n,
                                const struct safetensors_meta *meta, size_t n_meta, size_t min_bytes,
                                struct error *err);

/* A file being read. Every message names it. */
struct safetensors_file {
    char *path;
    int fd;
    uint64_t data_at;                  /* file offset of the data */
    struct safetensors_entry *entries; /* by offset */
    size_t n;
    struct safetensors_meta *meta;
    size_t n_meta;
    struct json_t *json; /* owns the texts */
};
/* Reads and checks the header: ERR_CORRUPT unless every tensor has a known dtype, a shape whose size
 * is its range, and the ranges tile the data exactly to the end of the file. */
MUST_USE int safetensors_open(struct safetensors_file *f, const char *path, struct error *err);
void safetensors_close(struct safetensors_file *f);
const struct safetensors_entry *safetensors_find(const struct safetensors_file *f, const char *name);
const char *safetensors_meta(const struct safetensors_file *f, const char *key); /* NULL: not there */
/* Reads a tensor of this file, end - begin bytes. */
MUST_USE int safetensors_read(const struct safetensors_file *f, const struct safetensors_entry *e, void *out,
                              struct error *err);
/* Bytes [offset, offset + bytes) of the open file `path`, counted from its start; ERR_CORRUPT where it ends before. */
MUST_USE int safetensors_read_at(int fd, const char *path, uint64_t offset, uint64_t bytes, void *out,
                                 struct error *err);

#endif
