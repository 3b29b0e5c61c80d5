/* JSON for any protobuf-c message, by the proto's snake_case names. Enums by name
 * (numbers are read too), 64-bit integers as JSON integers (strings are read too;
 * above 2^63-1 written as strings), bytes in base64, infinities and NaN as the
 * strings "Infinity", "-Infinity", "NaN"; null is an absent field. */
#ifndef BOOST_PROTO_JSON_H
#define BOOST_PROTO_JSON_H

#include "proto/reflect.h"

struct json_t; /* jansson's */

/* As text_read(). Syntax errors name line and column, others the JSON path
 * ("job.json: model.rank: ..."). */
MUST_USE int json_read(ProtobufCMessage *m, struct arena *a, const char *name, const char *text, size_t len,
                       const struct read_options *options, struct error *err);
/* Appends the message as an indented object with a final newline, fields by number,
 * only those present. Bytes that are not UTF-8 become U+FFFD. */
MUST_USE int json_write(const ProtobufCMessage *m, struct buffer *out, struct error *err);
/* The same as a jansson tree for embedding; the caller's reference. NULL when out of memory. */
struct json_t *json_tree(const ProtobufCMessage *m);

#endif
