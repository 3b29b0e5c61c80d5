/* data.h */
#include "worker/data.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- token files ------------------------------------------------------------ */

static int token_bytes_of(Boost__Format__Value format, const char *path, int *out, struct error *err)
{
    switch (format) {
    case BOOST__FORMAT__VALUE__TEXT:
        *out = 1;
        return ERR_OK;
    case BOOST__FORMAT__VALUE__U16:
        *out = 2;
        return ERR_OK;
    case BOOST__FORMAT__VALUE__U32:
        *out = 4;
        return ERR_OK;
    default:
        error_set(err, ERR_UNSUPPORTED, "%s: this version reads token files of format TEXT, U16 and U32", path);
        return error_hint(err, "set data.format to TEXT (bytes), U16 or U32 (little-endian ids)");
    }
}

static int check_size(struct token_file *f, int64_t bytes, struct error *err)
{
    if (bytes % f->token_bytes) {
        error_set(err, ERR_INVALID, "%s: %lld bytes are not a whole number of %d-byte tokens", f->path,
                  (long long)bytes, f->token_bytes);
        return error_hint(err, "the file is cut short, or data.format is not its format");
    }
    f->tokens = bytes / f->token_bytes;
    f->windows = f->tokens > f->s ? (f->tokens - 1) / f->s : 0;
    if (f->windows < 1) {
        error_set(err, ERR_INVALID, "%s: %lld tokens are fewer than one window of seq_len + 1 = %lld", f->path,
                  (long long)f->tokens, (long long)f->s + 1);
        return error_hint(err, "give a longer file or set data.seq_len to at most %lld",
                          (long long)(f->tokens > 1 ? f->tokens - 1 : 1));
    }
    return ERR_OK;
}

int token_file_open(struct token_file *f, const char *path, Boost__Format__Value format, int64_t s, int64_t vocab,
                    struct error *err)
{
    *f = (struct token_file){.fd = -1, .s = s, .vocab = vocab};
    int rc = token_bytes_of(format, path, &f->token_bytes, err);
    if (rc)
        return rc;
    f->path = strdup(path);
    if (!f->path)
        return error_set(err, ERR_NOMEM, "out of memory");
    f->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not block here */
    struct stat st;
    if (f->fd < 0) {
        rc = error_errno(err, errno, "cannot open token file %s", path);
        error_hint(err, "data files are opened on the node that trains, as the job's user");
    } else if (fstat(f->fd, &st) < 0) {
        rc = error_errno(err, errno, "cannot read the size of %s", path);
    } else if (!S_ISREG(st.st_mode)) {
        rc = error_set(err, ERR_INVALID, "%s is not a regular file", path);
    } else {
        rc = check_size(f, st.st_size, err);
    }
    if (rc)
        token_file_close(f);
    return rc;
}

void token_file_close(struct token_file *f)
{
    if (f->fd >= 0)
        close(f->fd);
    free(f->path);
    f->path = NULL;
    f->fd = -1;
}

static int read_exact(const struct token_file *f, void *out, size_t bytes, int64_t offset, struct error *err)
{
    size_t done = 0;
    while (done < bytes) {
        ssize_t n = pread(f->fd, (char *)out + done, bytes - done, offset + (int64_t)done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return error_errno(err, errno, "cannot read %s at byte %lld", f->path, (long long)offset + (int64_t)done);
        if (n == 0) {
            error_set(err, ERR_INVALID, "%s ends before byte %lld, it was longer when training began", f->path,
                      (long long)offset + (int64_t)done);
            return error_hint(err, "token files must not change while a job uses them");
        }
        done += (size_t)n;
    }
    return ERR_OK;
}

/* Widens in place, from the end, so that one buffer is enough. */
static void widen(int32_t *tokens, int64_t n, int token_bytes)
{
    const uint8_t *raw = (const uint8_t *)tokens;
    for (int64_t i = n - 1; i >= 0; i--) {
        const uint8_t *p = raw + i * token_bytes;
        uint32_t id = p[0];
        for (int b = 1; b < token_bytes; b++)
            id |= (uint32_t)p[b] << 8 * b;
        memcpy(&tokens[i], &id, sizeof id);
    }
}

int token_file_window(const struct token_file *f, int64_t window, int32_t *out, struct error *err)
{
    int64_t n = f->s + 1, first = window * f->s;
    int rc = read_exact(f, out, (size_t)n * (size_t)f->token_bytes, first * f->token_bytes, err);
    if (rc)
        return rc;
    widen(out, n, f->token_bytes);
    for (int64_t i = 0; i < n; i++) {
        if (out[i] >= 0 && out[i] < f->vocab)
            continue;
        error_set(err, ERR_INVALID, "%s: token id %lu at token %lld is not below the vocabulary of %lld", f->path,
                  (unsigned long)(uint32_t)out[i], (long long)(first + i), (long long)f->vocab);
        return error_hint(err, "set model.vocab above every id of the file, or check data.format");
    }
    return ERR_OK;
}

/* ---- order ------------------------------------------------------------------ */

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

/* ---- batches ---------------------------------------------------------------- */

static int one_file(Boost__TokenFile **files, size_t n, const char *what, struct error *err)
{
    if (n > 1) {
        error_set(err, ERR_UNSUPPORTED, "data.%s has %zu files; mixing files is not built in this version", what, n);
        return error_hint(err, "concatenate the token files into one");
    }
    if (!files[0]->path)
        return error_set(err, ERR_INVALID, "data.%s has no path", what);
    return ERR_OK;
}

static int open_files(struct data *d, const Boost__JobSpec *spec, struct error *err)
{
    const Boost__Data *x = spec->data;
    if (!x->n_train)
        return error_set(err, ERR_INVALID, "data.train is missing");
    int rc = one_file(x->train, x->n_train, "train", err);
    if (!rc)
        rc = token_file_open(&d->train, x->train[0]->path, x->format, d->plan->s, d->plan->V, err);
    if (rc || !x->n_eval)
        return rc;
    rc = one_file(x->eval, x->n_eval, "eval", err);
    if (!rc)
        rc = token_file_open(&d->eval, x->eval[0]->path, x->format, d->plan->s, d->plan->V, err);
    if (rc)
        return rc;
    d->has_eval = true;
    int64_t want = spec->run->eval_tokens / d->plan->s + (spec->run->eval_tokens % d->plan->s != 0);
    d->eval_windows = want < 1 ? 1 : want < d->eval.windows ? want : d->eval.windows;
    return ERR_OK;
}

int data_open(struct data *d, const Boost__JobSpec *spec, const struct plan *plan, int rank, struct error *err)
{
    *d = (struct data){.plan = plan,
                       .train.fd = -1,
                       .eval.fd = -1,
                       .dp_index = rank / plan->tp % plan->dp,
                       .eod_id = spec->data->eod_id,
                       .pad_id = spec->data->pad_id,
                       .mask_eod = spec->data->mask_eod};
    int rc = open_files(d, spec, err);
    if (rc)
        goto out;
    size_t n = (size_t)plan->accumulation, T = (size_t)plan->T;
    d->tokens = calloc((size_t)plan->s + 1, sizeof *d->tokens);
    d->inputs = calloc(n * T, sizeof *d->inputs);
    d->targets = calloc(n * T, sizeof *d->targets);
    d->micro = calloc(n, sizeof *d->micro);
    if (!d->tokens || !d->inputs || !d->targets || !d->micro) {
        rc = error_set(err, ERR_NOMEM, "no memory for %zu micro-batches of %zu tokens", n, T);
        goto out;
    }
    for (size_t i = 0; i < n; i++)
        d->micro[i] = (struct micro_batch){.inputs = d->inputs + i * T, .targets = d->targets + i * T};
out:
    if (rc)
        data_close(d);
    return rc;
}

void data_close(struct data *d)
{
    token_file_close(&d->train);
    token_file_close(&d->eval);
    free(d->tokens);
    free(d->inputs);
    free(d->targets);
    free(d->micro);
    *d = (struct data){.train.fd = -1, .eval.fd = -1};
}

/* Row `row` of micro-batch `m` := the window; masked targets are -1. */
static int fill_row(struct data *d, const struct token_file *f, int64_t window, int64_t m, int64_t row,
                    struct error *err)
{
    int rc = token_file_window(f, window, d->tokens, err);
    if (rc)
        return rc;
    int64_t s = d->plan->s, at = m * d->plan->T + row * s;
    for (int64_t i = 0; i < s; i++) {
        int32_t input = d->tokens[i], target = d->tokens[i + 1];
        bool masked = (d->pad_id >= 0 && target == d->pad_id) || (d->mask_eod && input == d->eod_id);
        d->inputs[at + i] = input;
        d->targets[at + i] = masked ? -1 : target;
    }
    return ERR_OK;
}

int data_train(struct data *d, int64_t step, const struct micro_batch **out, struct error *err)
{
    const struct plan *p = d->plan;
    int64_t start = (step - 1) * p->global_batch, n = d->train.windows;
    for (int64_t m = 0; m < p->accumulation; m++) {
        for (int64_t j = 0; j < p->micro_batch; j++) {
            int64_t sample = start + (m * p->dp + d->dp_index) * p->micro_batch + j;
            int64_t window = data_permute(p->data_seed, sample / n, n, sample % n);
            int rc = fill_row(d, &d->train, window, m, j, err);
            if (rc)
                return rc;
        }
    }
    *out = d->micro;
    return ERR_OK;
}

void data_range(const struct data *d, int64_t step, int64_t *first, int64_t *last)
{
    *first = (step - 1) * d->plan->global_batch;
    *last = *first + d->plan->global_batch - 1;
}

int64_t data_eval_count(const struct data *d)
{
    return d->has_eval ? (d->eval_windows + d->plan->micro_batch - 1) / d->plan->micro_batch : 0;
}

/* The k-th of `n` windows spread evenly over `all`, without overflow of k * all. */
static int64_t spread(int64_t k, int64_t n, int64_t all)
{
    return k * (all / n) + k * (all % n) / n;
}

int data_eval(struct data *d, int64_t i, const struct micro_batch **out, struct error *err)
{
    const struct plan *p = d->plan;
    for (int64_t j = 0; j < p->micro_batch; j++) {
        int64_t k = i * p->micro_batch + j;
        if (k < d->eval_windows) {
            int rc = fill_row(d, &d->eval, spread(k, d->eval_windows, d->eval.windows), 0, j, err);
            if (rc)
                return rc;
            continue;
        }
        for (int64_t x = 0; x < p->s; x++) {
            d->inputs[j * p->s + x] = 0;
            d->targets[j * p->s + x] = -1;
        }
    }
    *out = d->micro;
    return ERR_OK;
}
