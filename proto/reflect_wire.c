/* reflect.h: packed bytes before and after unpacking. */
#include <stdio.h>
#include <string.h>

#include "proto/reflect.h"

struct wire {
    const uint8_t *start;
    const uint8_t *at;
    const uint8_t *end;
    struct error *err;
};

static unsigned long offset_of(const struct wire *w)
{
    return (unsigned long)(w->at - w->start);
}

static int cut_off(const struct wire *w, const char *path)
{
    error_set(w->err, ERR_INVALID, "the data are cut off at byte %lu, inside %s", (unsigned long)(w->end - w->start),
              path[0] ? path : "the first field");
    error_hint(w->err, "the file was not written or copied whole; make it again");
    return ERR_INVALID;
}

static int not_this_type(const struct wire *w, const char *path, const char *what)
{
    error_set(w->err, ERR_INVALID, "%s%s%s at byte %lu", path, path[0] ? ": " : "", what, offset_of(w));
    error_hint(w->err, "this is not a protobuf message of this kind, or it is damaged");
    return ERR_INVALID;
}

/* At most max_bytes of varint. */
static int take_varint(struct wire *w, const char *path, int max_bytes, uint64_t *out)
{
    *out = 0;
    for (int i = 0; i < max_bytes; i++) {
        if (w->at == w->end)
            return cut_off(w, path);
        uint8_t byte = *w->at++;
        *out |= (uint64_t)(byte & 0x7f) << 7 * i;
        if (!(byte & 0x80))
            return ERR_OK;
    }
    return not_this_type(w, path, "overlong number");
}

static const ProtobufCFieldDescriptor *field_by_id(const ProtobufCMessageDescriptor *type, uint32_t id)
{
    for (unsigned i = 0; i < type->n_fields; i++)
        if (type->fields[i].id == id)
            return &type->fields[i];
    return NULL;
}

static int wire_type_of(const ProtobufCFieldDescriptor *f)
{
    switch (f->type) {
    case PROTOBUF_C_TYPE_SFIXED32:
    case PROTOBUF_C_TYPE_FIXED32:
    case PROTOBUF_C_TYPE_FLOAT:
        return PROTOBUF_C_WIRE_TYPE_32BIT;
    case PROTOBUF_C_TYPE_SFIXED64:
    case PROTOBUF_C_TYPE_FIXED64:
    case PROTOBUF_C_TYPE_DOUBLE:
        return PROTOBUF_C_WIRE_TYPE_64BIT;
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_BYTES:
    case PROTOBUF_C_TYPE_MESSAGE:
        return PROTOBUF_C_WIRE_TYPE_LENGTH_PREFIXED;
    default:
        return PROTOBUF_C_WIRE_TYPE_VARINT;
    }
}

/* Packed lists are checked for whole entries, so that a cut one is named here. */
static int check_packed(struct wire *w, const ProtobufCFieldDescriptor *f, const char *path, const uint8_t *end,
                        size_t *count)
{
    struct wire in = {w->start, w->at, end, w->err};
    size_t fixed = wire_type_of(f) == PROTOBUF_C_WIRE_TYPE_32BIT ? 4 : 8;
    while (in.at < end) {
        uint64_t skip;
        ++*count;
        if (wire_type_of(f) == PROTOBUF_C_WIRE_TYPE_VARINT) {
            int rc = take_varint(&in, path, 10, &skip);
            if (rc)
                return rc;
        } else if ((size_t)(end - in.at) < fixed) {
            return not_this_type(&in, path, "packed list with a part of an entry");
        } else {
            in.at += fixed;
        }
    }
    return ERR_OK;
}

static int check_message(struct wire *w, const ProtobufCMessageDescriptor *type, const char *path, int depth);

/* A length-prefixed value [w->at, end). */
static int check_bytes(struct wire *w, const ProtobufCFieldDescriptor *f, const char *path, const uint8_t *end,
                       int depth, size_t *count)
{
    size_t len = (size_t)(end - w->at);
    if (f->type == PROTOBUF_C_TYPE_STRING && len && memchr(w->at, 0, len)) {
        error_set(w->err, ERR_INVALID, "%s holds a NUL byte", path);
        error_hint(w->err, "strings are text: leave the byte out");
        return ERR_INVALID;
    }
    if (f->type == PROTOBUF_C_TYPE_MESSAGE) {
        struct wire in = {w->start, w->at, end, w->err};
        ++*count;
        return check_message(&in, f->descriptor, path, depth + 1);
    }
    if (wire_type_of(f) != PROTOBUF_C_WIRE_TYPE_LENGTH_PREFIXED)
        return check_packed(w, f, path, end, count);
    ++*count;
    return ERR_OK;
}

static int check_field(struct wire *w, const ProtobufCFieldDescriptor *f, const char *path, int wire_type, int depth,
                       size_t *count)
{
    uint64_t number;
    size_t need = wire_type == PROTOBUF_C_WIRE_TYPE_32BIT ? 4 : 8;
    if (f && wire_type != wire_type_of(f) &&
        !(f->label == PROTOBUF_C_LABEL_REPEATED && wire_type == PROTOBUF_C_WIRE_TYPE_LENGTH_PREFIXED))
        return not_this_type(w, path, "wire type of another kind of field");
    switch (wire_type) {
    case PROTOBUF_C_WIRE_TYPE_VARINT:
        ++*count;
        return take_varint(w, path, 10, &number);
    case PROTOBUF_C_WIRE_TYPE_32BIT:
    case PROTOBUF_C_WIRE_TYPE_64BIT:
        if ((size_t)(w->end - w->at) < need)
            return cut_off(w, path);
        w->at += need;
        ++*count;
        return ERR_OK;
    case PROTOBUF_C_WIRE_TYPE_LENGTH_PREFIXED: {
        int rc = take_varint(w, path, 5, &number);
        if (rc)
            return rc;
        if ((uint64_t)(w->end - w->at) < number)
            return cut_off(w, path);
        const uint8_t *end = w->at + number;
        rc = f ? check_bytes(w, f, path, end, depth, count) : ERR_OK;
        w->at = end;
        return rc;
    }
    default:
        return not_this_type(w, path, "unknown wire type");
    }
}

static int check_message(struct wire *w, const ProtobufCMessageDescriptor *type, const char *path, int depth)
{
    if (depth > REFLECT_MAX_DEPTH)
        return not_this_type(w, path, "messages nest too deep");
    const ProtobufCFieldDescriptor *last = NULL;
    size_t count = 0; /* of a run of one field; lists are written together */
    while (w->at < w->end) {
        uint64_t tag;
        int rc = take_varint(w, path, 5, &tag);
        if (rc)
            return rc;
        if (tag >> 3 == 0 || tag > UINT32_MAX)
            return not_this_type(w, path, "bad field number");
        const ProtobufCFieldDescriptor *f = field_by_id(type, (uint32_t)(tag >> 3));
        char name[24], sub[REFLECT_PATH];
        if (f != last)
            count = 0;
        last = f;
        snprintf(name, sizeof name, "#%u", (unsigned)(tag >> 3));
        reflect_path(sub, path, f ? f->name : name, f && f->label == PROTOBUF_C_LABEL_REPEATED ? (long)count : -1);
        rc = check_field(w, f, sub, (int)(tag & 7), depth, &count);
        if (rc)
            return rc;
        if (f && f->label == PROTOBUF_C_LABEL_REPEATED && count > REFLECT_MAX_REPEATED)
            return error_set(w->err, ERR_INVALID, "%s: more than %d entries", sub, REFLECT_MAX_REPEATED);
    }
    return ERR_OK;
}

int reflect_check_wire(const ProtobufCMessageDescriptor *type, const void *data, size_t len, struct error *err)
{
    struct wire w = {data, data, (const uint8_t *)data + len, err};
    return len ? check_message(&w, type, "", 0) : ERR_OK;
}

ProtobufCMessage *reflect_unpack(const ProtobufCMessageDescriptor *type, const void *data, size_t len, struct arena *a,
                                 struct error *err)
{
    if (reflect_check_wire(type, data, len, err))
        return NULL;
    ProtobufCMessage *m = protobuf_c_message_unpack(type, &a->allocator, len, data);
    if (!m && a->failed) {
        error_set(err, ERR_NOMEM, "a %s message of %zu bytes is over the memory limit", type->short_name, len);
    } else if (!m) {
        error_set(err, ERR_INVALID, "not a %s message", type->short_name);
        error_hint(err, "the data are damaged, or of another kind");
    }
    return m;
}

static size_t unknown_in(const ProtobufCMessage *m, const char *path, struct buffer *out)
{
    size_t count = m->n_unknown_fields;
    for (unsigned i = 0; i < m->n_unknown_fields; i++)
        buffer_printf(out, "%s%s%s#%u", out->len ? ", " : "", path, path[0] ? "." : "", m->unknown_fields[i].tag);
    for (unsigned i = 0; i < m->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *f = &m->descriptor->fields[i];
        if (f->type != PROTOBUF_C_TYPE_MESSAGE)
            continue;
        for (size_t k = 0; k < reflect_count(m, f); k++) {
            char sub[REFLECT_PATH];
            reflect_path(sub, path, f->name, f->label == PROTOBUF_C_LABEL_REPEATED ? (long)k : -1);
            count += unknown_in(*(ProtobufCMessage **)reflect_get(m, f, k), sub, out);
        }
    }
    return count;
}

size_t reflect_unknown_fields(const ProtobufCMessage *m, struct buffer *out)
{
    return unknown_in(m, "", out);
}
