/* cudnn.h. */
#include "kernels/cuda/cudnn.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

static const char library_name[] = "libcudnn.so.9";

/* As major * 10000 + minor * 100 + patch. NVIDIA's own frontend refuses these two for attention. */
static const size_t wrong_versions[] = {91000, 91001};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct cudnn library;
static struct error failure; /* code ERR_OK: `library` is filled */

static void check_version(size_t version)
{
    for (size_t i = 0; i < sizeof wrong_versions / sizeof *wrong_versions; i++) {
        if (version != wrong_versions[i])
            continue;
        error_set(&failure, ERR_UNSUPPORTED, "cuDNN %zu.%zu.%zu computes some attention wrongly", version / 10000,
                  version / 100 % 100, version % 100);
        error_hint(&failure, "install a newer cuDNN 9 and put its folder first on LD_LIBRARY_PATH");
    }
}

static void open_library(void)
{
    struct cudnn *l = &library;
    const struct {
        const char *name;
        void *to;
    } symbols[] = {
        {"cudnnGetVersion", &l->get_version},
        {"cudnnGetErrorString", &l->error_string},
        {"cudnnGetLastErrorString", &l->last_error},
        {"cudnnCreate", &l->create},
        {"cudnnDestroy", &l->destroy},
        {"cudnnSetStream", &l->set_stream},
        {"cudnnBackendCreateDescriptor", &l->make},
        {"cudnnBackendDestroyDescriptor", &l->release},
        {"cudnnBackendSetAttribute", &l->set},
        {"cudnnBackendGetAttribute", &l->get},
        {"cudnnBackendFinalize", &l->finalize},
        {"cudnnBackendExecute", &l->execute},
    };
    void *handle = dlopen(library_name, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        const char *why = dlerror();
        error_set(&failure, ERR_NOT_FOUND, "no cuDNN: tried %s: %s", library_name, why ? why : "cannot be opened");
        error_hint(&failure, "install cuDNN 9 or put its folder on LD_LIBRARY_PATH");
        return;
    }
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *at = dlsym(handle, symbols[i].name);
        if (!at) {
            error_set(&failure, ERR_UNSUPPORTED, "%s has no %s", library_name, symbols[i].name);
            error_hint(&failure, "install a newer cuDNN 9");
            return;
        }
        memcpy(symbols[i].to, &at, sizeof at); /* ISO C has no cast from an object's address to a function's */
    }
    l->version = l->get_version();
    check_version(l->version);
}

int cudnn_open(const struct cudnn **out, struct error *err)
{
    *out = NULL;
    pthread_once(&once, open_library);
    if (failure.code) {
        error_set(err, failure.code, "%s", failure.message);
        return error_hint(err, "%s", failure.hint);
    }
    *out = &library;
    return ERR_OK;
}

int cudnn_failed(const struct cudnn *lib, cudnnStatus_t status, const char *what, struct error *err)
{
    char words[512] = "";
    lib->last_error(words, sizeof words);
    return error_set(err, ERR_DEVICE, "cuDNN, %s: %s%s%s", what, lib->error_string(status), words[0] ? ": " : "",
                     words);
}
