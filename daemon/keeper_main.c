/* keeper_main.h */
#include "daemon/keeper_main.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/keeper.h"
#include "daemon/log.h"
#include "proto/base/fs.h"
#include "proto/version.h"

static void usage(FILE *out)
{
    fputs("usage: boost-keeper [--foreground] [--no-cgroup] RUN_DIR\n"
          "Keeps the ranks of one attempt; boost-agent starts it.\n"
          "  --foreground  do not detach\n"
          "  --no-cgroup   do not use a cgroup even where that is possible\n"
          "  --help, --version\n",
          out);
}

/* Standard input from /dev/null, output and errors into keeper.log, nothing else open but `keep`. */
static int clean_descriptors(const char *run_dir, int keep, struct error *err)
{
    char path[PATH_MAX];
    int rc = fs_join(path, sizeof path, err, run_dir, "keeper.log");
    if (rc)
        return rc;
    int log = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0644);
    int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (log < 0 || null < 0)
        return error_errno(err, errno, "cannot open %s", log < 0 ? path : "/dev/null");
    if (dup2(null, 0) < 0 || dup2(log, 1) < 0 || dup2(log, 2) < 0)
        return error_errno(err, errno, "dup2");
    for (int fd = 3; fd < 1024; fd++) {
        if (fd != keep)
            close(fd);
    }
    return ERR_OK;
}

/* Double fork. Returns in the grandchild with the descriptor that says "ready"; the first
 * process waits for that and exits. */
static int detach(int *ready_fd, struct error *err)
{
    int fds[2];
    if (pipe2(fds, O_CLOEXEC) < 0)
        return error_errno(err, errno, "pipe");
    pid_t pid = fork();
    if (pid < 0)
        return error_errno(err, errno, "fork");
    if (pid > 0) {
        close(fds[1]);
        char byte;
        ssize_t n;
        do
            n = read(fds[0], &byte, 1);
        while (n < 0 && errno == EINTR);
        _exit(n == 1 ? 0 : 1);
    }
    close(fds[0]);
    if (setsid() < 0)
        return error_errno(err, errno, "setsid");
    pid = fork();
    if (pid < 0)
        return error_errno(err, errno, "fork");
    if (pid > 0)
        _exit(0);
    *ready_fd = fds[1];
    return ERR_OK;
}

int keeper_main(int argc, char **argv)
{
    static const struct option long_options[] = {
        {"foreground", no_argument, NULL, 'f'},
        {"no-cgroup", no_argument, NULL, 'c'},
        {"help", no_argument, NULL, 'h'},
        {"version", no_argument, NULL, 'V'},
        {0},
    };
    struct keeper_options options = {.use_cgroup = true, .ready_fd = -1};
    bool foreground = false;
    int c;
    while ((c = getopt_long(argc, argv, "", long_options, NULL)) != -1) {
        if (c == 'h' || c == 'V') {
            if (c == 'h')
                usage(stdout);
            else
                printf("boost-keeper %s (%s)\n", boost_version(), boost_build_id());
            return 0;
        }
        if (c == '?') {
            usage(stderr);
            return 2;
        }
        foreground = foreground || c == 'f';
        options.use_cgroup = options.use_cgroup && c != 'c';
    }
    if (optind != argc - 1 || argv[optind][0] != '/') {
        fputs(optind == argc - 1 ? "boost-keeper: RUN_DIR must be absolute\n" : "boost-keeper: one RUN_DIR is needed\n",
              stderr);
        usage(stderr);
        return 2;
    }
    options.run_dir = argv[optind];
    struct error err;
    int rc = foreground ? ERR_OK : detach(&options.ready_fd, &err);
    if (!rc)
        rc = clean_descriptors(options.run_dir, options.ready_fd, &err);
    umask(022);
    if (!rc && chdir("/") < 0)
        rc = error_errno(&err, errno, "chdir /");
    if (!rc)
        rc = keeper_run(&options, &err);
    if (rc)
        log_error(LOG_ERROR, &err, "keeper");
    return rc ? 1 : 0;
}
