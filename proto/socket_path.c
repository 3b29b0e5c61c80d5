/* socket_path.h */
#include "proto/socket_path.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/base/fs.h"

#define SYSTEM_SOCKET "/run/boost/boostd.sock"

static bool is_set(const char *text)
{
    return text && *text;
}

static int put(char out[SOCKET_PATH_MAX], const char *dir, const char *path, const char *origin, struct error *err)
{
    size_t len = strlen(dir) + strlen(path);
    if (len >= SOCKET_PATH_MAX) {
        error_set(err, ERR_INVALID, "socket path from %s has %zu bytes, the system's limit is %d: %s%s", origin, len,
                  SOCKET_PATH_MAX - 1, dir, path);
        return error_hint(err, "choose a shorter directory, e.g. --socket /tmp/boost/boostd.sock");
    }
    snprintf(out, SOCKET_PATH_MAX, "%s%s", dir, path);
    return ERR_OK;
}

int socket_path_find(enum socket_side side, const char *option, const char *configured, char out[SOCKET_PATH_MAX],
                     struct error *err)
{
    const char *env = getenv("BOOST_SOCKET");
    if (is_set(option))
        return put(out, "", option, "--socket", err);
    if (is_set(configured))
        return put(out, "", configured, "the configuration", err);
    if (is_set(env))
        return put(out, "", env, "$BOOST_SOCKET", err);
    const char *runtime = getenv("XDG_RUNTIME_DIR");
    if (!is_set(runtime) || (side == SOCKET_LISTEN && geteuid() == 0))
        return put(out, "", SYSTEM_SOCKET, "the default", err);
    int rc = put(out, runtime, "/boost/boostd.sock", "$XDG_RUNTIME_DIR", err);
    if (rc == ERR_OK && side == SOCKET_CONNECT && !fs_exists(out) && fs_exists(SYSTEM_SOCKET))
        rc = put(out, "", SYSTEM_SOCKET, "the default", err);
    return rc;
}
