/* frame.h */
#include "proto/frame.h"

int frame_append(struct buffer *out, const ProtobufCMessage *message, struct error *err)
{
    size_t len = protobuf_c_message_get_packed_size(message);
    if (len > LIMIT_FRAME)
        return error_set(err, ERR_INVALID, "message %s of %zu bytes is over the frame limit of %d bytes",
                         message->descriptor->name, len, LIMIT_FRAME);
    uint8_t *at = buffer_reserve(out, FRAME_HEADER + len);
    if (!at)
        return error_set(err, ERR_NOMEM, "send buffer is full (%zu bytes waiting)", out->len);
    for (int i = 0; i < FRAME_HEADER; i++)
        at[i] = (uint8_t)(len >> 8 * (FRAME_HEADER - 1 - i));
    protobuf_c_message_pack(message, at + FRAME_HEADER);
    out->len += FRAME_HEADER + len;
    out->data[out->len] = '\0';
    return ERR_OK;
}

int frame_next(const uint8_t *in, size_t len, const uint8_t **payload, size_t *payload_len, size_t *used,
               struct error *err)
{
    *used = 0;
    if (len < FRAME_HEADER)
        return ERR_OK;
    size_t body = (size_t)in[0] << 24 | (size_t)in[1] << 16 | (size_t)in[2] << 8 | in[3];
    if (body > LIMIT_FRAME)
        return error_set(err, ERR_PROTOCOL, "frame of %zu bytes is over the limit of %d bytes", body, LIMIT_FRAME);
    if (len - FRAME_HEADER < body)
        return ERR_OK;
    *payload = in + FRAME_HEADER;
    *payload_len = body;
    *used = FRAME_HEADER + body;
    return ERR_OK;
}
