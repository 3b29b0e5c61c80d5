/* A backend that lies in a shared library of its own, so that programs run where its vendor's libraries are not
 * installed: boost-cuda.so. */
#ifndef BOOST_KERNELS_LIBRARY_H
#define BOOST_KERNELS_LIBRARY_H

#include "proto/base/error.h"

/* What boost-cuda.so exports as `name`; the library is opened at the first call and stays open while the process lives.
 * It is the file that $BOOST_CUDA_LIBRARY names, else lib/boost-cuda.so in the folder above the program's, or the one
 * above that. ERR_DEVICE: this machine has no NVIDIA driver. ERR_UNSUPPORTED: there is no library, it or one that it
 * needs cannot be loaded, or its build is not `build_id`. Any thread. */
MUST_USE int kernels_library(const char *build_id, const char *name, void **symbol, struct error *err);
/* Whether there is such a library of that build, and all that it needs; asks for no driver. Any thread. */
MUST_USE int kernels_library_check(const char *build_id, struct error *err);

#endif
