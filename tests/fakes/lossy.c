/* For LD_PRELOAD, a bad network: of what arrives on TCP sockets of boostd and boost-agent, BOOST_TEST_LOSS_PCT per cent
 * of the segments are dropped, by a classic BPF filter on the kernel's random numbers. A connection that is accepted has
 * the filter of the socket that listened. Other programs (they inherit the variable) are left alone. */
#include <errno.h>
#include <linux/filter.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static long share(void)
{
    const char *text = getenv("BOOST_TEST_LOSS_PCT"), *name = program_invocation_short_name;
    return text && (strcmp(name, "boostd") == 0 || strcmp(name, "boost-agent") == 0) ? strtol(text, NULL, 10) : 0;
}

int socket(int domain, int type, int protocol)
{
    int fd = (int)syscall(SYS_socket, domain, type, protocol);
    long pct = share();
    if (fd < 0 || pct <= 0 || (domain != AF_INET && domain != AF_INET6) || (type & 0xF) != SOCK_STREAM)
        return fd;
    const unsigned limit = (unsigned)((unsigned long long)pct * 0xFFFFFFFFu / 100);
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, (unsigned)(SKF_AD_OFF + SKF_AD_RANDOM)),
        BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, limit, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, 0),
        BPF_STMT(BPF_RET | BPF_K, 0xFFFFFFFFu),
    };
    const struct sock_fprog program = {.len = sizeof code / sizeof *code, .filter = code};
    if (setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program) < 0) {
        close(fd); /* a test of a bad network must not pass on a good one */
        return -1;
    }
    return fd;
}
