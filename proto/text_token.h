/* Tokens of the protobuf text format; used by text_read.c only. */
#ifndef BOOST_PROTO_TEXT_TOKEN_H
#define BOOST_PROTO_TEXT_TOKEN_H

#include "proto/reflect.h"

enum token_kind { TOKEN_END, TOKEN_WORD, TOKEN_INTEGER, TOKEN_FLOAT, TOKEN_STRING, TOKEN_SYMBOL };

struct token {
    enum token_kind kind;
    const char *start; /* a string with its quotes */
    size_t len;
    int line, column; /* from 1; columns in bytes */
};

struct tokens {
    const char *name; /* of the file, or NULL: errors without a position */
    const char *at, *end;
    const char *line_start;
    int line;
    struct token now;
    struct error *err;
};

/* "name:line:column: " of a place, or "". */
void token_prefix(const struct tokens *t, int line, int column, char *out, size_t cap);
/* Moves to the next token, t->now. */
MUST_USE int token_next(struct tokens *t);
/* Begins at the first token. A UTF-8 byte order mark is passed over. */
MUST_USE int token_start(struct tokens *t, const char *text, size_t len);
/* Appends the bytes that a string token stands for. */
MUST_USE int token_unescape(struct tokens *t, struct buffer *out);

#endif
