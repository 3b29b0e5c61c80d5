/* The bounded cache of a job's files by URL (data.cache_dir), on this node. Blocking; a cache belongs to one thread at a
 * time.
 *
 *   cache_dir/<24 hex digits of the URL's SHA-256>-<name>     a token file; a directory with the checkpoint of init_from
 *   cache_dir/<the same>.part                                 on its way
 *   cache_dir/<the same>.part.etag                            what it is a part of
 *   cache_dir/<the same>.gone                                 on its way out
 *   cache_dir/.lock                                           held while one fetches or removes */
#ifndef BOOST_DAEMON_AGENT_CACHE_H
#define BOOST_DAEMON_AGENT_CACHE_H

#include <limits.h>
#include <stdbool.h>

#include "daemon/agent_remote.h"
#include "daemon/agent_user.h"
#include "daemon/remote/fetch.h"
#include "daemon/remote/sigv4.h"
#include "proto/base/error.h"
#include "proto/job.pb-c.h"

/* For messages: without what may be a password. */
const char *cache_shown(const char *path);

/* ---- names ---- */

struct cache_item {
    char *url;            /* without its fragment; the caller's to free */
    char sum[SIGV4_HASH]; /* that it has to have; "" = not told */
    char name[160];       /* in the cache */
};
/* ERR_INVALID: no URL that can be fetched; nothing is to be freed then. */
MUST_USE int cache_item_parse(const char *path, struct cache_item *out, struct error *err);
/* The i-th URL of the job, as it stands there, or a path that is none: training files, evaluation files, then
 * checkpoint.init_from. NULL: no more. */
const char *cache_path_at(const Boost__JobSpec *spec, size_t i);

/* ---- the cache ---- */

struct cache {
    const struct agent_remote *by;
    const char *attempts_dir; /* what orders there name stays */
    const Boost__JobSpec *spec;
    struct http *http;
    struct s3 *s3; /* where the job has URLs of a store */
    int64_t max;   /* bytes; 0 = no limit */
    char dir[PATH_MAX];
    struct as_user user;
    bool as_user; /* the thread is the job's user */
    int lock;
};
/* `tries` of each request; 0: as many as usual. `spec` and `by` outlive it; cache_end() whatever comes back. */
MUST_USE int cache_begin(struct cache *c, const struct agent_remote *by, const char *attempts_dir,
                         const Boost__JobSpec *spec, int tries, struct error *err);
/* Takes the user's identity and makes the directory. For all below. */
MUST_USE int cache_enter(struct cache *c, struct error *err);
/* One at a time fetches and removes: waits for the lock, and keeps it until cache_end(). */
MUST_USE int cache_lock(struct cache *c, struct error *err);
/* The thread's own identity meanwhile, for work that takes the user's by itself. */
void cache_own_identity(struct cache *c);
MUST_USE int cache_user_identity(struct cache *c, struct error *err);
void cache_end(struct cache *c);

MUST_USE int cache_look(const struct cache *c, const char *url, struct fetch_info *out, struct error *err);
/* A small one, with a NUL behind it. */
MUST_USE int cache_text(const struct cache *c, const char *url, struct buffer *out, struct error *err);

struct cache_file {
    const char *url, *sum; /* as of an item */
    const char *path;      /* where it belongs, below the cache's directory */
    bool keep_etag;        /* beside it, in <path>.etag: so that a later look can tell whether it is still the same */
    struct fetch_info info;
};
/* All of them, those that are there (and the same, with keep_etag) not again; takes the lock where one is missing.
 * *moved: bytes that travelled; *at: the one that an error is about. */
MUST_USE int cache_fetch(struct cache *c, struct cache_file *files, size_t n, int64_t *moved, size_t *at,
                         struct error *err);
/* Is this whole and the user's (or root's)? It counts as used now. */
bool cache_has(const struct cache *c, const char *path, bool directory);
int cache_too_large(const struct cache *c, const char *url, int64_t bytes, struct error *err);
/* What was not found on the disk is no file of the job's that is missing, but a cache that somebody empties meanwhile:
 * ERR_IO in place of ERR_NOT_FOUND, so that the job is tried again. */
int cache_of_disk(int rc, struct error *err);

#endif
