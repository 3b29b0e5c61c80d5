/* kept_logs.h */
#include "daemon/kept_logs.h"

#include <dirent.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/log.h"
#include "proto/base/fs.h"

struct kept_work {
    uv_work_t work;
    char dir[PATH_MAX], name[64];
    struct buffer data;
    bool put;
    int rc;
    struct error err;
    void (*done)(void *arg, const void *data, size_t len);
    void *arg;
};

void kept_logs_init(struct kept_logs *k, uv_loop_t *loop, const char *state_dir)
{
    *k = (struct kept_logs){.loop = loop};
    int used = snprintf(k->dir, sizeof k->dir, "%s/kept", state_dir);
    if (used < 0 || (size_t)used >= sizeof k->dir)
        k->dir[0] = '\0'; /* the state directory itself would not have opened */
}

/* ---- in a thread ---- */

struct old_file {
    char name[64];
    int64_t bytes;
    struct timespec time;
};

static int older_first(const void *x, const void *y)
{
    const struct old_file *a = x, *b = y;
    if (a->time.tv_sec != b->time.tv_sec)
        return a->time.tv_sec < b->time.tv_sec ? -1 : 1;
    return (a->time.tv_nsec > b->time.tv_nsec) - (a->time.tv_nsec < b->time.tv_nsec);
}

static void trim(const char *path)
{
    DIR *dir = opendir(path);
    struct old_file *list = NULL;
    size_t n = 0;
    int64_t total = 0;
    for (struct dirent *e; dir && (e = readdir(dir));) {
        struct stat st;
        if (e->d_name[0] == '.' || strlen(e->d_name) >= sizeof list->name ||
            fstatat(dirfd(dir), e->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0 || !S_ISREG(st.st_mode))
            continue;
        struct old_file *more = realloc(list, (n + 1) * sizeof *list);
        if (!more)
            break;
        list = more;
        list[n] = (struct old_file){.bytes = st.st_size, .time = st.st_mtim};
        memcpy(list[n].name, e->d_name, strlen(e->d_name) + 1);
        total += list[n++].bytes;
    }
    if (total > KEPT_LOGS_BYTES)
        qsort(list, n, sizeof *list, older_first);
    for (size_t i = 0; i < n && total > KEPT_LOGS_BYTES; i++) {
        unlinkat(dirfd(dir), list[i].name, 0);
        total -= list[i].bytes;
    }
    if (dir)
        closedir(dir);
    free(list);
}

static void work(uv_work_t *w)
{
    struct kept_work *x = w->data;
    char path[PATH_MAX];
    x->rc = fs_join(path, sizeof path, &x->err, x->dir, x->name);
    if (!x->put) {
        if (!x->rc)
            x->rc = fs_read_regular(path, &x->data, &x->err);
        return;
    }
    if (!x->rc)
        x->rc = fs_make_dirs(x->dir, 0700, &x->err);
    if (!x->rc)
        x->rc = fs_write_durable(path, x->data.data, x->data.len, 0600, &x->err);
    trim(x->dir);
}

/* ---- on the loop ---- */

static void worked(uv_work_t *w, int status)
{
    struct kept_work *x = w->data;
    bool ok = status >= 0 && !x->rc;
    if (x->put && !ok)
        log_error(LOG_WARN, &x->err, "last output of attempt %s is not kept", x->name);
    if (!x->put)
        x->done(x->arg, ok ? x->data.data : NULL, ok ? x->data.len : 0);
    buffer_free(&x->data);
    free(x);
}

static struct kept_work *begin(struct kept_logs *k, int64_t job, int attempt)
{
    struct kept_work *x = calloc(1, sizeof *x);
    if (!x)
        return NULL;
    x->work.data = x;
    snprintf(x->dir, sizeof x->dir, "%s", k->dir);
    snprintf(x->name, sizeof x->name, "%" PRId64 ".%d", job, attempt);
    buffer_init(&x->data, KEPT_LOGS_ONE);
    return x;
}

void kept_logs_put(struct kept_logs *k, int64_t job, int attempt, const void *data, size_t len)
{
    struct kept_work *x = begin(k, job, attempt);
    if (!x)
        return;
    x->put = true;
    if (!buffer_append(&x->data, data, len) && uv_queue_work(k->loop, &x->work, work, worked) >= 0)
        return;
    buffer_free(&x->data);
    free(x);
}

void kept_logs_get(struct kept_logs *k, int64_t job, int attempt, void (*done)(void *arg, const void *data, size_t len),
                   void *arg)
{
    struct kept_work *x = begin(k, job, attempt);
    if (x) {
        x->done = done;
        x->arg = arg;
        if (uv_queue_work(k->loop, &x->work, work, worked) >= 0)
            return;
        buffer_free(&x->data);
        free(x);
    }
    done(arg, NULL, 0);
}
