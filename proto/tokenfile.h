/* Files of token ids, as the worker reads them and as the agent checks them before a job starts.
 *
 * | format   | what lies in the file                                                              |
 * |----------|------------------------------------------------------------------------------------|
 * | TEXT     | bytes, each a token                                                                |
 * | U16, U32 | little-endian ids and nothing else                                                 |
 * | LLMC     | a shard of llm.c: 256 int32 (magic, version, number of tokens, zeros), then ids.   |
 * |          | Magic 20240520 version 1: u16; magic 20240801 version 7: u32                       |
 * | MEGATRON | ids in X.bin, described by X.idx: "MMIDIDX\0\0", u64 version 1, u8 type of an id   |
 * |          | (1 u8, 4 i32, 8 u16), u64 sequences, u64 document marks, i32 lengths, i64 byte     |
 * |          | offsets, i64 marks. Either name, or X alone, names the pair. Its tokens are those  |
 * |          | of X.bin in order: the index has to cover that file without gap or overlap         |
 *
 * A file is n windows of s+1 tokens at stride s (neighbours share one token; the ragged end is
 * dropped). Files are read with pread at 64-bit offsets, never mapped: a file that shrinks under
 * us is an error with a text. Any thread, one at a time a file. */
#ifndef BOOST_PROTO_TOKENFILE_H
#define BOOST_PROTO_TOKENFILE_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/error.h"
#include "proto/job.pb-c.h"

struct token_file {
    char *path;                  /* of the ids: X.bin of a MEGATRON pair */
    int fd;                      /* -1: rests until the next read */
    Boost__Format__Value format; /* never AUTO */
    int token_bytes;             /* 1, 2 or 4; little-endian */
    bool is_signed;
    int64_t start; /* byte of token 0 */
    int64_t bytes; /* of the file */
    int64_t tokens;
    int64_t windows;
    int64_t s;     /* tokens of a window without the last target */
    int64_t vocab; /* ids at or above are an error */
};

/* What a name says under AUTO: U16 for .u16, U32 for .u32, TEXT for others. AUTO for .bin and .idx, which
 * only the node can decide: MEGATRON for .idx and for a .bin with its .idx beside, else LLMC. Pure. */
Boost__Format__Value token_format_of_name(const char *path);

/* ERR_INVALID: not a regular file, cut short, at odds with its header or index, shorter than one
 * window. ERR_UNSUPPORTED: a known kind of file that is not read. Messages name file and byte. */
MUST_USE int token_file_open(struct token_file *f, const char *path, Boost__Format__Value format, int64_t s,
                             int64_t vocab, struct error *err);
void token_file_close(struct token_file *f);
/* Gives the descriptor back; the next read opens the file again, and refuses one of another size. */
void token_file_rest(struct token_file *f);

/* The s+1 tokens of a window. ERR_INVALID names file, token, byte and id when an id is
 * outside the vocabulary, and says so when the file has shrunk. */
MUST_USE int token_file_window(struct token_file *f, int64_t window, int32_t *out, struct error *err);

#endif
