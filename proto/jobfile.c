/* jobfile.h: telling formats apart, loading, writing, absolute paths. */
#include "proto/jobfile.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/base/fs.h"
#include "proto/json.h"
#include "proto/text.h"

/* A spec of LIMIT_JOB_FILE bytes made of the smallest messages needs about this much. */
enum { ARENA_MAX = 64 << 20 };

int job_format_by_name(const char *name, enum job_format *out, struct error *err)
{
    static const struct {
        const char *name;
        enum job_format format;
    } names[] = {
        {"auto", JOB_FORMAT_AUTO}, {"binary", JOB_FORMAT_BINARY}, {"pb", JOB_FORMAT_BINARY},
        {"text", JOB_FORMAT_TEXT}, {"pbtxt", JOB_FORMAT_TEXT},    {"textproto", JOB_FORMAT_TEXT},
        {"json", JOB_FORMAT_JSON},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i].name) == 0) {
            *out = names[i].format;
            return ERR_OK;
        }
    error_set(err, ERR_USAGE, "unknown job file format '%s'", name);
    error_hint(err, "formats are: auto, binary (pb), text (pbtxt), json");
    return ERR_USAGE;
}

const char *job_format_name(enum job_format format)
{
    static const char *const names[] = {"auto", "binary", "text", "json"};
    return (unsigned)format < sizeof names / sizeof *names ? names[format] : "unknown";
}

enum job_format job_format_of(const void *data, size_t len)
{
    const uint8_t *p = data;
    size_t first = len >= 3 && memcmp(p, "\xEF\xBB\xBF", 3) == 0 ? 3 : 0;
    while (first < len && (p[first] == ' ' || p[first] == '\t' || p[first] == '\n' || p[first] == '\r'))
        first++;
    if (first < len && p[first] == '{')
        return JOB_FORMAT_JSON;
    for (size_t i = 0; i < len; i++)
        if (p[i] < ' ' && p[i] != '\t' && p[i] != '\n' && p[i] != '\r')
            return JOB_FORMAT_BINARY;
    return JOB_FORMAT_TEXT;
}

/* ---- reading ---- */

static int parse_binary(struct job_file *f, const char *name, const void *data, size_t len, bool allow_unknown,
                        struct error *err)
{
    ProtobufCMessage *m = reflect_unpack(&boost__job_spec__descriptor, data, len, &f->arena, err);
    if (!m) {
        error_context(err, "%s", name);
        return err ? (int)err->code : ERR_INVALID;
    }
    f->spec = (Boost__JobSpec *)m;
    if (!reflect_unknown_fields(m, &f->unknown) || allow_unknown)
        return ERR_OK;
    error_set(err, ERR_INVALID, "%s: unknown field numbers: %s", name, f->unknown.data ? (char *)f->unknown.data : "");
    error_hint(err, "the file was written for another version of job.proto; --allow-unknown passes over them");
    return ERR_INVALID;
}

static int parse_as(struct job_file *f, const char *name, const void *data, size_t len, bool allow_unknown,
                    struct error *err)
{
    if (f->format == JOB_FORMAT_BINARY)
        return parse_binary(f, name, data, len, allow_unknown, err);
    struct read_options options = {allow_unknown, &f->unknown};
    return f->format == JOB_FORMAT_JSON ? json_read(&f->spec->base, &f->arena, name, data, len, &options, err)
                                        : text_read(&f->spec->base, &f->arena, name, data, len, &options, err);
}

static void jobfile_init(struct job_file *f)
{
    *f = (struct job_file){0};
    arena_init(&f->arena, ARENA_MAX);
    buffer_init(&f->unknown, 4096);
}

static int parse_into(struct job_file *f, const char *name, const void *data, size_t len, enum job_format format,
                      bool allow_unknown, struct error *err)
{
    if (len > LIMIT_JOB_FILE)
        return error_set(err, ERR_INVALID, "%s is larger than the limit of %d bytes", name, LIMIT_JOB_FILE);
    bool blank = true;
    for (size_t i = 0; i < len && blank; i++)
        blank = strchr(" \t\r\n", ((const char *)data)[i]) && ((const char *)data)[i];
    if (blank) {
        error_set(err, ERR_INVALID, "%s is empty", name);
        error_hint(err, "a job file holds at least spec_version, name, model, data, run, optimizer and checkpoint");
        return ERR_INVALID;
    }
    f->format = format == JOB_FORMAT_AUTO ? job_format_of(data, len) : format;
    f->spec = (Boost__JobSpec *)reflect_new(&f->arena, &boost__job_spec__descriptor);
    if (!f->spec)
        return error_set(err, ERR_NOMEM, "%s: no memory", name);
    return parse_as(f, name, data, len, allow_unknown, err);
}

int jobfile_parse(struct job_file *f, const char *name, const void *data, size_t len, enum job_format format,
                  bool allow_unknown, struct error *err)
{
    jobfile_init(f);
    return parse_into(f, name, data, len, format, allow_unknown, err);
}

static int read_stdin(struct buffer *out, struct error *err)
{
    for (;;) {
        uint8_t chunk[16 << 10];
        ssize_t n = read(STDIN_FILENO, chunk, sizeof chunk);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return error_errno(err, errno, "cannot read standard input");
        if (n == 0)
            return ERR_OK;
        if (buffer_append(out, chunk, (size_t)n))
            return error_set(err, ERR_INVALID, "standard input is larger than the limit of %zu bytes", out->max);
    }
}

static int read_path(const char *path, struct buffer *out, struct error *err)
{
    struct stat st;
    if (stat(path, &st) < 0) {
        int rc = error_errno(err, errno, "cannot open job file %s", path);
        if (rc == ERR_NOT_FOUND)
            error_hint(err, "give the path of a job file, or - for standard input");
        return rc;
    }
    if (S_ISDIR(st.st_mode)) {
        error_set(err, ERR_INVALID, "%s is a directory, not a job file", path);
        error_hint(err, "give the path of a job file, or - for standard input");
        return ERR_INVALID;
    }
    return fs_read_file(path, out, err);
}

int jobfile_load(struct job_file *f, const char *path, enum job_format format, bool allow_unknown, struct error *err)
{
    jobfile_init(f);
    struct buffer data;
    buffer_init(&data, LIMIT_JOB_FILE);
    bool standard = strcmp(path, "-") == 0;
    int rc = standard ? read_stdin(&data, err) : read_path(path, &data, err);
    if (!rc)
        rc = parse_into(f, standard ? "standard input" : path, data.data, data.len, format, allow_unknown, err);
    buffer_free(&data);
    return rc;
}

void jobfile_free(struct job_file *f)
{
    arena_free(&f->arena);
    buffer_free(&f->unknown);
    f->spec = NULL;
}

/* ---- writing ---- */

static int write_binary(const ProtobufCMessage *m, struct buffer *out, struct error *err)
{
    uint8_t *at = buffer_reserve(out, protobuf_c_message_get_packed_size(m));
    if (!at)
        return error_set(err, ERR_NOMEM, "the job spec is over %zu bytes", out->max);
    out->len += protobuf_c_message_pack(m, at);
    out->data[out->len] = '\0';
    return ERR_OK;
}

int jobfile_write(const Boost__JobSpec *spec, enum job_format format, struct buffer *out, struct error *err)
{
    switch (format) {
    case JOB_FORMAT_BINARY:
        return write_binary(&spec->base, out, err);
    case JOB_FORMAT_TEXT:
        return text_write(&spec->base, out, err);
    case JOB_FORMAT_JSON:
        return json_write(&spec->base, out, err);
    case JOB_FORMAT_AUTO:
        break;
    }
    error_set(err, ERR_USAGE, "a format to write is needed");
    error_hint(err, "formats are: binary, text, json");
    return ERR_USAGE;
}

int jobfile_save(const Boost__JobSpec *spec, const char *path, enum job_format format, struct error *err)
{
    struct buffer out;
    buffer_init(&out, ARENA_MAX);
    int rc = jobfile_write(spec, format, &out, err);
    if (!rc)
        rc = fs_write_atomic(path, out.data ? (void *)out.data : "", out.len, 0644, err);
    buffer_free(&out);
    return rc;
}

/* ---- paths ---- */

struct path_walk {
    int (*each)(struct path_walk *walk, char **path, const char *field, struct error *err);
    struct arena *arena;
    const char *cwd;
};

/* Calls walk->each for every field that holds a path, until one fails. */
static int walk_paths(Boost__JobSpec *spec, struct path_walk *walk, struct error *err)
{
    int rc = walk->each(walk, &spec->workdir, "workdir", err);
    for (size_t i = 0; spec->data && !rc && i < spec->data->n_train; i++)
        rc = walk->each(walk, &spec->data->train[i]->path, "data.train.path", err);
    for (size_t i = 0; spec->data && !rc && i < spec->data->n_eval; i++)
        rc = walk->each(walk, &spec->data->eval[i]->path, "data.eval.path", err);
    if (!rc && spec->data)
        rc = walk->each(walk, &spec->data->cache_dir, "data.cache_dir", err);
    if (!rc && spec->checkpoint)
        rc = walk->each(walk, &spec->checkpoint->dir, "checkpoint.dir", err);
    Boost__InitFrom *from = spec->checkpoint ? spec->checkpoint->init_from : NULL;
    if (!rc && from && from->path && strncmp(from->path, "job:", 4) != 0)
        rc = walk->each(walk, &from->path, "checkpoint.init_from.path", err);
    if (!rc && spec->run)
        rc = walk->each(walk, &spec->run->tensorboard_dir, "run.tensorboard_dir", err);
    if (!rc && spec->notify)
        rc = walk->each(walk, &spec->notify->secret_file, "notify.secret_file", err);
    return rc;
}

bool jobfile_is_url(const char *path)
{
    return path && strstr(path, "://");
}

bool jobfile_is_fetched(const char *url)
{
    return !strncmp(url, "http://", 7) || !strncmp(url, "https://", 8) || !strncmp(url, "s3://", 5);
}

static bool is_relative(const char *path)
{
    return path && *path && *path != '/' && !jobfile_is_url(path);
}

static int make_absolute(struct path_walk *walk, char **path, const char *field, struct error *err)
{
    (void)field;
    const char *p = *path, *cwd = walk->cwd;
    if (!is_relative(p))
        return ERR_OK;
    while (p[0] == '.' && p[1] == '/')
        for (p++; *p == '/'; p++)
            continue;
    const char *slash = cwd[strlen(cwd) - 1] == '/' ? "" : "/";
    char *joined = strcmp(p, ".") == 0 || !*p ? arena_strdup(walk->arena, cwd)
                                              : arena_printf(walk->arena, "%s%s%s", cwd, slash, p);
    if (!joined)
        return error_set(err, ERR_NOMEM, "no memory for the path %s", *path);
    *path = joined;
    return ERR_OK;
}

int jobfile_absolute_paths(Boost__JobSpec *spec, struct arena *a, const char *cwd, struct error *err)
{
    if (cwd[0] != '/')
        return error_set(err, ERR_INVALID, "'%s' is not an absolute directory", cwd);
    struct path_walk walk = {.each = make_absolute, .arena = a, .cwd = cwd};
    return walk_paths(spec, &walk, err);
}

static int refuse_relative(struct path_walk *walk, char **path, const char *field, struct error *err)
{
    (void)walk;
    if (!is_relative(*path))
        return ERR_OK;
    error_set(err, ERR_INVALID, "%s = '%s' is a relative path", field, *path);
    return error_hint(err, "the client makes paths absolute before it submits: only it knows its directory");
}

int jobfile_check_paths(const Boost__JobSpec *spec, struct error *err)
{
    struct path_walk walk = {.each = refuse_relative};
    return walk_paths((Boost__JobSpec *)(uintptr_t)spec, &walk, err); /* refuse_relative changes nothing */
}
