/* One connection to boostd: frames in and out of a Unix stream socket or, inside TLS, of TCP; the hello,
 * and who is at the other end. What the frames mean is the handler's.
 *
 * A session never lets its peer grow the daemon: reading pauses while more than
 * SESSION_HIGH_WATER bytes wait to be sent or SESSION_MAX_PENDING requests are open;
 * a peer that lets SESSION_MAX_OUT bytes pile up is dropped. One that breaks the
 * protocol gets a Failure and is closed; no other session notices. Of connections by TCP that have not said a good
 * hello yet there are at most SESSION_MAX_HALF_OPEN: one more, and the oldest of them goes.
 *
 * One thread, the loop's. Handlers may close any session at any time: memory is
 * released only from the loop, after `closed`. */
#ifndef BOOST_DAEMON_SESSION_H
#define BOOST_DAEMON_SESSION_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <uv.h>

#include "proto/base/buffer.h"
#include "proto/base/error.h"
#include "proto/rpc.pb-c.h"
#include "proto/tls.h"

enum {
    SESSION_HIGH_WATER = 1 << 20, /* bytes waiting to be sent: nothing more is read          */
    SESSION_MAX_OUT = 16 << 20,   /* bytes waiting to be sent: the peer is dropped           */
    SESSION_MAX_PENDING = 256,    /* requests without an answer: nothing more is read        */
    SESSION_GRACE_MS = 10000,     /* for the hello, and for the last words before a close    */
    SESSION_MAX_HALF_OPEN = 1024, /* by TCP, before the hello                                */
    SESSION_NODE_MAX = 64,
};

struct session;
struct session_handler {
    void *arg;
    /* The hello is agreed. ERR_OK, or the refusal that the peer gets. */
    int (*opened)(void *arg, struct session *s, struct error *err);
    /* A whole frame. An error closes the session after sending it to the peer. */
    int (*frame)(void *arg, struct session *s, const uint8_t *payload, size_t len, struct error *err);
    /* There is room again below SESSION_HIGH_WATER. */
    void (*drained)(void *arg, struct session *s);
    /* The last call for this session; it was opened unless `opened` never came or refused. */
    void (*closed)(void *arg, struct session *s);
};

struct session {
    struct session *prev, *next; /* of the set */
    struct session_set *set;
    union {
        uv_handle_t handle;
        uv_stream_t stream;
        uv_pipe_t pipe;
        uv_tcp_t tcp;
    } io;
    struct tls *tls; /* NULL: a Unix socket */
    uint64_t serial; /* for log lines */
    char who[192];   /* for log lines: "uid 0, pid 12"; "10.0.0.3:40012, node gpu01" */
    /* Unix: of the peer, from the kernel. TLS: once somebody has looked the certificate's user up; until then
     * uid_known is false and they mean nothing. */
    bool uid_known;
    uid_t uid;
    gid_t gid;
    Boost__Component__Value component;
    char node[SESSION_NODE_MAX + 1]; /* AGENT: as its hello says */
    bool greeted;                    /* both hellos are through      */
    bool ending;                     /* closes once all is sent      */
    bool closing;                    /* the handle is being closed   */
    void *user;                      /* the handler's                */

    /* session.c's own */
    bool reading, processing;
    int pending;
    int64_t deadline_ms; /* of the loop's clock; 0 = none */
    struct buffer in, out, in_flight;
    uv_write_t write;
};

/* All sessions of one listener. */
struct session_set {
    uv_loop_t *loop;
    struct session_handler handler;
    struct session *first;
    size_t count, half_open;
    int64_t crowd_said_ms; /* when the log was told of too many half-open ones */
    uint64_t accepted;
    const char *store_id; /* what the hello says of this boostd; NULL: nothing */
    uint64_t epoch;
    char replaced[160]; /* not "": an agent obeys a later boostd of the same store; the text says which */
    uv_timer_t timer; /* runs while a session has a deadline */
    bool timing;
    uint8_t scratch[64 << 10];
};
void session_set_init(struct session_set *set, uv_loop_t *loop, const struct session_handler *handler);
/* Closes every session and the timer; the loop has to run until all are gone. */
void session_set_close(struct session_set *set);

/* Takes the waiting connection of a listening pipe. On failure nothing is left of it. */
MUST_USE int session_accept(struct session_set *set, uv_stream_t *listener, struct error *err);
/* Likewise of a listening TCP socket; the context may go when this returns. */
MUST_USE int session_accept_tls(struct session_set *set, uv_stream_t *listener, struct tls_context *context,
                                struct error *err);
/* NULL on a Unix socket. Once opened: whose certificate the peer has shown. */
const struct tls_peer *session_peer(const struct session *s);

/* Queues a frame. ERR_INVALID: over the frame limit, nothing is queued; any other error: the session is
 * closing, and so is one with more than SESSION_MAX_OUT queued. */
MUST_USE int session_send(struct session *s, const ProtobufCMessage *message, struct error *err);
/* A peer that reads slowly: hold back what can wait until `drained`. */
bool session_full(const struct session *s);
/* Closes at once; `closed` follows from the loop. */
void session_close(struct session *s);
/* Sends what is queued first, within SESSION_GRACE_MS. Nothing more is read. */
void session_end(struct session *s);
/* Counts a request that gets its answer later, and its end. */
void session_request_begin(struct session *s);
void session_request_end(struct session *s);

#endif
