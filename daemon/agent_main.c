/* agent_main.h */
#include "daemon/agent_main.h"

#include <getopt.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "daemon/agent_node.h"
#include "daemon/agent_remote.h"
#include "proto/config.h"
#include "daemon/log.h"
#include "proto/base/fs.h"
#include "proto/version.h"

enum { EXIT_USAGE = 2, EXIT_IN_USE = 5 };
enum { MAX_SETS = 64, FIELD_OPTIONS = 5, ASSIGNMENT = PATH_MAX + 64, CONFIG_ARENA = 4 << 20 };

struct options {
    const char *config, *keeper, *worker, *controller_socket;
    const char *sets[MAX_SETS + FIELD_OPTIONS];
    size_t set_count;
    char texts[FIELD_OPTIONS][ASSIGNMENT]; /* of options that are assignments, each at most once */
    size_t text_count;
};

static void usage(FILE *out)
{
    fputs("usage: boost-agent [options]\n"
          "Runs the ranks of this node for boostd.\n"
          "  --config FILE             configuration (default " CONFIG_AGENT_PATH " if it is there)\n"
          "  --state-dir DIR           run directories, logs\n"
          "  --controller-socket PATH  boostd's socket, on the same machine\n"
          "  --controller HOST:PORT    boostd on another machine, by TCP with TLS (controller_address of the\n"
          "                            configuration, which may name several); certificates: tls_certificate, ...\n"
          "  --node NAME               this node's name (default: the host name); it stays while attempts run here\n"
          "  --cpu-slots N             ranks at once (default: cores)\n"
          "  --log-level LEVEL         debug, info, warn, error\n"
          "  --set FIELD=VALUE         any field of the configuration; may be repeated\n"
          "  --keeper PATH             boost-keeper (default: next to this program)\n"
          "  --worker PATH             boost-worker (default: next to this program)\n"
          "  --help, --version\n"
          "Prints \"boost-agent ready node=NAME\" once the controller has taken it. Ends on SIGTERM or SIGINT;\n"
          "the ranks go on, and the next agent takes them up.\n",
          out);
}

static void add_set(struct options *o, const char *field, const char *value)
{
    char *text = o->texts[o->text_count++];
    snprintf(text, ASSIGNMENT, "%s=%s", field, value);
    o->sets[o->set_count++] = text;
}

/* -1: go on; else the exit status. */
static int parse(int argc, char **argv, struct options *o)
{
    enum { CONFIG = 1, STATE_DIR, SOCKET, CONTROLLER, NODE, SLOTS, LEVEL, SET, KEEPER, WORKER, HELP, VERSION };
    static const struct option long_options[] = {
        {"config", required_argument, NULL, CONFIG},
        {"state-dir", required_argument, NULL, STATE_DIR},
        {"controller-socket", required_argument, NULL, SOCKET},
        {"controller", required_argument, NULL, CONTROLLER},
        {"node", required_argument, NULL, NODE},
        {"cpu-slots", required_argument, NULL, SLOTS},
        {"log-level", required_argument, NULL, LEVEL},
        {"set", required_argument, NULL, SET},
        {"keeper", required_argument, NULL, KEEPER},
        {"worker", required_argument, NULL, WORKER},
        {"help", no_argument, NULL, HELP},
        {"version", no_argument, NULL, VERSION},
        {0},
    };
    static const char *const fields[] = {[STATE_DIR] = "state_dir",
                                         [CONTROLLER] = "controller_address",
                                         [NODE] = "node",
                                         [SLOTS] = "cpu_slots",
                                         [LEVEL] = "log_level"};
    unsigned seen = 0;
    for (int c; (c = getopt_long(argc, argv, "", long_options, NULL)) != -1;) {
        switch (c) {
        case CONFIG:
            o->config = optarg;
            break;
        case KEEPER:
            o->keeper = optarg;
            break;
        case WORKER:
            o->worker = optarg;
            break;
        case SOCKET:
            o->controller_socket = optarg;
            break;
        case SET:
            if (o->set_count - o->text_count == MAX_SETS) {
                fprintf(stderr, "boost-agent: more than %d --set\n", MAX_SETS);
                return EXIT_USAGE;
            }
            o->sets[o->set_count++] = optarg;
            break;
        case HELP:
            usage(stdout);
            return 0;
        case VERSION:
            printf("boost-agent %s (%s)\n", boost_version(), boost_build_id());
            return 0;
        case STATE_DIR:
        case CONTROLLER:
        case NODE:
        case SLOTS:
        case LEVEL:
            if (seen & 1u << c || strlen(optarg) >= PATH_MAX) {
                fprintf(stderr, "boost-agent: --%s is given twice or too long\n", fields[c]);
                return EXIT_USAGE;
            }
            seen |= 1u << c;
            add_set(o, fields[c], optarg);
            break;
        default:
            usage(stderr);
            return EXIT_USAGE;
        }
    }
    if (optind == argc)
        return -1;
    fprintf(stderr, "boost-agent: unexpected argument '%s'\n", argv[optind]);
    usage(stderr);
    return EXIT_USAGE;
}

/* `given`, made absolute, or the sibling of this program. */
static int program_path(char out[PATH_MAX], const char *given, const char *name, struct error *err)
{
    char dir[PATH_MAX];
    if (given && !realpath(given, out)) {
        error_set(err, ERR_NOT_FOUND, "there is no %s", given);
        return error_hint(err, "give the path of %s", name);
    }
    if (given)
        return ERR_OK;
    int rc = fs_self_dir(dir, sizeof dir, err);
    return rc ? rc : fs_join(out, PATH_MAX, err, dir, name);
}

int agent_main(int argc, char **argv)
{
    static struct options o; /* outlives a thread that never comes back */
    static char keeper[PATH_MAX], worker[PATH_MAX];
    static struct arena arena;
    Boost__AgentConfig *config;
    struct error err = {0};
    enum log_level level;
    o = (struct options){0};
    int status = parse(argc, argv, &o);
    if (status >= 0)
        return status;
    umask(022);
    /* Preflights wait for file systems, epilogs for whatever they like; those that hang must not take all threads. */
    setenv("UV_THREADPOOL_SIZE", "64", 0);
    agent_remote_begin();
    arena_init(&arena, CONFIG_ARENA);
    int rc = config_load_agent(o.config, CONFIG_AGENT_PATH, o.sets, o.set_count, &arena, &config, &err);
    if (!rc)
        rc = log_level_by_name(config->log_level, &level, &err);
    if (!rc)
        rc = program_path(keeper, o.keeper, "boost-keeper", &err);
    if (!rc)
        rc = program_path(worker, o.worker, "boost-worker", &err);
    if (!rc) {
        log_set_level(level);
        struct agent_setup setup = {
            .config = config, .keeper_path = keeper, .worker_path = worker, .controller_socket = o.controller_socket};
        rc = agent_run(&setup, &err);
    }
    if (!rc)
        return 0;
    fprintf(stderr, "boost-agent: %s%s%s%s\n", err.message, err.hint[0] ? " (" : "", err.hint, err.hint[0] ? ")" : "");
    return rc == ERR_USAGE || rc == ERR_INVALID ? EXIT_USAGE : rc == ERR_BUSY ? EXIT_IN_USE : 1;
}
