/* The job file: one JobSpec in binary protobuf, protobuf text or JSON; which one
 * is told by content. Syntax and schema only: ranges are
 * proto/validate.h, layout is worker/plan. Blocking file access. */
#ifndef BOOST_PROTO_JOBFILE_H
#define BOOST_PROTO_JOBFILE_H

#include "proto/job.pb-c.h"
#include "proto/reflect.h"

enum job_format { JOB_FORMAT_AUTO = 0, JOB_FORMAT_BINARY, JOB_FORMAT_TEXT, JOB_FORMAT_JSON };

struct job_file {
    struct arena arena; /* owns the spec                                       */
    Boost__JobSpec *spec;
    enum job_format format; /* the one that was read                               */
    struct buffer unknown;  /* with allow_unknown: the fields passed over, "a, b.c" */
};

/* "binary", "text", "json", "auto" (also pb, pbtxt, textproto); anything else is ERR_USAGE. */
MUST_USE int job_format_by_name(const char *name, enum job_format *out, struct error *err);
const char *job_format_name(enum job_format format);
/* First non-space byte '{': JSON; a control byte other than tab, LF, CR: binary; else text. */
enum job_format job_format_of(const void *data, size_t len);

/* Reads a file ("-" is standard input), at most LIMIT_JOB_FILE bytes. On success and on
 * failure alike *f is to be given to jobfile_free(). JOB_FORMAT_AUTO goes by content.
 * ERR_NOT_FOUND: no such file; ERR_INVALID: anything wrong inside it. */
MUST_USE int jobfile_load(struct job_file *f, const char *path, enum job_format format, bool allow_unknown,
                          struct error *err);
/* The same from memory; `name` stands for the path in messages. */
MUST_USE int jobfile_parse(struct job_file *f, const char *name, const void *data, size_t len, enum job_format format,
                           bool allow_unknown, struct error *err);
void jobfile_free(struct job_file *f);

/* Appends the spec in a format (not AUTO). */
MUST_USE int jobfile_write(const Boost__JobSpec *spec, enum job_format format, struct buffer *out, struct error *err);
/* Replaces `path` atomically by the spec in a format (not AUTO). */
MUST_USE int jobfile_save(const Boost__JobSpec *spec, const char *path, enum job_format format, struct error *err);

/* Applies one `--set`: "optimizer.lr=1e-3", "parallel.strategy=BTP", "name=x y" (strings
 * need no quotes), "data.train[0].path=a.bin" (an index one past the end appends),
 * "after=afterok:17" (the list becomes this one entry), "after+=afterok:18" (one more),
 * "after=" (none), "data.eval=[{path: \"a\"}]" (text format). "x.y=" on anything but a
 * string makes it absent. What it makes lives in `a`, which must live as long as the spec. */
MUST_USE int jobfile_set(Boost__JobSpec *spec, struct arena *a, const char *assignment, struct error *err);

/* Whether such a path is a URL ("://"), which an agent fetches; NULL is none. */
bool jobfile_is_url(const char *path);
bool jobfile_is_fetched(const char *url); /* of a kind that nodes can fetch: http, https, s3 */
/* Makes the paths that the client means absolute against `cwd`: data.train and eval, data.cache_dir,
 * checkpoint.dir, checkpoint.init_from.path (not "job:..."), workdir, run.tensorboard_dir,
 * notify.secret_file. URLs, empty and absolute ones stay. New strings live in `a`. */
MUST_USE int jobfile_absolute_paths(Boost__JobSpec *spec, struct arena *a, const char *cwd, struct error *err);
/* ERR_INVALID naming the first of these that is relative: what a server says to a client that did not do it. */
MUST_USE int jobfile_check_paths(const Boost__JobSpec *spec, struct error *err);

#endif
