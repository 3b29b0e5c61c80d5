/* library.h */
#include "kernels/library.h"

#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char file[] = "lib/boost-cuda.so";

/* The library's path. */
static int find(char out[PATH_MAX], struct error *err)
{
    const char *given = getenv("BOOST_CUDA_LIBRARY");
    if (given && *given) {
        if (snprintf(out, PATH_MAX, "%s", given) >= PATH_MAX)
            return error_set(err, ERR_INVALID, "BOOST_CUDA_LIBRARY is longer than a path");
        return ERR_OK;
    }
    char program[PATH_MAX];
    ssize_t len = readlink("/proc/self/exe", program, sizeof program - 1);
    if (len < 0)
        return error_set(err, ERR_IO, "where this program lies: /proc/self/exe cannot be read");
    program[len] = 0;
    for (int above = 0; above < 3; above++) {
        char *slash = strrchr(program, '/');
        if (!slash)
            break;
        *slash = 0;
        if (above > 0 && snprintf(out, PATH_MAX, "%s/%s", program, file) < PATH_MAX && access(out, F_OK) == 0)
            return ERR_OK;
    }
    error_set(err, ERR_UNSUPPORTED, "this installation has no CUDA backend: %s is not beside its programs", file);
    return error_hint(err, "build where the CUDA toolkit is (make says what it misses), or name the library in "
                           "BOOST_CUDA_LIBRARY");
}

static bool reaches(off_t size, uint64_t from, uint64_t bytes)
{
    return bytes <= (uint64_t)size && from <= (uint64_t)size - bytes;
}

/* dlopen() maps what the headers promise: from a file that was copied half it dies of SIGBUS, and a fifo it waits for. */
static int check_whole(const char *path, struct error *err)
{
    Elf64_Ehdr head;
    Elf64_Phdr part;
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), rc = ERR_OK;
    if (fd < 0 || fstat(fd, &st) < 0) {
        rc = error_set(err, ERR_UNSUPPORTED, "the CUDA backend cannot be loaded: %s: %s", path, strerror(errno));
    } else if (!S_ISREG(st.st_mode)) {
        rc = error_set(err, ERR_UNSUPPORTED, "the CUDA backend cannot be loaded: %s is not a file", path);
    } else if (pread(fd, &head, sizeof head, 0) != sizeof head || memcmp(head.e_ident, ELFMAG, SELFMAG) != 0 ||
               head.e_ident[EI_CLASS] != ELFCLASS64) {
        error_set(err, ERR_UNSUPPORTED, "the CUDA backend cannot be loaded: %s is no library of this machine", path);
        rc = error_hint(err, "copy or build it anew");
    } else {
        bool whole = true;
        for (int i = 0; whole && i < head.e_phnum; i++)
            whole = reaches(st.st_size, head.e_phoff, (uint64_t)(i + 1) * sizeof part) &&
                    pread(fd, &part, sizeof part, (off_t)(head.e_phoff + (uint64_t)i * sizeof part)) == sizeof part &&
                    (part.p_type != PT_LOAD || reaches(st.st_size, part.p_offset, part.p_filesz));
        if (!whole) {
            error_set(err, ERR_UNSUPPORTED, "the CUDA backend cannot be loaded: %s is cut short", path);
            rc = error_hint(err, "copy or build it anew");
        }
    }
    if (fd >= 0)
        close(fd);
    return rc;
}

static int load_library(const char *build_id, void **out, struct error *err)
{
    char path[PATH_MAX];
    int rc = find(path, err);
    if (!rc && strchr(path, '/')) /* a bare name is looked for by the loader */
        rc = check_whole(path, err);
    if (rc)
        return rc;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        error_set(err, ERR_UNSUPPORTED, "the CUDA backend cannot be loaded: %s", dlerror());
        return error_hint(err, "put the folders of cuBLAS and NCCL on LD_LIBRARY_PATH");
    }
    void *symbol = dlsym(library, "boost_build_id");
    const char *(*its_build_id)(void);
    memcpy(&its_build_id, &symbol, sizeof symbol);
    if (!symbol || strcmp(its_build_id(), build_id) != 0) {
        error_set(err, ERR_UNSUPPORTED, "%s is of build %s, this program of %s", path,
                  symbol ? its_build_id() : "unknown", build_id);
        error_hint(err, "build both anew");
        dlclose(library);
        return ERR_UNSUPPORTED;
    }
    *out = library;
    return ERR_OK;
}

static int open_library(const char *build_id, void **out, struct error *err)
{
    /* Asked for first: a machine without a driver is the usual case, and then nothing large is loaded. */
    if (!dlopen("libcuda.so.1", RTLD_NOW)) {
        error_set(err, ERR_DEVICE, "this machine has no NVIDIA driver: %s", dlerror());
        return error_hint(err, "install the driver, or run the job on the CPU");
    }
    return load_library(build_id, out, err);
}

int kernels_library_check(const char *build_id, struct error *err)
{
    void *library;
    int rc = load_library(build_id, &library, err);
    if (!rc)
        dlclose(library);
    return rc;
}

int kernels_library(const char *build_id, const char *name, void **symbol, struct error *err)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static void *library;
    *symbol = NULL;
    pthread_mutex_lock(&lock);
    int rc = library ? ERR_OK : open_library(build_id, &library, err);
    pthread_mutex_unlock(&lock);
    if (!rc && !(*symbol = dlsym(library, name)))
        rc = error_set(err, ERR_UNSUPPORTED, "boost-cuda.so does not export %s", name);
    return rc;
}
