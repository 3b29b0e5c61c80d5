/* ctl.h: requests to boostd, and errors as users see them. */
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ctl/ctl.h"
#include "proto/base/clock.h"
#include "proto/base/fs.h"
#include "proto/socket_path.h"

static volatile sig_atomic_t interrupted;

static void on_interrupt(int signum)
{
    (void)signum;
    interrupted = 1;
}

void ctl_catch_interrupt(void)
{
    /* No SA_RESTART: a blocking wait has to end. A second one kills as usual. */
    struct sigaction action = {.sa_handler = on_interrupt, .sa_flags = (int)SA_RESETHAND};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

bool ctl_interrupted(void)
{
    return interrupted;
}

void ctl_arena(struct arena *arena)
{
    arena_init(arena, 64 << 20);
}

/* The user's certificate: a directory as deploy/make-certs.sh makes it. */
static int tls_paths(const struct ctl *ctl, char paths[3][PATH_MAX], struct error *err)
{
    static const char *const names[] = {"tls.crt", "tls.key", "ca.crt"};
    char dir[PATH_MAX];
    const char *env = getenv("BOOST_TLS_DIR"), *config = getenv("XDG_CONFIG_HOME"), *home = getenv("HOME");
    if (ctl->tls_option)
        snprintf(dir, sizeof dir, "%s", ctl->tls_option);
    else if (env && *env)
        snprintf(dir, sizeof dir, "%s", env);
    else if (config && *config)
        snprintf(dir, sizeof dir, "%s/boost", config);
    else
        snprintf(dir, sizeof dir, "%s/.config/boost", home && *home ? home : "");
    int rc = ERR_OK;
    for (int i = 0; !rc && i < 3; i++)
        rc = fs_join(paths[i], PATH_MAX, err, dir, names[i]);
    return rc;
}

static int connect_tls(struct ctl *ctl, const char *host, const char *what, struct error *err)
{
    static char paths[3][PATH_MAX];
    struct address address;
    int rc = address_parse(host, false, what, &address, err);
    if (!rc)
        rc = tls_paths(ctl, paths, err);
    if (rc)
        return rc;
    const struct tls_files files = {.certificate = paths[0], .key = paths[1], .ca = paths[2]};
    rc = client_open_tls(&ctl->client, &address, &files, BOOST__COMPONENT__VALUE__CTL, NULL, CALL_TIMEOUT_MS, err);
    if (rc == ERR_REFUSED && access(files.certificate, F_OK) < 0)
        error_hint(err, "put your certificate's three files there (deploy/make-certs.sh DIR user NAME), or name their "
                        "directory with --tls-dir or $BOOST_TLS_DIR");
    return rc;
}

static int connect_socket(struct ctl *ctl, struct error *err)
{
    char path[SOCKET_PATH_MAX];
    int rc = socket_path_find(SOCKET_CONNECT, ctl->socket_option, NULL, path, err);
    return rc ? rc : client_open(&ctl->client, path, BOOST__COMPONENT__VALUE__CTL, NULL, CALL_TIMEOUT_MS, err);
}

static int ensure_connected(struct ctl *ctl, struct error *err)
{
    if (ctl->connected)
        return ERR_OK;
    const char *env = getenv("BOOST_HOST");
    int rc;
    if (ctl->host_option)
        rc = connect_tls(ctl, ctl->host_option, "--host", err);
    else if (!ctl->socket_option && env && *env)
        rc = connect_tls(ctl, env, "$BOOST_HOST", err);
    else
        rc = connect_socket(ctl, err);
    if (rc == ERR_INVALID)
        rc = err->code = ERR_USAGE; /* ERR_INVALID would be a bad job file */
    if (rc)
        return rc;
    ctl->client.interrupted = &interrupted;
    ctl->connected = ctl->was_connected = true;
    return ERR_OK;
}

static void disconnect(struct ctl *ctl)
{
    if (ctl->connected)
        client_close(&ctl->client);
    ctl->connected = false;
}

/* After these the stream can be used no more. */
static void drop_if_broken(struct ctl *ctl, const struct error *err)
{
    if (err->code == ERR_UNREACHABLE || err->code == ERR_PROTOCOL || err->code == ERR_CANCELLED)
        disconnect(ctl);
}

static Boost__Reply *call(struct ctl *ctl, Boost__Request *request, int timeout_ms, struct arena *arena,
                          struct error *err)
{
    Boost__Reply *reply = NULL;
    if (ensure_connected(ctl, err))
        return NULL;
    int rc = client_send(&ctl->client, request, CALL_TIMEOUT_MS, err);
    if (!rc) {
        ctl->request_id = request->id;
        rc = client_receive(&ctl->client, request->id, timeout_ms, arena, &reply, err);
    }
    if (!rc)
        return reply;
    drop_if_broken(ctl, err);
    return NULL;
}

Boost__Reply *ctl_call(struct ctl *ctl, Boost__Request *request, struct arena *arena, struct error *err)
{
    return call(ctl, request, CALL_TIMEOUT_MS + LONG_POLL_MS, arena, err);
}

Boost__Reply *ctl_call_long(struct ctl *ctl, Boost__Request *request, struct arena *arena, struct error *err)
{
    return call(ctl, request, -1, arena, err);
}

Boost__Reply *ctl_more(struct ctl *ctl, struct arena *arena, struct error *err)
{
    Boost__Reply *reply = NULL;
    if (!client_receive(&ctl->client, ctl->request_id, CALL_TIMEOUT_MS, arena, &reply, err))
        return reply;
    drop_if_broken(ctl, err);
    return NULL;
}

Boost__Reply *ctl_call_patient(struct ctl *ctl, Boost__Request *request, struct arena *arena, struct error *err)
{
    int64_t since = clock_mono_ns();
    bool said = false;
    for (;;) {
        if (ctl_interrupted()) {
            error_set(err, ERR_CANCELLED, "interrupted");
            return NULL;
        }
        Boost__Reply *reply = ctl_call(ctl, request, arena, err);
        if (reply || err->code != ERR_UNREACHABLE || !ctl->was_connected) {
            if (reply && said && !ctl->quiet)
                fprintf(stderr, "boostctl: boostd is back\n");
            return reply;
        }
        if (ctl->deadline_ns && clock_mono_ns() >= ctl->deadline_ns) {
            error_set(err, ERR_TIMEOUT, "timed out; boostd does not answer");
            return NULL;
        }
        if (!said && clock_mono_ns() - since > NS_PER_S) {
            said = true;
            if (!ctl->quiet)
                fprintf(stderr, "boostctl: boostd does not answer; still trying (jobs run on without it)\n");
        }
        struct timespec pause = {0, 100 * NS_PER_MS};
        nanosleep(&pause, NULL); /* between two attempts to connect: nothing to wait on */
    }
}

int ctl_exit_code(int error_code)
{
    switch (error_code) {
    case ERR_OK:
        return EXIT_OK;
    case ERR_USAGE:
        return EXIT_USAGE;
    case ERR_UNREACHABLE:
    case ERR_PROTOCOL:
        return EXIT_UNREACHABLE;
    case ERR_NOT_FOUND:
    case ERR_AMBIGUOUS:
        return EXIT_NOT_FOUND;
    case ERR_INVALID:
    case ERR_UNSUPPORTED:
        return EXIT_INVALID;
    case ERR_TIMEOUT:
        return EXIT_TIMED_OUT;
    case ERR_CANCELLED:
        return EXIT_INTERRUPTED;
    default:
        return EXIT_REFUSED;
    }
}

int ctl_fail(const struct error *err)
{
    fprintf(stderr, "boostctl: %s\n", err->message);
    if (err->hint[0])
        fprintf(stderr, "  hint: %s\n", err->hint);
    return ctl_exit_code(err->code);
}

int ctl_end_follow(const char *job, const struct error *err)
{
    if (err->code != ERR_CANCELLED)
        return ctl_fail(err);
    if (*job)
        fprintf(stderr, "\nboostctl: stopped following; job %s goes on (stop it with: boostctl cancel %s)\n", job, job);
    else
        fprintf(stderr, "\nboostctl: stopped following; the jobs go on\n");
    return EXIT_INTERRUPTED;
}

int ctl_usage(const char *verb, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    fprintf(stderr, "boostctl %s: ", verb);
    vfprintf(stderr, fmt, ap);
    fprintf(stderr, "\n  hint: boostctl help %s\n", verb);
    va_end(ap);
    return EXIT_USAGE;
}

Boost__JobRef *ctl_ref(struct arena *arena, const char *text)
{
    Boost__JobRef *ref = arena_alloc(arena, sizeof *ref);
    if (!ref)
        return NULL;
    boost__job_ref__init(ref);
    ref->text = arena_strdup(arena, text);
    return ref->text ? ref : NULL;
}

/* A request with one job and one reply: the common part of show and ckpt ls. */
Boost__Reply *ctl_ask(struct ctl *ctl, Boost__Request *request, Boost__Reply__BodyCase want, struct arena *arena,
                      int *code)
{
    struct error err;
    Boost__Reply *reply = ctl_call(ctl, request, arena, &err);
    if (reply && reply->body_case != want) {
        error_set(&err, ERR_PROTOCOL, "boostd answered with something else");
        reply = NULL;
    }
    *code = reply ? EXIT_OK : ctl_fail(&err);
    return reply;
}

struct ctl_ref ctl_split_ref(char *text)
{
    struct ctl_ref ref = {.job = text, .rank = -1};
    char *slash = strrchr(text, '/'), *end;
    if (slash) {
        long long rank = strtoll(slash + 1, &end, 10);
        if (end != slash + 1 && !*end && rank >= 0) {
            ref.rank = rank;
            *slash = '\0';
        }
    }
    char *dot = strrchr(text, '.');
    if (dot && strspn(text, "0123456789") == (size_t)(dot - text)) {
        long long attempt = strtoll(dot + 1, &end, 10);
        if (end != dot + 1 && !*end && attempt > 0) {
            ref.attempt = attempt;
            *dot = '\0';
        }
    }
    return ref;
}
