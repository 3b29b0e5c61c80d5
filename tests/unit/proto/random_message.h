/* Random messages of any type, from a seed: what the property tests feed on. */
#ifndef BOOST_TESTS_RANDOM_MESSAGE_H
#define BOOST_TESTS_RANDOM_MESSAGE_H

#include <math.h>
#include <string.h>

#include "proto/base/utf8.h"
#include "proto/reflect.h"

struct rng {
    uint64_t state; /* not 0 */
};

/* xorshift64* */
static inline uint64_t rng_next(struct rng *g)
{
    g->state ^= g->state >> 12;
    g->state ^= g->state << 25;
    g->state ^= g->state >> 27;
    return g->state * UINT64_C(2685821657736338717);
}

static inline unsigned rng_below(struct rng *g, unsigned n)
{
    return (unsigned)(rng_next(g) >> 33) % n;
}

/* Edge values half of the time. */
static inline uint64_t rng_integer(struct rng *g)
{
    static const uint64_t edges[] = {
        0, 1, 2, UINT64_MAX, INT32_MAX, (uint64_t)INT32_MIN, UINT32_MAX, INT64_MAX, (uint64_t)1 << 63, 127, 128};
    if (rng_below(g, 2))
        return edges[rng_below(g, sizeof edges / sizeof *edges)];
    return rng_next(g) >> rng_below(g, 64);
}

static inline double rng_double(struct rng *g, bool finite)
{
    static const double edges[] = {
        0.0,   -0.0,       1.0, 0.1, 1e-8, 1e22, 1e23, 5e-324, 2.2250738585072014e-308, 1.7976931348623157e308,
        -1e-3, 123456789.0};
    if (rng_below(g, 2))
        return edges[rng_below(g, sizeof edges / sizeof *edges)];
    if (!finite && rng_below(g, 10) == 0)
        return rng_below(g, 2) ? INFINITY : -INFINITY;
    uint64_t bits = rng_next(g);
    double v;
    memcpy(&v, &bits, 8);
    return isfinite(v) ? v : 1.5;
}

/* UTF-8 without NUL, with quotes, escapes, controls and long characters. */
static inline char *rng_string(struct rng *g, struct arena *a)
{
    char text[128];
    size_t len = 0;
    for (unsigned n = rng_below(g, 24); n > 0; n--) {
        static const uint32_t odd[] = {'"',    '\'',   '\\',    '\n', '\t', '\r', 1,   0x1f, 0x7f, 0xe9,
                                       0x20ac, 0xfffd, 0x1f600, '0',  '7',  '?',  '{', '#',  ':'};
        uint32_t code = rng_below(g, 3) ? 32 + rng_below(g, 95) : odd[rng_below(g, sizeof odd / sizeof *odd)];
        len += utf8_put(code, text + len);
    }
    text[len] = '\0';
    return arena_strdup(a, text);
}

static inline ProtobufCMessage *random_message(struct rng *g, struct arena *a, const ProtobufCMessageDescriptor *type,
                                               bool finite, int depth);

static inline void random_value(struct rng *g, struct arena *a, const ProtobufCFieldDescriptor *f, void *at,
                                bool finite, int depth)
{
    const ProtobufCEnumDescriptor *choices = f->descriptor;
    switch (f->type) {
    case PROTOBUF_C_TYPE_DOUBLE:
        *(double *)at = rng_double(g, finite);
        break;
    case PROTOBUF_C_TYPE_FLOAT:
        *(float *)at = (float)rng_double(g, finite);
        if (finite && !isfinite(*(float *)at))
            *(float *)at = 0.1f;
        break;
    case PROTOBUF_C_TYPE_BOOL:
        *(protobuf_c_boolean *)at = (protobuf_c_boolean)rng_below(g, 2);
        break;
    case PROTOBUF_C_TYPE_ENUM:
        *(int *)at = choices->values[rng_below(g, choices->n_values)].value;
        break;
    case PROTOBUF_C_TYPE_STRING:
        *(char **)at = rng_string(g, a);
        break;
    case PROTOBUF_C_TYPE_BYTES: {
        ProtobufCBinaryData *bytes = at;
        bytes->len = rng_below(g, 20);
        bytes->data = arena_alloc(a, bytes->len);
        for (size_t i = 0; i < bytes->len; i++)
            bytes->data[i] = (uint8_t)rng_next(g);
        break;
    }
    case PROTOBUF_C_TYPE_MESSAGE:
        *(ProtobufCMessage **)at = random_message(g, a, f->descriptor, finite, depth + 1);
        break;
    default: {
        uint64_t v = rng_integer(g);
        memcpy(at, &v, reflect_value_size(f));
        break;
    }
    }
}

/* Each field is there with probability 1/2, of a oneof the last that is drawn. */
static inline ProtobufCMessage *random_message(struct rng *g, struct arena *a, const ProtobufCMessageDescriptor *type,
                                               bool finite, int depth)
{
    ProtobufCMessage *m = reflect_new(a, type);
    for (unsigned i = 0; m && i < type->n_fields; i++) {
        const ProtobufCFieldDescriptor *f = &type->fields[i];
        unsigned n = f->label == PROTOBUF_C_LABEL_REPEATED ? rng_below(g, 7) : rng_below(g, 2);
        if (f->type == PROTOBUF_C_TYPE_MESSAGE && depth > 2)
            n = 0;
        while (n-- > 0)
            random_value(g, a, f, reflect_push(m, f, a), finite, depth);
    }
    return m;
}

#endif
