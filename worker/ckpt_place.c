/* ckpt_place.h */
#include "worker/ckpt_place.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/fs.h"
#include "worker/ckpt_dir.h"

/* ---- names ---- */

static bool in_checkpoint(const char *path)
{
    char part[PATH_MAX];
    int64_t step, attempt;
    for (const char *slash = path; slash;) {
        slash = strchr(slash + 1, '/');
        snprintf(part, sizeof part, "%.*s", slash ? (int)(slash - path) : (int)strlen(path), path);
        if (ckpt_dir_parse(part, &step, &attempt))
            return true;
    }
    return false;
}

/* "…/<store id>-<job>": any directory may be called so, therefore only one that holds such a job's checkpoints counts. */
static bool may_be_of_job(const char *dir)
{
    const char *name = strrchr(dir, '/') + 1;
    size_t store = strspn(name, "0123456789abcdef");
    size_t job = name[store] == '-' ? strspn(name + store + 1, "0123456789") : 0;
    return store && job && !name[store + 1 + job];
}

/* ---- what a directory holds ---- */

static bool is_empty(const char *dir)
{
    DIR *d = opendir(dir);
    bool found = false;
    for (struct dirent *e; d && !found && (e = readdir(d));)
        found = strcmp(e->d_name, ".") && strcmp(e->d_name, "..");
    if (d)
        closedir(d);
    return !found;
}

static int not_whole(const char *dir, const char *name, struct error *err)
{
    error_set(err, ERR_REFUSED, "%s holds %s, which is no whole checkpoint: a job is writing it, or has left it", dir,
              name);
    return error_hint(err, "name a directory elsewhere, or remove that one if no job needs it");
}

/* Of a checkpoint in dir. own: only one of the job that dir is named for is in the way. */
static int check_one(const char *dir, const char *name, bool own, struct error *err)
{
    char path[PATH_MAX], job_dir[NAME_MAX + 1];
    json_t *manifest = NULL;
    int rc = fs_join(path, sizeof path, err, dir, name);
    if (!rc)
        rc = ckpt_dir_manifest(path, &manifest, err);
    if (rc == ERR_NOT_FOUND)
        return is_empty(path) ? ERR_OK : not_whole(dir, name, err);
    if (rc == ERR_CORRUPT)
        return not_whole(dir, name, err);
    if (rc)
        return error_context(err, "cannot tell whose checkpoint %s/%s is", dir, name);
    const char *store = json_string_value(json_object_get(manifest, "store_id"));
    json_int_t job = json_integer_value(json_object_get(manifest, "job"));
    snprintf(job_dir, sizeof job_dir, "%s-%" JSON_INTEGER_FORMAT, store ? store : "", job);
    if (job && (!own || !strcmp(strrchr(dir, '/') + 1, job_dir))) {
        rc = error_set(err, ERR_REFUSED, "%s holds %s, a checkpoint of job %" JSON_INTEGER_FORMAT " (%s)", dir, name,
                       job, job_dir);
        error_hint(err, own ? "a job writes and deletes what lies there: name a directory elsewhere"
                            : "a job would take one for another: name a directory elsewhere");
    }
    json_decref(manifest);
    return rc;
}

static int check_all(const char *dir, bool own, struct error *err)
{
    int64_t step, attempt;
    int rc = ERR_OK;
    DIR *d = opendir(dir);
    if (!d)
        return errno == ENOENT ? ERR_OK : error_errno(err, errno, "cannot read %s", dir);
    for (struct dirent *e; !rc && (e = readdir(d));)
        if (ckpt_dir_parse(e->d_name, &step, &attempt))
            rc = check_one(dir, e->d_name, own, err);
    closedir(d);
    return rc;
}

/* ---- both ---- */

int ckpt_place_check(const char *to, struct error *err)
{
    char name[PATH_MAX], parent[PATH_MAX], real[PATH_MAX] = "";
    int64_t step, attempt;
    fs_parent(name, to);
    snprintf(parent, sizeof parent, "%s", name);
    bool there = realpath(parent, real) != NULL, found = there; /* the directory that it is to appear in */
    while (!found && errno == ENOENT && strlen(parent) > 1) {
        fs_parent(parent, parent);
        found = realpath(parent, real) != NULL;
    }
    if (!found)
        real[0] = '\0';
    /* By its name what is not there yet, by where links lead what is. */
    if ((found && in_checkpoint(real)) || in_checkpoint(name)) {
        error_set(err, ERR_REFUSED, "%s lies in the directory of a checkpoint, which is deleted with all that is in it",
                  to);
        return error_hint(err, "name a directory elsewhere");
    }
    int rc = ERR_OK;
    if (there && ckpt_dir_parse(to, &step, &attempt))
        rc = check_all(real, false, err);
    for (; !rc && strlen(real) > 1; fs_parent(real, real))
        if (may_be_of_job(real))
            rc = check_all(real, true, err);
    return rc;
}
