/* cpu.h: streams, their faults, and memory. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "kernels/cpu/cpu.h"

enum { ALIGNMENT = 256, HUGE_PAGE = 2 << 20 };

void cpu_fault(struct kstream *ks, enum error_code code, const char *fmt, ...)
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

bool cpu_gemm_valid(struct kstream *ks, const struct gemm *g)
{
    int64_t row_a = g->trans_a ? g->m : g->k, row_b = g->trans_b ? g->k : g->n;
    bool sizes = g->m >= 1 && g->n >= 1 && g->k >= 1 && g->batch >= 1;
    if (sizes && g->lda >= row_a && g->ldb >= row_b && g->ldc >= g->n && !(g->add && g->c_grad))
        return true;
    cpu_fault(ks, ERR_INTERNAL, "a matrix product with m=%lld n=%lld k=%lld batch=%d lda=%lld ldb=%lld ldc=%lld%s",
              (long long)g->m, (long long)g->n, (long long)g->k, g->batch, (long long)g->lda, (long long)g->ldb,
              (long long)g->ldc, g->add && g->c_grad ? ", a gradient to a matrix apart" : "");
    return false;
}

int cpu_stream_create(int threads, struct kstream **out, struct error *err)
{
    *out = NULL;
    if (threads < 1)
        return error_set(err, ERR_INVALID, "a kernel stream needs at least one thread, not %d", threads);
    struct kstream *ks = calloc(1, sizeof *ks);
    if (!ks)
        return error_set(err, ERR_NOMEM, "out of memory for a kernel stream");
    ks->threads = threads;
    *out = ks;
    return ERR_OK;
}

void cpu_stream_destroy(struct kstream *ks)
{
    if (!ks)
        return;
    free(ks->rope.cosine);
    free(ks->rope.sine);
    free(ks->scratch.at);
    free(ks);
}

int cpu_stream_sync(struct kstream *ks, struct error *err)
{
    enum error_code code = ks->fault.code;
    if (code == ERR_OK)
        return ERR_OK;
    if (err)
        *err = ks->fault;
    error_clear(&ks->fault);
    return code;
}

double cpu_gemm_seconds(struct kstream *ks)
{
    return (double)ks->gemm_ns / (double)NS_PER_S;
}

void *cpu_alloc(size_t bytes, struct error *err)
{
    /* Zero bytes still give a pointer to release. */
    size_t rounded = bytes ? (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT : ALIGNMENT;
    void *p = NULL;
    if (rounded < bytes || posix_memalign(&p, rounded < HUGE_PAGE ? ALIGNMENT : HUGE_PAGE, rounded))
        p = NULL;
    /* A step streams through all of its memory, and a product packs operands whose rows lie apart: with small pages
     * that is a miss of the TLB every few rows. A wish only; and no more than was asked for becomes resident. */
    if (p && rounded >= HUGE_PAGE)
        (void)madvise(p, rounded / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE);
    if (!p) {
        error_set(err, ERR_NOMEM, "out of memory: the rank asked for %zu MiB in one piece", bytes >> 20);
        error_hint(err, "use a smaller parallel.micro_batch or data.seq_len, or a larger parallel.tp");
    }
    return p;
}

void cpu_release(void *p)
{
    free(p);
}

void cpu_upload(struct kstream *ks, void *dst, const void *host, size_t bytes)
{
    (void)ks;
    if (bytes)
        memcpy(dst, host, bytes);
}

void cpu_download(struct kstream *ks, void *host, const void *src, size_t bytes)
{
    (void)ks;
    if (bytes)
        memcpy(host, src, bytes);
}

void cpu_zero(struct kstream *ks, void *dst, size_t bytes)
{
    (void)ks;
    if (bytes)
        memset(dst, 0, bytes);
}

void cpu_zero_each(struct kstream *ks, void *dst, size_t bytes, size_t stride, int64_t times)
{
    for (int64_t i = 0; i < times; i++)
        cpu_zero(ks, (char *)dst + (size_t)i * stride, bytes);
}
