/* What the files of this folder share. Nothing outside store/ and its tests includes it. */
#ifndef BOOST_STORE_INTERNAL_H
#define BOOST_STORE_INTERNAL_H

#include <limits.h>
#include <pthread.h>
#include <sqlite3.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/arena.h"
#include "proto/base/buffer.h"
#include "proto/base/error.h"
#include "store/store.h"

/* ---- db.c: one SQLite connection, used by one thread at a time --------------- */

struct store_db {
    sqlite3 *handle;
    const char *name; /* "state.db" or "metrics.db", for messages */
    char path[PATH_MAX];
    bool unchecked; /* too large for quick_check while the daemon waits */
};

enum store_db_mode { STORE_DB_WRITE, STORE_DB_READ };

/* WRITE makes the file when it is missing. A wait for another process's lock takes at most STORE_BUSY_MS. */
enum { STORE_BUSY_MS = 5000 };
MUST_USE int store_db_open(struct store_db *db, const char *dir, const char *name, enum store_db_mode mode,
                           struct error *err);
void store_db_close(struct store_db *db);
MUST_USE int store_db_exec(struct store_db *db, const char *sql, struct error *err);
/* A statement kept for the life of the connection; the caller finalizes it. */
MUST_USE int store_db_prepare(struct store_db *db, const char *sql, sqlite3_stmt **out, struct error *err);
/* First column of the first row; 0 when there is none. */
MUST_USE int store_db_int(struct store_db *db, const char *sql, int64_t *out, struct error *err);
/* Steps a statement that gives no rows, and resets it. Returns SQLite's code, SQLITE_OK at the end. */
int store_db_step(sqlite3_stmt *stmt);
/* Turns SQLite's last failure on db (code rc) into ours: "state.db: <what>: <text>", with a mend. */
int store_db_error(struct store_db *db, int rc, const char *what, struct error *err);
/* True when rc is about the file, the disk, memory or a lock, not about the row: worth a retry. */
bool store_db_in_trouble(int rc);

/* ---- schema.c: numbered migrations ------------------------------------------- */

struct store_migration {
    int version; /* ascending, from 1 */
    const char *sql;
};
struct store_schema {
    const char *name; /* the file */
    int64_t application_id;
    const char *synchronous;
    int64_t check_at_open_max; /* bytes */
    const struct store_migration *migrations;
    int count;
};
extern const struct store_schema store_state_schema;
extern const struct store_schema store_metrics_schema;

/* Opens <dir>/<schema name> for writing, checks it and brings it to the newest version.
 * *notice gets a line when something was found and mended. */
MUST_USE int store_schema_open(struct store_db *db, const char *dir, const struct store_schema *schema,
                               struct buffer *notice, struct error *err);

MUST_USE int store_schema_check(struct store_db *db, struct error *err); /* quick_check */

/* ---- rows.c: the tables of state.db as data ----------------------------------- */

/* Parents before children: a transaction writes its rows in this order. */
enum store_row_kind { ROW_JOB, ROW_NODE, ROW_ATTEMPT, ROW_CHECKPOINT, ROW_SHARD, ROW_EVENT, ROW_KINDS };

enum store_column_type { COLUMN_INT, COLUMN_I64, COLUMN_U32, COLUMN_BOOL, COLUMN_F64, COLUMN_TEXT, COLUMN_BLOB };
struct store_column {
    const char *name;
    enum store_column_type type;
    size_t offset;
    size_t len_offset; /* of a BLOB's size_t */
};
struct store_table {
    const char *name;
    const struct store_column *columns;
    int count;
    int keys; /* the first `keys` columns */
    bool append_only;
    size_t row_size;
};
extern const struct store_table store_tables[ROW_KINDS];
enum { STORE_ROW_MAX = 512 }; /* bytes, at least every row_size */

/* A deep copy in the arena; NULL when it does not fit. */
void *store_row_copy(struct arena *mem, const struct store_table *t, const void *row);
void store_row_put_sql(const struct store_table *t, struct buffer *sql);
void store_row_select_sql(const struct store_table *t, struct buffer *sql);
/* Binds without copying: the row lives until the statement is reset. */
int store_row_bind(sqlite3_stmt *stmt, const struct store_table *t, const void *row);
/* Pointers in *row are SQLite's until the statement's next step. */
void store_row_read(sqlite3_stmt *stmt, const struct store_table *t, void *row);

/* ---- work: what the loop queues and a thread answers ---------------------------- */

struct store_work {
    struct store_work *next;
    void (*finish)(struct store_work *work); /* on the loop's thread: calls back and frees */
    int rc;
    struct error err;
    struct arena mem; /* rows of the request and of the answer */
};
struct store_work_list {
    struct store_work *head;
    struct store_work **tail; /* NULL: not initialised */
};
void store_work_list_init(struct store_work_list *list);
void store_work_list_add(struct store_work_list *list, struct store_work *work);
/* Moves everything of `from` behind `to`. */
void store_work_list_join(struct store_work_list *to, struct store_work_list *from);

/* Answers on their way to store_dispatch(). */
struct store_answers {
    pthread_mutex_t mutex;
    struct store_work_list list;
    int fd;
};
void store_answers_post(struct store_answers *a, struct store_work_list *list);
/* Starts a thread with every signal blocked, so that the daemon's signals stay with its loop. */
MUST_USE int store_thread_start(pthread_t *thread, const char *name, void *(*run)(void *), void *arg,
                                struct error *err);

/* ---- writer.c: group commit ---------------------------------------------------- */

struct store_writer;
struct store_writer_ops {
    /* Runs one piece of work inside a savepoint. Returns SQLite's code; *err is filled when it is not SQLITE_OK. */
    int (*apply)(struct store_writer *w, struct store_work *work, struct error *err);
    /* After a rollback: forget what the lost transaction had taught. May be NULL. */
    void (*rolled_back)(struct store_writer *w);
    /* A bounded piece of upkeep while nothing waits; true: there is more. May be NULL. */
    bool (*chore)(struct store_writer *w);
    /* Frees `state`, before the database is closed. */
    void (*free)(struct store_writer *w);
};
struct store_writer {
    struct store_db db;
    const struct store_writer_ops *ops;
    void *state; /* of ops */
    struct store_answers *answers;
    size_t max_queued; /* bytes waiting, 0 = without limit */

    pthread_t thread;
    bool started;
    pthread_mutex_t mutex;
    pthread_cond_t wake; /* monotonic clock */
    struct store_work_list queue;
    size_t queued;
    bool stopping;
    int64_t stop_ns;
    bool checking;           /* a late quick_check runs: store_writer_stop interrupts it */
    struct error trouble;    /* code ERR_OK while all is well */
    int64_t busy_since_ns;   /* start of the commit in progress, 0 = none */

    /* the thread's own */
    sqlite3_stmt *begin, *commit, *rollback, *savepoint, *release, *undo;
    bool broken; /* `trouble` is for good: the late check failed */
    int wal_pages;
    int commits_without_chore;
};
/* Takes over an open db, and `state` and `ops` from store_*_init. */
MUST_USE int store_writer_start(struct store_writer *w, const char *thread_name, struct error *err);
/* Commits what waits (gives up on a failing disk after STORE_CLOSE_MS), answers all of it, joins, closes db.
 * Also of one that never started. */
enum { STORE_CLOSE_MS = 3000 };
void store_writer_stop(struct store_writer *w);
/* Queues work, or answers it at once with an error when the queue is full or the writer has stopped. */
void store_writer_add(struct store_writer *w, struct store_work *work);
int store_writer_health(struct store_writer *w, struct error *err);

/* ---- state.c, metrics.c, thin.c: what the two writers do ------------------------- */

MUST_USE int store_state_init(struct store_writer *w, struct error *err);
MUST_USE int store_metrics_init(struct store_writer *w, struct error *err);

struct store_metrics_state {
    sqlite3_stmt *find_names, *add_names;
    sqlite3_stmt *find_series, *put_series, *mark_due;
    sqlite3_stmt *add_row, *next_seqs;
    sqlite3_stmt *find_due, *horizon, *slice, *drop_rows, *replace_row, *set_thinned;
    struct {
        void *names;
        size_t len;
        int64_t id;
    } cache[16];
    int cache_next;
};
/* The id of a set of names (each NUL-terminated, joined), making it when new. Returns SQLite's code. */
int store_metric_names_id(struct store_writer *w, const void *names, size_t len, int64_t *id);
/* One slice of thinning, in a transaction of its own; true: there is more. */
bool store_metrics_thin(struct store_writer *w);

/* Thinned rows hold four numbers a name: mean, minimum, maximum, count of values that were numbers. */
enum { METRIC_FULL = 0, METRIC_TENS = 1, METRIC_HUNDREDS = 2, METRIC_SUMMARY_VALUES = 4 };
/* Retention, in steps behind the newest of the job: every row, then 1 in 10, then 1 in 100. */
#define METRIC_KEEP_FULL INT64_C(100000)
#define METRIC_KEEP_TENS INT64_C(1000000)
/* Thinning is looked at again each time a series has gone this far. */
#define METRIC_THIN_STRIDE INT64_C(1000)

void store_f64_write(uint8_t *at, double value); /* little-endian */
double store_f64_read(const uint8_t *at);

/* ---- reader.c ---------------------------------------------------------------------- */

struct store_reader {
    struct store_db state_db, metrics_db;
    sqlite3_stmt *events[4]; /* [of one job][newest first] */
    sqlite3_stmt *metrics;
    struct store_answers *answers;
    pthread_t thread;
    bool started;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    struct store_work_list queue;
    bool stopping;
};
MUST_USE int store_reader_start(struct store_reader *r, const char *dir, struct error *err);
void store_reader_stop(struct store_reader *r); /* answers what waits */

/* ---- store.c ------------------------------------------------------------------------ */

/* ---- backup.c ------------------------------------------------------------------ */

enum { STORE_META_MAX = 64 };
/* The epoch of an open state.db: made when it is new, raised when it is adopted. Refuses a copy that is not. */
MUST_USE int store_take_epoch(struct store_db *db, bool adopt, uint64_t *epoch, struct error *err);

struct store {
    char dir[PATH_MAX];
    char id[9];
    uint64_t epoch;
    atomic_bool backup_stop;
    int lock_fd;
    int64_t max_job, max_event;
    struct buffer notice;
    struct store_answers answers;
    struct store_writer state, metrics;
    struct store_reader reader;
    struct store_db boot_state, boot_metrics; /* the caller's thread: store_load_* */
};

#endif
