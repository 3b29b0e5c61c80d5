/* data.h */
#include "worker/data.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/jobfile.h"

/* More files than this are opened anew for each window, so that a rank stays far below its limit of descriptors. */
enum { KEPT_OPEN = 64 };

static int open_set(struct token_set *set, Boost__TokenFile **files, size_t n, const char *what, const struct data *d,
                    const Boost__Data *x, struct error *err)
{
    set->files = calloc(n, sizeof *set->files);
    if (n && !set->files)
        return error_set(err, ERR_NOMEM, "no memory for %zu token files", n);
    for (size_t i = 0; i < n; i++) {
        if (!files[i]->path)
            return error_set(err, ERR_INVALID, "data.%s[%zu] has no path", what, i);
        if (jobfile_is_url(files[i]->path)) {
            error_set(err, ERR_UNSUPPORTED, "data.%s[%zu]: %s is fetched by boost-agent, not by a rank", what, i,
                      files[i]->path);
            return error_hint(err, "name a file of this machine, or submit the job");
        }
        struct token_file *f = &set->files[i];
        int rc = token_file_open(f, files[i]->path, x->format, d->plan->s, d->plan->V, err);
        if (rc)
            return rc;
        set->n++;
        set->windows += f->windows;
        if (x->n_train + x->n_eval > KEPT_OPEN)
            token_file_rest(f);
    }
    return ERR_OK;
}

static void close_set(struct token_set *set)
{
    for (int i = 0; i < set->n; i++)
        token_file_close(&set->files[i]);
    free(set->files);
    *set = (struct token_set){.n = 0};
}

static int mix_files(struct data *d, const Boost__Data *x, struct error *err)
{
    double *weights = calloc(x->n_train, sizeof *weights);
    if (!weights)
        return error_set(err, ERR_NOMEM, "no memory for %zu weights", x->n_train);
    for (size_t i = 0; i < x->n_train; i++)
        weights[i] = x->train[i]->weight;
    int rc = data_mixture_make(&d->mixture, weights, (int)x->n_train, err);
    free(weights);
    return rc;
}

static int open_files(struct data *d, const Boost__JobSpec *spec, struct error *err)
{
    const Boost__Data *x = spec->data;
    if (!x->n_train)
        return error_set(err, ERR_INVALID, "data.train is missing");
    int rc = open_set(&d->train, x->train, x->n_train, "train", d, x, err);
    if (!rc)
        rc = mix_files(d, x, err);
    if (rc || !x->n_eval)
        return rc;
    rc = open_set(&d->eval, x->eval, x->n_eval, "eval", d, x, err);
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
    close_set(&d->train);
    close_set(&d->eval);
    data_mixture_free(&d->mixture);
    free(d->tokens);
    free(d->inputs);
    free(d->targets);
    free(d->micro);
    *d = (struct data){.plan = NULL};
}

/* Row `row` of micro-batch `m` := the window; masked targets are -1. */
static int fill_row(struct data *d, struct token_file *f, int64_t window, int64_t m, int64_t row, struct error *err)
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

void data_sample(const struct data *d, int64_t sample, int *file, int64_t *window)
{
    int64_t number;
    data_mixture_at(&d->mixture, sample, file, &number);
    int64_t n = d->train.files[*file].windows;
    *window = data_permute(data_file_seed(d->plan->data_seed, *file), number / n, n, number % n);
}

void data_describe(const struct data *d, int i, char *out, size_t cap)
{
    const struct token_file *f = &d->train.files[i];
    snprintf(out, cap, "data.train[%d]: %s, %" PRId64 " tokens, %" PRId64 " windows, %d of %d samples", i, f->path,
             f->tokens, f->windows, d->mixture.share[i], d->mixture.period);
}

int data_train(struct data *d, int64_t step, const struct micro_batch **out, struct error *err)
{
    const struct plan *p = d->plan;
    int64_t start = (step - 1) * p->global_batch;
    for (int64_t m = 0; m < p->accumulation; m++) {
        for (int64_t j = 0; j < p->micro_batch; j++) {
            int64_t sample = start + (m * p->dp + d->dp_index) * p->micro_batch + j;
            int file;
            int64_t window;
            data_sample(d, sample, &file, &window);
            int rc = fill_row(d, &d->train.files[file], window, m, j, err);
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
            int64_t window = spread(k, d->eval_windows, d->eval.windows);
            int file = 0;
            for (; window >= d->eval.files[file].windows; file++)
                window -= d->eval.files[file].windows;
            int rc = fill_row(d, &d->eval.files[file], window, 0, j, err);
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
