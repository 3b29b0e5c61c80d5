/* boostctl config and completion: what stands around a cluster and not in it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/ctl.h"
#include "ctl/json_out.h"
#include "ctl/options.h"
#include "proto/config.h"
#include "proto/socket_path.h"

enum { CONFIG_ARENA = 4 << 20 };

/* ---- config check ---- */

enum kind { BOOSTD, AGENT, KINDS };
static const char *const kind_names[] = {"boostd", "agent"};

static int check(enum kind kind, const char *path, struct error *err)
{
    struct arena arena;
    Boost__BoostdConfig *boostd;
    Boost__AgentConfig *agent;
    arena_init(&arena, CONFIG_ARENA);
    int rc = kind == BOOSTD ? config_load_boostd(path, NULL, NULL, 0, &arena, &boostd, err)
                            : config_load_agent(path, NULL, NULL, 0, &arena, &agent, err);
    arena_free(&arena);
    return rc;
}

/* By what --for says, or the file's name; KINDS: neither tells. */
static enum kind kind_of(const char *path, const char *given)
{
    const char *slash = strrchr(path, '/'), *base = slash ? slash + 1 : path;
    for (int k = 0; k < KINDS; k++)
        if (given ? !strcmp(given, kind_names[k]) : strstr(base, kind_names[k]) != NULL)
            return (enum kind)k;
    return KINDS;
}

static int check_file(struct ctl *ctl, const char *path, const char *given)
{
    struct error err;
    enum kind kind = kind_of(path, given);
    if (given && kind == KINDS)
        return ctl_usage("config", "--for takes boostd or agent, not '%s'", given);
    int rc = kind == KINDS ? check(BOOSTD, path, &err) : check(kind, path, &err);
    if (kind == KINDS && !rc) {
        kind = BOOSTD;
    } else if (kind == KINDS) { /* the error to show is that of the program that it is for, which nothing tells */
        struct error other;
        kind = check(AGENT, path, &other) ? KINDS : AGENT;
        rc = kind == AGENT ? ERR_OK : rc;
        if (rc)
            error_hint(&err, "%.200s%s--for agent checks it as agent.conf", err.hint, *err.hint ? "; " : "");
    }
    if (ctl->output == OUTPUT_JSON || ctl->output == OUTPUT_JSONL) {
        json_t *document = json_document("boost.config-check/1");
        json_put(document, "valid", json_boolean(!rc));
        if (kind < KINDS)
            json_put(document, "for", json_string(kind_names[kind]));
        if (rc) {
            json_put(document, "message", json_text(err.message));
            json_put(document, "hint", json_text(err.hint));
        }
        json_emit(document, ctl->output == OUTPUT_JSONL);
        return rc ? EXIT_INVALID : EXIT_OK;
    }
    if (rc) {
        ctl_fail(&err);
        return EXIT_INVALID;
    }
    if (!ctl->quiet)
        printf("%s: valid for %s\n", path, kind == BOOSTD ? "boostd" : "boost-agent");
    return EXIT_OK;
}

/* Where commands go, and what decides that. */
static int show_way(const struct ctl *ctl)
{
    char socket[SOCKET_PATH_MAX];
    struct error err;
    const char *host = ctl->host_option ? ctl->host_option : ctl->socket_option ? NULL : getenv("BOOST_HOST");
    const char *env = getenv("BOOST_SOCKET");
    const char *by = ctl->host_option     ? "--host"
                     : ctl->socket_option ? "--socket"
                     : host && *host      ? "$BOOST_HOST"
                     : env && *env        ? "$BOOST_SOCKET"
                                          : "default";
    bool remote = host && *host;
    if (!remote && socket_path_find(SOCKET_CONNECT, ctl->socket_option, NULL, socket, &err))
        return ctl_fail(&err);
    if (ctl->output == OUTPUT_JSON || ctl->output == OUTPUT_JSONL) {
        json_t *document = json_document("boost.config/1");
        json_put(document, remote ? "host" : "socket", json_text(remote ? host : socket));
        json_put(document, "by", json_text(by));
        json_emit(document, ctl->output == OUTPUT_JSONL);
        return EXIT_OK;
    }
    printf("%-8s%s  (%s)\n", remote ? "host" : "socket", remote ? host : socket, by);
    printf("files   %s, %s: boostctl config check FILE\n", CONFIG_BOOSTD_PATH, CONFIG_AGENT_PATH);
    return EXIT_OK;
}

int verb_config(struct ctl *ctl, int argc, char **argv)
{
    const char *given = NULL;
    bool help = false;
    const struct option_row rows[] = {
        {0, "for", "boostd|agent", "whose file it is; else by its name, then its content", NULL, &given, NULL},
        {'h', "help", NULL, "this text", &help, NULL, NULL},
        {0, NULL, NULL, NULL, NULL, NULL, NULL},
    };
    int first = options_parse("config", argc, argv, rows);
    if (first < 0)
        return EXIT_USAGE;
    if (help) {
        printf("usage: boostctl config               where boostd is looked for\n"
               "       boostctl config check FILE    a configuration file, as its program would read it here\n");
        options_help(rows);
        return EXIT_OK;
    }
    if (first == argc)
        return given ? ctl_usage("config", "--for belongs to config check FILE") : show_way(ctl);
    if (strcmp(argv[first], "check") != 0)
        return ctl_usage("config", "unknown command '%s'", argv[first]);
    if (argc - first != 2)
        return ctl_usage("config", "takes: config check FILE");
    return check_file(ctl, argv[first + 1], given);
}

/* ---- completion ---- */

/* The scripts ask boostctl itself for commands, options, jobs and nodes, so they need not be made anew. */
#define COMMANDS      "boostctl --help | sed -n 's/^  \\([a-z][a-z]*\\)  *[a-z].*/\\1/p'"
#define OPTIONS(word) "boostctl help " word " 2>/dev/null | grep -o -- '--[a-z][a-z-]*' | sort -u"

static const char bash_script[] =
    "# boostctl completion for bash:  source <(boostctl completion bash)\n"
    "_boostctl()\n"
    "{\n"
    "    local cur=${COMP_WORDS[COMP_CWORD]} cmd= i\n"
    "    for ((i = 1; i < COMP_CWORD; i++)); do\n"
    "        case ${COMP_WORDS[i]} in\n"
    "            --socket | --host | -o | --output) ((i++)) ;;\n"
    "            -*) ;;\n"
    "            *) cmd=${COMP_WORDS[i]}; break ;;\n"
    "        esac\n"
    "    done\n"
    "    case ${COMP_WORDS[COMP_CWORD - 1]} in\n"
    "        -o | --output) COMPREPLY=($(compgen -W 'table wide json jsonl name' -- \"$cur\")); return ;;\n"
    "        --socket | --set) COMPREPLY=($(compgen -f -- \"$cur\")); return ;;\n"
    "    esac\n"
    "    if [[ -z $cmd && $cur == -* ]]; then\n"
    "        COMPREPLY=($(compgen -W '--socket --host --no-color --help --version -o -q' -- \"$cur\"))\n"
    "    elif [[ -z $cmd || $cmd == help ]]; then\n"
    "        COMPREPLY=($(compgen -W \"$(" COMMANDS ")\" -- \"$cur\"))\n"
    "    elif [[ $cur == -* ]]; then\n"
    "        COMPREPLY=($(compgen -W \"$(" OPTIONS(
        "\"$cmd\"") ")\" -- \"$cur\"))\n"
                    "    else\n"
                    "        COMPREPLY=($(compgen -W \"$(boostctl completion --words "
                    "\"${COMP_WORDS[@]:i:COMP_CWORD-i}\")\" -- \"$cur\"))\n"
                    "        [[ ${#COMPREPLY[@]} -eq 0 ]] && COMPREPLY=($(compgen -f -- \"$cur\"))\n"
                    "    fi\n"
                    "}\n"
                    "complete -o filenames -F _boostctl boostctl\n";

static const char zsh_script[] =
    "#compdef boostctl\n"
    "# boostctl completion for zsh:  source <(boostctl completion zsh)\n"
    "_boostctl()\n"
    "{\n"
    "    local i=2 cmd=\n"
    "    while (( i < CURRENT )); do\n"
    "        case ${words[i]} in\n"
    "            --socket|--host|-o|--output) (( i++ )) ;;\n"
    "            -*) ;;\n"
    "            *) cmd=${words[i]}; break ;;\n"
    "        esac\n"
    "        (( i++ ))\n"
    "    done\n"
    "    case ${words[CURRENT-1]} in\n"
    "        -o|--output) compadd table wide json jsonl name; return ;;\n"
    "        --socket|--set) _files; return ;;\n"
    "    esac\n"
    "    if [[ -z $cmd && ${words[CURRENT]} == -* ]]; then\n"
    "        compadd -- --socket --host --no-color --help --version -o -q\n"
    "    elif [[ -z $cmd || $cmd == help ]]; then\n"
    "        compadd -- ${=\"$(" COMMANDS ")\"}\n"
    "    elif [[ ${words[CURRENT]} == -* ]]; then\n"
    "        compadd -- ${=\"$(" OPTIONS(
        "$cmd") ")\"}\n"
                "    else\n"
                "        compadd -- ${=\"$(boostctl completion --words ${words[i,CURRENT-1]})\"}\n"
                "        _files\n"
                "    fi\n"
                "}\n"
                "compdef _boostctl boostctl\n";

static const char fish_script[] =
    "# boostctl completion for fish:  boostctl completion fish | source\n"
    "function __boostctl_words\n"
    "    set -l words (commandline -opc)[2..-1]\n"
    "    set -l current (commandline -ct)\n"
    "    while set -q words[1]; and string match -q -- '-*' $words[1]\n"
    "        contains -- $words[1] --socket --host -o --output; and set -e words[1]\n"
    "        set -e words[1]\n"
    "    end\n"
    "    if not set -q words[1]; or test \"$words[1]\" = help\n"
    "        " COMMANDS "\n"
    "    else if string match -q -- '-*' $current\n"
    "        " OPTIONS("$words[1]") "\n"
                                    "    else\n"
                                    "        boostctl completion --words $words\n"
                                    "    end\n"
                                    "end\n"
                                    "complete -c boostctl -a '(__boostctl_words)'\n"
                                    "complete -c boostctl -s o -l output -x -a 'table wide json jsonl name'\n"
                                    "complete -c boostctl -l socket -r\n"
                                    "complete -c boostctl -l host -x\n";

/* Names of jobs or nodes; nothing, and no message, where boostd cannot be asked. */
static void print_names(struct ctl *ctl, bool nodes)
{
    struct arena arena;
    struct error err;
    Boost__ListRequest list = BOOST__LIST_REQUEST__INIT;
    Boost__NodesRequest all = BOOST__NODES_REQUEST__INIT;
    Boost__Request request = BOOST__REQUEST__INIT;
    request.body_case = nodes ? BOOST__REQUEST__BODY_NODES : BOOST__REQUEST__BODY_LIST;
    if (nodes)
        request.nodes = &all;
    else
        request.list = &list;
    ctl_arena(&arena);
    for (Boost__Reply *r = ctl_call(ctl, &request, &arena, &err); r; r = ctl_more(ctl, &arena, &err)) {
        for (size_t i = 0; r->body_case == BOOST__REPLY__BODY_NODES && i < r->nodes->n_nodes; i++)
            printf("%s\n", r->nodes->nodes[i]->name);
        for (size_t i = 0; r->body_case == BOOST__REPLY__BODY_LIST && i < r->list->n_jobs; i++)
            printf("%lld\n%s\n", (long long)r->list->jobs[i]->id, r->list->jobs[i]->name);
        if (!r->more)
            break;
    }
    arena_free(&arena);
}

/* What may stand behind these words (the command first): names of jobs where one is taken, words of the command. */
static int print_words(struct ctl *ctl, int argc, char **argv)
{
    static const struct {
        const char *command, *words;
    } second[] = {{"node", "ls\nshow\ncordon\ndrain\nresume"},
                  {"ckpt", "ls\nverify\npin\nunpin\nrm\nmirror\nexport\nimport\nconvert"},
                  {"config", "check"},
                  {"completion", "bash\nzsh\nfish"}};
    static const char *const of_jobs[] = {"show",    "events",     "metrics", "logs",   "wait",   "cancel", "hold",
                                          "release", "checkpoint", "restart", "stacks", "update", "status"};
    for (size_t i = 0; argc == 1 && i < sizeof second / sizeof *second; i++)
        if (!strcmp(argv[0], second[i].command))
            puts(second[i].words);
    for (size_t i = 0; i < sizeof of_jobs / sizeof *of_jobs; i++)
        if (argc > 0 && !strcmp(argv[0], of_jobs[i]))
            print_names(ctl, false);
    if (argc > 1 && !strcmp(argv[0], "ckpt"))
        print_names(ctl, false);
    if (argc > 1 && !strcmp(argv[0], "node") && strcmp(argv[1], "ls") != 0)
        print_names(ctl, true);
    return EXIT_OK;
}

int verb_completion(struct ctl *ctl, int argc, char **argv)
{
    static const struct {
        const char *shell, *script;
    } shells[] = {{"bash", bash_script}, {"zsh", zsh_script}, {"fish", fish_script}};
    const char *what = argc > 1 ? argv[1] : "";
    if (!strcmp(what, "--words"))
        return print_words(ctl, argc - 2, argv + 2);
    for (size_t i = 0; argc == 2 && i < sizeof shells / sizeof *shells; i++)
        if (!strcmp(what, shells[i].shell)) {
            fputs(shells[i].script, stdout);
            return EXIT_OK;
        }
    if (!strcmp(what, "--help") || !strcmp(what, "-h")) {
        printf("usage: boostctl completion bash|zsh|fish\n"
               "  source <(boostctl completion bash)     in ~/.bashrc\n"
               "  source <(boostctl completion zsh)      in ~/.zshrc, behind compinit\n"
               "  boostctl completion fish | source      in config.fish\n");
        return EXIT_OK;
    }
    return ctl_usage("completion", "takes: completion bash|zsh|fish");
}
