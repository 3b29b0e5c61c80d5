/* The way of this node to object stores and web servers: address and keys from the agent's configuration. Any thread;
 * blocking. */
#ifndef BOOST_DAEMON_AGENT_REMOTE_H
#define BOOST_DAEMON_AGENT_REMOTE_H

#include <stdatomic.h>
#include <sys/types.h>

#include "daemon/remote/s3.h"
#include "proto/base/error.h"
#include "proto/config.pb-c.h"

/* `stop`: see http.h, outlives what is made from it. */
struct http_options agent_http_options(const Boost__AgentConfig *config, const atomic_bool *stop);
/* The keys are those of `uid`, or the site's (s3_credentials), or the environment's of an agent that runs as this user.
 * Called before the thread takes the user's identity: the site's file is the agent's own. A file of the user's home is
 * read as the user, whatever it is a link to. ERR_NOT_FOUND: there are none. */
MUST_USE int agent_s3_credentials(const Boost__AgentConfig *config, uid_t uid, gid_t gid, struct s3_credentials *out,
                                  struct error *err);
/* `tries` of each request, 0: HTTP_TRIES. */
MUST_USE int agent_s3_open(const Boost__AgentConfig *config, uid_t uid, gid_t gid, const atomic_bool *stop, int tries,
                           struct s3 **out, struct error *err);

#endif
