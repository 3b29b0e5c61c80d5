/* Numbers, times and tables for people. Pure but for the printing functions. */
#ifndef BOOST_CTL_FORMAT_H
#define BOOST_CTL_FORMAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "proto/rpc.pb-c.h"

enum { FORMAT_TEXT = 32 };
/* Three significant digits with k, M, G, T: 1210000 -> "1.21M", 950 -> "950". */
char *format_count(double value, char out[FORMAT_TEXT]);
/* Bytes with KiB, MiB, GiB. */
char *format_bytes(int64_t bytes, char out[FORMAT_TEXT]);
/* "41m2s", "1h32m", "3d4h", "8s"; below ten seconds one decimal ("0.4s"). */
char *format_duration(double seconds, char out[FORMAT_TEXT]);
/* "90", "90s", "10m", "2h", "1d"; false when it is none of them. */
bool parse_duration(const char *text, double *seconds);

/* How long before `now` (wall clock) a time was: a duration as above, or RFC 3339 in UTC ("2026-11-29T13:02:46Z", as
 * events show it; a fraction and the Z may be left out). One still to come is 0. False when it is neither. */
bool parse_age(const char *text, int64_t now_wall_ns, double *seconds);

/* "R", "RC", ...; "QUEUED" and so on. */
const char *state_letters(Boost__JobState__Value s);
const char *state_name(Boost__JobState__Value s);
/* By name or letters, any case; false when unknown. */
bool state_parse(const char *text, Boost__JobState__Value *out);
const char *enum_name(const ProtobufCEnumDescriptor *type, int value); /* "UNKNOWN" for a value without one */
const char *reason_name(Boost__Reason__Value r); /* "" for NONE */
const char *state_color(Boost__JobState__Value s); /* an escape sequence */

/* A table: cells are copied; columns as wide as their widest cell, the last one free. Control bytes and
 * bytes that are not UTF-8 are shown as '?', so that no text of a job can drive the terminal. */
struct table;
struct table *table_new(int columns, const char *const *headers, const char *align /* one of l r a column */);
void table_cell(struct table *t, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void table_color(struct table *t, const char *escape); /* of the cell added last */
void table_print(struct table *t, FILE *out, bool color, int indent);
void table_free(struct table *t);
/* Writes text with control bytes (newline and tab apart) and broken UTF-8 replaced. */
void print_safe(FILE *out, const char *text);
/* "label        text" on stdout, the text through print_safe; nothing when there is no text. */
void print_line(const char *label, const char *text);

#endif
