/* dtype.h */
#include "proto/base/dtype.h"

#include <assert.h>

size_t dtype_size(enum dtype t)
{
    static const size_t sizes[DTYPE_IN_FILES] = {4, 8, 2, 4, 2};
    assert((unsigned)t < DTYPE_IN_FILES);
    return sizes[t];
}

const char *dtype_name(enum dtype t)
{
    static const char *const names[DTYPE_IN_FILES] = {"F32", "F64", "BF16", "I32", "F16"};
    assert((unsigned)t < DTYPE_IN_FILES);
    return names[t];
}
