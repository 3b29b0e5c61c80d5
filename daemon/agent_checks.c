/* agent_checks.h */
#include "daemon/agent_checks.h"

#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/agent_script.h"
#include "proto/base/arena.h"
#include "proto/base/buffer.h"
#include "proto/base/clock.h"
#include "proto/base/fs.h"

enum { LEFTOVER_MS = 5000, LOOK_MS = 50 };

/* ---- findings ---- */

void finding_clear(struct findings *list, const char *check)
{
    for (int i = 0; i < list->n; i++)
        if (strcmp(list->items[i].check, check) == 0) {
            memmove(&list->items[i], &list->items[i + 1], (size_t)(list->n - i - 1) * sizeof *list->items);
            list->n--;
            return;
        }
}

void finding_set(struct findings *list, const char *check, const char *fmt, ...)
{
    va_list ap;
    finding_clear(list, check);
    if (list->n == FINDINGS_MAX)
        return;
    struct finding *f = &list->items[list->n++];
    snprintf(f->check, sizeof f->check, "%s", check);
    va_start(ap, fmt);
    vsnprintf(f->text, sizeof f->text, fmt, ap);
    va_end(ap);
}

void findings_text(const struct findings *list, char *out, size_t cap)
{
    size_t used = 0;
    out[0] = '\0';
    for (int i = 0; i < list->n && used < cap - 1; i++)
        used += (size_t)snprintf(out + used, cap - used, "%s%s: %s", i ? "; " : "", list->items[i].check,
                                 list->items[i].text);
}

/* ---- memory ---- */

/* MiB that programs can still have, by the kernel's own estimate; -1: not known. */
static int64_t memory_available(void)
{
    static const char key[] = "\nMemAvailable:";
    struct buffer text;
    int64_t mib = -1;
    buffer_init(&text, 64 << 10);
    if (!fs_read_file("/proc/meminfo", &text, NULL) && text.len) {
        const char *at = strstr((char *)text.data, key);
        if (at)
            mib = strtoll(at + sizeof key - 1, NULL, 10) >> 10;
    }
    buffer_free(&text);
    return mib;
}

int check_room(const Boost__AttemptStart *start, struct error *err)
{
    int64_t each = start->spec && start->spec->resources ? start->spec->resources->memory_mib : 0;
    int64_t wanted = each * (int64_t)start->n_ranks, there = memory_available();
    if (each <= 0 || there < 0 || there >= wanted)
        return ERR_OK;
    error_set(err, ERR_BUSY,
              "%" PRId64 " MiB of memory are available, and %" PRId64 " MiB are asked for (%zu x %" PRId64 ")", there,
              wanted, start->n_ranks, each);
    return error_hint(err, "end what else uses the node's memory, or lower resources.memory_mib");
}

/* ---- the data plane's address ---- */

static void check_port(const char *address, struct findings *out)
{
    struct sockaddr_storage any = {0};
    struct sockaddr_in *v4 = (struct sockaddr_in *)&any;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&any;
    socklen_t len = 0;
    if (inet_pton(AF_INET, address, &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET;
        len = sizeof *v4;
    } else if (inet_pton(AF_INET6, address, &v6->sin6_addr) == 1) {
        v6->sin6_family = AF_INET6;
        len = sizeof *v6;
    }
    int fd = len ? socket(any.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0) : -1;
    if (!len)
        finding_set(out, "port", "data_address \"%.100s\" is no IP address", address);
    else if (fd < 0 || bind(fd, (struct sockaddr *)&any, len) < 0 || listen(fd, 1) < 0)
        finding_set(out, "port", "no port of data_address %.100s can be bound: %s", address, strerror(errno));
    if (fd >= 0)
        close(fd);
}

void checks_at_once(const Boost__AgentConfig *config, struct findings *out)
{
    int64_t there = memory_available();
    if (config->memory_floor_mib > 0 && there >= 0 && there < config->memory_floor_mib)
        finding_set(out, "memory", "%" PRId64 " MiB are available, less than memory_floor_mib (%" PRId64 ")", there,
                    config->memory_floor_mib);
    check_port(config->data_address, out);
}

/* ---- scripts of the site ---- */

enum { ENVIRONMENT = 4 << 20 };

/* "0,1,5" */
static char *list_ranks(const Boost__AttemptStart *s, struct arena *mem)
{
    struct buffer b;
    buffer_init(&b, ENVIRONMENT / 2);
    for (size_t i = 0; i < s->n_ranks; i++)
        buffer_printf(&b, "%s%d", i ? "," : "", s->ranks[i]);
    char *text = b.len ? arena_strdup(mem, (char *)b.data) : NULL;
    buffer_free(&b);
    return text;
}

static char *list_gpus(const Boost__AttemptStart *s, struct arena *mem)
{
    struct buffer b;
    buffer_init(&b, ENVIRONMENT / 2);
    for (size_t i = 0; i < s->n_devices; i++)
        buffer_printf(&b, "%s%s", i ? "," : "", s->devices[i]->uuid ? s->devices[i]->uuid : "");
    char *text = b.len ? arena_strdup(mem, (char *)b.data) : NULL;
    buffer_free(&b);
    return text;
}

int site_script(const char *which, const char *path, int timeout_ms, int cancel_fd, const char *node,
                const Boost__AttemptStart *s, struct error *err)
{
    struct arena mem;
    arena_init(&mem, ENVIRONMENT);
    const struct script_variable variables[] = {
        {"BOOST_SCRIPT", which},
        {"BOOST_NODE", node},
        {"BOOST_JOB", s ? arena_printf(&mem, "%" PRId64, s->job) : NULL},
        {"BOOST_JOB_NAME", s && s->spec ? s->spec->name : NULL},
        {"BOOST_ATTEMPT", s ? arena_printf(&mem, "%s-%" PRId64 ".%d", s->store_id, s->job, s->attempt) : NULL},
        {"BOOST_USER", s ? s->user : NULL},
        {"BOOST_UID", s ? arena_printf(&mem, "%u", s->has_uid ? s->uid : (unsigned)geteuid()) : NULL},
        {"BOOST_GID", s ? arena_printf(&mem, "%u", s->has_gid ? s->gid : (unsigned)getegid()) : NULL},
        {"BOOST_WORLD", s ? arena_printf(&mem, "%d", s->world) : NULL},
        {"BOOST_RANKS", s ? list_ranks(s, &mem) : NULL},
        {"BOOST_GPUS", s ? list_gpus(s, &mem) : NULL},
        {"BOOST_CHECKPOINT_DIR", s ? s->checkpoint_dir : NULL},
    };
    char limit[32];
    snprintf(limit, sizeof limit, "%s_timeout_ms", which);
    const struct script script = {.path = path,
                                  .variables = variables,
                                  .n_variables = sizeof variables / sizeof *variables,
                                  .timeout_ms = timeout_ms,
                                  .limit = limit,
                                  .cancel_fd = cancel_fd,
                                  .kill_children = strcmp(which, "health") == 0};
    int rc = script_run(&script, err);
    arena_free(&mem);
    return rc;
}

void check_script(const Boost__AgentConfig *config, const char *node, const Boost__AttemptStart *start,
                  struct findings *out)
{
    struct error err;
    if (*config->health_script &&
        site_script("health", config->health_script, config->health_timeout_ms, -1, node, start, &err))
        finding_set(out, "script", "%s", err.message);
}

/* ---- what is left ---- */

/* Whether the run directory's name is of an attempt of this job before that one. */
static bool is_earlier(const char *name, const Boost__AttemptStart *start)
{
    char prefix[64];
    char *end;
    int len = snprintf(prefix, sizeof prefix, "%s-%" PRId64 ".", start->store_id, start->job);
    if (strncmp(name, prefix, (size_t)len) != 0)
        return false;
    long attempt = strtol(name + len, &end, 10);
    return !*end && attempt < start->attempt;
}

void check_earlier_attempts(const char *attempts_dir, const Boost__AttemptStart *start, struct findings *out)
{
    int64_t deadline = clock_mono_ns() + LEFTOVER_MS * NS_PER_MS;
    struct leftover *found = calloc(LEFTOVERS_MAX, sizeof *found);
    const struct leftover *one = NULL;
    uid_t uid = start->has_uid ? start->uid : geteuid();
    for (bool first = true; found; first = false) {
        int n = leftovers_find(attempts_dir, "", found);
        one = NULL;
        for (int i = 0; i < n; i++)
            if (is_earlier(found[i].attempt, start) && found[i].uid == uid &&
                procid_signal(&found[i].id, SIGKILL, NULL) != ERR_NOT_FOUND)
                one = &found[i];
        if (!one || clock_mono_ns() >= deadline)
            break;
        poll(NULL, 0, first ? 1 : LOOK_MS);
    }
    if (one)
        finding_set(out, "leftover", "process %ld (%s) of attempt %s cannot be killed", (long)one->id.pid, one->name,
                    one->attempt);
    free(found);
}
