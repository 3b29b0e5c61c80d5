/* arena.h: a list of chunks, bump allocation in the newest. */
#include "proto/base/arena.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK_BYTES = 16 << 10, ALIGN = 16 };

struct arena_chunk {
    struct arena_chunk *next;
    size_t cap;
    size_t used;
    _Alignas(ALIGN) uint8_t bytes[];
};

static void *allocator_alloc(void *data, size_t size)
{
    return arena_alloc(data, size);
}

/* protobuf-c frees single pieces on its error paths; the arena frees all later. */
static void allocator_free(void *data, void *pointer)
{
    (void)data;
    (void)pointer;
}

void arena_init(struct arena *a, size_t max_bytes)
{
    *a = (struct arena){.max = max_bytes};
    a->allocator = (ProtobufCAllocator){allocator_alloc, allocator_free, a};
}

void arena_free(struct arena *a)
{
    struct arena_chunk *chunk = a->head;
    while (chunk) {
        struct arena_chunk *next = chunk->next;
        free(chunk);
        chunk = next;
    }
    a->head = NULL;
    a->used = 0;
    a->failed = false;
}

static void *refuse(struct arena *a)
{
    a->failed = true;
    return NULL;
}

void *arena_alloc(struct arena *a, size_t size)
{
    if (size > a->max || a->used > a->max - size)
        return refuse(a);
    size_t padded = (size + ALIGN - 1) & ~(size_t)(ALIGN - 1);
    if (!padded)
        padded = ALIGN;
    struct arena_chunk *chunk = a->head;
    if (!chunk || chunk->cap - chunk->used < padded) {
        size_t cap = padded > CHUNK_BYTES ? padded : CHUNK_BYTES;
        chunk = calloc(1, sizeof *chunk + cap);
        if (!chunk)
            return refuse(a);
        chunk->cap = cap;
        chunk->next = a->head;
        a->head = chunk;
    }
    void *at = chunk->bytes + chunk->used;
    chunk->used += padded;
    a->used += padded;
    return at;
}

char *arena_strdup(struct arena *a, const char *s)
{
    size_t len = strlen(s) + 1;
    char *copy = arena_alloc(a, len);
    return copy ? memcpy(copy, s, len) : NULL;
}

char *arena_printf(struct arena *a, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    int need = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    char *text = need < 0 ? NULL : arena_alloc(a, (size_t)need + 1);
    if (!text)
        return NULL;
    va_start(ap, fmt);
    vsnprintf(text, (size_t)need + 1, fmt, ap);
    va_end(ap);
    return text;
}
