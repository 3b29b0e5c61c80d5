/* json.h: the reader, over jansson's tree. */
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/number.h"
#include "proto/json.h"

struct reader {
    const char *name;
    struct arena *arena;
    const struct read_options *options;
    struct error *err;
};

static int fail(const struct reader *r, const char *path, const char *fmt, ...) PRINTF_LIKE(3, 4);
static int fail(const struct reader *r, const char *path, const char *fmt, ...)
{
    char text[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return error_set(r->err, ERR_INVALID, "%s: %s%s%s", r->name, path, path[0] ? ": " : "", text);
}

static const char *type_of(const json_t *v)
{
    static const char *const names[] = {
        [JSON_OBJECT] = "an object",   [JSON_ARRAY] = "an array", [JSON_STRING] = "a string",
        [JSON_INTEGER] = "an integer", [JSON_REAL] = "a number",  [JSON_TRUE] = "true",
        [JSON_FALSE] = "false",        [JSON_NULL] = "null",
    };
    return names[json_typeof(v)];
}

static int fail_expected(const struct reader *r, const char *path, const char *what, const json_t *v)
{
    return fail(r, path, "expected %s, found %s", what, type_of(v));
}

/* ---- scalars ---- */

/* A whole number from an integer, a whole real, or decimal text, as sign and magnitude. */
static bool whole_number(const json_t *v, bool *negative, uint64_t *magnitude)
{
    if (json_is_integer(v)) {
        json_int_t i = json_integer_value(v);
        *negative = i < 0;
        *magnitude = i < 0 ? 0 - (uint64_t)i : (uint64_t)i;
        return true;
    }
    if (json_is_real(v)) {
        double d = json_real_value(v);
        *negative = d < 0;
        if (d != floor(d) || fabs(d) >= 0x1p64)
            return false;
        *magnitude = (uint64_t)fabs(d);
        return true;
    }
    const char *s = json_string_value(v);
    if (!s)
        return false;
    *negative = *s == '-';
    s += *negative;
    if (!*s || strspn(s, "0123456789") != strlen(s))
        return false;
    errno = 0;
    *magnitude = strtoull(s, NULL, 10);
    return errno == 0;
}

static int read_integer(const struct reader *r, const ProtobufCFieldDescriptor *f, const char *path, const json_t *v,
                        uint64_t below, uint64_t above, uint64_t *out)
{
    bool negative = false;
    uint64_t magnitude = 0;
    if (!json_is_number(v) && !json_is_string(v))
        return fail_expected(r, path, "a whole number", v);
    if (!whole_number(v, &negative, &magnitude))
        return fail(r, path, "expected a whole number of type %s", reflect_type_name(f));
    if (magnitude > (negative ? below : above)) {
        fail(r, path, "%s%llu does not fit its type %s", negative ? "-" : "", (unsigned long long)magnitude,
             reflect_type_name(f));
        error_hint(r->err, "%s takes %s%llu to %llu", path, below ? "-" : "", (unsigned long long)below,
                   (unsigned long long)above);
        return ERR_INVALID;
    }
    *out = negative ? 0 - magnitude : magnitude;
    return ERR_OK;
}

static int read_double(const struct reader *r, const char *path, const json_t *v, double *out)
{
    static const struct {
        const char *word;
        double value;
    } words[] = {{"Infinity", INFINITY}, {"-Infinity", -INFINITY}, {"NaN", NAN}};
    if (json_is_number(v)) {
        *out = json_number_value(v);
        return ERR_OK;
    }
    const char *s = json_string_value(v);
    if (!s)
        return fail_expected(r, path, "a number", v);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strcmp(s, words[i].word) == 0) {
            *out = words[i].value;
            return ERR_OK;
        }
    char *end;
    *out = number_to_double(s, &end);
    if (end == s || *end || strspn(s, "+-.0123456789eE") != strlen(s))
        return fail(r, path, "'%.80s' is not a number", s);
    return ERR_OK;
}

static int read_enum(const struct reader *r, const ProtobufCFieldDescriptor *f, const char *path, const json_t *v,
                     int *out)
{
    const char *s = json_string_value(v);
    char prefix[REFLECT_PATH], digits[24];
    snprintf(prefix, sizeof prefix, "%s: ", r->name);
    if (s) {
        const ProtobufCEnumValue *value = reflect_enum_by_name(f->descriptor, s, strlen(s));
        if (!value)
            return reflect_unknown_enum_error(r->err, prefix, path, f->descriptor, s, strlen(s));
        *out = value->value;
        return ERR_OK;
    }
    if (!json_is_integer(v))
        return fail_expected(r, path, "the name of a value", v);
    json_int_t number = json_integer_value(v);
    if (number >= INT32_MIN && number <= INT32_MAX &&
        protobuf_c_enum_descriptor_get_value(f->descriptor, (int)number)) {
        *out = (int)number;
        return ERR_OK;
    }
    snprintf(digits, sizeof digits, "%lld", (long long)number);
    return reflect_unknown_enum_error(r->err, prefix, path, f->descriptor, digits, strlen(digits));
}

static int base64_digit(unsigned char c)
{
    static const char standard[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    if (c == '-' || c == '_') /* the URL alphabet is read as well */
        return c == '-' ? 62 : 63;
    const char *at = c ? strchr(standard, c) : NULL;
    return at ? (int)(at - standard) : -1;
}

/* Decoded length, or -1. `out` takes 3 bytes for each 4 begun. */
static long base64_decode(const char *s, uint8_t *out)
{
    size_t len = strlen(s);
    while (len && s[len - 1] == '=')
        len--;
    if (len % 4 == 1)
        return -1;
    long n = 0;
    uint32_t bits = 0;
    for (size_t i = 0; i < len; i++) {
        int digit = base64_digit((unsigned char)s[i]);
        if (digit < 0)
            return -1;
        bits = bits << 6 | (uint32_t)digit;
        if (i % 4)
            out[n++] = (uint8_t)(bits >> (6 - 2 * (i % 4)));
    }
    return n;
}

static int read_bytes(const struct reader *r, const char *path, const json_t *v, ProtobufCBinaryData *out)
{
    const char *s = json_string_value(v);
    if (!s)
        return fail_expected(r, path, "base64 in a string", v);
    uint8_t *data = arena_alloc(r->arena, strlen(s) + 4);
    if (!data)
        return error_set(r->err, ERR_NOMEM, "%s: %s: no memory", r->name, path);
    long len = base64_decode(s, data);
    if (len < 0)
        return fail(r, path, "not base64");
    *out = (ProtobufCBinaryData){(size_t)len, data};
    return ERR_OK;
}

static int read_string(const struct reader *r, const char *path, const json_t *v, char **out)
{
    const char *s = json_string_value(v);
    if (!s)
        return fail_expected(r, path, "a string", v);
    *out = arena_strdup(r->arena, s);
    return *out ? ERR_OK : error_set(r->err, ERR_NOMEM, "%s: %s: no memory", r->name, path);
}

static int read_scalar(const struct reader *r, const ProtobufCFieldDescriptor *f, const char *path, const json_t *v,
                       void *at)
{
    uint64_t number = 0;
    double real = 0;
    int rc;
    switch (f->type) {
    case PROTOBUF_C_TYPE_INT32:
    case PROTOBUF_C_TYPE_SINT32:
    case PROTOBUF_C_TYPE_SFIXED32:
        rc = read_integer(r, f, path, v, (uint64_t)1 << 31, INT32_MAX, &number);
        *(int32_t *)at = (int32_t)(int64_t)number;
        return rc;
    case PROTOBUF_C_TYPE_UINT32:
    case PROTOBUF_C_TYPE_FIXED32:
        rc = read_integer(r, f, path, v, 0, UINT32_MAX, &number);
        *(uint32_t *)at = (uint32_t)number;
        return rc;
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_SINT64:
    case PROTOBUF_C_TYPE_SFIXED64:
        rc = read_integer(r, f, path, v, (uint64_t)1 << 63, INT64_MAX, &number);
        *(int64_t *)at = (int64_t)number;
        return rc;
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_FIXED64:
        return read_integer(r, f, path, v, 0, UINT64_MAX, at);
    case PROTOBUF_C_TYPE_DOUBLE:
        return read_double(r, path, v, at);
    case PROTOBUF_C_TYPE_FLOAT:
        rc = read_double(r, path, v, &real);
        *(float *)at = (float)real;
        return rc;
    case PROTOBUF_C_TYPE_BOOL:
        if (!json_is_boolean(v))
            return fail_expected(r, path, "true or false", v);
        *(protobuf_c_boolean *)at = json_is_true(v);
        return ERR_OK;
    case PROTOBUF_C_TYPE_ENUM:
        return read_enum(r, f, path, v, at);
    case PROTOBUF_C_TYPE_STRING:
        return read_string(r, path, v, at);
    case PROTOBUF_C_TYPE_BYTES:
        return read_bytes(r, path, v, at);
    case PROTOBUF_C_TYPE_MESSAGE:
        break;
    }
    return error_set(r->err, ERR_INTERNAL, "%s: not a scalar", path);
}

/* ---- messages ---- */

static int read_object(const struct reader *r, ProtobufCMessage *m, const json_t *object, const char *path, int depth);

static int read_value(const struct reader *r, ProtobufCMessage *m, const ProtobufCFieldDescriptor *f, const json_t *v,
                      const char *path, int depth)
{
    union {
        uint64_t number;
        double real;
        char *string;
        ProtobufCMessage *message;
        ProtobufCBinaryData bytes;
    } value = {0};
    int rc;
    if (f->type == PROTOBUF_C_TYPE_MESSAGE) {
        value.message = reflect_new(r->arena, f->descriptor);
        if (!value.message)
            return error_set(r->err, ERR_NOMEM, "%s: %s: no memory", r->name, path);
        rc = read_object(r, value.message, v, path, depth + 1);
    } else {
        rc = read_scalar(r, f, path, v, &value);
    }
    if (rc)
        return rc;
    void *at = reflect_push(m, f, r->arena);
    if (!at && reflect_count(m, f) >= REFLECT_MAX_REPEATED)
        return fail(r, path, "more than %d entries", REFLECT_MAX_REPEATED);
    if (!at)
        return error_set(r->err, ERR_NOMEM, "%s: %s: no memory", r->name, path);
    memcpy(at, &value, reflect_value_size(f));
    return ERR_OK;
}

static int read_list(const struct reader *r, ProtobufCMessage *m, const ProtobufCFieldDescriptor *f, const json_t *list,
                     const char *path, int depth)
{
    if (!json_is_array(list)) {
        fail_expected(r, path, "an array", list);
        error_hint(r->err, "%s is a list: write [ ... ]", path);
        return ERR_INVALID;
    }
    for (size_t i = 0; i < json_array_size(list); i++) {
        char entry[REFLECT_PATH];
        snprintf(entry, sizeof entry, "%.200s[%zu]", path, i);
        int rc = read_value(r, m, f, json_array_get(list, i), entry, depth);
        if (rc)
            return rc;
    }
    return ERR_OK;
}

static int read_member(const struct reader *r, ProtobufCMessage *m, const char *key, const json_t *v, const char *path,
                       int depth)
{
    const ProtobufCFieldDescriptor *f = reflect_field(m->descriptor, key, strlen(key));
    char sub[REFLECT_PATH], prefix[REFLECT_PATH];
    reflect_path(sub, path, key, -1);
    if (!f && r->options && r->options->allow_unknown) {
        if (r->options->unknown)
            buffer_printf(r->options->unknown, "%s%s", r->options->unknown->len ? ", " : "", sub);
        return ERR_OK;
    }
    if (!f) {
        snprintf(prefix, sizeof prefix, "%s: ", r->name);
        return reflect_unknown_field_error(r->err, prefix, path, m->descriptor, key, strlen(key), REFLECT_BRACES);
    }
    if (json_is_null(v))
        return ERR_OK;
    if (f->label == PROTOBUF_C_LABEL_REPEATED)
        return read_list(r, m, f, v, sub, depth);
    if (f->flags & PROTOBUF_C_FIELD_FLAG_ONEOF)
        for (unsigned i = 0; i < m->descriptor->n_fields; i++) {
            const ProtobufCFieldDescriptor *other = &m->descriptor->fields[i];
            if ((other->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) && other->quantifier_offset == f->quantifier_offset &&
                reflect_count(m, other))
                return fail(r, sub, "given beside '%s'; only one of them may be", other->name);
        }
    return read_value(r, m, f, v, sub, depth);
}

static int read_object(const struct reader *r, ProtobufCMessage *m, const json_t *object, const char *path, int depth)
{
    if (depth > REFLECT_MAX_DEPTH)
        return fail(r, path, "objects nest deeper than %d", REFLECT_MAX_DEPTH);
    if (!json_is_object(object))
        return fail_expected(r, path, "an object", object);
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)(uintptr_t)object, key, v)
    {
        int rc = read_member(r, m, key, v, path, depth);
        if (rc)
            return rc;
    }
    return ERR_OK;
}

int json_read(ProtobufCMessage *m, struct arena *a, const char *name, const char *text, size_t len,
              const struct read_options *options, struct error *err)
{
    struct reader r = {name, a, options, err};
    json_error_t fault;
    if (len >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) { /* byte order mark */
        text += 3;
        len -= 3;
    }
    json_t *tree = json_loadb(text, len, JSON_REJECT_DUPLICATES, &fault);
    if (!tree) {
        const char *nul = strstr(fault.text, "JSON_ALLOW_NUL") ? "a string cannot hold a NUL byte" : NULL;
        error_set(err, ERR_INVALID, "%s:%d:%d: %s", name, fault.line, fault.column, nul ? nul : fault.text);
        error_hint(err,
                   "JSON has double quotes around names and strings, no comments and no comma before a '}' or ']'");
        return ERR_INVALID;
    }
    int rc = read_object(&r, m, tree, "", 0);
    json_decref(tree);
    return rc;
}
