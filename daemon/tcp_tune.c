/* tcp_tune.h */
#include "daemon/tcp_tune.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>

#include "daemon/log.h"

enum { KEEPALIVE_S = 10 };

static void set(int fd, int option, unsigned value, const char *name)
{
    int number = (int)value;
    if (setsockopt(fd, IPPROTO_TCP, option, &number, sizeof number) < 0)
        log_line(LOG_DEBUG, "this kernel does not take %s: %m", name);
}

void tcp_tune(uv_tcp_t *tcp, unsigned timeout_ms)
{
    uv_os_fd_t fd;
    uv_tcp_nodelay(tcp, 1);
    uv_tcp_keepalive(tcp, 1, KEEPALIVE_S);
    if (uv_fileno((const uv_handle_t *)tcp, &fd) < 0)
        return;
    set(fd, TCP_USER_TIMEOUT, timeout_ms, "TCP_USER_TIMEOUT");
#ifdef TCP_THIN_LINEAR_TIMEOUTS
    set(fd, TCP_THIN_LINEAR_TIMEOUTS, 1, "TCP_THIN_LINEAR_TIMEOUTS");
#endif
}
