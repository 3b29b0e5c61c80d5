/* Files that must survive a power cut, and small path helpers. Every descriptor
 * opened here has O_CLOEXEC. Blocking: never on an event loop for large files. */
#ifndef BOOST_PROTO_BASE_FS_H
#define BOOST_PROTO_BASE_FS_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include "proto/base/buffer.h"
#include "proto/base/error.h"

/* Replaces `path` by `data` so that a crash leaves the old or the new content
 * whole: temporary name in the same directory, fsync, rename, fsync of the
 * directory. */
MUST_USE int fs_write_durable(const char *path, const void *data, size_t len, mode_t mode, struct error *err);
/* As above without the fsyncs: atomic for readers, not durable (a signal between processes). */
MUST_USE int fs_write_atomic(const char *path, const void *data, size_t len, mode_t mode, struct error *err);
/* Appends the whole file to `out`; larger than out->max is an error naming both sizes. */
MUST_USE int fs_read_file(const char *path, struct buffer *out, struct error *err);
/* The same of a regular file only, and no link to one: for names in a directory that somebody else may write.
 * ERR_CORRUPT for anything else; never blocks on a fifo. */
MUST_USE int fs_read_regular(const char *path, struct buffer *out, struct error *err);
/* The file or, through links, what they lead to, opened to be read. ERR_CORRUPT for anything that is no regular file;
 * never blocks on a fifo. *fd -1 when it fails, else the caller's to close. */
MUST_USE int fs_open_linked(const char *path, int *fd, struct error *err);
/* fs_read_file() of such a one. */
MUST_USE int fs_read_linked(const char *path, struct buffer *out, struct error *err);
/* mkdir -p, durable; a component that exists as something else is named in the error. */
MUST_USE int fs_make_dirs(const char *path, mode_t mode, struct error *err);
MUST_USE int fs_sync_dir(const char *path, struct error *err);
/* Removes a directory tree without following links, also none that its owner puts there meanwhile; a missing one is
 * fine. At most FS_MAX_DEPTH levels. */
enum { FS_MAX_DEPTH = 200 };
MUST_USE int fs_remove_tree(const char *path, struct error *err);
bool fs_exists(const char *path);
/* Joins with one '/'; ERR_INVALID when it does not fit. */
MUST_USE int fs_join(char *out, size_t cap, struct error *err, const char *dir, const char *name);
/* The directory that the last word of a path is in: "." of a lone word, "/" of "/a". out: PATH_MAX bytes, which may be
 * `path`; a longer path is cut. */
void fs_parent(char *out, const char *path);
/* Writes all of it, through EINTR and short writes. */
MUST_USE int fs_write_all(int fd, const void *data, size_t len, struct error *err);
/* The directory of the running binary, for finding its siblings. */
MUST_USE int fs_self_dir(char *out, size_t cap, struct error *err);

#endif
