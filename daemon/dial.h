/* One connection that this process makes to boostd: a Unix socket, or TCP with TLS. Frames in and out; hello and
 * meaning are the caller's. All on the loop. */
#ifndef BOOST_DAEMON_DIAL_H
#define BOOST_DAEMON_DIAL_H

#include <protobuf-c/protobuf-c.h>
#include <stddef.h>
#include <uv.h>

#include "proto/address.h"
#include "proto/base/error.h"
#include "proto/tls.h"

struct dial_target {
    const char *path;              /* of a Unix socket; NULL: by TCP, to */
    const struct address *address; /* this                                */
    struct tls_context *tls;       /* with these certificates             */
    unsigned timeout_ms;           /* TCP_USER_TIMEOUT                    */
};

struct dial;
struct dial_ops {
    void *arg;
    /* The way is open (by TCP: the controller's certificate is good). */
    void (*connected)(void *arg, struct dial *d);
    void (*frame)(void *arg, struct dial *d, const uint8_t *payload, size_t len);
    /* It never came to be, or is gone. The caller has to dial_close() it. Never from inside dial_open(). */
    void (*broken)(void *arg, struct dial *d, const struct error *why);
};

/* Begins; what the target points to has to last until this returns. The deadline is the caller's. */
MUST_USE int dial_open(uv_loop_t *loop, const struct dial_target *target, const struct dial_ops *ops, struct dial **out,
                       struct error *err);
/* Queues a frame. ERR_INVALID: over the frame limit. Any other error: `broken` follows. Only once connected. */
MUST_USE int dial_send(struct dial *d, const ProtobufCMessage *message, struct error *err);
/* Bytes of frames that the kernel has not taken. */
size_t dial_queued(const struct dial *d);
/* Nothing is called after this; the memory goes from the loop. NULL: nothing. */
void dial_close(struct dial *d);

#endif
