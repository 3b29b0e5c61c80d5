/* cuda.h: streams, their faults, memory, marks, captured sequences. */
#include <nvtx3/nvToolsExt.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/reach.h"

struct kgraph {
    cudaGraphExec_t exec;
};

/* ---- faults ------------------------------------------------------------------------- */

void cuda_fault(struct kstream *ks, enum error_code code, const char *fmt, ...)
{
    if (ks->fault.code != ERR_OK)
        return;
    char text[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    error_set(&ks->fault, code, "%s", text);
}

static enum error_code code_of(cudaError_t status)
{
    switch (status) {
    case cudaErrorMemoryAllocation:
        return ERR_NOMEM;
    case cudaErrorInvalidValue:
    case cudaErrorInvalidConfiguration:
    /* Of the program, as its Xids 13 and 31 are to the agent: another device would not help. */
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorLaunchOutOfResources:
    case cudaErrorAssert:
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureUnjoined:
    case cudaErrorStreamCaptureIsolation:
        return ERR_INTERNAL;
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
        return ERR_UNSUPPORTED;
    default:
        return ERR_DEVICE;
    }
}

static int device_error(struct error *err, cudaError_t status, const char *what)
{
    cudaGetLastError(); /* or the next launch would report it */
    return error_set(err, code_of(status), "CUDA: %s: %s (%s)", what, cudaGetErrorString(status),
                     cudaGetErrorName(status));
}

bool cuda_ok(struct kstream *ks, cudaError_t status, const char *what)
{
    if (status == cudaSuccess)
        return true;
    struct error e;
    device_error(&e, status, what);
    cuda_fault(ks, e.code, "%s", e.message);
    return false;
}

bool cuda_launched(struct kstream *ks, const char *what)
{
    return cuda_ok(ks, cudaGetLastError(), what);
}

void *cuda_scratch(struct kstream *ks, size_t bytes, const char *what)
{
    if (ks->scratch && bytes <= ks->scratch_bytes)
        return ks->scratch;
    cuda_fault(ks, ERR_INTERNAL, "%s needs %zu bytes of scratch, the stream has %zu", what, bytes, ks->scratch_bytes);
    return NULL;
}

/* ---- streams -------------------------------------------------------------------------- */

static int find_device(struct cudaDeviceProp *device, struct error *err)
{
    int devices = 0, driver = 0;
    cudaError_t status = cudaGetDeviceCount(&devices);
    if (status == cudaErrorInsufficientDriver || status == cudaErrorSystemDriverMismatch ||
        status == cudaErrorCompatNotSupportedOnDevice) {
        cudaGetLastError();
        cudaDriverGetVersion(&driver);
        if (driver == 0) {
            error_set(err, ERR_DEVICE, "this machine has no NVIDIA driver");
            return error_hint(err, "install the driver, or run the job on the CPU");
        }
        error_set(err, ERR_DEVICE, "the NVIDIA driver serves CUDA %d.%d at most, this build needs %d.%d", driver / 1000,
                  driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
        return error_hint(err, "install a newer driver, or build with the older CUDA toolkit");
    }
    if (status == cudaErrorNoDevice || (status == cudaSuccess && devices == 0)) {
        cudaGetLastError();
        error_set(err, ERR_DEVICE, "no CUDA device is visible to this process");
        return error_hint(err, "see what nvidia-smi shows, and CUDA_VISIBLE_DEVICES");
    }
    if (status != cudaSuccess) {
        device_error(err, status, "looking for devices");
        return error_hint(err, "see what nvidia-smi shows");
    }
    status = cudaSetDevice(0);
    if (status == cudaSuccess)
        status = cudaGetDeviceProperties(device, 0);
    if (status != cudaSuccess)
        return device_error(err, status, "opening the first device");
    if (device->major < 8) {
        error_set(err, ERR_DEVICE, "%s has compute capability %d.%d, bf16 needs 8.0", device->name, device->major,
                  device->minor);
        return error_hint(err, "use a device of the Ampere generation or later");
    }
    return ERR_OK;
}

/* The stream and its events; the rest stays empty. */
static int open_stream(int priority, struct kstream **out, struct error *err)
{
    struct kstream *ks = calloc(1, sizeof *ks);
    if (!ks)
        return error_set(err, ERR_NOMEM, "out of memory for a kernel stream");
    cudaError_t status = cudaStreamCreateWithPriority(&ks->stream, cudaStreamNonBlocking, priority);
    for (int i = 0; i < KSTREAM_MARKS && status == cudaSuccess; i++)
        status = cudaEventCreateWithFlags(&ks->marks[i], cudaEventDisableTiming);
    if (status == cudaSuccess) {
        *out = ks;
        return ERR_OK;
    }
    device_error(err, status, "making a stream");
    cuda_stream_destroy(ks);
    return err ? (int)err->code : ERR_DEVICE;
}

int cuda_stream_create(int threads, struct kstream **out, struct error *err)
{
    struct error unread;
    struct cudaDeviceProp device;
    struct kstream *ks = NULL;
    *out = NULL;
    if (!err)
        err = &unread;
    if (threads < 1)
        return error_set(err, ERR_INVALID, "a kernel stream needs at least one thread, not %d", threads);
    int rc = find_device(&device, err);
    if (!rc)
        rc = open_stream(0, &ks, err);
    if (rc)
        return rc;
    ks->sms = device.multiProcessorCount;
    cublasStatus_t status = cublasLtCreate(&ks->lt);
    if (status != CUBLAS_STATUS_SUCCESS) {
        cuda_stream_destroy(ks);
        return error_set(err, ERR_DEVICE, "cuBLASLt does not start: %s", cublasLtGetStatusString(status));
    }
    *out = ks;
    return ERR_OK;
}

int cuda_stream_beside(struct kstream *ks, struct kstream **out, struct error *err)
{
    struct error unread;
    int lowest, highest;
    *out = NULL;
    if (!err)
        err = &unread;
    cudaError_t status = cudaDeviceGetStreamPriorityRange(&lowest, &highest);
    if (status != cudaSuccess)
        return device_error(err, status, "the priorities of streams");
    int rc = open_stream(highest, out, err);
    if (!rc)
        (*out)->sms = ks->sms;
    return rc;
}

void cuda_set_spare(struct kstream *ks, int processors)
{
    ks->spare = processors < ks->sms ? processors : 0;
}

void cuda_stream_destroy(struct kstream *ks)
{
    if (!ks)
        return;
    if (ks->stream)
        cudaStreamSynchronize(ks->stream);
    cuda_gemms_destroy(ks->gemms);
    cuda_attentions_destroy(ks->attentions);
    if (ks->lt)
        cublasLtDestroy(ks->lt);
    for (int i = 0; i < KSTREAM_MARKS; i++)
        if (ks->marks[i])
            cudaEventDestroy(ks->marks[i]);
    if (ks->stream)
        cudaStreamDestroy(ks->stream);
    free(ks);
}

static int take_fault(struct kstream *ks, struct error *err)
{
    enum error_code code = ks->fault.code;
    if (code != ERR_OK && err)
        *err = ks->fault;
    error_clear(&ks->fault);
    return code;
}

int cuda_stream_sync(struct kstream *ks, struct error *err)
{
    cuda_ok(ks, cudaStreamSynchronize(ks->stream), "waiting for the device");
    return take_fault(ks, err);
}

void cuda_set_scratch(struct kstream *ks, void *scratch, size_t bytes)
{
    ks->scratch = scratch;
    ks->scratch_bytes = bytes;
}

size_t cuda_scratch_bytes(const struct scratch_shape *shape)
{
    size_t sums = cuda_sums_scratch(shape);
    return sums > CUDA_GEMM_WORKSPACE ? sums : CUDA_GEMM_WORKSPACE;
}

/* ---- memory ----------------------------------------------------------------------------- */

/* What the context and the libraries of this process have of a device at most; plan_cuda_reserve() is the same. */
static const size_t OWN_BYTES = (size_t)1536 << 20;

/* By NCCL's allocator, so that other ranks' devices can be let into it; where the driver has no memory of that kind it
 * is cudaMalloc's. */
void *cuda_alloc(size_t bytes, struct error *err)
{
    void *p = NULL;
    cudaError_t device = cudaFree(NULL); /* the context, which NCCL takes for granted */
    if (device != cudaSuccess) {
        device_error(err, device, "memory for tensors");
        return NULL;
    }
    ncclResult_t status = bytes > SIZE_MAX / 2 ? ncclInvalidArgument : ncclMemAlloc(&p, bytes ? bytes : 1);
    if (status == ncclSuccess)
        return p;
    cudaGetLastError();
    size_t free_bytes = 0, total = 0;
    device = cudaMemGetInfo(&free_bytes, &total);
    if (device != cudaSuccess) {
        device_error(err, device, "memory for tensors");
        return NULL;
    }
    if (bytes <= free_bytes / 16 * 15) {
        const char *detail = ncclGetLastError(NULL);
        error_set(err, ERR_DEVICE, "memory for tensors: %zu MiB: %s%s%s", bytes >> 20, ncclGetErrorString(status),
                  detail && detail[0] ? ": " : "", detail ? detail : "");
        error_hint(err, "NCCL_CUMEM_ENABLE=0 in the environment of the job takes memory of another kind");
        return NULL;
    }
    bool fits_alone = total > OWN_BYTES && bytes <= total - OWN_BYTES;
    error_set(err, fits_alone ? ERR_DEVICE : ERR_NOMEM,
              "out of device memory: the rank asked for %zu MiB in one piece; %zu of the device's %zu MiB are free%s",
              bytes >> 20, free_bytes >> 20, total >> 20, fits_alone ? ", other processes have the rest" : "");
    error_hint(err, fits_alone ? "nvidia-smi shows what else runs on the device; end it"
                               : "use a smaller parallel.micro_batch, parallel.recompute or a larger parallel.tp");
    return NULL;
}

void cuda_release(void *p)
{
    if (!p)
        return;
    cudaDeviceSynchronize(); /* as cudaFree() does: its kernels may use it */
    if (ncclMemFree(p) != ncclSuccess)
        cudaGetLastError(); /* the stream's next call reports a broken device */
}

void *cuda_host_alloc(size_t bytes, struct error *err)
{
    void *p = NULL;
    cudaError_t status = cudaHostAlloc(&p, bytes ? bytes : 1, cudaHostAllocPortable);
    if (status == cudaSuccess)
        return p;
    device_error(err, status, "page-locked host memory");
    return NULL;
}

void cuda_host_release(void *p)
{
    if (p && cudaFreeHost(p) != cudaSuccess)
        cudaGetLastError();
}

void cuda_upload(struct kstream *ks, void *dst, const void *host, size_t bytes)
{
    if (bytes)
        cuda_ok(ks, cudaMemcpyAsync(dst, host, bytes, cudaMemcpyHostToDevice, ks->stream), "upload");
}

void cuda_download(struct kstream *ks, void *host, const void *src, size_t bytes)
{
    if (bytes)
        cuda_ok(ks, cudaMemcpyAsync(host, src, bytes, cudaMemcpyDeviceToHost, ks->stream), "download");
}

void cuda_zero(struct kstream *ks, void *dst, size_t bytes)
{
    if (bytes)
        cuda_ok(ks, cudaMemsetAsync(dst, 0, bytes, ks->stream), "zero");
}

void cuda_zero_each(struct kstream *ks, void *dst, size_t bytes, size_t stride, int64_t times)
{
    if (bytes && times > 0)
        cuda_ok(ks, cudaMemset2DAsync(dst, stride, 0, bytes, (size_t)times, ks->stream), "zero_each");
}

/* ---- marks -------------------------------------------------------------------------------- */

/* The captured sequence that the stream is recording into; 0: none. */
static bool capture_of(struct kstream *faults, struct kstream *ks, unsigned long long *id)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    *id = 0;
#if CUDART_VERSION >= 13000
    cudaError_t rc = cudaStreamGetCaptureInfo(ks->stream, &status, id, NULL, NULL, NULL, NULL);
#else
    cudaError_t rc = cudaStreamGetCaptureInfo(ks->stream, &status, id, NULL, NULL, NULL);
#endif
    if (!cuda_ok(faults, rc, "state of a captured sequence"))
        return false;
    if (status == cudaStreamCaptureStatusNone)
        *id = 0;
    return true;
}

void cuda_mark(struct kstream *ks, int slot)
{
    if (slot < 0 || slot >= KSTREAM_MARKS) {
        cuda_fault(ks, ERR_INTERNAL, "mark %d of %d", slot, KSTREAM_MARKS);
        return;
    }
    ks->marked[slot] =
        capture_of(ks, ks, &ks->marked_in[slot]) && cuda_ok(ks, cudaEventRecord(ks->marks[slot], ks->stream), "mark");
}

void cuda_await(struct kstream *ks, struct kstream *of, int slot)
{
    unsigned long long id;
    if (slot < 0 || slot >= KSTREAM_MARKS) {
        cuda_fault(ks, ERR_INTERNAL, "await of mark %d of %d", slot, KSTREAM_MARKS);
        return;
    }
    if (!of->marked[slot] || !capture_of(ks, ks, &id))
        return;
    /* A stream that does not record joins the sequence of the one that it awaits. */
    if (id == 0 && !capture_of(ks, of, &id))
        return;
    if (of->marked_in[slot] == id)
        cuda_ok(ks, cudaStreamWaitEvent(ks->stream, of->marks[slot], 0), "await");
}

/* ---- captured sequences --------------------------------------------------------------------- */

int cuda_capture_begin(struct kstream *ks, struct error *err)
{
    /* Thread-local: other ranks of the process may allocate meanwhile. */
    cudaError_t status = cudaStreamBeginCapture(ks->stream, cudaStreamCaptureModeThreadLocal);
    return status == cudaSuccess ? ERR_OK : device_error(err, status, "starting to capture");
}

int cuda_capture_end(struct kstream *ks, struct kgraph **out, struct error *err)
{
    cudaGraph_t graph = NULL;
    struct kgraph *g = NULL;
    *out = NULL;
    /* Ended whatever has happened, so that the stream is usable again; a fault on the way tells more than the
     * invalid sequence that it leaves. */
    cudaError_t status = cudaStreamEndCapture(ks->stream, &graph);
    int rc = take_fault(ks, err);
    if (!rc && status != cudaSuccess)
        rc = device_error(err, status, "ending a captured sequence");
    if (!rc && !(g = calloc(1, sizeof *g)))
        rc = error_set(err, ERR_NOMEM, "out of memory for a captured sequence");
    if (!rc && (status = cudaGraphInstantiate(&g->exec, graph, 0)) != cudaSuccess)
        rc = device_error(err, status, "making a captured sequence executable");
    if (!rc && (status = cudaGraphUpload(g->exec, ks->stream)) != cudaSuccess)
        rc = device_error(err, status, "loading a captured sequence");
    if (graph)
        cudaGraphDestroy(graph);
    if (rc) {
        cudaGetLastError();
        cuda_graph_destroy(g);
    } else {
        *out = g;
    }
    return rc;
}

void cuda_graph_launch(struct kstream *ks, const struct kgraph *graph)
{
    cuda_ok(ks, cudaGraphLaunch(graph->exec, ks->stream), "launching a captured sequence");
}

void cuda_graph_destroy(struct kgraph *graph)
{
    if (!graph)
        return;
    if (graph->exec)
        cudaGraphExecDestroy(graph->exec);
    free(graph);
}

/* ---- for profilers --------------------------------------------------------------------------- */

void cuda_range_begin(const char *name)
{
    nvtxRangePushA(name);
}

void cuda_range_end(void)
{
    nvtxRangePop();
}
