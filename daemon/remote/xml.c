/* xml.h */
#include "daemon/remote/xml.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const char *find(const char *at, const char *end, const char *text, size_t len)
{
    return at < end ? memmem(at, (size_t)(end - at), text, len) : NULL;
}

bool xml_next(struct xml_span *in, const char *name, struct xml_span *content)
{
    size_t len = strlen(name);
    for (const char *at = in->at; (at = find(at, in->end, "<", 1));) {
        const char *after = ++at + len;
        if (after >= in->end || memcmp(at, name, len) != 0 || !strchr("> /\t\r\n", *after) || !*after)
            continue;
        const char *close = find(after, in->end, ">", 1);
        if (!close)
            return false;
        content->at = content->end = close + 1;
        if (close[-1] == '/') {
            in->at = close + 1;
            return true;
        }
        for (const char *back = close; (back = find(back, in->end, "</", 2)); back += 2) {
            if ((size_t)(in->end - back) > len + 2 && !memcmp(back + 2, name, len) && back[2 + len] == '>') {
                content->end = back;
                in->at = back + len + 3;
                return true;
            }
        }
        return false;
    }
    return false;
}

/* The byte that "&...;" at `at` stands for, 0: none; *len of the entity. */
static char entity(const char *at, size_t left, size_t *len)
{
    static const struct {
        const char *text;
        char byte;
    } known[] = {{"&amp;", '&'}, {"&lt;", '<'}, {"&gt;", '>'}, {"&quot;", '"'}, {"&apos;", '\''}, {"&#34;", '"'},
                 {"&#39;", '\''}, {"&#xD;", '\r'}, {"&#xA;", '\n'}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        *len = strlen(known[i].text);
        if (left >= *len && !memcmp(at, known[i].text, *len))
            return known[i].byte;
    }
    return 0;
}

bool xml_text(struct xml_span in, const char *name, char *out, size_t cap)
{
    struct xml_span text;
    size_t used = 0, len;
    if (!xml_next(&in, name, &text))
        return false;
    for (const char *p = text.at; p < text.end; p++) {
        char byte = *p;
        if (byte == '&' && (byte = entity(p, (size_t)(text.end - p), &len)))
            p += len - 1;
        else
            byte = *p;
        if (used + 1 >= cap)
            return false;
        out[used++] = byte;
    }
    out[used] = '\0';
    return true;
}

int64_t xml_number(struct xml_span in, const char *name)
{
    char text[32], *end;
    if (!xml_text(in, name, text, sizeof text))
        return -1;
    errno = 0;
    long long v = strtoll(text, &end, 10);
    return errno || end == text || *end || v < 0 ? -1 : v;
}
