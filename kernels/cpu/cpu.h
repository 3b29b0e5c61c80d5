/* What the CPU backends share: the stream, memory, casts and the scalar part of the
 * update. "Enqueue" here means "run now", so a stream is only its settings, its
 * sticky fault and its clock. */
#ifndef BOOST_KERNELS_CPU_CPU_H
#define BOOST_KERNELS_CPU_CPU_H

#include "kernels/kernels.h"
#include "proto/base/clock.h"

/* cos and sin of every (position, pair) of the last rope() shape, kept because they cost
 * more than the rotation. [s, e/2] each; made when the shape first appears. */
struct rope_table {
    int64_t s, e;
    double theta;
    float *cosine, *sine;
};

struct fp32_loops;

struct kstream {
    int threads;
    const struct fp32_loops *loops; /* fp32 only */
    int64_t gemm_ns;
    struct error fault; /* the first since the last sync; code ERR_OK = none */
    struct rope_table rope;
    struct { /* bf16 only: fp32 copies */
        float *at;
        int64_t floats;
    } scratch;
};

/* Remembers the first fault of the stream. */
void cpu_fault(struct kstream *ks, enum error_code code, const char *fmt, ...) PRINTF_LIKE(3, 4);

/* False, and a fault of the stream, for sizes below 1 or a leading dimension shorter than a row. */
bool cpu_gemm_valid(struct kstream *ks, const struct gemm *g);

/* Entries of the table that do not depend on the backend's precision. */
int cpu_stream_create(int threads, struct kstream **out, struct error *err);
void cpu_stream_destroy(struct kstream *ks);
int cpu_stream_sync(struct kstream *ks, struct error *err);
double cpu_gemm_seconds(struct kstream *ks);
void *cpu_alloc(size_t bytes, struct error *err);
void cpu_release(void *p);
void cpu_upload(struct kstream *ks, void *dst, const void *host, size_t bytes);
void cpu_download(struct kstream *ks, void *host, const void *src, size_t bytes);
void cpu_zero(struct kstream *ks, void *dst, size_t bytes);
void cpu_zero_each(struct kstream *ks, void *dst, size_t bytes, size_t stride, int64_t times);
void cpu_cast(struct kstream *ks, enum dtype to, void *dst, enum dtype from, const void *src, int64_t n);
void cpu_step_finish(struct kstream *ks, struct step_block *block, double beta1, double beta2, double clip);

#endif
