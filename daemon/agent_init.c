/* agent_init.h */
#include "daemon/agent_init.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/agent_checkpoint.h"
#include "daemon/agent_preflight.h"
#include "daemon/agent_tool.h"
#include "proto/base/fs.h"
#include "proto/jobfile.h"
#include "proto/manifest.h"
#include "worker/plan/plan.h"

enum { MANIFEST_ARENA = 256 << 20, FILES_MAX = 4096 };
static const char index_name[] = "model.safetensors.index.json", single_name[] = "model.safetensors";

struct init {
    struct cache_item item;
    const char *step; /* "step-<n>.a<k>", of the URL; NULL: it is one of Hugging Face's */
    int64_t step_n;
    int attempt;
    bool weights_only;
};

static const Boost__InitFrom *from_of(const Boost__JobSpec *spec)
{
    const Boost__InitFrom *from = spec->checkpoint ? spec->checkpoint->init_from : NULL;
    return from && jobfile_is_url(from->path) ? from : NULL;
}

static int parse(const Boost__JobSpec *spec, struct init *out, struct error *err)
{
    const Boost__InitFrom *from = from_of(spec);
    *out = (struct init){.weights_only = from->weights_only};
    int rc = cache_item_parse(from->path, &out->item, err);
    if (!rc && *out->item.sum) {
        error_set(err, ERR_INVALID, "a checkpoint has no checksum of its own");
        rc = error_hint(err, "leave #sha256= out: its manifest holds those of its files");
    }
    const char *last = rc ? NULL : strrchr(out->item.url, '/') + 1;
    if (!rc && checkpoint_parse_name(last, &out->step_n, &out->attempt))
        out->step = last;
    return rc;
}

int init_local(const Boost__JobSpec *spec, char out[PATH_MAX], bool *has, struct error *err)
{
    struct init x = {0};
    *has = from_of(spec) != NULL;
    if (!*has)
        return ERR_OK;
    int rc = parse(spec, &x, err);
    if (!rc && snprintf(out, PATH_MAX, "%s/%s%s%s", spec->data->cache_dir, x.item.name, x.step ? "/" : "",
                        x.step ? x.step : "") >= PATH_MAX)
        rc = error_set(err, ERR_INVALID, "data.cache_dir: path too long");
    free(x.item.url);
    return rc;
}

static char *url_of(const struct init *x, const char *file, struct error *err)
{
    char *out = NULL;
    if (asprintf(&out, "%s/%s", x->item.url, file) < 0) {
        error_set(err, ERR_NOMEM, "no memory for a URL");
        return NULL;
    }
    return out;
}

/* The text of one of its files. */
static int text_of(const struct cache *c, const struct init *x, const char *file, struct buffer *out, struct error *err)
{
    char *url = url_of(x, file, err);
    int rc = url ? cache_text(c, url, out, err) : ERR_NOMEM;
    free(url);
    return rc ? error_context(err, "%s", file) : ERR_OK;
}

/* ---- which files ---- */

struct list {
    char **names; /* [n], the arena's, with `bytes` where they are known */
    int64_t *bytes;
    size_t n;
};

static int make_list(struct list *l, size_t n, struct arena *mem, struct error *err)
{
    l->n = 0;
    l->names = arena_alloc(mem, (n + 1) * sizeof *l->names);
    l->bytes = arena_alloc(mem, (n + 1) * sizeof *l->bytes);
    return l->names && l->bytes ? ERR_OK : error_set(err, ERR_NOMEM, "no memory for a list of files");
}

static int list_add(struct list *l, const char *name, int64_t bytes, struct arena *mem, struct error *err)
{
    if (!name || !*name || *name == '.' || strchr(name, '/'))
        return error_set(err, ERR_CORRUPT, "'%.200s' is not the name of a file of a checkpoint", name ? name : "");
    l->names[l->n] = arena_strdup(mem, name);
    l->bytes[l->n] = bytes;
    return l->names[l->n++] ? ERR_OK : error_set(err, ERR_NOMEM, "no memory for a list of files");
}

/* An index names a file with each of its tensors. */
static int list_once(struct list *l, const char *name, struct arena *mem, struct error *err)
{
    for (size_t i = l->n; name && i > 0; i--) /* most often the newest */
        if (!strcmp(l->names[i - 1], name))
            return ERR_OK;
    if (l->n > FILES_MAX)
        return error_set(err, ERR_UNSUPPORTED, "%s names more than %d files", index_name, FILES_MAX);
    return list_add(l, name, -1, mem, err);
}

static int list_shards(const struct buffer *manifest, struct list *l, struct arena *mem, struct error *err)
{
    json_t *top = json_loads((char *)manifest->data, 0, NULL), *one, *shards = json_object_get(top, "shards");
    size_t i;
    int rc = json_array_size(shards) ? make_list(l, json_array_size(shards), mem, err)
                                     : error_set(err, ERR_CORRUPT, "%s lists no shards", MANIFEST_NAME);
    json_array_foreach(shards, i, one)
    {
        if (!rc)
            rc = list_add(l, json_string_value(json_object_get(one, "file")),
                          json_integer_value(json_object_get(one, "bytes")), mem, err);
    }
    json_decref(top);
    return rc;
}

/* config.json, and the file of all tensors or the index with the files that it names. */
static int list_weights(const struct cache *c, const struct init *x, struct list *l, struct arena *mem,
                        struct error *err)
{
    struct buffer text;
    json_t *top = NULL, *map, *file;
    const char *tensor;
    buffer_init(&text, 0);
    int rc = text_of(c, x, index_name, &text, err);
    if (rc == ERR_NOT_FOUND) {
        rc = make_list(l, 2, mem, err);
        if (!rc)
            rc = list_add(l, single_name, -1, mem, err);
    } else if (!rc) {
        top = json_loads((char *)text.data, 0, NULL);
        map = json_object_get(top, "weight_map");
        rc = json_object_size(map) ? make_list(l, json_object_size(map) + 2, mem, err)
                                   : error_set(err, ERR_CORRUPT, "%s has no weight_map", index_name);
        if (!rc)
            rc = list_add(l, index_name, -1, mem, err);
        json_object_foreach(map, tensor, file)
        {
            if (!rc)
                rc = list_once(l, json_string_value(file), mem, err);
        }
    }
    if (!rc)
        rc = list_add(l, "config.json", -1, mem, err);
    json_decref(top);
    buffer_free(&text);
    return rc;
}

/* ---- before the job is accepted ---- */

static int look_checkpoint(const struct cache *c, const struct init *x, struct list *l, struct arena *mem,
                           struct error *err)
{
    struct buffer text;
    Boost__JobSpec *was = NULL;
    buffer_init(&text, 0);
    int rc = text_of(c, x, MANIFEST_NAME, &text, err);
    if (rc == ERR_NOT_FOUND)
        error_hint(err, "only a directory with its manifest.json is a whole checkpoint");
    if (!rc)
        rc = checkpoint_spec_of((char *)text.data, text.len - 1, x->step_n, x->attempt, x->weights_only, mem, &was,
                                err);
    if (!rc)
        rc = plan_continues(was, c->spec, x->weights_only, err);
    if (!rc)
        rc = list_shards(&text, l, mem, err);
    buffer_free(&text);
    return rc;
}

static int look_sizes(const struct cache *c, const struct init *x, struct list *l, struct error *err)
{
    int rc = ERR_OK;
    for (size_t i = 0; !rc && i < l->n; i++) {
        struct fetch_info info;
        char *url = url_of(x, l->names[i], err);
        rc = url ? cache_look(c, url, &info, err) : ERR_NOMEM;
        if (rc)
            error_context(err, "%s", l->names[i]);
        l->bytes[i] = rc ? 0 : info.bytes;
        free(url);
    }
    return rc;
}

int init_look(const struct cache *c, int64_t bytes, struct error *err)
{
    struct init x = {0};
    struct list l = {0};
    struct arena mem;
    if (!from_of(c->spec))
        return ERR_OK;
    arena_init(&mem, MANIFEST_ARENA);
    int rc = parse(c->spec, &x, err);
    if (!rc && x.step)
        rc = look_checkpoint(c, &x, &l, &mem, err);
    else if (!rc && !(rc = list_weights(c, &x, &l, &mem, err)))
        rc = look_sizes(c, &x, &l, err);
    for (size_t i = 0; !rc && i < l.n; i++)
        bytes += l.bytes[i] > 0 ? l.bytes[i] : 0;
    if (!rc && c->max && bytes > c->max)
        rc = cache_too_large(c, "all that is fetched for the job", bytes, err);
    free(x.item.url);
    arena_free(&mem);
    return rc ? error_context(err, "checkpoint.init_from %.300s", cache_shown(from_of(c->spec)->path)) : ERR_OK;
}

/* ---- fetching ---- */

static int fetch_list(struct cache *c, const struct init *x, const struct list *l, const char *dir, bool keep_etag,
                      int64_t *moved, struct error *err)
{
    size_t at = 0;
    struct cache_file *files = calloc(l->n + 1, sizeof *files);
    char **strings = calloc(2 * l->n + 1, sizeof *strings);
    int rc = files && strings ? ERR_OK : error_set(err, ERR_NOMEM, "no memory for a list of files");
    for (size_t i = 0; !rc && i < l->n; i++) {
        strings[2 * i] = url_of(x, l->names[i], err);
        if (!strings[2 * i] || asprintf(&strings[2 * i + 1], "%s/%s", dir, l->names[i]) < 0) {
            strings[2 * i + 1] = NULL; /* whatever a call that failed has left in it */
            rc = error_set(err, ERR_NOMEM, "no memory for a list of files");
        }
        files[i] = (struct cache_file){.url = strings[2 * i], .path = strings[2 * i + 1], .keep_etag = keep_etag};
    }
    if (!rc && (rc = cache_fetch(c, files, l->n, moved, &at, err)))
        error_context(err, "%s", l->names[at]);
    for (size_t i = 0; strings && i < 2 * l->n; i++)
        free(strings[i]);
    free(strings);
    free(files);
    return rc;
}

static int run_worker(struct cache *c, char *const argv[], struct tool_output *out, struct arena *mem,
                      struct error *err)
{
    struct error back;
    cache_own_identity(c);
    int rc = agent_tool_run(argv, c->by->uid, c->by->gid, mem, out, err);
    int again = cache_user_identity(c, &back);
    if (!rc && again)
        *err = back;
    return rc ? rc : again;
}

/* Begins anew where the manifest is another one than that of what lies there. */
static int keep_manifest(const char *part, const char *dir, const struct buffer *manifest, bool *carried,
                         struct error *err)
{
    char path[PATH_MAX];
    struct buffer was;
    buffer_init(&was, manifest->len + 1);
    int rc = fs_join(path, sizeof path, err, dir, MANIFEST_NAME);
    size_t len = manifest->len - 1;
    *carried = !rc && !fs_read_regular(path, &was, NULL) && was.len == len && !memcmp(was.data, manifest->data, len);
    buffer_free(&was);
    if (rc || *carried)
        return rc;
    rc = fs_remove_tree(part, err);
    if (!rc)
        rc = fs_make_dirs(dir, 0777, err);
    return rc ? rc : cache_of_disk(fs_write_durable(path, manifest->data, len, 0600, err), err);
}

static int verify(struct cache *c, const struct init *x, char *worker, char *dir, struct arena *mem, struct error *err)
{
    struct tool_output said = {0};
    Boost__VerifyCheckpoint order = BOOST__VERIFY_CHECKPOINT__INIT;
    char *argv[] = {worker, (char[]){"ckpt"}, (char[]){"verify"}, (char[]){"--headers"}, dir, NULL};
    order.dir = dir;
    order.step = x->step_n;
    order.attempt = x->attempt;
    int rc = checkpoint_verify(&order, err);
    if (!rc && (rc = run_worker(c, argv, &said, mem, err)))
        rc = err->code = ERR_INTERNAL; /* says nothing about the files */
    return !rc && said.n_faults ? error_set(err, ERR_CORRUPT, "%s", said.faults[0]) : rc;
}

static int fetch_checkpoint(struct cache *c, const struct init *x, char *worker, const char *part, int64_t *moved,
                            struct arena *mem, struct error *err)
{
    struct buffer manifest;
    struct list l;
    struct error ignored;
    char dir[PATH_MAX];
    bool carried = false;
    buffer_init(&manifest, 0);
    int rc = fs_join(dir, sizeof dir, err, part, x->step);
    if (!rc)
        rc = text_of(c, x, MANIFEST_NAME, &manifest, err);
    if (!rc)
        rc = list_shards(&manifest, &l, mem, err);
    for (bool again = true; !rc && again;) {
        rc = keep_manifest(part, dir, &manifest, &carried, err);
        if (!rc)
            rc = fetch_list(c, x, &l, dir, false, moved, err);
        if (!rc)
            rc = cache_of_disk(verify(c, x, worker, dir, mem, err), err);
        again = rc == ERR_CORRUPT && carried; /* what an earlier try had left may be what is wrong */
        if (rc == ERR_CORRUPT && fs_remove_tree(part, &ignored) == ERR_OK && again)
            rc = ERR_OK;
    }
    buffer_free(&manifest);
    return rc;
}

static int fetch_weights(struct cache *c, const struct init *x, const char *part, int64_t *moved, struct arena *mem,
                         struct error *err)
{
    struct list l;
    char path[PATH_MAX];
    int rc = list_weights(c, x, &l, mem, err);
    if (!rc)
        rc = fetch_list(c, x, &l, part, true, moved, err);
    for (size_t i = 0; !rc && i < l.n; i++) {
        if (snprintf(path, sizeof path, "%s/%s.etag", part, l.names[i]) < (int)sizeof path && unlink(path) < 0)
            rc = cache_of_disk(error_errno(err, errno, "cannot remove %s", path), err);
    }
    return rc;
}

/* Fetched for another job, perhaps, or of a form whose submit could not tell. */
static int continues(struct cache *c, const struct init *x, char *worker, char *path, struct arena *mem,
                     struct error *err)
{
    char dir[PATH_MAX];
    Boost__JobSpec *was = NULL;
    int rc;
    if (!x->step) {
        cache_own_identity(c);
        rc = agent_preflight_model(worker, path, c->by->uid, c->by->gid, mem, &was, err);
        int back = cache_user_identity(c, rc ? NULL : err);
        rc = rc ? rc : back;
    } else if (!(rc = fs_join(dir, sizeof dir, err, path, x->step))) {
        rc = checkpoint_spec(dir, x->weights_only, mem, &was, err);
    }
    return rc ? rc : plan_continues(was, c->spec, x->weights_only, err);
}

int init_fetch(struct cache *c, char *worker_path, int64_t *moved, struct error *err)
{
    struct init x = {0};
    struct arena mem;
    char path[PATH_MAX], part[PATH_MAX];
    if (!from_of(c->spec))
        return ERR_OK;
    arena_init(&mem, MANIFEST_ARENA);
    int rc = parse(c->spec, &x, err);
    if (!rc)
        rc = fs_join(path, sizeof path, err, c->dir, x.item.name);
    bool there = !rc && cache_has(c, path, true);
    if (!rc && !there && !(rc = cache_lock(c, err)))
        there = cache_has(c, path, true); /* somebody else has fetched it meanwhile */
    if (there) {
        rc = continues(c, &x, worker_path, path, &mem, err);
        goto out;
    }
    if (!rc && snprintf(part, sizeof part, "%s.part", path) >= (int)sizeof part)
        rc = error_set(err, ERR_INVALID, "path too long: %s", path);
    if (!rc)
        rc = fs_make_dirs(part, 0777, err);
    if (!rc)
        rc = x.step ? fetch_checkpoint(c, &x, worker_path, part, moved, &mem, err)
                    : fetch_weights(c, &x, part, moved, &mem, err);
    if (!rc && rename(part, path) < 0)
        rc = cache_of_disk(error_errno(err, errno, "cannot rename %s", part), err);
    if (!rc)
        rc = cache_of_disk(fs_sync_dir(c->dir, err), err);
    if (!rc)
        rc = cache_has(c, path, true) ? continues(c, &x, worker_path, path, &mem, err)
                                      : error_set(err, ERR_IO, "%s is not there", path);
out:
    free(x.item.url);
    arena_free(&mem);
    return rc ? error_context(err, "checkpoint.init_from %.300s", cache_shown(from_of(c->spec)->path)) : ERR_OK;
}
