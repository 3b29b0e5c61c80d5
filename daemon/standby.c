/* standby.h */
#include "daemon/standby.h"

#include "daemon/log.h"

enum { FIRST_MS = 1000, METRICS_EVERY = 10 };

static void copy(uv_work_t *work)
{
    struct standby *s = work->data;
    error_clear(&s->err);
    /* metrics.db is the large one, and what it lacks no job needs. */
    if (store_backup(s->store, s->dir, s->made % METRICS_EVERY == 0, &s->err) == ERR_OK)
        error_clear(&s->err);
}

static void copied(uv_work_t *work, int status)
{
    struct standby *s = work->data;
    s->working = false;
    if (s->stopped || status < 0)
        return;
    if (s->err.code == ERR_OK) {
        if (s->failing || !s->made)
            log_line(LOG_INFO, "the store is copied to %s, every %llu s", s->dir,
                     (unsigned long long)s->every_ms / 1000);
        s->failing = false;
        s->made++;
    } else if (!s->failing) {
        s->failing = true;
        log_error(LOG_ERROR, &s->err, "the store cannot be copied to %s", s->dir);
    }
}

static void on_time(uv_timer_t *timer)
{
    struct standby *s = timer->data;
    if (s->working) /* the one before is not through: a slow disk */
        return;
    s->work.data = s;
    s->working = uv_queue_work(timer->loop, &s->work, copy, copied) == 0;
}

int standby_start(struct standby *s, uv_loop_t *loop, struct store *store, const char *dir, int every_s,
                  struct error *err)
{
    *s = (struct standby){.store = store, .dir = dir, .every_ms = (uint64_t)every_s * 1000};
    if (!*dir)
        return ERR_OK;
    int rc = uv_timer_init(loop, &s->timer);
    if (rc < 0)
        return error_errno(err, -rc, "cannot set up copies of the store");
    s->open = true;
    s->timer.data = s;
    uv_timer_start(&s->timer, on_time, FIRST_MS < s->every_ms ? FIRST_MS : s->every_ms, s->every_ms);
    return ERR_OK;
}

void standby_stop(struct standby *s)
{
    s->stopped = true;
    if (!s->open)
        return;
    s->open = false;
    store_backup_stop(s->store);
    uv_close((uv_handle_t *)&s->timer, NULL);
}
