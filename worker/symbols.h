/* Addresses of this process as "function+0x2a (library)", from the symbol tables of the files themselves, so that
 * static functions have names too. Not for a signal handler. One thread at a time. */
#ifndef BOOST_WORKER_SYMBOLS_H
#define BOOST_WORKER_SYMBOLS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct symbols;

struct symbols *symbols_new(void); /* NULL: out of memory */
void symbols_free(struct symbols *s);
/* `returns`: a return address, whose call lies before it. C++ names are demangled. "main+0x1c (boost-worker)",
 * "boost-worker+0x4711" where no symbol covers it, "code without a file" for what a JIT made. Returns out. */
char *symbols_describe(struct symbols *s, uintptr_t pc, bool returns, char *out, size_t cap);

#endif
