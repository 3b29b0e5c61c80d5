/* What the answers of an object store need of XML: elements without attributes that matter, texts with entities. */
#ifndef BOOST_DAEMON_REMOTE_XML_H
#define BOOST_DAEMON_REMOTE_XML_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct xml_span {
    const char *at, *end;
};

/* The content of the next element of this name in *in, which goes on behind it; false: there is none. Elements of one
 * name do not lie in each other. */
bool xml_next(struct xml_span *in, const char *name, struct xml_span *content);
/* The text of the first such element, entities resolved; false: none, or it does not fit. */
bool xml_text(struct xml_span in, const char *name, char *out, size_t cap);
int64_t xml_number(struct xml_span in, const char *name); /* -1: none */

#endif
