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

/* Where the walk is, innermost first. The text of it is made only for an error:
 * every frame that a daemon receives comes through here. */
struct level {
    const struct level *up;
    const ProtobufCFieldDescriptor *f; /* NULL: unknown */
    uint32_t id;                       /* 0 at the top, where there is no field */
    size_t index;                      /* in a list */
};

static void level_path(const struct level *level, char out[REFLECT_PATH])
{
    char outer[REFLECT_PATH], name[24];
    out[0] = '\0';
    if (!level || !level->id)
        return;
    level_path(level->up, outer);
    snprintf(name, sizeof name, "#%u", (unsigned)level->id);
    bool list = level->f && level->f->label == PROTOBUF_C_LABEL_REPEATED;
    reflect_path(out, outer, level->f ? level->f->name : name, list ? (long)level->index : -1);
}

static int cut_off(const struct wire *w, const struct level *level)
{
    char path[REFLECT_PATH];
    level_path(level, path);
    error_set(w->err, ERR_INVALID, "the data are cut off at byte %lu, inside %s", (unsigned long)(w->end - w->start),
              path[0] ? path : "the first field");
    error_hint(w->err, "the file was not written or copied whole; make it again");
    return ERR_INVALID;
}

static int not_this_type(const struct wire *w, const struct level *level, const char *what)
{
    char path[REFLECT_PATH];
    level_path(level, path);
    error_set(w->err, ERR_INVALID, "%s%s%s at byte %lu", path, path[0] ? ": " : "", what,
              (unsigned long)(w->at - w->start));
    error_hint(w->err, "this is not a protobuf message of this kind, or it is damaged");
    return ERR_INVALID;
}

/* At most max_bytes of varint. */
static int take_varint(struct wire *w, const struct level *level, int max_bytes, uint64_t *out)
{
    *out = 0;
    for (int i = 0; i < max_bytes; i++) {
        if (w->at == w->end)
            return cut_off(w, level);
        uint8_t byte = *w->at++;
        *out |= (uint64_t)(byte & 0x7f) << 7 * i;
        if (!(byte & 0x80))
            return ERR_OK;
    }
    return not_this_type(w, level, "overlong number");
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
static int check_packed(const struct wire *w, struct level *level, const uint8_t *end)
{
    struct wire in = {w->start, w->at, end, w->err};
    int wire_type = wire_type_of(level->f);
    size_t fixed = wire_type == PROTOBUF_C_WIRE_TYPE_32BIT ? 4 : 8;
    for (; in.at < end; level->index++) {
        uint64_t skip;
        if (wire_type == PROTOBUF_C_WIRE_TYPE_VARINT) {
            int rc = take_varint(&in, level, 10, &skip);
            if (rc)
                return rc;
        } else if ((size_t)(end - in.at) < fixed) {
            return not_this_type(&in, level, "packed list with a part of an entry");
        } else {
            in.at += fixed;
        }
    }
    return ERR_OK;
}

static int check_message(struct wire *w, const ProtobufCMessageDescriptor *type, const struct level *level, int depth);

/* The length-prefixed value [w->at, end) of a known field. */
static int check_bytes(const struct wire *w, struct level *level, const uint8_t *end, int depth)
{
    size_t len = (size_t)(end - w->at);
    int rc = ERR_OK;
    if (level->f->type == PROTOBUF_C_TYPE_STRING && len && memchr(w->at, 0, len)) {
        char path[REFLECT_PATH];
        level_path(level, path);
        rc = error_set(w->err, ERR_INVALID, "%s holds a NUL byte", path);
        error_hint(w->err, "strings are text: leave the byte out");
    } else if (level->f->type == PROTOBUF_C_TYPE_MESSAGE) {
        struct wire in = {w->start, w->at, end, w->err};
        rc = check_message(&in, level->f->descriptor, level, depth + 1);
    } else if (wire_type_of(level->f) != PROTOBUF_C_WIRE_TYPE_LENGTH_PREFIXED) {
        return check_packed(w, level, end);
    }
    level->index++;
    return rc;
}

/* The value behind a tag; level->index moves past what it adds to a list. */
static int check_value(struct wire *w, struct level *level, int wire_type, int depth)
{
    const ProtobufCFieldDescriptor *f = level->f;
    uint64_t number;
    size_t need = wire_type == PROTOBUF_C_WIRE_TYPE_32BIT ? 4 : 8;
    if (f && wire_type != wire_type_of(f) &&
        !(f->label == PROTOBUF_C_LABEL_REPEATED && wire_type == PROTOBUF_C_WIRE_TYPE_LENGTH_PREFIXED))
        return not_this_type(w, level, "wire type of another kind of field");
    switch (wire_type) {
    case PROTOBUF_C_WIRE_TYPE_VARINT: {
        int rc = take_varint(w, level, 10, &number);
        level->index++;
        return rc;
    }
    case PROTOBUF_C_WIRE_TYPE_32BIT:
    case PROTOBUF_C_WIRE_TYPE_64BIT:
        if ((size_t)(w->end - w->at) < need)
            return cut_off(w, level);
        w->at += need;
        level->index++;
        return ERR_OK;
    case PROTOBUF_C_WIRE_TYPE_LENGTH_PREFIXED: {
        int rc = take_varint(w, level, 5, &number);
        if (rc)
            return rc;
        if ((uint64_t)(w->end - w->at) < number)
            return cut_off(w, level);
        const uint8_t *end = w->at + number;
        rc = f ? check_bytes(w, level, end, depth) : ERR_OK;
        w->at = end;
        return rc;
    }
    default:
        return not_this_type(w, level, "unknown wire type");
    }
}

static int check_message(struct wire *w, const ProtobufCMessageDescriptor *type, const struct level *level, int depth)
{
    if (depth > REFLECT_MAX_DEPTH)
        return not_this_type(w, level, "messages nest too deep");
    struct level sub = {.up = level};
    while (w->at < w->end) {
        uint64_t tag;
        int rc = take_varint(w, level, 5, &tag);
        if (rc)
            return rc;
        if (tag >> 3 == 0 || tag > UINT32_MAX)
            return not_this_type(w, level, "bad field number");
        if (sub.id != tag >> 3) { /* the entries of a list are written together: count a run of them */
            sub.id = (uint32_t)(tag >> 3);
            sub.f = field_by_id(type, sub.id);
            sub.index = 0;
        }
        rc = check_value(w, &sub, (int)(tag & 7), depth);
        if (rc)
            return rc;
        if (sub.f && sub.f->label == PROTOBUF_C_LABEL_REPEATED && sub.index > REFLECT_MAX_REPEATED)
            return error_set(w->err, ERR_INVALID, "%s: more than %d entries", sub.f->name, REFLECT_MAX_REPEATED);
    }
    return ERR_OK;
}

int reflect_check_wire(const ProtobufCMessageDescriptor *type, const void *data, size_t len, struct error *err)
{
    /* cppcheck-suppress ctuuninitvar ; *err is only written */
    struct wire w = {data, data, (const uint8_t *)data + len, err};
    return len ? check_message(&w, type, NULL, 0) : ERR_OK;
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
