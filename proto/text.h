/* protobuf text format for any protobuf-c message, in the dialect of protoc 3.21
 * (`protoc --encode` / `--decode`), which it agrees with value for value.
 *
 * Differences, all on purpose: a string with a NUL byte is refused (protobuf-c
 * strings end there), as is a \U escape above 10ffff; extensions and Any are unknown
 * fields; nesting deeper than REFLECT_MAX_DEPTH is refused; a UTF-8 byte order mark
 * at the start is passed over; and errors say more. */
#ifndef BOOST_PROTO_TEXT_H
#define BOOST_PROTO_TEXT_H

#include "proto/reflect.h"

/* Reads `text` into `m`, a message made with reflect_new() on the same arena. A
 * singular field given twice is an error, as in protoc, sub-messages too.
 * `name` is the file in "name:line:column: ..."; lines and columns count from 1,
 * columns in bytes. `options` may be NULL. ERR_INVALID or ERR_NOMEM. */
MUST_USE int text_read(ProtobufCMessage *m, struct arena *a, const char *name, const char *text, size_t len,
                       const struct read_options *options, struct error *err);
/* Reads one value ("1e-3", "BTP", "\"x\"", "{ path: \"y\" }") for field f of m and adds it as
 * reflect_add() does. `where` is the field's path for messages. */
MUST_USE int text_read_value(ProtobufCMessage *m, const ProtobufCFieldDescriptor *f, struct arena *a, const char *where,
                             const char *text, size_t len, struct error *err);
/* Appends the message, one field a line, two spaces a level, fields by number.
 * protoc reads it back to the same bytes. Unknown fields stand as comments. */
MUST_USE int text_write(const ProtobufCMessage *m, struct buffer *out, struct error *err);
/* The same on one line, for logs and table cells. */
MUST_USE int text_write_line(const ProtobufCMessage *m, struct buffer *out, struct error *err);

/* Reads a whole configuration file (BoostdConfig, AgentConfig) into a new message
 * of the arena; NULL and *err on failure. At most LIMIT_JOB_FILE bytes. */
ProtobufCMessage *text_load(const ProtobufCMessageDescriptor *type, const char *path, struct arena *a,
                            struct error *err);

#endif
