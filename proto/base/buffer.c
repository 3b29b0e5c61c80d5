/* buffer.h: growth by doubling up to the hard maximum. */
#include "proto/base/buffer.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void buffer_init(struct buffer *b, size_t max)
{
    *b = (struct buffer){.max = max};
}

void buffer_free(struct buffer *b)
{
    free(b->data);
    *b = (struct buffer){.max = b->max};
}

void buffer_clear(struct buffer *b)
{
    b->len = 0;
    b->failed = false;
    if (b->data)
        b->data[0] = '\0';
}

uint8_t *buffer_reserve(struct buffer *b, size_t extra)
{
    if (extra > b->max || b->len > b->max - extra) {
        b->failed = true;
        return NULL;
    }
    size_t need = b->len + extra + 1;
    if (need > b->cap) {
        size_t cap = b->cap ? b->cap : 256;
        while (cap < need)
            cap *= 2;
        uint8_t *data = realloc(b->data, cap);
        if (!data) {
            b->failed = true;
            return NULL;
        }
        b->data = data;
        b->cap = cap;
    }
    return b->data + b->len;
}

int buffer_append(struct buffer *b, const void *data, size_t len)
{
    uint8_t *at = buffer_reserve(b, len);
    if (!at)
        return ERR_NOMEM;
    if (len)
        memcpy(at, data, len);
    b->len += len;
    b->data[b->len] = '\0';
    return ERR_OK;
}

int buffer_append_str(struct buffer *b, const char *s)
{
    return buffer_append(b, s, strlen(s));
}

int buffer_printf(struct buffer *b, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    int need = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    assert(need >= 0);
    uint8_t *at = buffer_reserve(b, (size_t)need);
    if (!at)
        return ERR_NOMEM;
    va_start(ap, fmt);
    vsnprintf((char *)at, (size_t)need + 1, fmt, ap);
    va_end(ap);
    b->len += (size_t)need;
    return ERR_OK;
}

void buffer_consume(struct buffer *b, size_t n)
{
    assert(n <= b->len);
    if (!n)
        return;
    memmove(b->data, b->data + n, b->len - n);
    b->len -= n;
    b->data[b->len] = '\0';
}
