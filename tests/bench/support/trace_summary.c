/* trace.h: what a trace says. */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "tests/bench/support/trace.h"

enum { NAME_MAX_SHOWN = 96 };

const char *const trace_share_names[SHARE_COUNT] = {"gemm", "attention", "head", "element", "optimizer", "copy"};

/* A kernel: all its runs. */
struct entry {
    char name[NAME_MAX_SHOWN];
    enum trace_share share;
    int64_t runs;
    double ms;
};

/* ---- names ---- */

/* Of the C++ run time (the ABI's demangler). */
extern char *__cxa_demangle(const char *mangled, char *buffer, size_t *length, int *status);

static void cut(char *text, const char *what)
{
    size_t len = strlen(what);
    for (char *at = strstr(text, what); at; at = strstr(at, what))
        memmove(at, at + len, strlen(at + len) + 1);
}

/* The compiler's names of a file's own namespace. */
static void cut_internal(char *text)
{
    for (char *at = strstr(text, "_INTERNAL_"); at; at = strstr(text, "_INTERNAL_")) {
        char *end = strstr(at, "::");
        if (!end)
            return;
        memmove(at, end + 2, strlen(end + 2) + 1);
    }
}

/* Without its parameters: "each<8, glu_forward<true> >", "ce_max<8>". */
static void readable(const char *mangled, char out[NAME_MAX_SHOWN])
{
    int status = -1;
    char *whole = __cxa_demangle(mangled, NULL, NULL, &status);
    const char *from = status == 0 && whole ? whole : mangled;
    size_t len = strlen(from);
    char *text = malloc(len + 1);
    out[0] = 0;
    if (text) {
        memcpy(text, from, len + 1);
        cut(text, "(anonymous namespace)::");
        cut_internal(text);
        cut(text, "void ");
        int depth = 0;
        for (char *c = text; *c; c++) { /* the parameters begin at the first parenthesis outside template arguments */
            depth += (*c == '<') - (*c == '>');
            if (*c == '(' && depth == 0)
                *c = 0;
        }
        snprintf(out, NAME_MAX_SHOWN, "%s", text);
    }
    free(text);
    free(whole);
}

static bool has(const char *name, const char *const *words)
{
    for (; *words; words++)
        if (strstr(name, *words))
            return true;
    return false;
}

static bool begins(const char *name, const char *const *words)
{
    for (; *words; words++)
        if (!strncmp(name, *words, strlen(*words)))
            return true;
    return false;
}

/* By what the kernels of this repository and of NVIDIA's libraries are called. */
static enum trace_share share_of(const char *name)
{
    static const char *const copies[] = {"copy", "memset", NULL};
    static const char *const attention[] = {"cudnn", "fmha", "flash", "sdpa", "attention", NULL};
    static const char *const own_attention[] = {"forward", "backward_q", "backward_kv", "row_products", NULL};
    static const char *const gemms[] = {"nvjet", "gemm", "cutlass", "cublas", "xmma", "splitK", "splitk", NULL};
    static const char *const loss[] = {"ce_", "add_parts<false>", NULL};
    static const char *const optimizer[] = {"squares", "step_finish",     "decay_and_move",
                                            "adamw",   "add_parts<true>", NULL};
    if (!strcmp(name, copies[0]) || !strcmp(name, copies[1]))
        return SHARE_COPY;
    if (begins(name, loss))
        return SHARE_HEAD;
    if (begins(name, own_attention) || has(name, attention))
        return SHARE_ATTENTION;
    if (has(name, gemms))
        return SHARE_GEMM;
    return begins(name, optimizer) ? SHARE_OPTIMIZER : SHARE_ELEMENT;
}

/* ---- the summary ---- */

struct summing {
    struct entry *entries;
    int64_t n;
    int *of; /* [records] entry of each */
};

/* Names are few and repeat, and CUPTI gives every run of a kernel the same pointer. */
static int sort_into_entries(const struct trace *t, struct summing *s, struct error *err)
{
    const char **pointers = calloc((size_t)t->n, sizeof *pointers);
    s->entries = calloc((size_t)t->n, sizeof *s->entries);
    s->of = calloc((size_t)t->n, sizeof *s->of);
    if (!pointers || !s->entries || !s->of) {
        free(pointers);
        return error_set(err, ERR_NOMEM, "no memory for the summary of %lld records", (long long)t->n);
    }
    for (int64_t i = 0; i < t->n; i++) {
        int64_t k = 0;
        while (k < s->n && pointers[k] != t->records[i].name)
            k++;
        if (k == s->n) {
            pointers[s->n++] = t->records[i].name;
            readable(t->records[i].name, s->entries[k].name);
            s->entries[k].share = share_of(s->entries[k].name);
        }
        s->of[i] = (int)k;
    }
    free(pointers);
    return ERR_OK;
}

static bool is(const struct summing *s, int64_t i, const char *begin)
{
    return !strncmp(s->entries[s->of[i]].name, begin, strlen(begin));
}

/* The products of the head carry no name of their own: one stands before ce_max, two follow the gradient of the loss.
 */
static enum trace_share share_at(const struct trace *t, const struct summing *s, int64_t i)
{
    enum trace_share share = s->entries[s->of[i]].share;
    if (share != SHARE_GEMM)
        return share;
    if (i + 1 < t->n && is(s, i + 1, "ce_max"))
        return SHARE_HEAD;
    for (int64_t back = 1; back <= 2 && back <= i; back++) {
        if (s->entries[s->of[i - back]].share == SHARE_HEAD)
            return SHARE_HEAD;
        if (s->entries[s->of[i - back]].share != SHARE_GEMM)
            break;
    }
    return share;
}

static int by_time(const void *a, const void *b)
{
    const struct entry *x = a, *y = b;
    return (x->ms < y->ms) - (x->ms > y->ms);
}

static void print_table(struct summing *s, int steps, double span, FILE *out)
{
    qsort(s->entries, (size_t)s->n, sizeof *s->entries, by_time);
    fprintf(out, "%9s %7s %7s %9s  %-9s %s\n", "ms/step", "% step", "runs", "us each", "what", "kernel");
    for (int64_t k = 0; k < s->n; k++) {
        const struct entry *e = &s->entries[k];
        fprintf(out, "%9.3f %7.2f %7.1f %9.2f  %-9s %s\n", e->ms / steps, 100 * e->ms / span, (double)e->runs / steps,
                1e3 * e->ms / (double)e->runs, trace_share_names[e->share], e->name);
    }
}

int trace_summarize(const struct trace *t, int steps, FILE *table, struct trace_summary *out, struct error *err)
{
    struct summing s = {0};
    *out = (struct trace_summary){.launches = (double)t->n / steps};
    int rc = sort_into_entries(t, &s, err);
    uint64_t first = !rc && t->n ? t->records[0].start : 0, reached = first;
    double busy = 0;
    for (int64_t i = 0; i < t->n && !rc; i++) {
        const struct trace_record *r = &t->records[i];
        struct entry *e = &s.entries[s.of[i]];
        double ms = (double)(r->end - r->start) / 1e6;
        e->runs++;
        e->ms += ms;
        out->share_ms[share_at(t, &s, i)] += ms / steps;
        uint64_t from = r->start > reached ? r->start : reached;
        if (r->end > from) {
            busy += (double)(r->end - from) / 1e6;
            reached = r->end;
        }
    }
    if (!rc) {
        double span = (double)(reached - first) / 1e6;
        out->busy_ms = busy / steps;
        out->idle_ms = (span - busy) / steps;
        if (table)
            print_table(&s, steps, span, table);
    }
    free(s.entries);
    free(s.of);
    return rc;
}
