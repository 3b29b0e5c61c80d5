/* The way of this node to object stores and web servers: address and keys from the agent's configuration. Any thread;
 * blocking. */
#ifndef BOOST_DAEMON_AGENT_REMOTE_H
#define BOOST_DAEMON_AGENT_REMOTE_H

#include <stdatomic.h>
#include <sys/types.h>

#include "daemon/remote/s3.h"
#include "proto/base/error.h"
#include "proto/config.pb-c.h"

/* For whom, and how. Outlives what is made from it. */
struct agent_remote {
    const Boost__AgentConfig *config;
    const atomic_bool *stop;        /* see http.h */
    struct http_progress *progress; /* likewise; may be NULL */
    uid_t uid;                      /* not yet taken by the thread */
    gid_t gid;
};

/* `tries` of each request, 0: HTTP_TRIES; here and below. */
struct http_options agent_http_options(const struct agent_remote *r, int tries);
/* The keys are those of `uid`, or the site's (s3_credentials), or the environment's of an agent that runs as this user.
 * Called before the thread takes the user's identity: the site's file is the agent's own. A file of the user's home is
 * read as the user, whatever it is a link to. ERR_NOT_FOUND: there are none. */
MUST_USE int agent_s3_credentials(const Boost__AgentConfig *config, uid_t uid, gid_t gid, struct s3_credentials *out,
                                  struct error *err);
MUST_USE int agent_s3_open(const struct agent_remote *r, int tries, struct s3 **out, struct error *err);
/* Takes the keys that are in this process's environment out of it, so that nothing it runs has them: once, before there
 * are threads. */
void agent_remote_begin(void);

#endif
