/* Private to proto/tokenfile*.c: where the ids lie in a file that has a header or an index. */
#ifndef BOOST_PROTO_TOKENFILE_FORMATS_H
#define BOOST_PROTO_TOKENFILE_FORMATS_H

#include <stddef.h>

#include "proto/tokenfile.h"

/* Opens a regular file for reading without ever blocking on a device. */
MUST_USE int tokenfile_open_regular(const char *path, int *fd, int64_t *bytes, struct error *err);
MUST_USE int tokenfile_read(int fd, const char *path, void *out, size_t bytes, int64_t offset, struct error *err);

/* f->fd, path and bytes are set; these find token_bytes, is_signed, start and tokens. */
MUST_USE int tokenfile_llmc(struct token_file *f, struct error *err);
MUST_USE int tokenfile_megatron(struct token_file *f, const char *index_path, struct error *err);

#endif
