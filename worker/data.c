/* data.h */
#include "worker/data.h"

#include <stdlib.h>

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
static int fill_row(struct data *d, struct token_file *f, int64_t window, int64_t m, int64_t row,
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
