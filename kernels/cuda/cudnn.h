/* cuDNN's backend interface, opened at run time: a machine without it, or with a broken one, still trains on the own
 * attention. Types and constants are of cuDNN's headers, functions are looked up by name. */
#ifndef BOOST_KERNELS_CUDA_CUDNN_H
#define BOOST_KERNELS_CUDA_CUDNN_H

#include <stdbool.h> /* cuDNN's headers use bool without it */

#include <cudnn_graph.h>

#include "proto/base/error.h"

struct cudnn {
    size_t version;
    size_t (*get_version)(void);
    const char *(*error_string)(cudnnStatus_t status);
    void (*last_error)(char *message, size_t size);
    cudnnStatus_t (*create)(cudnnHandle_t *handle);
    cudnnStatus_t (*destroy)(cudnnHandle_t handle);
    cudnnStatus_t (*set_stream)(cudnnHandle_t handle, cudaStream_t stream);
    cudnnStatus_t (*make)(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *out);
    cudnnStatus_t (*release)(cudnnBackendDescriptor_t descriptor);
    cudnnStatus_t (*set)(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                         cudnnBackendAttributeType_t type, int64_t count, const void *values);
    cudnnStatus_t (*get)(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                         cudnnBackendAttributeType_t type, int64_t room, int64_t *count, void *values);
    cudnnStatus_t (*finalize)(cudnnBackendDescriptor_t descriptor);
    cudnnStatus_t (*execute)(cudnnHandle_t handle, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t pack);
};

/* The process's library, opened once and never closed; any thread. ERR_NOT_FOUND: there is none; ERR_UNSUPPORTED: a
 * version whose attention is known to be wrong, or a library without the backend interface. */
MUST_USE int cudnn_open(const struct cudnn **out, struct error *err);
/* Turns a status into an error that says what was asked for and cuDNN's own words. */
MUST_USE int cudnn_failed(const struct cudnn *lib, cudnnStatus_t status, const char *what, struct error *err);

#endif
