/* agent_attempts.h: metrics and shard records to the controller. */
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/agent_node.h"
#include "daemon/keeper_exit.h"
#include "daemon/log.h"
#include "proto/base/clock.h"
#include "proto/base/fs.h"
#include "proto/reclog.h"
#include "proto/reflect.h"

enum {
    BATCH_RECORDS = 256,
    BATCH_BYTES = 256 << 10,
    BATCH_ARENA = 8 << 20,
    QUEUE_BYTES = 4 << 20, /* more in the socket's queue: wait */
    RESEND_MS = 10000,     /* without an acknowledgement: send again */
    ACKS_MAX = 1 << 20,
};

/* ---- acknowledgements ---- */

void forward_rewind(struct forward *f)
{
    f->sent = f->acked;
    f->sent_seq = f->acked_seq;
    f->mark_count = 0;
    f->caught_up = false;
}

void forward_ack(struct forward *f, int64_t seq)
{
    int done = 0;
    while (done < f->mark_count && f->marks[done].seq <= seq) {
        f->acked = f->marks[done].offset;
        f->acked_seq = f->marks[done].seq;
        done++;
    }
    if (!done)
        return;
    f->mark_count -= done;
    memmove(f->marks, f->marks + done, (size_t)f->mark_count * sizeof *f->marks);
    f->last_ns = clock_mono_ns();
}

/* ---- batches ---- */

struct batch {
    ProtobufCMessage *records[BATCH_RECORDS];
    size_t count, bytes;
    uint64_t end;
    int64_t last_seq;
};

static int64_t record_seq(const ProtobufCMessage *m)
{
    return m->descriptor == &boost__metric_record__descriptor ? ((const Boost__MetricRecord *)m)->seq
                                                              : ((const Boost__ShardRecord *)m)->seq;
}

/* The records from f->sent on, as many as go into one message. */
static void collect(struct forward *f, const char *path, const ProtobufCMessageDescriptor *type, struct arena *arena,
                    struct batch *b)
{
    struct buffer record;
    struct error err;
    buffer_init(&record, RECLOG_MAX_RECORD);
    *b = (struct batch){.end = f->sent, .last_seq = f->sent_seq};
    while (b->count < BATCH_RECORDS && b->bytes < BATCH_BYTES) {
        bool got;
        uint64_t offset = b->end;
        int rc = reclog_read(path, &offset, &record, &got, &err);
        ProtobufCMessage *m = NULL;
        if (!rc && !got)
            break;
        if (!rc) {
            m = reflect_unpack(type, record.data, record.len, arena, &err);
            rc = m ? ERR_OK : (int)err.code;
        }
        if (rc == ERR_NOMEM && b->count)
            break; /* the arena is full: next batch */
        if (rc) {
            f->broken = rc == ERR_CORRUPT || rc == ERR_INVALID || rc == ERR_NOMEM;
            log_error(LOG_ERROR, &err, "%s: %s", path,
                      f->broken ? "the rest of this file is not forwarded" : "not now");
            break;
        }
        b->records[b->count++] = m;
        b->bytes += record.len;
        b->end = offset;
        b->last_seq = record_seq(m);
    }
    buffer_free(&record);
}

static bool send_batch(struct agent_attempt *a, struct agent_rank *r, const struct batch *b, bool metrics)
{
    if (metrics) {
        Boost__MetricBatch m = BOOST__METRIC_BATCH__INIT;
        m.has_job = m.has_attempt = m.has_rank = true;
        m.job = a->job;
        m.attempt = a->attempt;
        m.rank = r->rank;
        m.n_records = b->count;
        m.records = (Boost__MetricRecord **)(uintptr_t)b->records;
        return agent_send(a->agent, BOOST__AGENT_MESSAGE__BODY_METRICS, &m.base);
    }
    Boost__ShardBatch m = BOOST__SHARD_BATCH__INIT;
    m.has_job = m.has_attempt = m.has_rank = true;
    m.job = a->job;
    m.attempt = a->attempt;
    m.rank = r->rank;
    m.n_records = b->count;
    m.records = (Boost__ShardRecord **)(uintptr_t)b->records;
    return agent_send(a->agent, BOOST__AGENT_MESSAGE__BODY_SHARDS, &m.base);
}

static void forward(struct agent_attempt *a, struct agent_rank *r, struct forward *f, bool metrics)
{
    char path[PATH_MAX];
    struct link_up *link = a->agent->link;
    f->caught_up = f->broken;
    if (f->broken || !link_up_ready(link) ||
        rank_file_path(path, sizeof path, a->run_dir, r->rank, metrics ? "metrics" : "shards", NULL))
        return;
    if (!rank_file_regular(path)) { /* not there yet */
        f->caught_up = true;
        return;
    }
    if (f->mark_count && clock_mono_ns() - f->last_ns > RESEND_MS * NS_PER_MS)
        forward_rewind(f);
    while (f->mark_count < FORWARD_WINDOW && link_up_queued(link) < QUEUE_BYTES) {
        struct arena arena;
        struct batch b;
        arena_init(&arena, BATCH_ARENA);
        collect(f, path, metrics ? &boost__metric_record__descriptor : &boost__shard_record__descriptor, &arena, &b);
        bool sent = b.count && send_batch(a, r, &b, metrics);
        arena_free(&arena);
        if (!sent) {
            f->caught_up = !b.count;
            return;
        }
        f->sent = b.end;
        f->sent_seq = b.last_seq;
        f->marks[f->mark_count].offset = b.end;
        f->marks[f->mark_count++].seq = b.last_seq;
        f->last_ns = clock_mono_ns();
    }
}

void forward_metrics(struct agent_attempt *a, struct agent_rank *r)
{
    forward(a, r, &r->metrics, true);
}

void forward_shards(struct agent_attempt *a, struct agent_rank *r)
{
    forward(a, r, &r->shards, false);
}

/* ---- the file of acknowledgements ---- */

void acks_save(struct agent_attempt *a)
{
    char path[PATH_MAX];
    struct error err;
    struct buffer text;
    buffer_init(&text, ACKS_MAX);
    for (size_t i = 0; i < a->rank_count; i++) {
        const struct agent_rank *r = &a->ranks[i];
        buffer_printf(&text, "%d %" PRIu64 " %" PRId64 " %" PRIu64 " %" PRId64 " %d\n", r->rank, r->metrics.acked,
                      r->metrics.acked_seq, r->shards.acked, r->shards.acked_seq, r->exit_acked);
    }
    buffer_printf(&text, "end %d\n", a->end_acked);
    if (text.failed || fs_join(path, sizeof path, &err, a->run_dir, "agent.acks") ||
        fs_write_atomic(path, text.data, text.len, 0600, &err))
        log_line(LOG_DEBUG, "acknowledgements of %s are not saved", a->run_dir);
    buffer_free(&text);
    a->acks_dirty = false;
    a->acks_ns = clock_mono_ns();
}

void acks_load(struct agent_attempt *a)
{
    char path[PATH_MAX];
    struct buffer text;
    buffer_init(&text, ACKS_MAX);
    if (fs_join(path, sizeof path, NULL, a->run_dir, "agent.acks") ||
        fs_read_regular(path, &text, NULL) || !text.len)
        goto out;
    for (char *at = (char *)text.data; *at;) {
        char *end;
        long rank = strtol(at, &end, 10);
        struct agent_rank *r = end == at ? NULL : attempt_rank(a, (int)rank);
        if (r) {
            r->metrics.acked = strtoull(end, &end, 10);
            r->metrics.acked_seq = strtoll(end, &end, 10);
            r->shards.acked = strtoull(end, &end, 10);
            r->shards.acked_seq = strtoll(end, &end, 10);
            r->exit_acked = strtol(end, &end, 10) == 1;
            forward_rewind(&r->metrics);
            forward_rewind(&r->shards);
        } else if (!strncmp(at, "end ", 4)) {
            a->end_acked = at[4] == '1';
        }
        at = strchr(end, '\n');
        if (!at++)
            break;
    }
out:
    buffer_free(&text);
}
