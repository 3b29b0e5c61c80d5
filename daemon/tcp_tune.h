/* What a TCP connection between boostd and its peers asks of the kernel. */
#ifndef BOOST_DAEMON_TCP_TUNE_H
#define BOOST_DAEMON_TCP_TUNE_H

#include <uv.h>

/* No delay for small frames; keep-alive; retransmission without exponential back-off while little is under way
 * (TCP_THIN_LINEAR_TIMEOUTS); data that is not acknowledged for timeout_ms ends the connection (TCP_USER_TIMEOUT). A
 * kernel that lacks one of these does without. */
void tcp_tune(uv_tcp_t *tcp, unsigned timeout_ms);

#endif
