/* A frame onto a stream of libuv, in memory of its own. */
#ifndef BOOST_DAEMON_FRAME_OUT_H
#define BOOST_DAEMON_FRAME_OUT_H

#include <protobuf-c/protobuf-c.h>
#include <uv.h>

#include "proto/base/error.h"

/* `done` (may be NULL) comes from the loop, before the stream's close callback; status is libuv's. ERR_INVALID: over
 * the frame limit; after any error nothing is sent and `done` does not come. */
MUST_USE int frame_out(uv_stream_t *stream, const ProtobufCMessage *message,
                       void (*done)(uv_stream_t *stream, int status), struct error *err);

#endif
