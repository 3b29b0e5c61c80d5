/* dependency.h */
#include "proto/dependency.h"

#include <stddef.h>
#include <string.h>

bool dependency_parse(const char *text, enum dependency_kind *kind, int64_t *job)
{
    static const char *const names[] = {
        [AFTER] = "after:", [AFTER_ANY] = "afterany:", [AFTER_OK] = "afterok:", [AFTER_NOT_OK] = "afternotok:"};
    enum { MAX_DIGITS = 18 };
    for (size_t k = 0; k < sizeof names / sizeof *names; k++) {
        size_t len = strlen(names[k]);
        if (strncmp(text, names[k], len) != 0)
            continue;
        const char *id = text + len;
        size_t digits = strspn(id, "0123456789");
        if (!digits || digits > MAX_DIGITS || id[digits] || id[0] == '0')
            return false;
        *kind = (enum dependency_kind)k;
        *job = 0;
        for (size_t i = 0; i < digits; i++)
            *job = *job * 10 + (id[i] - '0');
        return true;
    }
    return false;
}
