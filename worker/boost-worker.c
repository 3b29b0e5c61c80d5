/* boost-worker: one rank of an attempt, as its keeper starts it, or a whole job in one
 * process. Arguments, signals, the one line on stderr; all else is in the library. */
#include <getopt.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/library.h"
#include "proto/base/fs.h"
#include "proto/base/streams.h"
#include "proto/rankfiles.h"
#include "proto/reflect.h"
#include "proto/version.h"
#include "worker/ckpt_tool.h"
#include "worker/rank.h"
#include "worker/signals.h"
#include "worker/standalone.h"

enum { EXIT_USAGE = 2, MAX_SET = 256 };

static const char usage[] =
    "usage: boost-worker --run-dir DIR --rank R\n"
    "       boost-worker --standalone JOBFILE --run-dir DIR [--resume CKPTDIR] [--set a.b=v ...]\n"
    "       boost-worker ckpt verify [--headers] CKPTDIR\n"
    "       boost-worker ckpt export [--bf16] [--file-mib N] CKPTDIR DIR\n"
    "       boost-worker ckpt import HFDIR DIR\n"
    "       boost-worker ckpt model HFDIR\n"
    "       boost-worker ckpt convert [--rank R] CKPTDIR DIR\n"
    "       boost-worker --check-cuda\n"
    "\n"
    "One rank of a training job, as started by boost-keeper from DIR/start.pb; or, with\n"
    "--standalone, all ranks of a job file as threads of this process, without daemons.\n"
    "\n"
    "  --run-dir DIR        directory of the attempt's files\n"
    "  --rank R             this rank\n"
    "  --standalone FILE    job file (text, JSON or binary)\n"
    "  --resume CKPTDIR     start from a checkpoint directory (step-<n>.a<k>)\n"
    "  --set FIELD=VALUE    override a field of the job file; may be repeated\n"
    "  --check-cuda         exit 0 if the CUDA backend is here, is of this build and can be loaded\n"
    "  --version            print the version and exit\n"
    "  --help               print this and exit\n"
    "\n"
    "SIGTERM: stop at the next agreed step after a checkpoint. Exit status: 0 done, 2 usage,\n"
    "64 wrong job or data, 65 another rank was lost, 66 device, 70 anything else.\n";

struct arguments {
    const char *run_dir;
    long rank;
    struct standalone standalone;
    const char *set[MAX_SET];
};

static void complain(const struct error *err)
{
    fprintf(stderr, "boost-worker: %s%s%s%s\n", err->message, err->hint[0] ? " (" : "", err->hint,
            err->hint[0] ? ")" : "");
}

static int check_cuda(void)
{
    struct error err;
    if (!kernels_library_check(boost_build_id(), &err))
        return 0;
    complain(&err);
    return RANK_EXIT_INFRA;
}

static int parse(int argc, char **argv, struct arguments *a)
{
    static const struct option options[] = {
        {"run-dir", required_argument, NULL, 'd'}, {"rank", required_argument, NULL, 'r'},
        {"standalone", required_argument, NULL, 's'}, {"resume", required_argument, NULL, 'c'},
        {"set", required_argument, NULL, 'e'}, {"version", no_argument, NULL, 'V'},
        {"check-cuda", no_argument, NULL, 'C'}, {"help", no_argument, NULL, 'h'}, {0},
    };
    *a = (struct arguments){.rank = -1};
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        char *end;
        switch (c) {
        case 'd':
            a->run_dir = optarg;
            break;
        case 'r':
            a->rank = strtol(optarg, &end, 10);
            if (end == optarg || *end || a->rank < 0 || a->rank > INT_MAX) {
                fprintf(stderr, "boost-worker: --rank wants a number from 0, not '%s'\n", optarg);
                return EXIT_USAGE;
            }
            break;
        case 's':
            a->standalone.job_file = optarg;
            break;
        case 'c':
            a->standalone.resume = optarg;
            break;
        case 'e':
            if (a->standalone.n_set == MAX_SET) {
                fprintf(stderr, "boost-worker: more than %d --set\n", MAX_SET);
                return EXIT_USAGE;
            }
            a->set[a->standalone.n_set++] = optarg;
            break;
        case 'V':
            printf("boost-worker %s (%s)\n", boost_version(), boost_build_id());
            exit(0);
        case 'C':
            exit(check_cuda());
        case 'h':
            fputs(usage, stdout);
            exit(0);
        default:
            return EXIT_USAGE;
        }
    }
    bool alone = a->standalone.job_file != NULL;
    if (optind < argc || !a->run_dir || alone == (a->rank >= 0) ||
        (!alone && (a->standalone.resume || a->standalone.n_set))) {
        fputs(usage, stderr);
        return EXIT_USAGE;
    }
    a->standalone.run_dir = a->run_dir;
    a->standalone.set = a->set;
    return 0;
}

/* The rank's orders from <run_dir>/start.pb. */
static int run_rank(const struct arguments *a, struct error *err)
{
    struct arena arena;
    struct buffer bytes;
    char path[PATH_MAX];
    arena_init(&arena, 16 << 20);
    buffer_init(&bytes, LIMIT_FRAME);
    Boost__AttemptStart *start = NULL;
    int rc = fs_join(path, sizeof path, err, a->run_dir, "start.pb");
    if (!rc)
        rc = fs_read_file(path, &bytes, err);
    if (!rc) {
        start = (Boost__AttemptStart *)reflect_unpack(&boost__attempt_start__descriptor, bytes.data, bytes.len, &arena,
                                                      err);
        rc = start ? ERR_OK : error_context(err, "%s", path);
    }
    struct rank_orders orders = {.start = start, .rank = (int)a->rank, .log = stdout, .end_process = _exit};
    int code = rc ? RANK_EXIT_APP : rank_run(&orders, err); /* bad orders are not the user's fault */
    buffer_free(&bytes);
    arena_free(&arena);
    return code;
}

int main(int argc, char **argv)
{
    struct arguments a;
    struct error err;
    error_clear(&err);
    int code = streams_hold(&err) ? RANK_EXIT_APP : 0;
    if (code) {
        complain(&err);
        return code;
    }
    if (argc > 1 && !strcmp(argv[1], "ckpt")) {
        code = ckpt_tool(argc - 2, argv + 2, &err);
        if (code)
            complain(&err);
        return code;
    }
    code = parse(argc, argv, &a);
    if (code)
        return code;
    if (signals_start(&err))
        code = RANK_EXIT_APP;
    else
        code = a.standalone.job_file ? standalone_run(&a.standalone, &err) : run_rank(&a, &err);
    if (code)
        complain(&err);
    return code;
}
