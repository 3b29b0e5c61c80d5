/* Keys of an S3-compatible store: from a file that only its owner can read, or from the environment. They are never
 * part of a message, a log line or a command line. */
#ifndef BOOST_DAEMON_REMOTE_CREDENTIALS_H
#define BOOST_DAEMON_REMOTE_CREDENTIALS_H

#include <stdbool.h>
#include <sys/types.h>

#include "proto/base/error.h"

struct s3_credentials {
    char access_key[130];
    char secret_key[260];
    char token[4100]; /* of temporary ones; "" = none */
};

/* Lines "aws_access_key_id = ...", "aws_secret_access_key = ..." and perhaps "aws_session_token = ..."; others, and
 * sections, are passed over. Has to be a regular file of `owner` (or root) that neither group nor others can touch:
 * else ERR_REFUSED. ERR_NOT_FOUND: there is none. Read with the calling thread's identity. */
MUST_USE int s3_credentials_file(const char *path, uid_t owner, struct s3_credentials *out, struct error *err);
/* AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN of this process. */
MUST_USE int s3_credentials_environment(struct s3_credentials *out, struct error *err);
void s3_credentials_wipe(struct s3_credentials *c);

#endif
