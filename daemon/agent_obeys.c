/* agent_obeys.h */
#include "daemon/agent_obeys.h"

#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/fs.h"

enum { FILE_MAX = 4096 };

static void put(struct obeys *o, const char *store, uint64_t epoch)
{
    int at = 0;
    while (at < o->n && strcmp(o->list[at].store, store) != 0)
        at++;
    if (at == o->n && o->n == OBEYS_STORES)
        at = 0; /* the one that was not met for longest */
    if (at < o->n) {
        memmove(&o->list[at], &o->list[at + 1], (size_t)(o->n - at - 1) * sizeof o->list[0]);
        o->n--;
    }
    snprintf(o->list[o->n].store, sizeof o->list[0].store, "%s", store);
    o->list[o->n++].epoch = epoch;
}

/* "<store> <epoch>\n" */
static bool take_line(struct obeys *o, const char *line)
{
    char store[17];
    size_t len = strcspn(line, " ");
    if (!len || len >= sizeof store || strspn(line, "0123456789abcdef") != len || line[len] != ' ')
        return false;
    snprintf(store, sizeof store, "%.*s", (int)len, line);
    char *end;
    errno = 0;
    uint64_t epoch = strtoull(line + len + 1, &end, 10);
    if (errno || !epoch || *end != '\n')
        return false;
    put(o, store, epoch);
    return true;
}

int obeys_load(struct obeys *o, const char *path, struct error *err)
{
    *o = (struct obeys){.n = 0};
    snprintf(o->path, sizeof o->path, "%s", path);
    if (!*path || !fs_exists(path))
        return ERR_OK;
    struct buffer text;
    buffer_init(&text, FILE_MAX);
    int rc = fs_read_regular(path, &text, err);
    bool good = !rc;
    for (const char *line = rc || !text.len ? "" : (const char *)text.data; *line;) {
        const char *next = strchr(line, '\n');
        good = take_line(o, line) && good;
        if (!next)
            break;
        line = next + 1;
    }
    good = good && text.len > 0;
    buffer_free(&text);
    if (good)
        return ERR_OK;
    char aside[PATH_MAX];
    if (snprintf(aside, sizeof aside, "%s.damaged", path) < (int)sizeof aside)
        rename(path, aside);
    return error_set(err, ERR_CORRUPT, "%s is damaged and set aside: an earlier controller may be obeyed", path);
}

uint64_t obeys_epoch(const struct obeys *o, const char *store)
{
    for (int i = 0; i < o->n; i++)
        if (strcmp(o->list[i].store, store) == 0)
            return o->list[i].epoch;
    return 0;
}

int obeys_set(struct obeys *o, const char *store, uint64_t epoch, struct error *err)
{
    if (epoch <= obeys_epoch(o, store))
        return ERR_OK;
    put(o, store, epoch);
    if (!*o->path)
        return ERR_OK;
    struct buffer text;
    buffer_init(&text, FILE_MAX);
    for (int i = 0; i < o->n; i++)
        buffer_printf(&text, "%s %" PRIu64 "\n", o->list[i].store, o->list[i].epoch);
    int rc = text.failed ? error_set(err, ERR_NOMEM, "no memory to write %s", o->path)
                         : fs_write_durable(o->path, text.data, text.len, 0600, err);
    buffer_free(&text);
    return rc;
}
