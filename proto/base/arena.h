/* A request arena: many small allocations, freed together. protobuf-c unpacks
 * into it, so that one arena_free() ends a request whatever it touched. */
#ifndef BOOST_PROTO_BASE_ARENA_H
#define BOOST_PROTO_BASE_ARENA_H

#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stddef.h>

#include "proto/base/error.h"

struct arena_chunk;
struct arena {
    struct arena_chunk *head;
    size_t used;
    size_t max;
    bool failed; /* sticky: an allocation was refused */
    ProtobufCAllocator allocator; /* pass &arena.allocator to *__unpack */
};

void arena_init(struct arena *a, size_t max_bytes);
void arena_free(struct arena *a);
/* 16-byte aligned, zeroed; NULL when over the maximum or out of memory. */
void *arena_alloc(struct arena *a, size_t size);
char *arena_strdup(struct arena *a, const char *s);
char *arena_printf(struct arena *a, const char *fmt, ...) PRINTF_LIKE(2, 3);

#endif
