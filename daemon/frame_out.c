/* frame_out.h */
#include "daemon/frame_out.h"

#include <stdlib.h>

#include "proto/frame.h"

struct outgoing {
    uv_write_t request;
    struct buffer bytes;
    void (*done)(uv_stream_t *stream, int status);
};

static void drop(struct outgoing *o)
{
    buffer_free(&o->bytes);
    free(o);
}

static void written(uv_write_t *request, int status)
{
    struct outgoing *o = request->data;
    uv_stream_t *stream = request->handle;
    void (*done)(uv_stream_t *, int) = o->done;
    drop(o);
    if (done)
        done(stream, status);
}

int frame_out(uv_stream_t *stream, const ProtobufCMessage *message, void (*done)(uv_stream_t *stream, int status),
              struct error *err)
{
    struct outgoing *o = calloc(1, sizeof *o);
    if (!o)
        return error_set(err, ERR_NOMEM, "no memory to send a message");
    buffer_init(&o->bytes, LIMIT_FRAME + FRAME_HEADER);
    o->done = done;
    o->request.data = o;
    int rc = frame_append(&o->bytes, message, err);
    if (!rc) {
        uv_buf_t bytes = uv_buf_init((char *)o->bytes.data, (unsigned)o->bytes.len);
        int uv = uv_write(&o->request, stream, &bytes, 1, written);
        if (uv < 0)
            rc = error_errno(err, -uv, "cannot send a message");
    }
    if (rc)
        drop(o);
    return rc;
}
