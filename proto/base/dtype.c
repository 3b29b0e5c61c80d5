/* dtype.h */
#include "proto/base/dtype.h"

#include <assert.h>

size_t dtype_size(enum dtype t)
{
    static const size_t sizes[DTYPE_COUNT] = {4, 8, 2, 4};
    assert((unsigned)t < DTYPE_COUNT);
    return sizes[t];
}

const char *dtype_name(enum dtype t)
{
    static const char *const names[DTYPE_COUNT] = {"F32", "F64", "BF16", "I32"};
    assert((unsigned)t < DTYPE_COUNT);
    return names[t];
}
