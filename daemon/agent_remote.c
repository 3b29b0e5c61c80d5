/* agent_remote.h */
#include "daemon/agent_remote.h"

#include <limits.h>
#include <pwd.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "daemon/agent_user.h"

enum { PASSWD_TEXT = 16 << 10, CONNECT_MS = 10000 };
static const char default_file[] = "~/.config/boost/s3.keys";

struct http_options agent_http_options(const Boost__AgentConfig *config, const atomic_bool *stop)
{
    return (struct http_options){
        .stop = stop, .stall_ms = config->s3_stall_ms, .connect_ms = CONNECT_MS, .ca_file = config->s3_ca};
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
    if (rc == ERR_NOT_FOUND && uid == geteuid() && !s3_credentials_environment(out, NULL))
        return ERR_OK;
    if (rc == ERR_NOT_FOUND)
        error_hint(err, "write aws_access_key_id = ... and aws_secret_access_key = ... into %s, mode 0600; "
                        "s3_credentials of agent.conf names another file", file);
    return rc;
}

int agent_s3_open(const Boost__AgentConfig *config, uid_t uid, gid_t gid, const atomic_bool *stop, int tries,
                  struct s3 **out, struct error *err)
{
    struct s3_options o = {.http = agent_http_options(config, stop), .endpoint = config->s3_endpoint,
                           .region = config->s3_region, .path_style = config->s3_path_style,
                           .part_bytes = (int64_t)config->s3_part_kib << 10};
    o.http.tries = tries;
    int rc = agent_s3_credentials(config, uid, gid, &o.credentials, err);
    if (!rc)
        rc = s3_open(&o, out, err);
    s3_credentials_wipe(&o.credentials);
    return rc;
}
