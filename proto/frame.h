/* Wire frames: u32 big-endian length, then that many bytes of protobuf.
 * Pure: bytes in, bytes out; sockets belong to the caller. */
#ifndef BOOST_PROTO_FRAME_H
#define BOOST_PROTO_FRAME_H

#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>

#include "proto/base/buffer.h"
#include "proto/base/error.h"

enum { FRAME_HEADER = 4, FRAME_PROTOCOL_VERSION = 1, FRAME_PROTOCOL_MIN = 1 };

/* Appends the frame of `message` to `out`; over LIMIT_FRAME is ERR_INVALID and leaves `out` as it was. */
MUST_USE int frame_append(struct buffer *out, const ProtobufCMessage *message, struct error *err);
/* The first whole frame of in[0..len): sets *payload, *payload_len and *used (header
 * included). *used 0: more bytes are needed. ERR_PROTOCOL: the length is over LIMIT_FRAME. */
MUST_USE int frame_next(const uint8_t *in, size_t len, const uint8_t **payload, size_t *payload_len, size_t *used,
                        struct error *err);

#endif
