/* rankfiles.h */
#include "proto/rankfiles.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

int rank_file_path(char *out, size_t cap, const char *run_dir, int rank, const char *suffix, struct error *err)
{
    int used = snprintf(out, cap, "%s/rank-%d.%s", run_dir, rank, suffix);
    if (used < 0 || (size_t)used >= cap)
        return error_set(err, ERR_INVALID, "path too long: %s/rank-%d.%s", run_dir, rank, suffix);
    return ERR_OK;
}

void *rank_file_map(const char *run_dir, int rank, const char *suffix, uint32_t magic, int create, struct error *err)
{
    char path[PATH_MAX];
    if (rank_file_path(path, sizeof path, run_dir, rank, suffix, err))
        return NULL;
    int fd = open(path, O_RDWR | O_CLOEXEC | (create ? O_CREAT : 0), 0644);
    if (fd < 0) {
        error_errno(err, errno, "cannot open %s", path);
        return NULL;
    }
    void *page = MAP_FAILED;
    if (create && ftruncate(fd, RANK_FILE_BYTES) < 0)
        error_errno(err, errno, "cannot size %s", path);
    else if (lseek(fd, 0, SEEK_END) < RANK_FILE_BYTES) /* touching a short mapping is SIGBUS */
        error_set(err, ERR_CORRUPT, "%s is shorter than %d bytes", path, RANK_FILE_BYTES);
    else if ((page = mmap(NULL, RANK_FILE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)) == MAP_FAILED)
        error_errno(err, errno, "cannot map %s", path);
    close(fd);
    if (page == MAP_FAILED)
        return NULL;
    uint32_t *magic_at = page;
    if (create)
        *magic_at = magic;
    if (*magic_at != magic) {
        error_set(err, ERR_CORRUPT, "%s is not a rank file of this version", path);
        rank_file_unmap(page);
        return NULL;
    }
    return page;
}

void rank_file_unmap(void *page)
{
    if (page)
        munmap(page, RANK_FILE_BYTES);
}

static void bytes_text(uint64_t bytes, char out[32])
{
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB"};
    double value = (double)bytes;
    int u = 0;
    while (value >= 1024 && u < 3) {
        value /= 1024;
        u++;
    }
    snprintf(out, 32, "%.*f %s", u && value < 99.95 ? 1 : 0, value, units[u]);
}

char *rank_collective_text(const struct rank_status *page, char *out, size_t cap)
{
    const struct rank_collective *c = &page->groups[page->group < RANK_GROUPS ? page->group : 0];
    char bytes[32];
    if (!c->group[0] || !c->seq) {
        snprintf(out, cap, "%.95s", page->collective);
    } else {
        bytes_text(c->bytes, bytes);
        snprintf(out, cap, "%.15s \"%.47s\" in group %.11s (call %" PRIu64 ", %s%s)", c->kind, c->what, c->group, c->seq,
                 bytes, c->inside == RANK_LEFT ? ", done" : "");
    }
    for (char *s = out; *s; s++) /* whoever owns the directory may have written it */
        if (*s < 0x20 || *s > 0x7E)
            *s = '?';
    return out;
}
