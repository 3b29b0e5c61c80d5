/* json.h: the writer. */
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <string.h>

#include "proto/base/number.h"
#include "proto/base/utf8.h"
#include "proto/json.h"

static void write_string(struct buffer *out, const char *s)
{
    size_t len = strlen(s);
    buffer_append_str(out, "\"");
    for (size_t i = 0; i < len;) {
        size_t n = utf8_length(s + i, len - i);
        unsigned char c = (unsigned char)s[i];
        if (!n)
            buffer_append_str(out, UTF8_REPLACEMENT);
        else if (c == '"' || c == '\\')
            buffer_printf(out, "\\%c", c);
        else if (c == '\n' || c == '\t' || c == '\r')
            buffer_append_str(out, c == '\n' ? "\\n" : c == '\t' ? "\\t" : "\\r");
        else if (c < ' ' || c == 0x7f)
            buffer_printf(out, "\\u%04x", c);
        else
            buffer_append(out, s + i, n);
        i += n ? n : 1;
    }
    buffer_append_str(out, "\"");
}

static void write_base64(struct buffer *out, const uint8_t *data, size_t len)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    buffer_append_str(out, "\"");
    for (size_t i = 0; i < len; i += 3) {
        size_t n = len - i < 3 ? len - i : 3;
        uint32_t bits = (uint32_t)data[i] << 16 | (n > 1 ? (uint32_t)data[i + 1] << 8 : 0) | (n > 2 ? data[i + 2] : 0);
        char four[4] = {digits[bits >> 18], digits[bits >> 12 & 63], n > 1 ? digits[bits >> 6 & 63] : '=',
                        n > 2 ? digits[bits & 63] : '='};
        buffer_append(out, four, sizeof four);
    }
    buffer_append_str(out, "\"");
}

/* JSON's numbers have no infinities, and a real keeps a point or an exponent so that it stays one. */
static void write_double(struct buffer *out, double v, bool narrow)
{
    char text[NUMBER_TEXT];
    if (isnan(v) || isinf(v)) {
        buffer_append_str(out, isnan(v) ? "\"NaN\"" : v < 0 ? "\"-Infinity\"" : "\"Infinity\"");
        return;
    }
    buffer_append_str(out, narrow ? number_from_float((float)v, text) : number_from_double(v, text));
    if (!strpbrk(text, ".e"))
        buffer_append_str(out, ".0");
}

static void write_scalar(struct buffer *out, const ProtobufCFieldDescriptor *f, const void *at)
{
    const ProtobufCEnumValue *value;
    const ProtobufCBinaryData *bytes = at;
    switch (f->type) {
    case PROTOBUF_C_TYPE_INT32:
    case PROTOBUF_C_TYPE_SINT32:
    case PROTOBUF_C_TYPE_SFIXED32:
        buffer_printf(out, "%" PRId32, *(const int32_t *)at);
        break;
    case PROTOBUF_C_TYPE_UINT32:
    case PROTOBUF_C_TYPE_FIXED32:
        buffer_printf(out, "%" PRIu32, *(const uint32_t *)at);
        break;
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_SINT64:
    case PROTOBUF_C_TYPE_SFIXED64:
        buffer_printf(out, "%" PRId64, *(const int64_t *)at);
        break;
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_FIXED64: {
        uint64_t v = *(const uint64_t *)at;
        const char *quote = v > INT64_MAX ? "\"" : "";
        buffer_printf(out, "%s%" PRIu64 "%s", quote, v, quote);
        break;
    }
    case PROTOBUF_C_TYPE_DOUBLE:
        write_double(out, *(const double *)at, false);
        break;
    case PROTOBUF_C_TYPE_FLOAT:
        write_double(out, (double)*(const float *)at, true);
        break;
    case PROTOBUF_C_TYPE_BOOL:
        buffer_append_str(out, *(const protobuf_c_boolean *)at ? "true" : "false");
        break;
    case PROTOBUF_C_TYPE_ENUM:
        value = protobuf_c_enum_descriptor_get_value(f->descriptor, *(const int *)at);
        if (value)
            buffer_printf(out, "\"%s\"", value->name);
        else
            buffer_printf(out, "%d", *(const int *)at);
        break;
    case PROTOBUF_C_TYPE_STRING: {
        const char *s = *(char *const *)at;
        write_string(out, s ? s : "");
        break;
    }
    case PROTOBUF_C_TYPE_BYTES:
        write_base64(out, bytes->data, bytes->len);
        break;
    case PROTOBUF_C_TYPE_MESSAGE:
        break;
    }
}

static int write_message(struct buffer *out, const ProtobufCMessage *m, int depth);

static int write_value(struct buffer *out, const ProtobufCMessage *m, const ProtobufCFieldDescriptor *f, size_t i,
                       int depth)
{
    const void *at = reflect_get(m, f, i);
    if (f->type == PROTOBUF_C_TYPE_MESSAGE)
        return write_message(out, *(ProtobufCMessage *const *)at, depth);
    write_scalar(out, f, at);
    return ERR_OK;
}

/* Lists of scalars stay on one line. */
static int write_list(struct buffer *out, const ProtobufCMessage *m, const ProtobufCFieldDescriptor *f, int depth)
{
    bool lines = f->type == PROTOBUF_C_TYPE_MESSAGE;
    int rc = ERR_OK;
    buffer_append_str(out, "[");
    for (size_t i = 0; !rc && i < reflect_count(m, f); i++) {
        if (lines)
            buffer_printf(out, "%s\n%*s", i ? "," : "", 2 * (depth + 1), "");
        else if (i)
            buffer_append_str(out, ", ");
        rc = write_value(out, m, f, i, depth + 1);
    }
    if (lines)
        buffer_printf(out, "\n%*s", 2 * depth, "");
    buffer_append_str(out, "]");
    return rc;
}

static int write_message(struct buffer *out, const ProtobufCMessage *m, int depth)
{
    if (depth > 2 * REFLECT_MAX_DEPTH) /* lists count as a level here */
        return ERR_INVALID;
    bool any = false;
    int rc = ERR_OK;
    buffer_append_str(out, "{");
    for (unsigned i = 0; !rc && i < m->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *f = &m->descriptor->fields[i];
        if (!reflect_count(m, f))
            continue;
        buffer_printf(out, "%s\n%*s\"%s\": ", any ? "," : "", 2 * (depth + 1), "", f->name);
        any = true;
        rc = f->label == PROTOBUF_C_LABEL_REPEATED ? write_list(out, m, f, depth + 1)
                                                   : write_value(out, m, f, 0, depth + 1);
    }
    if (any)
        buffer_printf(out, "\n%*s", 2 * depth, "");
    buffer_append_str(out, "}");
    return rc;
}

int json_write(const ProtobufCMessage *m, struct buffer *out, struct error *err)
{
    if (write_message(out, m, 0))
        return error_set(err, ERR_INVALID, "messages nest deeper than %d", REFLECT_MAX_DEPTH);
    buffer_append_str(out, "\n");
    if (out->failed)
        return error_set(err, ERR_NOMEM, "the JSON is over %zu bytes", out->max);
    return ERR_OK;
}

struct json_t *json_tree(const ProtobufCMessage *m)
{
    struct buffer text;
    buffer_init(&text, (size_t)64 << 20);
    json_t *tree = json_write(m, &text, NULL) ? NULL : json_loadb((char *)text.data, text.len, 0, NULL);
    buffer_free(&text);
    return tree;
}
