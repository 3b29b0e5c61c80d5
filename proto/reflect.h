/* Walking any protobuf-c message through its descriptor: what the text and JSON
 * readers and writers, `--set`, the defaults filler and the checks share.
 *
 * Messages made here live in an arena: every string, list and sub-message too,
 * and they go with arena_free(). Such a message must not be given to
 * protobuf_c_message_free_unpacked() with a NULL allocator. The readers of this
 * file (count, get, ...) work on messages of any owner.
 * Not thread-safe for one message; pure otherwise. */
#ifndef BOOST_PROTO_REFLECT_H
#define BOOST_PROTO_REFLECT_H

#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/arena.h"
#include "proto/base/buffer.h"
#include "proto/base/error.h"

enum {
    REFLECT_MAX_DEPTH = 64,          /* nesting of messages in any format   */
    REFLECT_MAX_REPEATED = 64 << 10, /* entries of one repeated field       */
    REFLECT_PATH = 256,              /* "data.train[3].path", cut if longer */
};

/* What a reader does with a field that the schema does not know. */
struct read_options {
    bool allow_unknown;     /* pass over it (its syntax must hold); else an error   */
    struct buffer *unknown; /* NULL, or gets the paths passed over, separated by ", " */
};

/* A new message with its defaults; NULL when the arena is full. */
ProtobufCMessage *reflect_new(struct arena *a, const ProtobufCMessageDescriptor *type);
/* Deep copy into the arena, unknown fields included; NULL when the arena is full. */
ProtobufCMessage *reflect_copy(struct arena *a, const ProtobufCMessage *m);
/* The same in memory of the system allocator, to be freed as an unpacked message; NULL when memory is out. */
ProtobufCMessage *reflect_clone(const ProtobufCMessage *m);
/* Whether both pack to the same bytes. */
bool reflect_equal(const ProtobufCMessage *x, const ProtobufCMessage *y);

/* By name of `len` bytes, or NULL. */
const ProtobufCFieldDescriptor *reflect_field(const ProtobufCMessageDescriptor *type, const char *name, size_t len);
/* Values the field holds: 0 or 1 when it is singular (presence), else the list's length. */
size_t reflect_count(const ProtobufCMessage *m, const ProtobufCFieldDescriptor *f);
/* Address of value i < count, of the field's C type: int32_t, uint64_t, double,
 * protobuf_c_boolean, int (enum), char *, ProtobufCBinaryData, ProtobufCMessage *. */
void *reflect_get(const ProtobufCMessage *m, const ProtobufCFieldDescriptor *f, size_t i);
/* Address of the value to write: appends to a list, marks a singular field (or
 * member of a oneof) present. Zeroed. NULL when the arena is full or the list has
 * REFLECT_MAX_REPEATED entries. A sub-message has to be made by the caller. A list
 * of any owner is copied into the arena first, so one call costs the whole list. */
void *reflect_add(ProtobufCMessage *m, const ProtobufCFieldDescriptor *f, struct arena *a);
/* The same at constant cost, for a list that only reflect_add and reflect_push have filled. */
void *reflect_push(ProtobufCMessage *m, const ProtobufCFieldDescriptor *f, struct arena *a);
/* Makes the field absent, or its list empty. */
void reflect_clear(ProtobufCMessage *m, const ProtobufCFieldDescriptor *f);
/* The singular sub-message of the field, made with its defaults when absent; NULL when the arena is full. */
ProtobufCMessage *reflect_sub(ProtobufCMessage *m, const ProtobufCFieldDescriptor *f, struct arena *a);

/* Bytes of the C type of one value. */
size_t reflect_value_size(const ProtobufCFieldDescriptor *f);
/* "int32", "string", "Strategy" ... for messages to people. */
const char *reflect_type_name(const ProtobufCFieldDescriptor *f);

/* Makes the defaults of job.proto explicit: every absent field that has a
 * [default] is set to it and every absent singular sub-message is made, all the
 * way down and in entries of lists. Fields without a [default] stay absent.
 * Members of a oneof are left alone. ERR_NOMEM when the arena is full. */
MUST_USE int reflect_fill_defaults(ProtobufCMessage *m, struct arena *a, struct error *err);

/* The known name nearest to `name` (edit distance with transpositions, case not
 * counted), or NULL when none is near. */
const char *reflect_nearest_field(const ProtobufCMessageDescriptor *type, const char *name, size_t len);
const char *reflect_nearest_enum(const ProtobufCEnumDescriptor *type, const char *name, size_t len);
const ProtobufCEnumValue *reflect_enum_by_name(const ProtobufCEnumDescriptor *type, const char *name, size_t len);
/* Fills *err (ERR_INVALID, with hint) for a field or enum value that is not known.
 * `where` is the message's path, "" at the top; `prefix` comes first ("job.pbtxt:3:5: "). A field that is in
 * a group is suggested as `form` writes it. */
enum reflect_form { REFLECT_BRACES /* optimizer { lr } */, REFLECT_DOTS /* optimizer.lr, as --set takes it */ };
int reflect_unknown_field_error(struct error *err, const char *prefix, const char *where,
                                const ProtobufCMessageDescriptor *type, const char *name, size_t len,
                                enum reflect_form form);
int reflect_unknown_enum_error(struct error *err, const char *prefix, const char *where,
                               const ProtobufCEnumDescriptor *type, const char *name, size_t len);

/* Appends the paths of fields that were unknown to the unpacker ("model.#99, #7"); the count of them. */
size_t reflect_unknown_fields(const ProtobufCMessage *m, struct buffer *out);
/* Walks packed bytes before they are unpacked and says what is wrong and where:
 * a cut or overlong field, a wrong wire type, NUL inside a string (protobuf-c
 * would cut it there without a word), nesting, list lengths. */
MUST_USE int reflect_check_wire(const ProtobufCMessageDescriptor *type, const void *data, size_t len,
                                struct error *err);
/* check_wire, then unpack into the arena; NULL and *err on failure. */
ProtobufCMessage *reflect_unpack(const ProtobufCMessageDescriptor *type, const void *data, size_t len, struct arena *a,
                                 struct error *err);

/* path + "." + field, or + "[i]" when i >= 0; cut to fit. `out` may not be `path`. */
void reflect_path(char out[REFLECT_PATH], const char *path, const char *field, long i);

#endif
