/* What the writer of state.db does: a transaction's rows, parents before children. */
#include <stdlib.h>

#include "store/internal.h"

enum { STORE_TXN_BYTES = 64 << 20 };

struct store_put {
    struct store_put *next;
    void *row; /* the struct of its kind, in the arena */
};
struct store_txn {
    struct store_work work; /* first: a transaction is a piece of work */
    struct store *store;
    struct store_put *head[ROW_KINDS], **tail[ROW_KINDS];
    store_done_fn done;
    void *arg;
};
struct state_statements {
    sqlite3_stmt *put[ROW_KINDS];
};

static void finish(struct store_work *work)
{
    struct store_txn *t = (struct store_txn *)work;
    if (t->done)
        t->done(t->arg, work->rc, &work->err);
    arena_free(&work->mem);
    free(t);
}

struct store_txn *store_begin(struct store *s)
{
    struct store_txn *t = calloc(1, sizeof *t);
    if (!t)
        return NULL;
    t->store = s;
    t->work.finish = finish;
    arena_init(&t->work.mem, STORE_TXN_BYTES);
    for (int kind = 0; kind < ROW_KINDS; kind++)
        t->tail[kind] = &t->head[kind];
    return t;
}

static void put(struct store_txn *t, enum store_row_kind kind, const void *row)
{
    struct store_put *p = arena_alloc(&t->work.mem, sizeof *p);
    if (p)
        p->row = store_row_copy(&t->work.mem, &store_tables[kind], row);
    if (!p || !p->row) {
        t->work.rc = error_set(&t->work.err, ERR_NOMEM, "state.db: a transaction does not fit in memory (limit %d MiB)",
                               STORE_TXN_BYTES >> 20);
        return;
    }
    p->next = NULL;
    *t->tail[kind] = p;
    t->tail[kind] = &p->next;
}

void store_put_job(struct store_txn *t, const struct store_job *row)
{
    put(t, ROW_JOB, row);
    if (row->id > t->store->max_job)
        t->store->max_job = row->id;
}

void store_put_attempt(struct store_txn *t, const struct store_attempt *row)
{
    put(t, ROW_ATTEMPT, row);
}

void store_put_node(struct store_txn *t, const struct store_node *row)
{
    put(t, ROW_NODE, row);
}

void store_put_checkpoint(struct store_txn *t, const struct store_checkpoint *row)
{
    put(t, ROW_CHECKPOINT, row);
}

void store_put_shard(struct store_txn *t, const struct store_shard *row)
{
    put(t, ROW_SHARD, row);
}

void store_add_event(struct store_txn *t, const struct store_event *row)
{
    put(t, ROW_EVENT, row);
    if (row->id > t->store->max_event)
        t->store->max_event = row->id;
}

void store_commit(struct store_txn *t, store_done_fn done, void *arg)
{
    t->done = done;
    t->arg = arg;
    store_writer_add(&t->store->state, &t->work);
}

void store_abort(struct store_txn *t)
{
    arena_free(&t->work.mem);
    free(t);
}

static int apply(struct store_writer *w, struct store_work *work, struct error *err)
{
    struct state_statements *st = w->state;
    struct store_txn *t = (struct store_txn *)work;
    for (int kind = 0; kind < ROW_KINDS; kind++) {
        for (struct store_put *p = t->head[kind]; p; p = p->next) {
            int code = store_row_bind(st->put[kind], &store_tables[kind], p->row);
            if (!code)
                code = store_db_step(st->put[kind]);
            sqlite3_clear_bindings(st->put[kind]);
            if (code) {
                store_db_error(&w->db, code, store_tables[kind].name, err);
                return code;
            }
        }
    }
    return SQLITE_OK;
}

static void free_state(struct store_writer *w)
{
    struct state_statements *st = w->state;
    for (int kind = 0; kind < ROW_KINDS; kind++)
        sqlite3_finalize(st->put[kind]);
    free(st);
}

static const struct store_writer_ops ops = {.apply = apply, .free = free_state};

int store_state_init(struct store_writer *w, struct error *err)
{
    struct state_statements *st = calloc(1, sizeof *st);
    if (!st)
        return error_set(err, ERR_NOMEM, "state.db: out of memory");
    w->state = st;
    w->ops = &ops;
    struct buffer sql;
    buffer_init(&sql, 16 << 10);
    int rc = ERR_OK;
    for (int kind = 0; !rc && kind < ROW_KINDS; kind++) {
        buffer_clear(&sql);
        store_row_put_sql(&store_tables[kind], &sql);
        rc = sql.failed ? error_set(err, ERR_NOMEM, "state.db: out of memory")
                        : store_db_prepare(&w->db, (const char *)sql.data, &st->put[kind], err);
    }
    buffer_free(&sql);
    return rc;
}
