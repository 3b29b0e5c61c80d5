/* agent_remote.h */
#include "daemon/agent_remote.h"

#include <limits.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/agent_user.h"

enum { PASSWD_TEXT = 16 << 10, CONNECT_MS = 10000 };
static const char default_file[] = "~/.config/boost/s3.keys";

/* Of the environment; without a key: there were none, or what was there is none (`environment_rc`). */
static struct s3_credentials environment;
static struct error environment_err;
static int environment_rc = ERR_NOT_FOUND;

void agent_remote_begin(void)
{
    environment_rc = s3_credentials_environment(&environment, &environment_err);
    unsetenv("AWS_ACCESS_KEY_ID");
    unsetenv("AWS_SECRET_ACCESS_KEY");
    unsetenv("AWS_SESSION_TOKEN");
}

struct http_options agent_http_options(const struct agent_remote *r, int tries)
{
    return (struct http_options){.stop = r->stop, .stall_ms = r->config->s3_stall_ms, .connect_ms = CONNECT_MS,
                                 .ca_file = r->config->s3_ca, .tries = tries, .progress = r->progress};
}

/* "~/name" of the user; false: no home, or too long. */
static bool in_home(uid_t uid, const char *name, char out[PATH_MAX])
{
    struct passwd entry, *found = NULL;
    char text[PASSWD_TEXT];
    if (getpwuid_r(uid, &entry, text, sizeof text, &found) || !found)
        return false;
    return snprintf(out, PATH_MAX, "%s/%s", entry.pw_dir, name + 2) < PATH_MAX;
}

static int of_user(const char *name, uid_t uid, gid_t gid, struct s3_credentials *out, struct error *err)
{
    char path[PATH_MAX];
    struct as_user user;
    if (!in_home(uid, name, path))
        return error_set(err, ERR_NOT_FOUND, "uid %u has no home directory on this node", (unsigned)uid);
    int rc = as_user_begin(&user, uid, gid, err);
    if (rc)
        return rc;
    rc = s3_credentials_file(path, uid, out, err);
    as_user_end(&user);
    return rc;
}

int agent_s3_credentials(const Boost__AgentConfig *config, uid_t uid, gid_t gid, struct s3_credentials *out,
                         struct error *err)
{
    const char *file = *config->s3_credentials ? config->s3_credentials : default_file;
    int rc = file[0] == '~' ? of_user(file, uid, gid, out, err) : s3_credentials_file(file, geteuid(), out, err);
    if (rc == ERR_NOT_FOUND && uid == geteuid() && environment_rc != ERR_NOT_FOUND) {
        *out = environment;
        if (environment_rc && err)
            *err = environment_err;
        return environment_rc;
    }
    if (rc == ERR_NOT_FOUND)
        error_hint(err, "write aws_access_key_id = ... and aws_secret_access_key = ... into %s, mode 0600; "
                        "s3_credentials of agent.conf names another file", file);
    return rc;
}

int agent_s3_open(const struct agent_remote *r, int tries, struct s3 **out, struct error *err)
{
    const Boost__AgentConfig *config = r->config;
    struct s3_options o = {.http = agent_http_options(r, tries), .endpoint = config->s3_endpoint,
                           .region = config->s3_region, .path_style = config->s3_path_style,
                           .part_bytes = (int64_t)config->s3_part_kib << 10};
    int rc = agent_s3_credentials(config, r->uid, r->gid, &o.credentials, err);
    if (!rc)
        rc = s3_open(&o, out, err);
    s3_credentials_wipe(&o.credentials);
    return rc;
}
