/* users.h */
#include "daemon/users.h"

#include <errno.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/error.h"

struct user_entry {
    struct user_entry *next;
    uid_t uid;
    char name[64];
};

struct lookup {
    uv_work_t work;
    struct users *users;
    struct user_entry *entry;
    void (*done)(void *arg, int rc);
    void *arg;
};

void users_init(struct users *u, uv_loop_t *loop)
{
    *u = (struct users){.loop = loop};
}

void users_free(struct users *u)
{
    while (u->first) {
        struct user_entry *e = u->first;
        u->first = e->next;
        free(e);
    }
}

const char *users_name(const struct users *u, uid_t uid)
{
    for (const struct user_entry *e = u->first; e; e = e->next) {
        if (e->uid == uid)
            return e->name;
    }
    return NULL;
}

static void look_up(uv_work_t *work)
{
    struct user_entry *e = ((struct lookup *)work->data)->entry;
    char text[4096];
    struct passwd pw, *found = NULL;
    if (getpwuid_r(e->uid, &pw, text, sizeof text, &found) == 0 && found && *found->pw_name)
        snprintf(e->name, sizeof e->name, "%s", found->pw_name);
    else
        snprintf(e->name, sizeof e->name, "%u", (unsigned)e->uid);
}

static void looked_up(uv_work_t *work, int status)
{
    struct lookup *l = work->data;
    if (status < 0 || users_name(l->users, l->entry->uid)) {
        free(l->entry);
    } else {
        l->entry->next = l->users->first;
        l->users->first = l->entry;
    }
    l->done(l->arg, status < 0 ? ERR_CANCELLED : ERR_OK);
    free(l);
}

void users_lookup(struct users *u, uid_t uid, void (*done)(void *arg, int rc), void *arg)
{
    struct lookup *l = calloc(1, sizeof *l);
    struct user_entry *e = calloc(1, sizeof *e);
    if (!l || !e) {
        free(l);
        free(e);
        done(arg, ERR_NOMEM);
        return;
    }
    e->uid = uid;
    *l = (struct lookup){.users = u, .entry = e, .done = done, .arg = arg};
    l->work.data = l;
    if (uv_queue_work(u->loop, &l->work, look_up, looked_up) < 0) {
        free(l);
        free(e);
        done(arg, ERR_INTERNAL);
    }
}

/* ---- by name ------------------------------------------------------------------ */

struct find {
    uv_work_t work;
    char name[64 + 1];
    int rc;
    uid_t uid;
    gid_t gid;
    void (*done)(void *arg, int rc, uid_t uid, gid_t gid);
    void *arg;
};

static void find_account(uv_work_t *work)
{
    struct find *f = work->data;
    char text[4096];
    struct passwd pw, *found = NULL;
    int failed = getpwnam_r(f->name, &pw, text, sizeof text, &found);
    f->rc = found ? ERR_OK : failed && failed != ENOENT && failed != ESRCH ? ERR_IO : ERR_NOT_FOUND;
    if (found) {
        f->uid = found->pw_uid;
        f->gid = found->pw_gid;
    }
}

static void account_found(uv_work_t *work, int status)
{
    struct find *f = work->data;
    f->done(f->arg, status < 0 ? ERR_CANCELLED : f->rc, f->uid, f->gid);
    free(f);
}

void users_find(struct users *u, const char *name, void (*done)(void *arg, int rc, uid_t uid, gid_t gid), void *arg)
{
    struct find *f = calloc(1, sizeof *f);
    if (!f) {
        done(arg, ERR_NOMEM, 0, 0);
        return;
    }
    *f = (struct find){.done = done, .arg = arg};
    snprintf(f->name, sizeof f->name, "%s", name);
    f->work.data = f;
    if (uv_queue_work(u->loop, &f->work, find_account, account_found) < 0) {
        free(f);
        done(arg, ERR_INTERNAL, 0, 0);
    }
}
