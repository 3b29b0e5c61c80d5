/* What a rank leaves in its run directory, and the record of its end, rank-<r>.exit.
 *
 * The directory belongs to the job's user, and readers may be root: nothing here follows
 * a link, waits on a fifo or maps a page that the user could cut short. */
#ifndef BOOST_DAEMON_KEEPER_EXIT_H
#define BOOST_DAEMON_KEEPER_EXIT_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/buffer.h"
#include "proto/base/error.h"
#include "proto/rankfiles.h"
#include "proto/worker.pb-c.h"

/* What is known of an end apart from the rank's own files. */
struct rank_exit {
    int rank;
    int64_t seq;
    int64_t wall_ns;
    bool lost;  /* the end was not seen: `status` means nothing */
    int status; /* as of waitpid */
    bool killed_by_us;
    bool oom;
    const char *error; /* why it never started; NULL = look into its DONE record */
};

/* Adds what the rank left (DONE record, status page, `tail`) and writes <run_dir>/rank-<r>.exit durably. On a
 * full disk <run_dir>/keeper.reserve is given up and the log tail left out before it is an error (ERR_NOSPACE). */
MUST_USE int rank_exit_write(const Boost__AttemptStart *start, const struct rank_exit *end, const struct buffer *tail,
                             struct error *err);
/* Room on the disk for rank_exit_write of `ranks` ranks; failure only loses that reserve. */
MUST_USE int rank_exit_reserve(const char *run_dir, int ranks, struct error *err);
/* A regular file, and no link to one. */
bool rank_file_regular(const char *path);
/* A copy of the status page; false when there is none. */
bool rank_status_read(const char *run_dir, int rank, struct rank_status *out);
/* The rank's DONE record, when there is a valid one of this attempt; the caller frees it. */
Boost__DoneRecord *rank_done_read(const Boost__AttemptStart *start, int rank);

#endif
