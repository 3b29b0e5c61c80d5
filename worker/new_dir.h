/* A directory that appears under its name when it is complete. */
#ifndef BOOST_WORKER_NEW_DIR_H
#define BOOST_WORKER_NEW_DIR_H

#include <limits.h>

#include "proto/base/error.h"

/* Made beside `to`, as <to>.partial-XXXXXX, which is locked while somebody works on it: what one that was killed has left
 * goes when the next begins. */
struct new_dir {
    char temp[PATH_MAX]; /* empty: there is none */
    const char *to;      /* the caller's */
    int fd;              /* of temp, or -1 */
};
/* ERR_REFUSED: no place for it (ckpt_place_check()), or something is at `to`, which may not be there or be an empty
 * directory. To be followed by new_dir_end(), also where it fails. */
MUST_USE int new_dir_begin(struct new_dir *d, const char *to, struct error *err);
/* rc: what went before; the directory goes away again unless that is ERR_OK. */
MUST_USE int new_dir_end(struct new_dir *d, int rc, struct error *err);

#endif
