/* UTF-8, strictly: no overlong forms, no surrogates, nothing above U+10FFFF. */
#ifndef BOOST_PROTO_BASE_UTF8_H
#define BOOST_PROTO_BASE_UTF8_H

#include <stddef.h>
#include <stdint.h>

#define UTF8_REPLACEMENT "\xEF\xBF\xBD" /* U+FFFD */

/* Bytes of the character at s (1 to 4); 0 when the bytes there are not UTF-8. */
size_t utf8_length(const void *s, size_t len);
/* The length without a character that was cut off at the end: what is left of a text that did not fit. */
size_t utf8_whole(const void *s, size_t len);
/* Writes a code point below 0x200000 (surrogates too, as three bytes); the bytes written. */
size_t utf8_put(uint32_t code, char out[4]);

#endif
