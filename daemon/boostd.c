/* boostd: the controller. Options and configuration, then the store's lock, then the socket. */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "proto/config.h"
#include "daemon/log.h"
#include "daemon/server.h"
#include "proto/base/fs.h"
#include "proto/base/streams.h"
#include "proto/socket_path.h"
#include "proto/version.h"

enum { MAX_SETS = 64, ASSIGNMENT = 320, MAX_LISTEN = 16, CONFIG_ARENA = 4 << 20, EXIT_USAGE = 2, EXIT_IN_USE = 5 };

struct options {
    const char *config, *state_dir, *socket, *log_level;
    const char *sets[MAX_SETS];
    size_t n_sets;
    char listen[MAX_LISTEN][ASSIGNMENT]; /* --listen, as assignments */
    size_t n_listen;
    int ready_fd;
    bool adopt;
    bool done; /* --help or --version: nothing else to do */
};

static const char usage[] =
    "usage: boostd [options]\n"
    "The controller of BOOST: keeps the jobs, places them, and answers boostctl and boost-agent.\n"
    "\n"
    "  --config FILE       configuration, protobuf text of BoostdConfig (" CONFIG_BOOSTD_PATH ")\n"
    "  --state-dir DIR     where jobs, events and metrics are kept\n"
    "  --socket PATH       Unix socket to listen on (socket of the configuration, $BOOST_SOCKET,\n"
    "                      $XDG_RUNTIME_DIR/boost/boostd.sock, as root /run/boost/boostd.sock)\n"
    "  --listen HOST:PORT  also by TCP with TLS, for agents and boostctl of other machines; may be repeated\n"
    "                      (certificates: tls_certificate, tls_key, tls_ca of the configuration)\n"
    "  --adopt             takes the place of the boostd that this store is of (backup_dir of its configuration makes\n"
    "                      copies); agents that have met this one obey the other no more\n"
    "  --log-level LEVEL   debug, info, warn or error\n"
    "  --set FIELD=VALUE   overrides one field of the configuration; may be repeated\n"
    "  --ready-fd N        writes a newline to this descriptor once it listens\n"
    "  --help, --version\n"
    "\n"
    "Once it listens it prints \"boostd ready socket=PATH store=ID\", with --listen also \"listen=ADDRESS,...\".\n"
    "SIGTERM ends it; ranks keep running. SIGHUP reads the certificates again.\n";

static int parse_ready_fd(const char *text, int *out, struct error *err)
{
    char *end;
    errno = 0;
    long fd = strtol(text, &end, 10);
    if (errno || *end || end == text || fd < 0 || fd > 65535 || fcntl((int)fd, F_GETFD) < 0)
        return error_set(err, ERR_USAGE, "--ready-fd %s is not an open descriptor", text);
    if (fd > STDERR_FILENO)
        fcntl((int)fd, F_SETFD, FD_CLOEXEC);
    *out = (int)fd;
    return ERR_OK;
}

static int add_set(struct options *o, const char *assignment, struct error *err)
{
    if (o->n_sets == MAX_SETS)
        return error_set(err, ERR_USAGE, "more than %d --set options", MAX_SETS);
    o->sets[o->n_sets++] = assignment;
    return ERR_OK;
}

static int add_listen(struct options *o, const char *address, struct error *err)
{
    if (o->n_listen == MAX_LISTEN || strlen(address) > ASSIGNMENT - sizeof "listen=")
        return error_set(err, ERR_USAGE, "--listen %.80s: more than %d of them, or too long", address, MAX_LISTEN);
    char *text = o->listen[o->n_listen++];
    snprintf(text, ASSIGNMENT, "listen=%s", address);
    return add_set(o, text, err);
}

static int parse_options(int argc, char **argv, struct options *o, struct error *err)
{
    enum { CONFIG = 256, STATE_DIR, SOCKET, LISTEN, ADOPT, LOG_LEVEL, SET, READY_FD, HELP, VERSION };
    static const struct option known[] = {
        {"config", required_argument, NULL, CONFIG},
        {"state-dir", required_argument, NULL, STATE_DIR},
        {"socket", required_argument, NULL, SOCKET},
        {"listen", required_argument, NULL, LISTEN},
        {"adopt", no_argument, NULL, ADOPT},
        {"log-level", required_argument, NULL, LOG_LEVEL},
        {"set", required_argument, NULL, SET},
        {"ready-fd", required_argument, NULL, READY_FD},
        {"help", no_argument, NULL, HELP},
        {"version", no_argument, NULL, VERSION},
        {NULL, 0, NULL, 0},
    };
    *o = (struct options){.ready_fd = -1};
    opterr = 0;
    int c, rc = ERR_OK;
    while (!rc && (c = getopt_long(argc, argv, ":", known, NULL)) != -1) {
        switch (c) {
        case CONFIG:
            o->config = optarg;
            break;
        case STATE_DIR:
            o->state_dir = optarg;
            break;
        case SOCKET:
            o->socket = optarg;
            break;
        case LOG_LEVEL:
            o->log_level = optarg;
            break;
        case ADOPT:
            o->adopt = true;
            break;
        case LISTEN:
            rc = add_listen(o, optarg, err);
            break;
        case SET:
            rc = add_set(o, optarg, err);
            break;
        case READY_FD:
            rc = parse_ready_fd(optarg, &o->ready_fd, err);
            break;
        case HELP:
            fputs(usage, stdout);
            o->done = true;
            return ERR_OK;
        case VERSION:
            printf("boostd %s (%s)\n", boost_version(), boost_build_id());
            o->done = true;
            return ERR_OK;
        case ':':
            rc = error_set(err, ERR_USAGE, "option %s needs a value", argv[optind - 1]);
            break;
        default:
            rc = error_set(err, ERR_USAGE, "unknown option %s", argv[optind - 1]);
            break;
        }
    }
    if (!rc && optind < argc)
        rc = error_set(err, ERR_USAGE, "unexpected argument %s", argv[optind]);
    return rc ? error_hint(err, "see: boostd --help") : ERR_OK;
}

static void raise_descriptor_limit(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
}

static int load(const struct options *o, struct arena *a, Boost__BoostdConfig **out, struct error *err)
{
    int rc = config_load_boostd(o->config, CONFIG_BOOSTD_PATH, o->sets, o->n_sets, a, out, err);
    if (rc)
        return rc;
    Boost__BoostdConfig *config = *out;
    if (o->state_dir)
        config->state_dir = (char *)o->state_dir;
    if (o->log_level)
        config->log_level = (char *)o->log_level;
    enum log_level level;
    rc = log_level_by_name(config->log_level, &level, err);
    if (!rc)
        log_set_level(level);
    return rc;
}

/* Whoever started it may wait for either of these. */
static void announce(const struct options *o, const char *socket_path, const struct store *store,
                     const struct server *server)
{
    printf("boostd ready socket=%s store=%s", socket_path, store_id(store));
    const char *address;
    for (size_t i = 0; (address = server_address(server, i)); i++) {
        log_line(LOG_INFO, "listens with TLS on %s", address);
        printf("%s%s", i ? "," : " listen=", address);
    }
    printf("\n");
    fflush(stdout);
    struct error err;
    if (o->ready_fd >= 0 && fs_write_all(o->ready_fd, "\n", 1, &err))
        log_error(LOG_WARN, &err, "--ready-fd");
    if (o->ready_fd > STDERR_FILENO)
        close(o->ready_fd);
}

static int run(const struct options *o, const Boost__BoostdConfig *config, struct error *err)
{
    char socket_path[SOCKET_PATH_MAX];
    struct store *store = NULL;
    struct server *server = NULL;
    uv_loop_t loop;
    int rc = socket_path_find(SOCKET_LISTEN, o->socket, config->socket, socket_path, err);
    if (rc)
        return rc;
    rc = o->adopt ? store_adopt(config->state_dir, &store, err) : store_open(config->state_dir, &store, err);
    if (rc) {
        if (!*err->hint)
            error_hint(err, "name another state directory with --state-dir");
        return rc;
    }
    if (*store_notice(store))
        log_line(LOG_WARN, "%s", store_notice(store));
    if (o->adopt)
        log_line(LOG_WARN, "store %s is adopted (adoption %u): what was acknowledged after the copy was made is lost",
                 store_id(store), (unsigned)(store_epoch(store) >> 32));
    int uv = uv_loop_init(&loop);
    if (uv < 0) {
        store_close(store);
        return error_errno(err, -uv, "cannot make the event loop");
    }
    rc = server_create(&loop, config, store, socket_path, o->adopt, &server, err);
    if (!rc) {
        log_line(LOG_INFO, "boostd %s (%s) listens on %s, state in %s, store %s", boost_version(), boost_build_id(),
                 socket_path, config->state_dir, store_id(store));
        announce(o, socket_path, store, server);
        server_run(server);
    }
    bool stopped = !server || server_stop(server);
    store_close(store);
    if (!stopped) {
        log_line(LOG_WARN, "stopped; a look-up of a user's name (getpwuid) never came back");
        _exit(rc ? EXIT_FAILURE : EXIT_SUCCESS);
    }
    server_destroy(server);
    uv_loop_close(&loop);
    if (!rc)
        log_line(LOG_INFO, "stopped");
    return rc;
}

int main(int argc, char **argv)
{
    struct error err;
    struct options options;
    struct arena arena;
    Boost__BoostdConfig *config = NULL;
    error_clear(&err);
    arena_init(&arena, CONFIG_ARENA);
    signal(SIGPIPE, SIG_IGN);
    int rc = streams_hold(&err);
    if (!rc)
        rc = parse_options(argc, argv, &options, &err);
    if (!rc && !options.done) {
        raise_descriptor_limit();
        rc = load(&options, &arena, &config, &err);
        if (!rc)
            rc = run(&options, config, &err);
    }
    arena_free(&arena);
    if (!rc)
        return 0;
    fprintf(stderr, "boostd: %s\n", err.message);
    if (*err.hint)
        fprintf(stderr, "  %s\n", err.hint);
    return rc == ERR_USAGE || rc == ERR_INVALID ? EXIT_USAGE : rc == ERR_BUSY ? EXIT_IN_USE : 1;
}
