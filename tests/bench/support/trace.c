/* trace.h: recording. CUPTI is opened by hand, since only a profile needs it. */
#include "tests/bench/support/trace.h"

#include <stdlib.h>

#if __has_include(<cupti.h>)
#include <cupti.h>
#endif

#if defined(CUPTI_API_VERSION) && CUPTI_API_VERSION >= 130000
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>

enum { BUFFER_BYTES = 8 << 20 };

static struct {
    CUptiResult (*register_callbacks)(CUpti_BuffersCallbackRequestFunc, CUpti_BuffersCallbackCompleteFunc);
    CUptiResult (*enable)(CUpti_ActivityKind);
    CUptiResult (*disable)(CUpti_ActivityKind);
    CUptiResult (*flush)(uint32_t);
    CUptiResult (*next)(uint8_t *, size_t, CUpti_Activity **);
    CUptiResult (*text)(CUptiResult, const char **);
} cupti;
static const CUpti_ActivityKind kinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
                                           CUPTI_ACTIVITY_KIND_MEMSET};
enum { KINDS = sizeof kinds / sizeof *kinds };

/* Filled by a thread of CUPTI's. */
static struct {
    pthread_mutex_t lock;
    struct trace trace;
    int64_t room;
} recorded = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int failed(struct error *err, CUptiResult status, const char *what)
{
    const char *text = NULL;
    if (cupti.text)
        cupti.text(status, &text);
    return error_set(err, ERR_UNSUPPORTED, "CUPTI: %s: %s (%d)", what, text ? text : "?", (int)status);
}

static void add(uint64_t start, uint64_t end, const char *name)
{
    struct trace *t = &recorded.trace;
    if (t->n == recorded.room) {
        int64_t room = recorded.room ? 2 * recorded.room : 1 << 14;
        struct trace_record *more = realloc(t->records, (size_t)room * sizeof *more);
        if (!more) {
            t->lost++;
            return;
        }
        t->records = more;
        recorded.room = room;
    }
    t->records[t->n++] = (struct trace_record){start, end, name};
}

static void take(const CUpti_Activity *record)
{
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
        const CUpti_ActivityKernel10 *k = (const CUpti_ActivityKernel10 *)record;
        add(k->start, k->end, k->name ? k->name : "?");
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
        const CUpti_ActivityMemcpy6 *c = (const CUpti_ActivityMemcpy6 *)record;
        add(c->start, c->end, "copy");
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
        const CUpti_ActivityMemset4 *s = (const CUpti_ActivityMemset4 *)record;
        add(s->start, s->end, "memset");
    }
}

static void CUPTIAPI give_buffer(uint8_t **buffer, size_t *size, size_t *most)
{
    *buffer = aligned_alloc(8, BUFFER_BYTES);
    *size = *buffer ? BUFFER_BYTES : 0;
    *most = 0;
}

static void CUPTIAPI take_buffer(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid)
{
    CUpti_Activity *record = NULL;
    (void)context, (void)stream, (void)size;
    pthread_mutex_lock(&recorded.lock);
    while (valid && cupti.next(buffer, valid, &record) == CUPTI_SUCCESS)
        take(record);
    pthread_mutex_unlock(&recorded.lock);
    free(buffer);
}

static bool symbol(void *library, const char *name, void *out)
{
    void *found = dlsym(library, name);
    memcpy(out, &found, sizeof found);
    return found != NULL;
}

static void *open_library(void)
{
    static const char *const places[] = {
        "libcupti.so.13",
        "/usr/local/cuda/extras/CUPTI/lib64/libcupti.so.13",
        "/usr/local/cuda/lib64/libcupti.so.13",
    };
    const char *given = getenv("BOOST_CUPTI");
    void *library = given && *given ? dlopen(given, RTLD_NOW) : NULL;
    for (size_t i = 0; i < sizeof places / sizeof *places && !library; i++)
        library = dlopen(places[i], RTLD_NOW);
    return library;
}

int trace_open(struct error *err)
{
    void *library = open_library();
    if (!library) {
        error_set(err, ERR_UNSUPPORTED, "CUPTI cannot be loaded: %s", dlerror());
        return error_hint(err, "name libcupti.so.13 in BOOST_CUPTI");
    }
    if (!symbol(library, "cuptiActivityRegisterCallbacks", &cupti.register_callbacks) ||
        !symbol(library, "cuptiActivityEnable", &cupti.enable) ||
        !symbol(library, "cuptiActivityDisable", &cupti.disable) ||
        !symbol(library, "cuptiActivityFlushAll", &cupti.flush) ||
        !symbol(library, "cuptiActivityGetNextRecord", &cupti.next) ||
        !symbol(library, "cuptiGetResultString", &cupti.text))
        return error_set(err, ERR_UNSUPPORTED, "this CUPTI lacks a function of its activity records");
    CUptiResult status = cupti.register_callbacks(give_buffer, take_buffer);
    for (int i = 0; i < KINDS && status == CUPTI_SUCCESS; i++)
        status = cupti.enable(kinds[i]);
    return status == CUPTI_SUCCESS ? ERR_OK : failed(err, status, "asking for activity records");
}

int trace_begin(struct error *err)
{
    CUptiResult status = cupti.flush(1);
    if (status != CUPTI_SUCCESS)
        return failed(err, status, "emptying its buffers");
    pthread_mutex_lock(&recorded.lock);
    recorded.trace.n = recorded.trace.lost = 0;
    pthread_mutex_unlock(&recorded.lock);
    return ERR_OK;
}

static int by_start(const void *a, const void *b)
{
    const struct trace_record *x = a, *y = b;
    return (x->start > y->start) - (x->start < y->start);
}

int trace_end(struct trace *out, struct error *err)
{
    *out = (struct trace){0};
    CUptiResult status = cupti.flush(1);
    if (status != CUPTI_SUCCESS)
        return failed(err, status, "emptying its buffers");
    pthread_mutex_lock(&recorded.lock);
    *out = recorded.trace;
    recorded.trace = (struct trace){0};
    recorded.room = 0;
    pthread_mutex_unlock(&recorded.lock);
    if (out->n == 0)
        return error_set(err, ERR_UNSUPPORTED, "CUPTI recorded nothing on this machine");
    qsort(out->records, (size_t)out->n, sizeof *out->records, by_start);
    return ERR_OK;
}

void trace_close(void)
{
    for (int i = 0; i < KINDS; i++)
        cupti.disable(kinds[i]);
}
#else
int trace_open(struct error *err)
{
    error_set(err, ERR_UNSUPPORTED, "this build has no CUPTI");
    return error_hint(err, "build with the CUDA toolkit 13 and its cupti.h");
}
int trace_begin(struct error *err)
{
    return trace_open(err);
}
int trace_end(struct trace *out, struct error *err)
{
    *out = (struct trace){0};
    return trace_open(err);
}
void trace_close(void)
{
}
#endif

void trace_free(struct trace *t)
{
    free(t->records);
    *t = (struct trace){0};
}
