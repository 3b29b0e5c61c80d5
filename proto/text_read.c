/* text.h: the reader, by recursive descent over the descriptors. */
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "proto/base/fs.h"
#include "proto/base/number.h"
#include "proto/text.h"
#include "proto/text_token.h"

struct reader {
    struct tokens t;
    struct arena *arena;
    const struct read_options *options;
    const ProtobufCMessage *foreign; /* whose lists others made, or NULL */
    struct buffer scratch;
};

/* Where in the message the reader is; on the C stack, one a level. */
struct place {
    char path[REFLECT_PATH];
    int depth;
};

static int fail_at(struct reader *r, const struct token *at, const char *fmt, ...) PRINTF_LIKE(3, 4);
static int fail_at(struct reader *r, const struct token *at, const char *fmt, ...)
{
    char prefix[REFLECT_PATH], text[512];
    token_prefix(&r->t, at->line, at->column, prefix, sizeof prefix);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return error_set(r->t.err, ERR_INVALID, "%s%s", prefix, text);
}

static bool at_symbol(const struct reader *r, char c)
{
    return r->t.now.kind == TOKEN_SYMBOL && *r->t.now.start == c;
}

static bool at_message(const struct reader *r)
{
    return at_symbol(r, '{') || at_symbol(r, '<');
}

/* The token as shown in errors. */
static const char *shown(const struct token *t, char out[64])
{
    if (t->kind == TOKEN_END)
        snprintf(out, 64, "the end");
    else if (t->len > 40)
        snprintf(out, 64, "%.37s...", t->start);
    else
        snprintf(out, 64, t->kind == TOKEN_STRING ? "%.*s" : "'%.*s'", (int)t->len, t->start);
    return out;
}

static int fail_expected(struct reader *r, const char *path, const char *what)
{
    char found[64];
    return fail_at(r, &r->t.now, "%s%sexpected %s, found %s", path, path[0] ? ": " : "", what, shown(&r->t.now, found));
}

static int expect(struct reader *r, const char *path, char c)
{
    char what[] = {'\'', c, '\'', '\0'};
    return at_symbol(r, c) ? token_next(&r->t) : fail_expected(r, path, what);
}

/* ---- values ---- */

/* The digits of an INTEGER token; false when over 2^64 - 1. */
static bool token_magnitude(const struct token *t, uint64_t *out)
{
    const char *p = t->start, *end = t->start + t->len;
    unsigned base = 10;
    if (t->len > 1 && p[0] == '0') {
        base = p[1] == 'x' || p[1] == 'X' ? 16 : 8;
        p += base == 16 ? 2 : 1;
    }
    *out = 0;
    for (; p < end; p++) {
        unsigned digit = *p <= '9' ? (unsigned)(*p - '0') : (unsigned)((*p | 0x20) - 'a' + 10);
        if (*out > (UINT64_MAX - digit) / base)
            return false;
        *out = *out * base + digit;
    }
    return true;
}

/* An integer of -`below` to `above` as two's complement. */
static int read_integer(struct reader *r, const ProtobufCFieldDescriptor *f, const char *path, uint64_t below,
                        uint64_t above, uint64_t *out)
{
    bool negative = false;
    if (below && at_symbol(r, '-')) {
        negative = true;
        int rc = token_next(&r->t);
        if (rc)
            return rc;
    }
    if (r->t.now.kind != TOKEN_INTEGER)
        return fail_expected(r, path, below ? "a whole number" : "a whole number, 0 or more");
    if (!token_magnitude(&r->t.now, out) || *out > (negative ? below : above)) {
        fail_at(r, &r->t.now, "%s = %s%.*s does not fit its type %s", path, negative ? "-" : "",
                r->t.now.len > 80 ? 80 : (int)r->t.now.len, r->t.now.start, reflect_type_name(f));
        error_hint(r->t.err, "%s takes %s%llu to %llu", path, below ? "-" : "", (unsigned long long)below,
                   (unsigned long long)above);
        return ERR_INVALID;
    }
    if (negative)
        *out = 0 - *out;
    return token_next(&r->t);
}

static bool word_is(const struct token *t, const char *lower)
{
    if (strlen(lower) != t->len)
        return false;
    for (size_t i = 0; i < t->len; i++)
        if ((t->start[i] | 0x20) != lower[i])
            return false;
    return true;
}

static int read_double(struct reader *r, const char *path, double *out)
{
    bool negative = at_symbol(r, '-');
    if (negative) {
        int rc = token_next(&r->t);
        if (rc)
            return rc;
    }
    const struct token *t = &r->t.now;
    if (t->kind == TOKEN_WORD && (word_is(t, "inf") || word_is(t, "infinity"))) {
        *out = INFINITY;
    } else if (t->kind == TOKEN_WORD && word_is(t, "nan")) {
        *out = NAN;
    } else if (t->kind == TOKEN_INTEGER || t->kind == TOKEN_FLOAT) {
        if (t->kind == TOKEN_INTEGER && t->len > 1 && t->start[0] == '0')
            return fail_at(r, t, "%s: expected a decimal number, found %.*s", path, (int)(t->len > 80 ? 80 : t->len),
                           t->start);
        buffer_clear(&r->scratch); /* the text need not end in NUL */
        if (buffer_append(&r->scratch, t->start, t->len))
            return error_set(r->t.err, ERR_NOMEM, "no memory for a number");
        *out = number_to_double((char *)r->scratch.data, NULL);
    } else {
        return fail_expected(r, path, "a number");
    }
    if (negative)
        *out = -*out;
    return token_next(&r->t);
}

static int read_bool(struct reader *r, const char *path, protobuf_c_boolean *out)
{
    const struct token *t = &r->t.now;
    uint64_t number;
    if (t->kind == TOKEN_INTEGER && token_magnitude(t, &number) && number <= 1) {
        *out = (protobuf_c_boolean)number;
        return token_next(&r->t);
    }
    static const char *const words[2][3] = {{"false", "False", "f"}, {"true", "True", "t"}};
    if (t->kind == TOKEN_WORD)
        for (int value = 0; value < 2; value++)
            for (int i = 0; i < 3; i++)
                if (strlen(words[value][i]) == t->len && memcmp(words[value][i], t->start, t->len) == 0) {
                    *out = value;
                    return token_next(&r->t);
                }
    return fail_expected(r, path, "true or false");
}

static int read_enum(struct reader *r, const ProtobufCFieldDescriptor *f, const char *path, int *out)
{
    const ProtobufCEnumDescriptor *type = f->descriptor;
    struct token first = r->t.now;
    char prefix[REFLECT_PATH];
    token_prefix(&r->t, first.line, first.column, prefix, sizeof prefix);
    if (first.kind == TOKEN_WORD) {
        const ProtobufCEnumValue *value = reflect_enum_by_name(type, first.start, first.len);
        if (!value)
            return reflect_unknown_enum_error(r->t.err, prefix, path, type, first.start, first.len);
        *out = value->value;
        return token_next(&r->t);
    }
    if (first.kind != TOKEN_INTEGER && !at_symbol(r, '-'))
        return fail_expected(r, path, "the name of a value, without quotes");
    uint64_t number;
    int rc = read_integer(r, f, path, INT32_MAX, INT32_MAX, &number);
    if (rc)
        return rc;
    *out = (int)(int64_t)number;
    if (protobuf_c_enum_descriptor_get_value(type, *out))
        return ERR_OK;
    char digits[16];
    snprintf(digits, sizeof digits, "%d", *out);
    return reflect_unknown_enum_error(r->t.err, prefix, path, type, digits, strlen(digits));
}

/* One or more string tokens, joined. */
static int read_string(struct reader *r, const ProtobufCFieldDescriptor *f, const char *path, void *at)
{
    struct token first = r->t.now;
    if (first.kind != TOKEN_STRING) {
        fail_expected(r, path, "text in quotes");
        if (first.kind == TOKEN_WORD)
            error_hint(r->t.err, "write %s: \"%.*s\"", f->name, first.len > 80 ? 80 : (int)first.len, first.start);
        return ERR_INVALID;
    }
    buffer_clear(&r->scratch);
    while (r->t.now.kind == TOKEN_STRING) {
        int rc = token_unescape(&r->t, &r->scratch);
        if (!rc)
            rc = token_next(&r->t);
        if (rc)
            return rc;
    }
    size_t len = r->scratch.len;
    if (f->type == PROTOBUF_C_TYPE_STRING && len && memchr(r->scratch.data, 0, len))
        return fail_at(r, &first, "%s holds a NUL byte, which a string cannot", path);
    char *copy = arena_alloc(r->arena, len + 1);
    if (!copy)
        return error_set(r->t.err, ERR_NOMEM, "%s: no memory for %zu bytes", path, len);
    if (len)
        memcpy(copy, r->scratch.data, len);
    if (f->type == PROTOBUF_C_TYPE_STRING)
        *(char **)at = copy;
    else
        *(ProtobufCBinaryData *)at = (ProtobufCBinaryData){len, (uint8_t *)copy};
    return ERR_OK;
}

static int read_message(struct reader *r, ProtobufCMessage *m, const ProtobufCMessageDescriptor *type,
                        const struct place *place, char closer);
static int skip_braces(struct reader *r, const struct place *place);

/* '{' fields '}' or '<' fields '>'. */
static int read_braces(struct reader *r, ProtobufCMessage *m, const struct place *place)
{
    char closer = at_symbol(r, '{') ? '}' : '>';
    if (!at_message(r))
        return fail_expected(r, place->path, "'{'");
    if (place->depth > REFLECT_MAX_DEPTH)
        return fail_at(r, &r->t.now, "messages nest deeper than %d", REFLECT_MAX_DEPTH);
    int rc = token_next(&r->t);
    if (!rc)
        rc = read_message(r, m, m->descriptor, place, closer);
    return rc ? rc : token_next(&r->t);
}

/* A scalar into *at, whose type is that of the field. */
static int read_scalar(struct reader *r, const ProtobufCFieldDescriptor *f, const char *path, void *at)
{
    uint64_t number = 0;
    double real = 0;
    int rc;
    switch (f->type) {
    case PROTOBUF_C_TYPE_INT32:
    case PROTOBUF_C_TYPE_SINT32:
    case PROTOBUF_C_TYPE_SFIXED32:
        rc = read_integer(r, f, path, (uint64_t)1 << 31, INT32_MAX, &number);
        *(int32_t *)at = (int32_t)(int64_t)number;
        return rc;
    case PROTOBUF_C_TYPE_UINT32:
    case PROTOBUF_C_TYPE_FIXED32:
        rc = read_integer(r, f, path, 0, UINT32_MAX, &number);
        *(uint32_t *)at = (uint32_t)number;
        return rc;
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_SINT64:
    case PROTOBUF_C_TYPE_SFIXED64:
        rc = read_integer(r, f, path, (uint64_t)1 << 63, INT64_MAX, &number);
        *(int64_t *)at = (int64_t)number;
        return rc;
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_FIXED64:
        return read_integer(r, f, path, 0, UINT64_MAX, at);
    case PROTOBUF_C_TYPE_DOUBLE:
        return read_double(r, path, at);
    case PROTOBUF_C_TYPE_FLOAT:
        rc = read_double(r, path, &real);
        *(float *)at = (float)real;
        return rc;
    case PROTOBUF_C_TYPE_BOOL:
        return read_bool(r, path, at);
    case PROTOBUF_C_TYPE_ENUM:
        return read_enum(r, f, path, at);
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_BYTES:
        return read_string(r, f, path, at);
    case PROTOBUF_C_TYPE_MESSAGE:
        break;
    }
    return error_set(r->t.err, ERR_INTERNAL, "%s: not a scalar", path);
}

/* One value (not a [list]) added to field f of m. */
static int read_value(struct reader *r, ProtobufCMessage *m, const ProtobufCFieldDescriptor *f,
                      const struct place *place)
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
            return error_set(r->t.err, ERR_NOMEM, "%s: no memory", place->path);
        rc = read_braces(r, value.message, place);
    } else {
        rc = read_scalar(r, f, place->path, &value);
    }
    if (rc)
        return rc;
    void *at = m == r->foreign ? reflect_add(m, f, r->arena) : reflect_push(m, f, r->arena);
    if (!at && reflect_count(m, f) >= REFLECT_MAX_REPEATED)
        return fail_at(r, &r->t.now, "%s: more than %d entries", place->path, REFLECT_MAX_REPEATED);
    if (!at)
        return error_set(r->t.err, ERR_NOMEM, "%s: no memory", place->path);
    memcpy(at, &value, reflect_value_size(f));
    return ERR_OK;
}

/* ---- fields ---- */

/* The field's place: "model.rank", for lists "data.train[2]". */
static void enter(struct place *out, const struct place *in, const ProtobufCMessage *m,
                  const ProtobufCFieldDescriptor *f)
{
    long index = f->label == PROTOBUF_C_LABEL_REPEATED ? (long)reflect_count(m, f) : -1;
    reflect_path(out->path, in->path, f->name, index);
    out->depth = in->depth + 1;
}

static int read_list(struct reader *r, ProtobufCMessage *m, const ProtobufCFieldDescriptor *f,
                     const struct place *place)
{
    int rc = token_next(&r->t); /* '[' */
    if (rc || at_symbol(r, ']'))
        return rc ? rc : token_next(&r->t);
    for (;;) {
        struct place sub;
        enter(&sub, place, m, f);
        rc = read_value(r, m, f, &sub);
        if (rc || at_symbol(r, ']'))
            return rc ? rc : token_next(&r->t);
        rc = at_symbol(r, ',') ? token_next(&r->t) : fail_expected(r, sub.path, "',' or ']'");
        if (rc)
            return rc;
    }
}

/* A singular field, or a member of a oneof, must not be there yet. */
static int check_once(struct reader *r, const ProtobufCMessage *m, const ProtobufCFieldDescriptor *f,
                      const struct token *name, const char *path)
{
    if (f->label == PROTOBUF_C_LABEL_REPEATED)
        return ERR_OK;
    if (reflect_count(m, f)) {
        fail_at(r, name, "%s is given a second time", path);
        error_hint(r->t.err, "a field that is not a list is given once; put all of it in one place");
        return ERR_INVALID;
    }
    if (!(f->flags & PROTOBUF_C_FIELD_FLAG_ONEOF))
        return ERR_OK;
    for (unsigned i = 0; i < m->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *other = &m->descriptor->fields[i];
        if ((other->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) && other->quantifier_offset == f->quantifier_offset &&
            reflect_count(m, other))
            return fail_at(r, name, "%s is given beside '%s'; only one of them may be", path, other->name);
    }
    return ERR_OK;
}

/* ';' or ',' may follow a field. */
static int take_separator(struct reader *r)
{
    return at_symbol(r, ';') || at_symbol(r, ',') ? token_next(&r->t) : ERR_OK;
}

static int read_field(struct reader *r, ProtobufCMessage *m, const ProtobufCFieldDescriptor *f,
                      const struct token *name, const struct place *place)
{
    struct place sub;
    enter(&sub, place, m, f);
    int rc = check_once(r, m, f, name, sub.path);
    if (rc)
        return rc;
    bool message = f->type == PROTOBUF_C_TYPE_MESSAGE;
    bool list = f->label == PROTOBUF_C_LABEL_REPEATED;
    if (at_symbol(r, ':'))
        rc = token_next(&r->t);
    else if (!message || !(at_message(r) || (list && at_symbol(r, '['))))
        rc = fail_expected(r, sub.path, message ? "'{'" : "':'");
    if (rc)
        return rc;
    rc = list && at_symbol(r, '[') ? read_list(r, m, f, place) : read_value(r, m, f, &sub);
    return rc ? rc : take_separator(r);
}

/* ---- fields passed over under allow_unknown: the syntax still has to hold ---- */

static int skip_scalar(struct reader *r)
{
    if (r->t.now.kind == TOKEN_STRING) {
        int rc = ERR_OK;
        while (!rc && r->t.now.kind == TOKEN_STRING) {
            buffer_clear(&r->scratch);
            rc = token_unescape(&r->t, &r->scratch);
            if (!rc)
                rc = token_next(&r->t);
        }
        return rc;
    }
    bool negative = at_symbol(r, '-');
    int rc = negative ? token_next(&r->t) : ERR_OK;
    if (rc)
        return rc;
    const struct token *t = &r->t.now;
    bool special = word_is(t, "inf") || word_is(t, "infinity") || word_is(t, "nan");
    if (t->kind == TOKEN_INTEGER || t->kind == TOKEN_FLOAT || (t->kind == TOKEN_WORD && (!negative || special)))
        return token_next(&r->t);
    return fail_expected(r, "", "a value");
}

static int skip_value(struct reader *r, const struct place *place)
{
    if (at_message(r))
        return skip_braces(r, place);
    if (!at_symbol(r, '['))
        return skip_scalar(r);
    int rc = token_next(&r->t);
    if (rc || at_symbol(r, ']'))
        return rc ? rc : token_next(&r->t);
    for (;;) {
        rc = at_message(r) ? skip_braces(r, place) : skip_scalar(r);
        if (rc || at_symbol(r, ']'))
            return rc ? rc : token_next(&r->t);
        rc = expect(r, "", ',');
        if (rc)
            return rc;
    }
}

static int skip_field(struct reader *r, const struct place *place)
{
    int rc = ERR_OK;
    if (at_symbol(r, ':'))
        rc = token_next(&r->t);
    else if (!at_message(r) && !at_symbol(r, '['))
        rc = fail_expected(r, "", "':' or '{'");
    if (!rc)
        rc = skip_value(r, place);
    return rc ? rc : take_separator(r);
}

static int skip_braces(struct reader *r, const struct place *place)
{
    struct place sub = *place;
    sub.depth++;
    if (sub.depth > REFLECT_MAX_DEPTH)
        return fail_at(r, &r->t.now, "messages nest deeper than %d", REFLECT_MAX_DEPTH);
    char closer = at_symbol(r, '{') ? '}' : '>';
    int rc = token_next(&r->t);
    if (!rc)
        rc = read_message(r, NULL, NULL, &sub, closer);
    return rc ? rc : token_next(&r->t);
}

/* '[' name '.' name ... '/' ... ']': an extension or Any, never known here. Leaves
 * its text in *name. */
static int take_bracket_name(struct reader *r, struct token *name)
{
    int rc;
    do {
        rc = token_next(&r->t);
        if (!rc && r->t.now.kind != TOKEN_WORD && !at_symbol(r, '.') && !at_symbol(r, '/') && !at_symbol(r, ']'))
            rc = fail_expected(r, "", "']'");
    } while (!rc && !at_symbol(r, ']'));
    name->len = (size_t)(r->t.at - name->start);
    return rc ? rc : token_next(&r->t);
}

static int read_unknown(struct reader *r, const ProtobufCMessageDescriptor *type, const struct token *name,
                        const struct place *place)
{
    if (type && !(r->options && r->options->allow_unknown)) {
        char prefix[REFLECT_PATH];
        token_prefix(&r->t, name->line, name->column, prefix, sizeof prefix);
        return reflect_unknown_field_error(r->t.err, prefix, place->path, type, name->start, name->len, REFLECT_BRACES);
    }
    if (type && r->options->unknown)
        buffer_printf(r->options->unknown, "%s%s%s%.*s", r->options->unknown->len ? ", " : "", place->path,
                      place->path[0] ? "." : "", (int)name->len, name->start);
    return skip_field(r, place);
}

/* Fields up to `closer` (not taken), or to the end when it is 0. type NULL: all are
 * passed over. */
static int read_message(struct reader *r, ProtobufCMessage *m, const ProtobufCMessageDescriptor *type,
                        const struct place *place, char closer)
{
    while (r->t.now.kind != TOKEN_END && !(closer && at_symbol(r, closer))) {
        struct token name = r->t.now;
        bool bracket = at_symbol(r, '[');
        if (name.kind != TOKEN_WORD && !bracket)
            return fail_expected(r, place->path, closer ? "a field name or the closing bracket" : "a field name");
        int rc = bracket ? take_bracket_name(r, &name) : token_next(&r->t);
        if (rc)
            return rc;
        const ProtobufCFieldDescriptor *f = type && !bracket ? reflect_field(type, name.start, name.len) : NULL;
        rc = f ? read_field(r, m, f, &name, place) : read_unknown(r, type, &name, place);
        if (rc)
            return rc;
    }
    if (closer && r->t.now.kind == TOKEN_END)
        return expect(r, place->path, closer);
    return ERR_OK;
}

int text_read(ProtobufCMessage *m, struct arena *a, const char *name, const char *text, size_t len,
              const struct read_options *options, struct error *err)
{
    struct reader r = {.t = {.name = name, .err = err}, .arena = a, .options = options};
    struct place top = {.path = "", .depth = 0};
    buffer_init(&r.scratch, len + 4);
    int rc = token_start(&r.t, text, len);
    if (!rc)
        rc = read_message(&r, m, m->descriptor, &top, 0);
    buffer_free(&r.scratch);
    return rc;
}

int text_read_value(ProtobufCMessage *m, const ProtobufCFieldDescriptor *f, struct arena *a, const char *where,
                    const char *text, size_t len, struct error *err)
{
    struct reader r = {.t = {.err = err}, .arena = a, .foreign = m};
    struct place place = {.depth = 1};
    snprintf(place.path, sizeof place.path, "%s", where);
    buffer_init(&r.scratch, len + 4);
    int rc = token_start(&r.t, text, len);
    if (!rc && f->label == PROTOBUF_C_LABEL_REPEATED && at_symbol(&r, '[')) {
        char *dot = strrchr(place.path, '.'); /* read_list() adds the field's name itself */
        place.path[dot ? dot - place.path : 0] = '\0';
        rc = read_list(&r, m, f, &place);
    } else if (!rc) {
        rc = read_value(&r, m, f, &place);
    }
    if (!rc && r.t.now.kind != TOKEN_END)
        rc = fail_expected(&r, where, "nothing more");
    buffer_free(&r.scratch);
    return rc;
}

ProtobufCMessage *text_load(const ProtobufCMessageDescriptor *type, const char *path, struct arena *a,
                            struct error *err)
{
    struct buffer text;
    buffer_init(&text, LIMIT_JOB_FILE);
    ProtobufCMessage *m = reflect_new(a, type);
    int rc = m ? fs_read_file(path, &text, err) : error_set(err, ERR_NOMEM, "%s: no memory", path);
    if (!rc && text.len)
        rc = text_read(m, a, path, (char *)text.data, text.len, NULL, err);
    buffer_free(&text);
    return rc ? NULL : m;
}
