/* rankfiles.h */
#include "proto/rankfiles.h"

#include <errno.h>
#include <fcntl.h>
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
