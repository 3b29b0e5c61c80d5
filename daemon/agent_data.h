/* Token files by URL, and a checkpoint to start from: fetched into data.cache_dir before an attempt begins, where ranks
 * then read them as any other file. What lies in the cache is named after its URL and taken for what it is as long as it
 * lies there. Any thread; blocking. */
#ifndef BOOST_DAEMON_AGENT_DATA_H
#define BOOST_DAEMON_AGENT_DATA_H

#include <stdbool.h>

#include "daemon/agent_remote.h"
#include "proto/base/error.h"
#include "proto/job.pb-c.h"

struct data_fetch {
    struct agent_remote by;
    const char *attempts_dir; /* what their orders name stays in the cache */
    char *worker_path;        /* looks into checkpoints */
};

bool data_has_urls(const Boost__JobSpec *spec); /* checkpoint.init_from counts too */
/* What can be said in one try: a URL that makes no sense, does not exist, is refused, or is too large for the cache; a
 * checkpoint that is of another model. */
MUST_USE int data_look(const struct data_fetch *x, const Boost__JobSpec *spec, struct error *err);
/* Fetches what is not there; `init`: checkpoint.init_from too; `tries` of each request (0: the usual). *moved: bytes that
 * travelled. ERR_NOSPACE: the cache is full of what is in use; ERR_INVALID, ERR_NOT_FOUND, ERR_REFUSED, ERR_CORRUPT:
 * trying again would not help. What was cut goes on the next time. */
MUST_USE int data_fetch(const struct data_fetch *x, const Boost__JobSpec *spec, bool init, int tries, int64_t *moved,
                        struct error *err);
/* A copy of the job with files of the cache in the place of its token files' URLs; the caller's, for
 * protobuf_c_message_free_unpacked(). */
MUST_USE int data_local(const Boost__JobSpec *spec, Boost__JobSpec **out, struct error *err);

#endif
