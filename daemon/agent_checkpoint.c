/* agent_checkpoint.h */
#include "daemon/agent_checkpoint.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/base/clock.h"
#include "proto/base/crc32c.h"
#include "proto/base/fs.h"
#include "proto/json.h"
#include "proto/manifest.h"
#include "proto/version.h"

enum { CHUNK = 1 << 20 };

/* ---- names ---- */

static const char *digits(const char *at, int64_t *value)
{
    char *end;
    if (*at < '0' || *at > '9')
        return NULL;
    errno = 0;
    *value = strtoll(at, &end, 10);
    return errno ? NULL : end;
}

/* "…/step-<n>.a<k>" */
static bool parse_dir(const char *dir, int64_t *step, int64_t *attempt)
{
    const char *name = strrchr(dir, '/');
    if (*dir != '/' || !name || strncmp(name, "/step-", 6))
        return false;
    const char *at = digits(name + 6, step);
    if (!at || strncmp(at, ".a", 2))
        return false;
    at = digits(at + 2, attempt);
    return at && !*at;
}

int checkpoint_check_dir(const char *dir, int64_t step, int32_t attempt, struct error *err)
{
    int64_t n, k;
    if (!dir || !parse_dir(dir, &n, &k))
        return error_set(err, ERR_REFUSED, "%s is not a checkpoint directory (step-<n>.a<k>)", dir ? dir : "(none)");
    if (n != step || k != attempt)
        return error_set(err, ERR_REFUSED, "%s is not of step %" PRId64 ", attempt %d", dir, step, attempt);
    return ERR_OK;
}

static int shard_path(char out[PATH_MAX], const char *dir, const char *file, struct error *err)
{
    if (!file || !*file || *file == '.' || strchr(file, '/'))
        return error_set(err, ERR_REFUSED, "'%s' is not the name of a shard", file ? file : "");
    return fs_join(out, PATH_MAX, err, dir, file);
}

/* ---- shards ---- */

/* Opens a file that a user may have put anything in the place of; what is there instead of it is damage, as a
 * missing one is, and no reason to look again and again. */
static int open_regular(const char *path, int *fd, int64_t *size, struct error *err)
{
    struct stat st;
    *fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (*fd < 0 && (errno == ENOTDIR || errno == ELOOP || errno == ENXIO))
        return error_set(err, ERR_CORRUPT, "%s is not a regular file: %s", path, strerror(errno));
    if (*fd < 0 || fstat(*fd, &st) < 0)
        return error_errno(err, errno, "cannot open %s", path);
    if (!S_ISREG(st.st_mode))
        return error_set(err, ERR_CORRUPT, "%s is not a regular file", path);
    *size = st.st_size;
    return ERR_OK;
}

static int open_shard(const char *path, int64_t bytes, int *fd, struct error *err)
{
    int64_t size = 0;
    int rc = open_regular(path, fd, &size, err);
    if (rc)
        return error_context(err, "shard");
    if (size != bytes)
        return error_set(err, ERR_CORRUPT, "shard %s has %lld bytes, %lld were written", path, (long long)size,
                         (long long)bytes);
    return ERR_OK;
}

int checkpoint_open_shard(const char *dir, const char *file, int64_t bytes, int *fd, struct error *err)
{
    char path[PATH_MAX];
    *fd = -1;
    int rc = shard_path(path, dir, file, err);
    return rc ? rc : open_shard(path, bytes, fd, err);
}

static int check_shard(const char *dir, const char *file, int64_t bytes, uint32_t sum, bool whole, struct error *err)
{
    char path[PATH_MAX];
    int fd = -1;
    uint32_t found = 0;
    uint8_t *chunk = whole ? malloc(CHUNK) : NULL;
    int rc = shard_path(path, dir, file, err);
    if (!rc && whole && !chunk)
        rc = error_set(err, ERR_NOMEM, "no memory to read %s", path);
    if (!rc)
        rc = open_shard(path, bytes, &fd, err);
    while (!rc && whole) {
        ssize_t n = read(fd, chunk, CHUNK);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            rc = error_errno(err, errno, "shard %s cannot be read", path);
        if (n <= 0)
            break;
        found = crc32c(found, chunk, (size_t)n);
    }
    if (!rc && whole && found != sum)
        rc =
            error_set(err, ERR_CORRUPT, "shard %s is damaged: its CRC-32C is %08x, %08x was written", path, found, sum);
    if (fd >= 0)
        close(fd);
    free(chunk);
    return rc;
}

/* ---- manifest ---- */

static int check_shard_set(const Boost__WriteManifest *o, struct error *err)
{
    if (o->world <= 0 || o->n_shards != (size_t)o->world)
        return error_set(err, ERR_INVALID, "%s: %zu shards for %d ranks", o->dir, o->n_shards, o->world);
    bool *seen = calloc(o->n_shards, sizeof *seen);
    int rc = seen ? ERR_OK : error_set(err, ERR_NOMEM, "no memory for a manifest");
    for (size_t i = 0; i < o->n_shards && !rc; i++) {
        const Boost__ShardRecord *s = o->shards[i];
        if (s->failed || s->step != o->step || s->rank < 0 || s->rank >= o->world || seen[s->rank])
            rc = error_set(err, ERR_INVALID, "%s: the record of rank %d's shard does not belong", o->dir, s->rank);
        else
            seen[s->rank] = true;
        if (!rc)
            rc = check_shard(o->dir, s->file, s->bytes, s->crc32c, false, err);
    }
    free(seen);
    return rc;
}

static json_t *layout_json(const Boost__JobSpec *spec)
{
    const Boost__Parallel *p = spec && spec->parallel ? spec->parallel : NULL;
    const ProtobufCEnumValue *strategy =
        p ? protobuf_c_enum_descriptor_get_value(&boost__strategy__value__descriptor, (int)p->strategy) : NULL;
    return json_pack("{s:s, s:i, s:i, s:i, s:i}", "strategy", strategy ? strategy->name : "", "tp", p ? (int)p->tp : 1,
                     "pp", p ? (int)p->pp : 1, "dp", p ? (int)p->dp : 1, "zero", p ? (int)p->zero : 0);
}

static json_t *shards_json(const Boost__WriteManifest *o)
{
    json_t *list = json_array();
    for (size_t i = 0; list && i < o->n_shards; i++) {
        const Boost__ShardRecord *s = o->shards[i];
        json_t *shard = json_pack("{s:i, s:s, s:I, s:I}", "rank", (int)s->rank, "file", s->file, "bytes",
                                  (json_int_t)s->bytes, "crc32c", (json_int_t)s->crc32c);
        if (!shard || json_array_append_new(list, shard) < 0) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

static json_t *manifest_json(const Boost__WriteManifest *o, int64_t job)
{
    const Boost__JobSpec *spec = o->spec;
    char now[CLOCK_TEXT];
    int64_t batch = spec && spec->parallel ? spec->parallel->global_batch : 0;
    return json_pack("{s:s, s:s, s:I, s:i, s:I, s:i, s:s, s:s, s:s, s:I, s:{s:I, s:I}, s:o, s:o, s:o}", "schema",
                     MANIFEST_SCHEMA, "store_id", o->store_id ? o->store_id : "", "job", (json_int_t)job, "attempt",
                     (int)o->attempt, "step", (json_int_t)o->step, "world", (int)o->world, "written",
                     clock_rfc3339(clock_wall_ns(), now), "version", boost_version(), "build", boost_build_id(),
                     "data_position", (json_int_t)(o->step * batch), "seeds", "init",
                     (json_int_t)(spec && spec->run ? spec->run->seed : 0), "data",
                     (json_int_t)(spec && spec->data ? spec->data->seed : 0), "layout", layout_json(spec), "shards",
                     shards_json(o), "spec", spec ? json_tree(&spec->base) : json_null());
}

/* So that what was done with the step directory itself holds after a power cut; two levels: the job's above it too. */
static int sync_parents(const char *dir, int levels, struct error *err)
{
    char path[PATH_MAX];
    int rc = fs_join(path, sizeof path, err, dir, "");
    for (int i = 0; i < levels && !rc; i++) {
        size_t len = strlen(path);
        while (len > 1 && path[len - 1] == '/')
            path[--len] = '\0';
        char *slash = strrchr(path, '/');
        if (!slash || slash == path)
            break;
        *slash = '\0';
        rc = fs_sync_dir(path, err);
    }
    return rc;
}

int checkpoint_write_manifest(const Boost__WriteManifest *o, int64_t job, struct error *err)
{
    char path[PATH_MAX];
    int rc = checkpoint_check_dir(o->dir, o->step, o->attempt, err);
    if (!rc)
        rc = check_shard_set(o, err);
    if (!rc)
        rc = fs_join(path, sizeof path, err, o->dir, MANIFEST_NAME);
    if (rc)
        return rc;
    json_t *manifest = manifest_json(o, job);
    char *text = manifest ? json_dumps(manifest, JSON_INDENT(1)) : NULL;
    if (!text)
        rc = error_set(err, ERR_NOMEM, "no memory for %s", path);
    if (!rc)
        rc = sync_parents(o->dir, 2, err);
    if (!rc)
        rc = fs_write_durable(path, text, strlen(text), 0644, err);
    free(text);
    json_decref(manifest);
    return rc;
}

/* ---- verify ---- */

static int read_manifest(const char *text, size_t len, const char *name, int64_t step, int32_t attempt, json_t **out,
                         struct error *err)
{
    json_error_t where;
    if (!(*out = json_loadb(text, len, 0, &where)))
        return error_set(err, ERR_CORRUPT, "%s is damaged: line %d: %s", name, where.line, where.text);
    const char *schema = json_string_value(json_object_get(*out, "schema"));
    if (!schema || strcmp(schema, MANIFEST_SCHEMA) || json_integer_value(json_object_get(*out, "step")) != step ||
        json_integer_value(json_object_get(*out, "attempt")) != attempt)
        return error_set(err, ERR_CORRUPT, "%s is not the manifest of step %" PRId64 ", attempt %d", name, step,
                         attempt);
    return ERR_OK;
}

static int load_manifest(const char *dir, int64_t step, int32_t attempt, json_t **out, struct error *err)
{
    char path[PATH_MAX];
    struct buffer text;
    buffer_init(&text, MANIFEST_MAX);
    *out = NULL;
    int rc = fs_join(path, sizeof path, err, dir, MANIFEST_NAME);
    if (!rc)
        rc = fs_read_regular(path, &text, err);
    if (!rc)
        rc = read_manifest(text.data ? (char *)text.data : "", text.len, path, step, attempt, out, err);
    buffer_free(&text);
    return rc;
}

static int verify_listed(const char *dir, const json_t *shards, struct error *err)
{
    size_t i;
    json_t *s;
    int rc = ERR_OK;
    if (!json_array_size(shards))
        return error_set(err, ERR_CORRUPT, "%s: the manifest lists no shards", dir);
    json_array_foreach(shards, i, s)
    {
        rc = check_shard(dir, json_string_value(json_object_get(s, "file")),
                         json_integer_value(json_object_get(s, "bytes")),
                         (uint32_t)json_integer_value(json_object_get(s, "crc32c")), true, err);
        if (rc)
            break;
    }
    return rc;
}

/* Whether the directory that the job's checkpoints share is gone, as it is where a file system is not mounted. */
static bool parent_is_gone(const char *dir)
{
    char path[PATH_MAX];
    struct stat st;
    fs_parent(path, dir);
    return stat(path, &st) < 0 ? errno == ENOENT || errno == ENOTDIR : !S_ISDIR(st.st_mode);
}

/* All of them at once: to call them damaged would begin the job anew, and delete them when they are back; to call them
 * deleted would leave them there for good. */
static int not_there(const char *dir, enum error_code code, struct error *err)
{
    error_set(err, code, "%.*s is not there: is its file system mounted?", (int)(strrchr(dir, '/') - dir), dir);
    return error_hint(err, "to give the job's checkpoints up, make an empty directory of that name");
}

int checkpoint_verify(const Boost__VerifyCheckpoint *o, struct error *err)
{
    json_t *manifest = NULL;
    int rc = checkpoint_check_dir(o->dir, o->step, o->attempt, err);
    if (!rc)
        rc = load_manifest(o->dir, o->step, o->attempt, &manifest, err);
    for (size_t i = 0; i < o->n_shards && !rc; i++)
        rc = check_shard(o->dir, o->shards[i]->file, o->shards[i]->bytes, o->shards[i]->crc32c, true, err);
    if (!rc && !o->n_shards)
        rc = verify_listed(o->dir, json_object_get(manifest, "shards"), err);
    json_decref(manifest);
    bool mirrored = o->mirror && *o->mirror;
    if ((rc == ERR_NOT_FOUND || rc == ERR_CORRUPT) && o->n_shards && !mirrored && parent_is_gone(o->dir))
        return not_there(o->dir, ERR_IO, err);
    return rc ? error_context(err, "checkpoint of step %" PRId64 ", attempt %d", o->step, o->attempt) : ERR_OK;
}

/* What cannot be looked at (EIO, EACCES) is not damaged by that: ERR_OK, or the error that says nothing about the files. */
static int add_fault(struct arena *mem, char **list, size_t *n, const struct error *err)
{
    if (err->code != ERR_CORRUPT && err->code != ERR_NOT_FOUND && err->code != ERR_INVALID)
        return (int)err->code;
    list[*n] = arena_strdup(mem, err->message);
    *n += list[*n] != NULL;
    return ERR_OK;
}

int checkpoint_faults(const Boost__VerifyCheckpoint *o, struct arena *mem, char ***faults, size_t *n, struct error *err)
{
    json_t *manifest = NULL;
    struct error what;
    *n = 0;
    *faults = arena_alloc(mem, (o->n_shards + 2) * sizeof **faults);
    int rc = *faults ? checkpoint_check_dir(o->dir, o->step, o->attempt, err)
                     : error_set(err, ERR_NOMEM, "out of memory");
    if (!rc && parent_is_gone(o->dir))
        rc = not_there(o->dir, ERR_IO, err);
    if (rc)
        return rc;
    error_clear(err);
    if (load_manifest(o->dir, o->step, o->attempt, &manifest, &what) && add_fault(mem, *faults, n, &what))
        *err = what;
    json_decref(manifest);
    for (size_t i = 0; i < o->n_shards; i++)
        if (check_shard(o->dir, o->shards[i]->file, o->shards[i]->bytes, o->shards[i]->crc32c, true, &what) &&
            add_fault(mem, *faults, n, &what))
            *err = what;
    return *n ? ERR_OK : (int)err->code;
}

/* Of a manifest of `dir`. */
static int spec_of(const json_t *manifest, const char *dir, bool weights_only, struct arena *a, Boost__JobSpec **out,
                   struct error *err)
{
    if (json_object_get(manifest, "holds") && !weights_only) {
        error_set(err, ERR_INVALID, "%s holds weights alone, as one that was imported or converted does", dir);
        return error_hint(err, "set checkpoint.init_from.weights_only: true");
    }
    char *text = json_dumps(json_object_get(manifest, "spec"), 0);
    int rc = text ? ERR_OK : error_set(err, ERR_CORRUPT, "%s/%s holds no job", dir, MANIFEST_NAME);
    if (!rc && !(*out = (Boost__JobSpec *)reflect_new(a, &boost__job_spec__descriptor)))
        rc = error_set(err, ERR_NOMEM, "no memory for the manifest of %s", dir);
    if (!rc)
        rc = json_read(&(*out)->base, a, MANIFEST_NAME, text, strlen(text),
                       &(struct read_options){.allow_unknown = true}, err);
    free(text);
    return rc;
}

bool checkpoint_parse_name(const char *name, int64_t *step, int *attempt)
{
    char dir[NAME_MAX + 2];
    int64_t k;
    if (snprintf(dir, sizeof dir, "/%s", name) >= (int)sizeof dir || !parse_dir(dir, step, &k) || k > INT32_MAX)
        return false;
    *attempt = (int)k;
    return true;
}

int checkpoint_spec_of(const char *text, size_t len, int64_t step, int32_t attempt, bool weights_only, struct arena *a,
                       Boost__JobSpec **out, struct error *err)
{
    json_t *manifest = NULL;
    *out = NULL;
    int rc = read_manifest(text, len, MANIFEST_NAME, step, attempt, &manifest, err);
    if (!rc)
        rc = spec_of(manifest, "the checkpoint", weights_only, a, out, err);
    json_decref(manifest);
    return rc;
}

int checkpoint_spec(const char *dir, bool weights_only, struct arena *a, Boost__JobSpec **out, struct error *err)
{
    int64_t step, attempt;
    json_t *manifest = NULL;
    *out = NULL;
    if (!parse_dir(dir, &step, &attempt) || attempt > INT32_MAX) {
        error_set(err, ERR_INVALID, "%s is not a checkpoint directory (step-<n>.a<k>)", dir);
        return error_hint(err, "boostctl ckpt ls JOB shows the directories of a job's checkpoints");
    }
    int rc = load_manifest(dir, step, (int32_t)attempt, &manifest, err);
    if (rc == ERR_NOT_FOUND)
        error_hint(err, "only a directory with its manifest.json is a whole checkpoint");
    if (!rc)
        rc = spec_of(manifest, dir, weights_only, a, out, err);
    json_decref(manifest);
    return rc;
}

/* ---- find ---- */

enum { FIND_DIRS = 4096, FIND_MAX = 16, FIND_SHARDS = 16384 };

struct step_dir {
    int64_t step, attempt;
};

static int newest_first(const void *a, const void *b)
{
    const struct step_dir *x = a, *y = b;
    if (x->step != y->step)
        return x->step > y->step ? -1 : 1;
    return (x->attempt < y->attempt) - (x->attempt > y->attempt);
}

static size_t list_steps(const char *parent, struct step_dir *list, struct error *err)
{
    DIR *d = opendir(parent);
    size_t n = 0;
    char dir[PATH_MAX];
    if (!d && errno != ENOENT)
        error_errno(err, errno, "cannot read %s", parent);
    for (struct dirent *e; d && n < FIND_DIRS && (e = readdir(d));) {
        if (!fs_join(dir, sizeof dir, NULL, parent, e->d_name) && parse_dir(dir, &list[n].step, &list[n].attempt) &&
            list[n].attempt > 0 && list[n].attempt <= INT32_MAX)
            n++;
    }
    if (d)
        closedir(d);
    return n;
}

/* Of the job whose checkpoints are in `parent`, <store id>-<job>: what users copy there is of another one, and a job that
 * went on from it would go on with somebody else's weights. */
static bool is_of(const json_t *manifest, const char *parent)
{
    char name[NAME_MAX + 1];
    const char *store = json_string_value(json_object_get(manifest, "store_id")), *slash = strrchr(parent, '/');
    int used = snprintf(name, sizeof name, "%s-%" JSON_INTEGER_FORMAT, store ? store : "",
                        json_integer_value(json_object_get(manifest, "job")));
    return used < (int)sizeof name && slash && !strcmp(slash + 1, name);
}

/* NULL: no manifest, one that says nothing usable or of another job, or no memory. */
static Boost__FoundCheckpoint *read_found(const char *parent, const struct step_dir *at, struct arena *mem)
{
    char dir[PATH_MAX];
    json_t *manifest = NULL, *s;
    size_t i;
    if (snprintf(dir, sizeof dir, "%s/step-%" PRId64 ".a%" PRId64, parent, at->step, at->attempt) >= (int)sizeof dir ||
        load_manifest(dir, at->step, (int32_t)at->attempt, &manifest, NULL))
        return NULL;
    const json_t *shards = json_object_get(manifest, "shards");
    size_t n = json_array_size(shards);
    bool good = is_of(manifest, parent) && n > 0 && n <= FIND_SHARDS;
    Boost__FoundCheckpoint *f = good ? arena_alloc(mem, sizeof *f) : NULL;
    Boost__ShardRecord **list = good ? arena_alloc(mem, n * sizeof *list) : NULL;
    Boost__ShardRecord *records = good ? arena_alloc(mem, n * sizeof *records) : NULL;
    if (f && list && records) {
        boost__found_checkpoint__init(f);
        f->has_step = f->has_attempt = f->has_world = true;
        f->step = at->step;
        f->attempt = (int32_t)at->attempt;
        f->world = (int32_t)n;
        f->shards = list;
        f->n_shards = n;
        for (i = 0; i < n; i++)
            list[i] = NULL;
        json_array_foreach(shards, i, s)
        {
            json_int_t rank = json_integer_value(json_object_get(s, "rank"));
            const char *file = json_string_value(json_object_get(s, "file"));
            if (rank < 0 || (size_t)rank >= n || list[rank] || !file)
                break;
            Boost__ShardRecord *r = list[rank] = &records[i];
            boost__shard_record__init(r);
            r->has_rank = r->has_bytes = r->has_crc32c = true;
            r->rank = (int32_t)rank;
            r->file = arena_strdup(mem, file);
            r->bytes = json_integer_value(json_object_get(s, "bytes"));
            r->crc32c = (uint32_t)json_integer_value(json_object_get(s, "crc32c"));
            good = good && r->file;
        }
        good = good && i == n;
    }
    json_decref(manifest);
    return good && f && list && records ? f : NULL;
}

int checkpoints_find(const char *parent, struct arena *mem, Boost__TaskReply *out, struct error *err)
{
    struct step_dir *dirs = calloc(FIND_DIRS, sizeof *dirs);
    out->found = arena_alloc(mem, FIND_MAX * sizeof(Boost__FoundCheckpoint *));
    out->n_found = 0;
    if (!dirs || !out->found || !parent || *parent != '/') {
        free(dirs);
        return error_set(err, parent && *parent == '/' ? ERR_NOMEM : ERR_PROTOCOL, "cannot look for checkpoints");
    }
    error_clear(err);
    size_t n = list_steps(parent, dirs, err), shards = 0;
    qsort(dirs, n, sizeof *dirs, newest_first);
    for (size_t i = 0; i < n && out->n_found < FIND_MAX && shards < FIND_SHARDS; i++) {
        Boost__FoundCheckpoint *f = read_found(parent, &dirs[i], mem);
        if (!f || shards + f->n_shards > FIND_SHARDS)
            continue;
        shards += f->n_shards;
        out->found[out->n_found++] = f;
    }
    free(dirs);
    return err->code;
}

/* ---- delete ---- */

/* On a full disk there may be no room for a new name: what makes it a checkpoint goes first then. */
static int remove_in_place(const char *dir, struct error *err)
{
    char manifest[PATH_MAX];
    int rc = fs_join(manifest, sizeof manifest, err, dir, MANIFEST_NAME);
    if (!rc && unlink(manifest) < 0 && errno != ENOENT)
        rc = error_errno(err, errno, "cannot remove %s", manifest);
    return rc ? rc : fs_remove_tree(dir, err);
}

static int put_aside(const char *dir, const char *going, struct error *err)
{
    /* What an earlier try left would be in the way. */
    int rc = fs_remove_tree(going, err);
    if (rc || rename(dir, going) == 0 || errno == ENOENT)
        return rc;
    if (errno == ENOSPC || errno == EDQUOT)
        return remove_in_place(dir, err);
    return error_errno(err, errno, "cannot rename %s to %s", dir, going);
}

int checkpoint_delete(const char *dir, struct error *err)
{
    char going[PATH_MAX];
    int64_t step, attempt;
    struct stat st;
    int rc = ERR_OK;
    if (!dir || !parse_dir(dir, &step, &attempt))
        return error_set(err, ERR_REFUSED, "%s is not a checkpoint directory (step-<n>.a<k>) and stays",
                         dir ? dir : "(none)");
    int used = snprintf(going, sizeof going, "%s.deleting", dir);
    if (used < 0 || (size_t)used >= sizeof going)
        return error_set(err, ERR_INVALID, "path too long: %s", dir);
    if (lstat(dir, &st) == 0) {
        if (!S_ISDIR(st.st_mode))
            return error_set(err, ERR_REFUSED, "%s is not a directory and stays", dir);
        rc = put_aside(dir, going, err);
        if (!rc)
            rc = sync_parents(dir, 1, err);
    } else if (errno != ENOENT && errno != ENOTDIR) {
        return error_errno(err, errno, "cannot look at %s", dir);
    }
    if (!rc && parent_is_gone(dir))
        return not_there(dir, ERR_BUSY, err);
    if (!rc)
        rc = fs_remove_tree(going, err);
    /* Else a power cut brings it back, and nobody knows of it any more. */
    if (!rc)
        rc = sync_parents(dir, 1, err);
    return rc == ERR_NOT_FOUND ? not_there(dir, ERR_BUSY, err) : rc;
}

int checkpoints_clear_torn(const char *parent, int32_t first, int32_t last, struct error *err)
{
    DIR *d = opendir(parent);
    if (!d)
        return errno == ENOENT ? ERR_OK : error_errno(err, errno, "cannot read %s", parent);
    int rc = ERR_OK;
    for (struct dirent *e; !rc && (e = readdir(d));) {
        char dir[PATH_MAX], manifest[PATH_MAX];
        int64_t step, k;
        struct stat st;
        rc = fs_join(dir, sizeof dir, err, parent, e->d_name);
        if (rc || !parse_dir(dir, &step, &k) || k < first || k > last)
            continue;
        rc = fs_join(manifest, sizeof manifest, err, dir, MANIFEST_NAME);
        if (!rc && lstat(manifest, &st) < 0 && errno == ENOENT)
            rc = checkpoint_delete(dir, err);
    }
    closedir(d);
    return rc;
}
