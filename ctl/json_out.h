/* The JSON contract of boostctl: schema names, upper-case enums, absent unknowns,
 * RFC 3339 times; bytes that are not UTF-8 become U+FFFD. Trees are jansson's, the
 * caller's reference. */
#ifndef BOOST_CTL_JSON_OUT_H
#define BOOST_CTL_JSON_OUT_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

#include "proto/rpc.pb-c.h"

/* {"schema": name} */
json_t *json_document(const char *schema);
json_t *json_text(const char *s);                /* sanitised string; NULL reads as "" */
json_t *json_bytes(const void *data, size_t len); /* the same from raw bytes */
json_t *json_time(int64_t wall_ns);
/* Finite numbers only; NULL (absent) otherwise. */
json_t *json_number(double v);
/* Sets key unless value is NULL. */
void json_put(json_t *object, const char *key, json_t *value);

json_t *json_summary(const Boost__JobSummary *s);
json_t *json_event(const Boost__Event *e);
json_t *json_checkpoint(const Boost__CheckpointInfo *c);
json_t *json_metric_row(const Boost__MetricRow *r);
json_t *json_node(const Boost__NodeInfo *n);
json_t *json_show(const Boost__ShowReply *r);

/* Prints and releases: indented as a document, or on one line for jsonl. */
void json_emit(json_t *value, bool one_line);

#endif
