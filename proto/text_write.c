/* text.h: the writer. */
#include <inttypes.h>
#include <string.h>

#include "proto/base/number.h"
#include "proto/base/utf8.h"
#include "proto/text.h"

struct writer {
    struct buffer *out;
    bool one_line;
    bool begun; /* one line: a space goes before the next field */
};

/* Before a field: indentation, or a space between fields on one line. */
static void begin(struct writer *w, int depth)
{
    if (w->one_line)
        buffer_append_str(w->out, w->begun ? " " : "");
    else
        buffer_printf(w->out, "%*s", 2 * depth, "");
    w->begun = true;
}

static void finish(struct writer *w)
{
    if (!w->one_line)
        buffer_append_str(w->out, "\n");
}

/* Quoted. Good UTF-8 stays as it is; other bytes beyond ASCII and controls are octal. */
static void write_string(struct writer *w, const uint8_t *s, size_t len)
{
    buffer_append_str(w->out, "\"");
    for (size_t i = 0; i < len;) {
        static const char from[] = "\n\r\t\"\\", to[] = "nrt\"\\";
        const char *simple = s[i] ? strchr(from, s[i]) : NULL;
        size_t n = utf8_length(s + i, len - i);
        if (simple)
            buffer_printf(w->out, "\\%c", to[simple - from]);
        else if (n > 1 || (s[i] >= ' ' && s[i] < 0x7f))
            buffer_append(w->out, s + i, n);
        else
            buffer_printf(w->out, "\\%03o", s[i]);
        i += n ? n : 1;
    }
    buffer_append_str(w->out, "\"");
}

static void write_scalar(struct writer *w, const ProtobufCFieldDescriptor *f, const void *at)
{
    char digits[NUMBER_TEXT];
    const ProtobufCEnumValue *value;
    const ProtobufCBinaryData *bytes = at;
    switch (f->type) {
    case PROTOBUF_C_TYPE_INT32:
    case PROTOBUF_C_TYPE_SINT32:
    case PROTOBUF_C_TYPE_SFIXED32:
        buffer_printf(w->out, "%" PRId32, *(const int32_t *)at);
        break;
    case PROTOBUF_C_TYPE_UINT32:
    case PROTOBUF_C_TYPE_FIXED32:
        buffer_printf(w->out, "%" PRIu32, *(const uint32_t *)at);
        break;
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_SINT64:
    case PROTOBUF_C_TYPE_SFIXED64:
        buffer_printf(w->out, "%" PRId64, *(const int64_t *)at);
        break;
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_FIXED64:
        buffer_printf(w->out, "%" PRIu64, *(const uint64_t *)at);
        break;
    case PROTOBUF_C_TYPE_DOUBLE:
        buffer_append_str(w->out, number_from_double(*(const double *)at, digits));
        break;
    case PROTOBUF_C_TYPE_FLOAT:
        buffer_append_str(w->out, number_from_float(*(const float *)at, digits));
        break;
    case PROTOBUF_C_TYPE_BOOL:
        buffer_append_str(w->out, *(const protobuf_c_boolean *)at ? "true" : "false");
        break;
    case PROTOBUF_C_TYPE_ENUM:
        value = protobuf_c_enum_descriptor_get_value(f->descriptor, *(const int *)at);
        if (value)
            buffer_append_str(w->out, value->name);
        else
            buffer_printf(w->out, "%d", *(const int *)at);
        break;
    case PROTOBUF_C_TYPE_STRING: {
        const char *s = *(char *const *)at;
        write_string(w, (const uint8_t *)(s ? s : ""), s ? strlen(s) : 0);
        break;
    }
    case PROTOBUF_C_TYPE_BYTES:
        write_string(w, bytes->data, bytes->len);
        break;
    case PROTOBUF_C_TYPE_MESSAGE:
        break;
    }
}

static int write_message(struct writer *w, const ProtobufCMessage *m, int depth);

static int write_field(struct writer *w, const ProtobufCMessage *m, const ProtobufCFieldDescriptor *f, int depth)
{
    int rc = ERR_OK;
    for (size_t i = 0; !rc && i < reflect_count(m, f); i++) {
        const void *at = reflect_get(m, f, i);
        begin(w, depth);
        buffer_append_str(w->out, f->name);
        if (f->type == PROTOBUF_C_TYPE_MESSAGE) {
            buffer_append_str(w->out, " {");
            finish(w);
            rc = write_message(w, *(ProtobufCMessage *const *)at, depth + 1);
            begin(w, depth);
            buffer_append_str(w->out, "}");
        } else {
            buffer_append_str(w->out, ": ");
            write_scalar(w, f, at);
        }
        finish(w);
    }
    return rc;
}

static int write_message(struct writer *w, const ProtobufCMessage *m, int depth)
{
    if (depth > REFLECT_MAX_DEPTH)
        return ERR_INVALID;
    for (unsigned i = 0; i < m->descriptor->n_fields; i++) {
        int rc = write_field(w, m, &m->descriptor->fields[i], depth);
        if (rc)
            return rc;
    }
    for (unsigned i = 0; !w->one_line && i < m->n_unknown_fields; i++) {
        begin(w, depth);
        buffer_printf(w->out, "# unknown field %u, %zu bytes\n", m->unknown_fields[i].tag, m->unknown_fields[i].len);
    }
    return ERR_OK;
}

static int write_all(struct writer *w, const ProtobufCMessage *m, struct error *err)
{
    int rc = write_message(w, m, 0);
    if (rc)
        return error_set(err, ERR_INVALID, "messages nest deeper than %d", REFLECT_MAX_DEPTH);
    if (w->out->failed)
        return error_set(err, ERR_NOMEM, "the text is over %zu bytes", w->out->max);
    return ERR_OK;
}

int text_write(const ProtobufCMessage *m, struct buffer *out, struct error *err)
{
    struct writer w = {.out = out};
    return write_all(&w, m, err);
}

int text_write_line(const ProtobufCMessage *m, struct buffer *out, struct error *err)
{
    struct writer w = {.out = out, .one_line = true};
    return write_all(&w, m, err);
}
