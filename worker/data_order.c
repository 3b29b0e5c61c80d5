/* data_order.h */
#include "worker/data_order.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

/* Finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014). */
static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

int64_t data_permute(uint64_t seed, int64_t epoch, int64_t n, int64_t i)
{
    enum { ROUNDS = 6 };
    uint64_t key = mix(seed + UINT64_C(0x9e3779b97f4a7c15));
    key = mix(key ^ mix((uint64_t)epoch + UINT64_C(0x3c6ef372fe94f82b)));
    int half = 1; /* bits of each half */
    while (half < 31 && INT64_C(1) << 2 * half < n)
        half++;
    uint64_t mask = (UINT64_C(1) << half) - 1, x = (uint64_t)i;
    do {
        uint64_t left = x >> half, right = x & mask;
        for (uint64_t round = 0; round < ROUNDS; round++) {
            uint64_t next = left ^ (mix(right ^ mix(key + round)) & mask);
            left = right;
            right = next;
        }
        x = left << half | right;
    } while (x >= (uint64_t)n);
    return (int64_t)x;
}

uint64_t data_file_seed(uint64_t seed, int file)
{
    return file ? mix(seed ^ mix((uint64_t)file + UINT64_C(0xa54ff53a5f1d36f1))) : seed;
}

/* ---- mixture ------------------------------------------------------------------ */

/* Shares of a period that are whole numbers; false: there are none. */
static bool whole_shares(const double *weights, int n, double sum, int32_t period, int32_t *share)
{
    static const double tolerance = 1e-9;
    int64_t total = 0;
    for (int i = 0; i < n; i++) {
        double part = weights[i] / sum * period, whole = round(part);
        if (whole < 1 || fabs(part - whole) > tolerance)
            return false;
        share[i] = (int32_t)whole;
        total += share[i];
    }
    return total == period;
}

/* Each end of a file's part of the period rounded: neighbours stay neighbours, so the sum is the period. */
static void rounded_shares(const double *weights, int n, double sum, int32_t period, int32_t *share)
{
    double end = 0;
    int32_t last = 0;
    for (int i = 0; i < n; i++) {
        end += weights[i];
        int32_t rounded = i == n - 1 ? period : (int32_t)round(fmin(end / sum, 1) * period);
        share[i] = rounded - last;
        last = rounded;
    }
}

static int choose_shares(struct data_mixture *m, const double *weights, struct error *err)
{
    double sum = 0;
    for (int i = 0; i < m->files; i++)
        sum += weights[i];
    for (m->period = 1; m->period <= MIXTURE_PERIOD_MAX; m->period++)
        if (whole_shares(weights, m->files, sum, m->period, m->share))
            return ERR_OK;
    m->period = MIXTURE_PERIOD_MAX;
    rounded_shares(weights, m->files, sum, m->period, m->share);
    for (int i = 0; i < m->files; i++)
        if (m->share[i] < 1) {
            error_set(err, ERR_INVALID, "data.train[%d].weight = %g is less than one part in %d of all weights", i,
                      weights[i], MIXTURE_PERIOD_MAX);
            return error_hint(err, "raise it, or leave the file out");
        }
    return ERR_OK;
}

/* A heap of the files whose next sample may be given now, the one that must be given first on top. */
struct waiting {
    int64_t *deadline; /* [files] */
    int *heap;
    int n;
};

static bool before(const struct waiting *w, int a, int b)
{
    return w->deadline[a] != w->deadline[b] ? w->deadline[a] < w->deadline[b] : a < b;
}

static void push(struct waiting *w, int file)
{
    int at = w->n++;
    for (; at > 0 && before(w, file, w->heap[(at - 1) / 2]); at = (at - 1) / 2)
        w->heap[at] = w->heap[(at - 1) / 2];
    w->heap[at] = file;
}

static int pop(struct waiting *w)
{
    int top = w->heap[0], last = w->heap[--w->n], at = 0;
    for (int child = 1; child < w->n; child = 2 * at + 1) {
        if (child + 1 < w->n && before(w, w->heap[child + 1], w->heap[child]))
            child++;
        if (!before(w, w->heap[child], last))
            break;
        w->heap[at] = w->heap[child];
        at = child;
    }
    w->heap[at] = last;
    return top;
}

/* Sample c of a file may be given from c period/share on, and must be given before (c+1) period/share; the
 * earliest deadline goes first (Baruah, Cohen, Plaxton, Varvel, Algorithmica 15, 1996: windows of this shape
 * can always be met). `first` and `next` list the files by when their next sample may be given. */
static void spread(struct data_mixture *m, struct waiting *w, int32_t *first, int32_t *next, int32_t *given)
{
    for (int32_t n = 0; n < m->period; n++)
        first[n] = -1;
    for (int f = m->files - 1; f >= 0; f--) {
        given[f] = 0;
        next[f] = first[0];
        first[0] = f;
    }
    for (int32_t n = 0; n < m->period; n++) {
        for (int32_t f = first[n], then; f >= 0; f = then) {
            then = next[f];
            w->deadline[f] = ((int64_t)(given[f] + 1) * m->period + m->share[f] - 1) / m->share[f];
            push(w, f);
        }
        int f = pop(w);
        m->file[n] = (uint16_t)f;
        m->turn[n] = given[f]++;
        if (given[f] == m->share[f])
            continue;
        int64_t from = (int64_t)given[f] * m->period / m->share[f];
        int32_t at = from > n ? (int32_t)from : n + 1;
        next[f] = first[at];
        first[at] = f;
    }
}

int data_mixture_make(struct data_mixture *m, const double *weights, int files, struct error *err)
{
    size_t n = (size_t)files;
    *m = (struct data_mixture){.files = files};
    struct waiting w = {.deadline = calloc(n, sizeof *w.deadline), .heap = calloc(n, sizeof *w.heap)};
    int32_t *first = NULL, *next = calloc(n, sizeof *next), *given = calloc(n, sizeof *given);
    m->share = calloc(n, sizeof *m->share);
    int rc = ERR_OK;
    if (!w.deadline || !w.heap || !next || !given || !m->share || files > MIXTURE_FILES_MAX) {
        rc = error_set(err, ERR_NOMEM, "no memory to mix %d training files", files);
        goto out;
    }
    rc = choose_shares(m, weights, err);
    if (rc)
        goto out;
    first = calloc((size_t)m->period, sizeof *first);
    m->file = calloc((size_t)m->period, sizeof *m->file);
    m->turn = calloc((size_t)m->period, sizeof *m->turn);
    if (!first || !m->file || !m->turn)
        rc = error_set(err, ERR_NOMEM, "no memory to mix %d training files", files);
    else
        spread(m, &w, first, next, given);
out:
    free(w.deadline);
    free(w.heap);
    free(first);
    free(next);
    free(given);
    if (rc)
        data_mixture_free(m);
    return rc;
}

void data_mixture_free(struct data_mixture *m)
{
    free(m->share);
    free(m->file);
    free(m->turn);
    *m = (struct data_mixture){.files = 0};
}

void data_mixture_at(const struct data_mixture *m, int64_t sample, int *file, int64_t *number)
{
    int64_t at = sample % m->period;
    *file = m->file[at];
    *number = sample / m->period * m->share[*file] + m->turn[at];
}
