/* reflect.h: presence, values, lists, defaults, copies. */
#include "proto/reflect.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FIRST_CAPACITY = 4 }; /* of a list; then powers of two */

static bool is_oneof(const ProtobufCFieldDescriptor *f)
{
    return f->flags & PROTOBUF_C_FIELD_FLAG_ONEOF;
}

static void *member(const ProtobufCMessage *m, unsigned offset)
{
    return (uint8_t *)(uintptr_t)m + offset;
}

ProtobufCMessage *reflect_new(struct arena *a, const ProtobufCMessageDescriptor *type)
{
    ProtobufCMessage *m = arena_alloc(a, type->sizeof_message);
    if (m)
        protobuf_c_message_init(type, m);
    return m;
}

/* The packed bytes stay behind in the arena until it goes. */
ProtobufCMessage *reflect_copy(struct arena *a, const ProtobufCMessage *m)
{
    size_t len = protobuf_c_message_get_packed_size(m);
    uint8_t *packed = arena_alloc(a, len ? len : 1);
    if (!packed)
        return NULL;
    protobuf_c_message_pack(m, packed);
    return protobuf_c_message_unpack(m->descriptor, &a->allocator, len, packed);
}

ProtobufCMessage *reflect_clone(const ProtobufCMessage *m)
{
    size_t len = protobuf_c_message_get_packed_size(m);
    uint8_t *packed = malloc(len ? len : 1);
    if (!packed)
        return NULL;
    protobuf_c_message_pack(m, packed);
    ProtobufCMessage *copy = protobuf_c_message_unpack(m->descriptor, NULL, len, packed);
    free(packed);
    return copy;
}

/* Compares what is packed into it with bytes packed before. */
struct compare_sink {
    ProtobufCBuffer base;
    const struct buffer *want;
    size_t at;
    bool same;
};

static void compare_append(ProtobufCBuffer *base, size_t len, const uint8_t *data)
{
    struct compare_sink *sink = (struct compare_sink *)base;
    if (sink->want->len - sink->at < len || (len && memcmp(sink->want->data + sink->at, data, len) != 0))
        sink->same = false;
    else
        sink->at += len;
}

bool reflect_equal(const ProtobufCMessage *x, const ProtobufCMessage *y)
{
    if (x->descriptor != y->descriptor)
        return false;
    size_t len = protobuf_c_message_get_packed_size(x);
    if (len != protobuf_c_message_get_packed_size(y))
        return false;
    struct buffer packed;
    buffer_init(&packed, len);
    uint8_t *at = buffer_reserve(&packed, len);
    struct compare_sink sink = {.base = {compare_append}, .want = &packed, .same = at != NULL};
    if (at) {
        packed.len = protobuf_c_message_pack(x, at);
        protobuf_c_message_pack_to_buffer(y, &sink.base);
    }
    buffer_free(&packed);
    return sink.same && sink.at == len;
}

const ProtobufCFieldDescriptor *reflect_field(const ProtobufCMessageDescriptor *type, const char *name, size_t len)
{
    for (unsigned i = 0; i < type->n_fields; i++)
        if (strlen(type->fields[i].name) == len && memcmp(type->fields[i].name, name, len) == 0)
            return &type->fields[i];
    return NULL;
}

size_t reflect_value_size(const ProtobufCFieldDescriptor *f)
{
    switch (f->type) {
    case PROTOBUF_C_TYPE_INT32:
    case PROTOBUF_C_TYPE_SINT32:
    case PROTOBUF_C_TYPE_SFIXED32:
    case PROTOBUF_C_TYPE_UINT32:
    case PROTOBUF_C_TYPE_FIXED32:
    case PROTOBUF_C_TYPE_FLOAT:
        return 4;
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_SINT64:
    case PROTOBUF_C_TYPE_SFIXED64:
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_FIXED64:
    case PROTOBUF_C_TYPE_DOUBLE:
        return 8;
    case PROTOBUF_C_TYPE_ENUM:
        return sizeof(int);
    case PROTOBUF_C_TYPE_BOOL:
        return sizeof(protobuf_c_boolean);
    case PROTOBUF_C_TYPE_BYTES:
        return sizeof(ProtobufCBinaryData);
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_MESSAGE:
        break;
    }
    return sizeof(void *);
}

const char *reflect_type_name(const ProtobufCFieldDescriptor *f)
{
    static const char *const names[] = {
        [PROTOBUF_C_TYPE_INT32] = "int32",       [PROTOBUF_C_TYPE_SINT32] = "sint32",
        [PROTOBUF_C_TYPE_SFIXED32] = "sfixed32", [PROTOBUF_C_TYPE_INT64] = "int64",
        [PROTOBUF_C_TYPE_SINT64] = "sint64",     [PROTOBUF_C_TYPE_SFIXED64] = "sfixed64",
        [PROTOBUF_C_TYPE_UINT32] = "uint32",     [PROTOBUF_C_TYPE_FIXED32] = "fixed32",
        [PROTOBUF_C_TYPE_UINT64] = "uint64",     [PROTOBUF_C_TYPE_FIXED64] = "fixed64",
        [PROTOBUF_C_TYPE_FLOAT] = "float",       [PROTOBUF_C_TYPE_DOUBLE] = "double",
        [PROTOBUF_C_TYPE_BOOL] = "bool",         [PROTOBUF_C_TYPE_ENUM] = "enum",
        [PROTOBUF_C_TYPE_STRING] = "string",     [PROTOBUF_C_TYPE_BYTES] = "bytes",
        [PROTOBUF_C_TYPE_MESSAGE] = "message",
    };
    return names[f->type];
}

/* protobuf-c's rule: a string is present unless it is NULL or the very default. */
static bool pointer_present(const ProtobufCMessage *m, const ProtobufCFieldDescriptor *f)
{
    const void *p = *(void *const *)member(m, f->offset);
    return p && p != f->default_value;
}

size_t reflect_count(const ProtobufCMessage *m, const ProtobufCFieldDescriptor *f)
{
    bool pointer = f->type == PROTOBUF_C_TYPE_STRING || f->type == PROTOBUF_C_TYPE_MESSAGE;
    if (f->label == PROTOBUF_C_LABEL_REPEATED)
        return *(size_t *)member(m, f->quantifier_offset);
    if (is_oneof(f))
        return *(uint32_t *)member(m, f->quantifier_offset) == f->id && (!pointer || pointer_present(m, f));
    if (pointer)
        return pointer_present(m, f);
    return f->label == PROTOBUF_C_LABEL_REQUIRED || *(protobuf_c_boolean *)member(m, f->quantifier_offset);
}

void *reflect_get(const ProtobufCMessage *m, const ProtobufCFieldDescriptor *f, size_t i)
{
    if (f->label != PROTOBUF_C_LABEL_REPEATED)
        return member(m, f->offset);
    return *(uint8_t **)member(m, f->offset) + i * reflect_value_size(f);
}

/* A list of n entries made here has room for this many. */
static size_t list_capacity(size_t n)
{
    size_t cap = FIRST_CAPACITY;
    while (cap < n)
        cap *= 2;
    return cap;
}

static void *list_add(ProtobufCMessage *m, const ProtobufCFieldDescriptor *f, struct arena *a, bool foreign)
{
    size_t *n = member(m, f->quantifier_offset);
    uint8_t **list = member(m, f->offset);
    size_t size = reflect_value_size(f);
    if (*n >= REFLECT_MAX_REPEATED)
        return NULL;
    if (!*n || foreign || *n == list_capacity(*n)) {
        uint8_t *bigger = arena_alloc(a, list_capacity(*n + 1) * size);
        if (!bigger)
            return NULL;
        if (*n)
            memcpy(bigger, *list, *n * size);
        *list = bigger;
    }
    void *at = *list + (*n)++ * size;
    memset(at, 0, size);
    return at;
}

static void *value_add(ProtobufCMessage *m, const ProtobufCFieldDescriptor *f, struct arena *a, bool foreign)
{
    if (f->label == PROTOBUF_C_LABEL_REPEATED)
        return list_add(m, f, a, foreign);
    if (is_oneof(f))
        *(uint32_t *)member(m, f->quantifier_offset) = f->id;
    else if (f->label != PROTOBUF_C_LABEL_REQUIRED && f->type != PROTOBUF_C_TYPE_STRING &&
             f->type != PROTOBUF_C_TYPE_MESSAGE)
        *(protobuf_c_boolean *)member(m, f->quantifier_offset) = 1;
    return memset(member(m, f->offset), 0, reflect_value_size(f));
}

void *reflect_add(ProtobufCMessage *m, const ProtobufCFieldDescriptor *f, struct arena *a)
{
    return value_add(m, f, a, true);
}

void *reflect_push(ProtobufCMessage *m, const ProtobufCFieldDescriptor *f, struct arena *a)
{
    return value_add(m, f, a, false);
}

/* What *__init() puts there. */
static void put_default(ProtobufCMessage *m, const ProtobufCFieldDescriptor *f)
{
    void *at = memset(member(m, f->offset), 0, reflect_value_size(f));
    if (f->default_value && f->type == PROTOBUF_C_TYPE_STRING)
        *(const char **)at = f->default_value;
    else if (f->default_value)
        memcpy(at, f->default_value, reflect_value_size(f));
}

void reflect_clear(ProtobufCMessage *m, const ProtobufCFieldDescriptor *f)
{
    if (f->label == PROTOBUF_C_LABEL_REPEATED) {
        *(size_t *)member(m, f->quantifier_offset) = 0;
        *(void **)member(m, f->offset) = NULL;
        return;
    }
    if (is_oneof(f)) {
        uint32_t *which = member(m, f->quantifier_offset);
        if (*which != f->id)
            return;
        *which = 0;
    } else if (f->label != PROTOBUF_C_LABEL_REQUIRED && f->type != PROTOBUF_C_TYPE_STRING &&
               f->type != PROTOBUF_C_TYPE_MESSAGE) {
        *(protobuf_c_boolean *)member(m, f->quantifier_offset) = 0;
    }
    put_default(m, f);
}

ProtobufCMessage *reflect_sub(ProtobufCMessage *m, const ProtobufCFieldDescriptor *f, struct arena *a)
{
    if (reflect_count(m, f))
        return *(ProtobufCMessage **)reflect_get(m, f, 0);
    ProtobufCMessage *sub = reflect_new(a, f->descriptor);
    if (sub)
        *(ProtobufCMessage **)reflect_add(m, f, a) = sub;
    return sub;
}

static int fill_field(ProtobufCMessage *m, const ProtobufCFieldDescriptor *f, struct arena *a, int depth,
                      struct error *err);

static int fill(ProtobufCMessage *m, struct arena *a, int depth, struct error *err)
{
    if (depth > REFLECT_MAX_DEPTH)
        return error_set(err, ERR_INVALID, "messages nest deeper than %d", REFLECT_MAX_DEPTH);
    for (unsigned i = 0; i < m->descriptor->n_fields; i++) {
        int rc = fill_field(m, &m->descriptor->fields[i], a, depth, err);
        if (rc)
            return rc;
    }
    return ERR_OK;
}

static int fill_field(ProtobufCMessage *m, const ProtobufCFieldDescriptor *f, struct arena *a, int depth,
                      struct error *err)
{
    bool list = f->label == PROTOBUF_C_LABEL_REPEATED;
    if (is_oneof(f) && !reflect_count(m, f))
        return ERR_OK;
    if (f->type == PROTOBUF_C_TYPE_MESSAGE) {
        if (!list && !reflect_sub(m, f, a))
            return error_set(err, ERR_NOMEM, "no memory for the defaults of %s", f->name);
        for (size_t i = 0; i < reflect_count(m, f); i++) {
            int rc = fill(*(ProtobufCMessage **)reflect_get(m, f, i), a, depth + 1, err);
            if (rc)
                return rc;
        }
        return ERR_OK;
    }
    if (list || !f->default_value || reflect_count(m, f))
        return ERR_OK;
    void *at = reflect_add(m, f, a);
    if (f->type != PROTOBUF_C_TYPE_STRING)
        memcpy(at, f->default_value, reflect_value_size(f));
    else if (!(*(char **)at = arena_strdup(a, f->default_value)))
        return error_set(err, ERR_NOMEM, "no memory for the defaults of %s", f->name);
    return ERR_OK;
}

int reflect_fill_defaults(ProtobufCMessage *m, struct arena *a, struct error *err)
{
    return fill(m, a, 0, err);
}

/* Appends what fits; the new length. Not snprintf: every check of every field of a job names its path. */
static size_t append(char out[REFLECT_PATH], size_t used, const char *text)
{
    size_t len = strlen(text), room = REFLECT_PATH - 1 - used;
    len = len < room ? len : room;
    memcpy(out + used, text, len);
    out[used + len] = '\0';
    return used + len;
}

void reflect_path(char out[REFLECT_PATH], const char *path, const char *field, long i)
{
    size_t used = append(out, 0, path);
    used = append(out, used, path[0] ? "." : "");
    used = append(out, used, field);
    if (i >= 0)
        snprintf(out + used, REFLECT_PATH - used, "[%ld]", i);
}
