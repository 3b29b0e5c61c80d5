/* checkpoint.init_from by URL: a checkpoint's directory (.../step-<n>.a<k>, as a mirror has it), or one of Hugging Face's
 * transformers (config.json and *.safetensors). Fetched into the cache of the node, checked, and kept
 * there like a token file. Blocking. */
#ifndef BOOST_DAEMON_AGENT_INIT_H
#define BOOST_DAEMON_AGENT_INIT_H

#include "daemon/agent_cache.h"

/* Where the checkpoint lies once it is fetched; *has: the job starts from a URL at all. */
MUST_USE int init_local(const Boost__JobSpec *spec, char out[PATH_MAX], bool *has, struct error *err);
/* That it is there, of this job's model, and fits into the cache beside `bytes`. Nothing where init_from is no URL, here
 * and below. */
MUST_USE int init_look(const struct cache *c, int64_t bytes, struct error *err);
/* The cache is entered. */
MUST_USE int init_fetch(struct cache *c, char *worker_path, int64_t *moved, struct error *err);

#endif
