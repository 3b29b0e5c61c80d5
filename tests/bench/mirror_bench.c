/* A file to an S3-compatible store and back, by the code that mirrors checkpoints: mirror_bench ENDPOINT BUCKET FILE. Keys
 * from the environment. Prints one JSON object: bytes, seconds up and down; status 1, and why, when what comes back is
 * not what went. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/remote/s3.h"
#include "proto/base/clock.h"
#include "proto/base/crc32c.h"

enum { CHUNK = 1 << 20, PART = 8 << 20 };

static uint32_t sum_of(int fd)
{
    static uint8_t chunk[CHUNK];
    uint32_t sum = 0;
    ssize_t n;
    for (off_t at = 0; (n = pread(fd, chunk, sizeof chunk, at)) > 0; at += n)
        sum = crc32c(sum, chunk, (size_t)n);
    return sum;
}

static int there_and_back(struct s3 *s, const char *bucket, int fd, int back, struct error *err)
{
    struct s3_url at = {.key = "bench/object"};
    struct stat st;
    int64_t sent = 0, got = 0;
    uint32_t sum = sum_of(fd);
    snprintf(at.bucket, sizeof at.bucket, "%s", bucket);
    if (fstat(fd, &st) < 0)
        return error_set(err, ERR_IO, "fstat");
    int rc = s3_delete(s, &at, err);
    int64_t begin = clock_mono_ns();
    if (!rc)
        rc = s3_upload(s, &at, fd, st.st_size, sum, &sent, err);
    int64_t up = clock_mono_ns();
    if (!rc)
        rc = s3_get(s, &at, back, &got, st.st_size, NULL, err);
    int64_t down = clock_mono_ns();
    if (!rc && sum_of(back) != sum)
        rc = error_set(err, ERR_CORRUPT, "what came back is not what went");
    if (!rc)
        printf("{\"bytes\": %lld, \"up_s\": %.6f, \"down_s\": %.6f}\n", (long long)sent, (double)(up - begin) / 1e9,
               (double)(down - up) / 1e9);
    return rc;
}

int main(int argc, char **argv)
{
    struct s3_options o = {.http = {.stall_ms = 30000, .connect_ms = 5000}, .path_style = true, .part_bytes = PART};
    struct error err = {0};
    struct s3 *s = NULL;
    char path[4096];
    if (argc != 4 || snprintf(path, sizeof path, "%s.back", argv[3]) >= (int)sizeof path) {
        fprintf(stderr, "usage: mirror_bench ENDPOINT BUCKET FILE\n");
        return 2;
    }
    o.endpoint = argv[1];
    int fd = open(argv[3], O_RDONLY | O_CLOEXEC), back = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    int rc = fd < 0 || back < 0 ? error_set(&err, ERR_IO, "cannot open %s or %s", argv[3], path) : ERR_OK;
    if (!rc)
        rc = s3_credentials_environment(&o.credentials, &err);
    if (!rc)
        rc = s3_open(&o, &s, &err);
    if (!rc)
        rc = there_and_back(s, argv[2], fd, back, &err);
    if (rc)
        fprintf(stderr, "mirror_bench: %s\n", err.message);
    s3_close(s);
    unlink(path);
    return rc != 0;
}
