/* A private directory with token files in it: what tests of data share. For inclusion behind cmocka.h. */
#ifndef BOOST_TESTS_SUPPORT_TOKEN_FILES_H
#define BOOST_TESTS_SUPPORT_TOKEN_FILES_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "proto/base/fs.h"

static char dir[512];

static int set_up(void **state)
{
    (void)state;
    const char *base = getenv("BOOST_TEST_DIR");
    snprintf(dir, sizeof dir, "%s/data-XXXXXX", base ? base : "/tmp");
    return mkdtemp(dir) ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    return fs_remove_tree(dir, NULL);
}

static char *path_of(const char *name)
{
    static char path[640];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

static char *write_file(const char *name, const void *data, size_t len)
{
    char *path = path_of(name);
    FILE *f = fopen(path, "we");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, len, f), len);
    fclose(f);
    return path;
}

/* n tokens: id of token i is i*7 % 1000, in the given width. */
static char *write_tokens(const char *name, int64_t n, int width)
{
    uint8_t *raw = calloc((size_t)n, (size_t)width);
    for (int64_t i = 0; i < n; i++) {
        uint32_t id = (uint32_t)(i * 7 % (width == 1 ? 200 : 1000));
        for (int b = 0; b < width; b++)
            raw[i * width + b] = (uint8_t)(id >> 8 * b);
    }
    char *path = write_file(name, raw, (size_t)(n * width));
    free(raw);
    return path;
}

#endif
