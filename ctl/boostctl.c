/* boostctl: what a user types. Global options, then a verb from the table below. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ctl/ctl.h"
#include "ctl/options.h"
#include "ctl/out.h"
#include "proto/base/streams.h"

struct verb {
    const char *name;
    int (*run)(struct ctl *ctl, int argc, char **argv);
    const char *what;
};

static const struct verb verbs[] = {
    {"submit", verb_submit, "give a job file to the controller"},
    {"status", verb_status, "jobs in a table"},
    {"show", verb_show, "everything about one job"},
    {"events", verb_events, "what happened, in order"},
    {"metrics", verb_metrics, "loss and speed, as numbers or a plot"},
    {"logs", verb_logs, "a rank's output"},
    {"stacks", verb_stacks, "where each rank of a job is, and whom the others wait for"},
    {"top", verb_top, "jobs and nodes on the whole screen, again and again"},
    {"wait", verb_wait, "until a job is in a state or at a step"},
    {"cancel", verb_control, "end jobs, after a checkpoint"},
    {"hold", verb_control, "checkpoint and set aside until released"},
    {"release", verb_control, "let held jobs run"},
    {"checkpoint", verb_control, "write a checkpoint now"},
    {"restart", verb_restart, "go on in a new attempt, with changes; after its end, as a new job"},
    {"update", verb_update, "change a job's priority or time limit"},
    {"usage", verb_usage, "device time of each user"},
    {"ckpt", verb_ckpt, "checkpoints: ls, verify, pin, unpin, rm, mirror, export, import, convert"},
    {"node", verb_node, "nodes: ls, show, cordon, drain, resume"},
    {"validate", verb_validate, "check a job file without a controller"},
    {"plan", verb_plan, "memory, collectives and matrix products of a job file"},
    {"encode", verb_convert, "a job file to binary protobuf"},
    {"decode", verb_convert, "a job file to protobuf text or JSON"},
    {"config", verb_config, "where boostd is looked for; config check FILE"},
    {"completion", verb_completion, "for bash, zsh or fish"},
    {"ping", verb_ping, "is the controller there"},
    {"version", verb_version, "versions of boostctl and of the controller"},
};

/* Named in the contract and not built yet: told apart from a typing error. */
static const char *const later[] = {"data", "sample", "eval"};

static void print_help(void)
{
    printf("usage: boostctl [--socket PATH | --host HOST:PORT] [-o table|wide|json|jsonl|name] [--no-color] [-q] COMMAND ...\n\n"
           "commands (boostctl help COMMAND tells the options):\n");
    for (size_t i = 0; i < sizeof verbs / sizeof *verbs; i++)
        printf("  %-11s %s\n", verbs[i].name, verbs[i].what);
    printf("\nglobal options:\n"
           "  --socket PATH   boostd's socket; else $BOOST_SOCKET, $XDG_RUNTIME_DIR/boost/boostd.sock,\n"
           "                  /run/boost/boostd.sock\n"
           "  --host H:P      boostd on another machine, by TCP with TLS; else $BOOST_HOST, which counts more than\n"
           "                  $BOOST_SOCKET. The port may be left out (7443)\n"
           "  --tls-dir DIR   your certificate: ca.crt, tls.crt, tls.key; else $BOOST_TLS_DIR, ~/.config/boost\n"
           "  -o FORMAT       table, wide, json, jsonl or name (ids only)\n"
           "  --no-color      no colour; also when NO_COLOR is set or stdout is no terminal\n"
           "  -q              no messages but errors\n\n"
           "JOB is an id (17), an attempt (17.2) where one is meant, a task of an array (17_3; 17_*: all\n"
           "that have not ended, where several jobs can be named), a name, or the start of a name.\n\n"
           "exit status: 0 ok; 1 the waited-for job ended FAILED, TIMEOUT or CANCELLED; 2 usage;\n"
           "3 cannot reach boostd; 4 not found or ambiguous; 5 refused, or the output could not be written;\n"
           "6 invalid job file; 7 timed out; 10 --dry-run: valid but must wait; 130 interrupted\n");
}

static int parse_output(const char *text, enum output *out)
{
    static const char *const names[] = {"table", "wide", "json", "jsonl", "name"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strcmp(text, names[i])) {
            *out = (enum output)i;
            return EXIT_OK;
        }
    fprintf(stderr, "boostctl: -o takes table, wide, json, jsonl or name, not '%s'\n", text);
    if (!strcmp(text, "csv"))
        fprintf(stderr, "  hint: csv is of metrics alone and goes behind it: boostctl metrics JOB -o csv\n");
    return EXIT_USAGE;
}

/* A global option with a value, "--name VALUE" or "--name=VALUE" (-oVALUE too). Returns EXIT_OK and *value when it is,
 * with *value NULL when it is another one. */
static int take_value(const char *arg, const char *name, int argc, char **argv, int *i, const char **value)
{
    size_t len = strlen(name);
    *value = NULL;
    if (strncmp(arg, name, len) != 0 || (arg[len] && arg[len] != '=' && len > 2))
        return EXIT_OK;
    if (arg[len]) {
        *value = arg + len + (len > 2);
        return EXIT_OK;
    }
    if (++*i == argc) {
        fprintf(stderr, "boostctl: option '%s' needs a value\n", arg);
        return EXIT_USAGE;
    }
    *value = argv[*i];
    return EXIT_OK;
}

static int set_global(struct ctl *ctl, const char *name, const char *value)
{
    if (!strcmp(name, "--socket"))
        ctl->socket_option = value;
    else if (!strcmp(name, "--host"))
        ctl->host_option = value;
    else if (!strcmp(name, "--tls-dir"))
        ctl->tls_option = value;
    else
        return parse_output(value, &ctl->output);
    if (!ctl->socket_option || !ctl->host_option)
        return EXIT_OK;
    fprintf(stderr, "boostctl: --socket and --host are two ways to one boostd\n  hint: give one of them\n");
    return EXIT_USAGE;
}

/* Options before the verb. Returns the verb's index in argv, or -exit code - 1. */
static int parse_globals(struct ctl *ctl, int argc, char **argv)
{
    static const char *const valued[] = {"-o", "--output", "--socket", "--host", "--tls-dir"};
    int i = 1;
    for (; i < argc && argv[i][0] == '-' && argv[i][1]; i++) {
        const char *arg = argv[i], *value = NULL;
        for (size_t k = 0; !value && k < sizeof valued / sizeof *valued; k++) {
            int rc = take_value(arg, valued[k], argc, argv, &i, &value);
            if (!rc && value)
                rc = set_global(ctl, valued[k], value);
            if (rc)
                return -rc - 1;
        }
        if (value) {
            continue;
        } else if (!strcmp(arg, "--no-color")) {
            ctl->color = false;
        } else if (!strcmp(arg, "-q") || !strcmp(arg, "--quiet")) {
            ctl->quiet = true;
        } else if (!strcmp(arg, "-h") || !strcmp(arg, "--help")) {
            print_help();
            return -EXIT_OK - 1;
        } else if (!strcmp(arg, "--version") || !strcmp(arg, "-V")) {
            return -verb_version(NULL, 0, NULL) - 1;
        } else {
            fprintf(stderr, "boostctl: unknown option '%s'\n  hint: boostctl --help\n", arg);
            return -EXIT_USAGE - 1;
        }
    }
    return i;
}

static int run_verb(struct ctl *ctl, int argc, char **argv)
{
    for (size_t i = 0; i < sizeof verbs / sizeof *verbs; i++)
        if (!strcmp(argv[0], verbs[i].name))
            return verbs[i].run(ctl, argc, argv);
    for (size_t i = 0; i < sizeof later / sizeof *later; i++)
        if (!strcmp(argv[0], later[i])) {
            fprintf(stderr, "boostctl: '%s' is not built in this version\n", argv[0]);
            return EXIT_REFUSED;
        }
    fprintf(stderr, "boostctl: unknown command '%s'\n  hint: boostctl --help\n", argv[0]);
    return EXIT_USAGE;
}

static int run(int argc, char **argv)
{
    struct ctl ctl = {.output = OUTPUT_TABLE, .client = CLIENT_INIT};
    ctl.tty = isatty(STDOUT_FILENO);
    const char *no_color = getenv("NO_COLOR");
    ctl.color = ctl.tty && !(no_color && *no_color);

    int at = parse_globals(&ctl, argc, argv);
    if (at < 0)
        return -at - 1;
    if (at < argc && !strcmp(argv[at], "help")) {
        if (at + 1 == argc) {
            print_help();
            return EXIT_OK;
        }
        char help[] = "--help";
        char *args[] = {argv[at + 1], help, NULL};
        return run_verb(&ctl, 2, args);
    }
    if (at == argc) {
        print_help();
        return EXIT_USAGE;
    }
    int code = run_verb(&ctl, argc - at, argv + at);
    if (ctl.connected)
        client_close(&ctl.client);
    return code;
}

int main(int argc, char **argv)
{
    struct error err;
    if (streams_hold(&err)) {
        fprintf(stderr, "boostctl: %s\n", err.message);
        return EXIT_REFUSED;
    }
    out_begin();
    return out_end(run(argc, argv));
}
