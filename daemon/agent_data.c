/* agent_data.h */
#include "daemon/agent_data.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/agent_cache.h"
#include "daemon/agent_init.h"
#include "proto/base/fs.h"
#include "proto/jobfile.h"
#include "proto/reflect.h"

/* The i-th file of the job, training files first; NULL: no more. */
static Boost__TokenFile *file_at(const Boost__JobSpec *spec, size_t i)
{
    const Boost__Data *d = spec->data;
    if (!d || i >= d->n_train + d->n_eval)
        return NULL;
    return i < d->n_train ? d->train[i] : d->eval[i - d->n_train];
}

static bool is_file_url(const Boost__JobSpec *spec, size_t i)
{
    return jobfile_is_url(file_at(spec, i)->path);
}

bool data_has_urls(const Boost__JobSpec *spec)
{
    for (size_t i = 0; spec && cache_path_at(spec, i); i++)
        if (jobfile_is_url(cache_path_at(spec, i)))
            return true;
    return false;
}

int data_local(const Boost__JobSpec *spec, Boost__JobSpec **out, struct error *err)
{
    Boost__JobSpec *copy = (Boost__JobSpec *)reflect_clone(&spec->base);
    int rc = copy ? ERR_OK : error_set(err, ERR_NOMEM, "no memory for a job");
    for (size_t i = 0; !rc && file_at(copy, i); i++) {
        Boost__TokenFile *f = file_at(copy, i);
        struct cache_item item = {0};
        char *path = NULL;
        if (!jobfile_is_url(f->path))
            continue;
        rc = cache_item_parse(f->path, &item, err);
        if (!rc && asprintf(&path, "%s/%s", copy->data->cache_dir, item.name) < 0)
            rc = error_set(err, ERR_NOMEM, "no memory for a path");
        if (!rc) {
            free(f->path);
            f->path = path;
        }
        free(item.url);
    }
    if (rc && copy)
        protobuf_c_message_free_unpacked(&copy->base, NULL);
    *out = rc ? NULL : copy;
    return rc;
}

/* ---- the token files of a job ---- */

static bool seen_before(const Boost__JobSpec *spec, size_t i)
{
    for (size_t k = 0; k < i; k++)
        if (file_at(spec, k)->path && !strcmp(file_at(spec, k)->path, file_at(spec, i)->path))
            return true;
    return false;
}

static void name_file(const Boost__JobSpec *spec, size_t i, struct error *err)
{
    bool train = i < spec->data->n_train;
    error_context(err, "data.%s[%zu] %.300s", train ? "train" : "eval", train ? i : i - spec->data->n_train,
                  cache_shown(file_at(spec, i)->path));
}

static int look_at(const struct cache *c, const char *path, int64_t *sum, struct error *err)
{
    struct cache_item item;
    struct fetch_info info;
    int rc = cache_item_parse(path, &item, err);
    if (rc)
        return rc;
    rc = cache_look(c, item.url, &info, err);
    *sum += !rc && info.bytes > 0 ? info.bytes : 0;
    if (!rc && c->max && *sum > c->max) {
        error_set(err, ERR_INVALID, "with the files before it these are %" PRId64 " MiB, more than "
                  "data.cache_max_mib = %" PRId64, (*sum + (1 << 20) - 1) >> 20, c->max >> 20);
        rc = error_hint(err, "raise data.cache_max_mib, or set it to 0 for no limit");
    }
    free(item.url);
    return rc;
}

int data_look(const struct data_fetch *x, const Boost__JobSpec *spec, struct error *err)
{
    struct cache c;
    int64_t sum = 0;
    int rc = cache_begin(&c, &x->by, x->attempts_dir, spec, 1, err);
    for (size_t i = 0; !rc && file_at(spec, i); i++) {
        if (!is_file_url(spec, i) || seen_before(spec, i))
            continue;
        rc = look_at(&c, file_at(spec, i)->path, &sum, err);
        if (rc)
            name_file(spec, i, err);
    }
    if (!rc)
        rc = init_look(&c, sum, err);
    cache_end(&c);
    return rc;
}

static int fetch_files(struct cache *c, int64_t *moved, struct error *err)
{
    const Boost__JobSpec *spec = c->spec;
    size_t n = 0, cap = 0, at = 0;
    while (file_at(spec, cap))
        cap++;
    struct cache_item *items = calloc(cap + 1, sizeof *items);
    struct cache_file *files = calloc(cap + 1, sizeof *files);
    size_t *which = calloc(cap + 1, sizeof *which);
    char **paths = calloc(cap + 1, sizeof *paths);
    int rc = items && files && which && paths ? ERR_OK : error_set(err, ERR_NOMEM, "no memory for a list of files");
    for (size_t i = 0; !rc && i < cap; i++) {
        if (!is_file_url(spec, i) || seen_before(spec, i))
            continue;
        which[n] = i;
        rc = cache_item_parse(file_at(spec, i)->path, &items[n], err);
        if (!rc && asprintf(&paths[n], "%s/%s", c->dir, items[n].name) < 0) {
            paths[n] = NULL; /* whatever a call that failed has left in it */
            rc = error_set(err, ERR_NOMEM, "no memory for a path");
        }
        if (rc) {
            name_file(spec, i, err);
            break;
        }
        files[n] = (struct cache_file){.url = items[n].url, .sum = items[n].sum, .path = paths[n]};
        n++;
    }
    if (!rc && n && (rc = cache_fetch(c, files, n, moved, &at, err)))
        name_file(spec, which[at], err);
    for (size_t i = 0; items && paths && i <= n && i < cap; i++) {
        free(items[i].url);
        free(paths[i]);
    }
    free(items);
    free(files);
    free(which);
    free(paths);
    return rc;
}

int data_fetch(const struct data_fetch *x, const Boost__JobSpec *spec, bool init, int tries, int64_t *moved,
               struct error *err)
{
    struct cache c;
    *moved = 0;
    int rc = cache_begin(&c, &x->by, x->attempts_dir, spec, tries, err);
    if (!rc)
        rc = cache_enter(&c, err);
    if (!rc)
        rc = fetch_files(&c, moved, err);
    if (!rc && init)
        rc = init_fetch(&c, x->worker_path, moved, err);
    cache_end(&c);
    return rc;
}
