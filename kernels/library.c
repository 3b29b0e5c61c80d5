/* library.h */
#include "kernels/library.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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

static int load_library(const char *build_id, void **out, struct error *err)
{
    char path[PATH_MAX];
    int rc = find(path, err);
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
