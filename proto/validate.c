/* validate.h: one table row a field, then the rules between fields. */
#include "proto/validate.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "proto/base/number.h"
#include "proto/constraint.h"
#include "proto/dependency.h"
#include "proto/jobfile.h"
#include "proto/nodelist.h"
#include "proto/reflect.h"

/* ---- faults, collected ---- */

struct faults {
    struct buffer text; /* separated by "; " */
    char hint[sizeof((struct error *)0)->hint];
    int shown, more;
};

enum {
    ROOM_FOR_COUNT = 24, /* "; and 123 more" */
    MAX_PAIRS = 256,     /* of env, the longer of the two lists of pairs */
    MAX_RANKS = 1 << 16,
};

static void fault(struct faults *all, const char *hint, const char *fmt, ...) PRINTF_LIKE(3, 4);
static void fault(struct faults *all, const char *hint, const char *fmt, ...)
{
    char text[sizeof((struct error *)0)->message / 2];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (all->more || buffer_printf(&all->text, "%s%s", all->shown ? "; " : "", text)) {
        all->more++;
        return;
    }
    if (!all->shown++)
        snprintf(all->hint, sizeof all->hint, "%s", hint);
}

/* ---- the table ---- */

enum flags {
    REQUIRED = 1,
    ABOVE_MIN = 2, /* min itself is outside */
    BELOW_MAX = 4, /* max itself is outside */
    GROUP = 8,     /* a sub-message whose absence hides that of its own fields */
};

struct row {
    const char *path; /* "data.train[].path": of every entry */
    int flags;
    double min, max; /* of numbers; of lists: how many entries */
    const char *mend;
};

#define ANY_NUMBER -INFINITY, INFINITY

static const struct row rows[] = {
    {"spec_version", REQUIRED, 1, 1, "write spec_version: 1, the only one that this build reads"},
    {"name", REQUIRED, ANY_NUMBER, "1 to 64 bytes of A-Z a-z 0-9 . _ -, e.g. name: \"cola-60m\""},
    {"priority", 0, 0, 100, "priority goes from 0 to 100, higher is placed first"},
    {"time_limit_s", 0, 0, 1e9, "seconds over all attempts, 0 for no limit"},
    {"stop_grace_s", 0, 0, 1e9, "seconds from SIGTERM to SIGKILL, 0 to derive it from step and checkpoint time"},
    {"after", 0, 0, 256, "at most 256 dependencies"},
    {"label", 0, 0, 64, "at most 64 labels"},
    {"label[].key", REQUIRED, ANY_NUMBER, "write label { key: \"team\" value: \"x\" }"},
    {"env", 0, 0, 256, "at most 256 variables"},
    {"env[].key", REQUIRED, ANY_NUMBER, "write env { key: \"NAME\" value: \"x\" }"},

    {"model", REQUIRED | GROUP, ANY_NUMBER,
     "add model { factorization: COLA hidden: 512 layers: 8 heads: 8 intermediate: 1376 rank: 128 vocab: 256 }"},
    {"model.factorization", REQUIRED, ANY_NUMBER, "choose factorization: FULL_RANK, SVD, COLA or LAX"},
    {"model.hidden", REQUIRED, 1, 1 << 20, "hidden is the width d of the model, a multiple of heads"},
    {"model.layers", REQUIRED, 1, 4096, "layers is the number of decoder blocks"},
    {"model.heads", REQUIRED, 1, 1 << 16, "heads is the number of attention heads, a divisor of hidden"},
    {"model.kv_heads", 0, 1, 1 << 16, "kv_heads divides heads; leave it out for kv_heads = heads"},
    {"model.intermediate", REQUIRED, 1, 1 << 22, "intermediate is the width f of the MLP"},
    {"model.rank", 0, 1, 1 << 20, "rank is the width r of the low-rank bottleneck, usually a quarter of hidden"},
    {"model.vocab", REQUIRED, 2, 1 << 24, "vocab is the number of token ids; 256 for text read as bytes"},
    {"model.rope_theta", ABOVE_MIN, 1, INFINITY, "rope_theta is usually 10000"},
    {"model.norm_eps", ABOVE_MIN, 0, 0.1, "norm_eps is usually 1e-6"},

    {"parallel.tp", 0, 1, MAX_RANKS, "tp is the tensor-parallel degree, 1 for none"},
    {"parallel.pp", 0, 1, MAX_RANKS, "pp is the number of pipeline stages, 1 for none"},
    {"parallel.dp", 0, 1, MAX_RANKS, "dp is the number of data-parallel replicas, 1 for none"},
    {"parallel.micro_batch", 0, 1, 1 << 20,
     "micro_batch is sequences a rank takes at once; leave it out to have it chosen"},
    {"parallel.global_batch", REQUIRED, 1, 1 << 24, "global_batch is sequences a step, a multiple of micro_batch * dp"},
    {"parallel.zero", 0, 0, 1, "zero: 1 shards the optimizer state over dp, 0 does not"},
    {"parallel.bucket_mib", 0, 1, 4096, "MiB a gradient bucket; leave it out for 64"},

    {"data", REQUIRED | GROUP, ANY_NUMBER, "add data { train { path: \"train.txt\" } seq_len: 256 }"},
    {"data.train", REQUIRED, 0, 4096, "add train { path: \"train.txt\" }; at most 4096 files"},
    {"data.train[].path", REQUIRED, ANY_NUMBER, "name the token file: train { path: \"train.txt\" }"},
    {"data.train[].weight", ABOVE_MIN, 0, INFINITY, "weight is the relative share of samples; leave it out for 1"},
    {"data.eval", 0, 0, 4096, "at most 4096 files"},
    {"data.eval[].path", REQUIRED, ANY_NUMBER, "name the token file: eval { path: \"val.txt\" }"},
    {"data.eval[].weight", ABOVE_MIN, 0, INFINITY, "leave it out for 1"},
    {"data.seq_len", REQUIRED, 1, 1 << 20, "seq_len is the tokens a sequence"},
    {"data.seed", 0, 0, INFINITY, "the seed of the sample order is 0 or more"},
    {"data.eod_id", 0, -1, (1 << 24) - 1, "eod_id is a token id, or -1 for none"},
    {"data.pad_id", 0, -1, (1 << 24) - 1, "pad_id is a token id, or -1 for none"},
    {"data.cache_max_mib", 0, 0, INFINITY, "MiB, 0 for no limit"},

    {"optimizer.lr", REQUIRED | ABOVE_MIN, 0, 10, "lr is the peak learning rate, e.g. lr: 1e-3"},
    {"optimizer.beta1", BELOW_MAX, 0, 1, "beta1 is usually 0.9"},
    {"optimizer.beta2", BELOW_MAX, 0, 1, "beta2 is usually 0.95"},
    {"optimizer.eps", ABOVE_MIN, 0, INFINITY, "eps is usually 1e-8"},
    {"optimizer.weight_decay", 0, 0, 10, "weight_decay is usually 0.01 to 0.1"},
    {"optimizer.grad_clip", 0, 0, INFINITY, "grad_clip is the largest global gradient norm, 0 for no clipping"},
    {"optimizer.warmup_steps", 0, 0, 1e9, "steps of linear warm-up, 0 for none"},
    {"optimizer.min_lr_ratio", 0, 0, 1, "the last learning rate as a share of the peak"},
    {"optimizer.wsd_decay_steps", 0, 0, 1e9, "steps of the final decay of schedule WSD"},
    {"optimizer.max_skipped", 0, 1, INFINITY, "updates in a row that may be skipped before the job fails, at least 1"},

    {"run.steps", REQUIRED, 1, 1e9, "steps is the number of updates, e.g. steps: 10000"},
    {"run.eval_every", 0, 0, 1e9, "steps between evaluations, 0 for none"},
    {"run.eval_tokens", 0, 1, INFINITY, "tokens an evaluation, rounded up to whole windows"},
    {"run.log_every", 0, 1, 1e9, "steps between metric records, at least 1"},
    {"run.seed", 0, 0, INFINITY, "the seed of the initial weights is 0 or more"},

    {"checkpoint.dir", REQUIRED, ANY_NUMBER,
     "name a directory that every node of the job sees: checkpoint { dir: \"ckpt\" }"},
    {"checkpoint.every_steps", 0, 0, 1e9, "steps between checkpoints, 0 for only at stop and at the end"},
    {"checkpoint.every_seconds", 0, 0, 1e9, "seconds between checkpoints under interval SECONDS"},
    {"checkpoint.keep", 0, 1, INFINITY, "the number of newest checkpoints kept, at least 1"},
    {"checkpoint.keep_every", 0, 0, 1e9, "steps divisible by this are kept as well, 0 for none"},
    {"checkpoint.write_mib_s", 0, 0, INFINITY, "MiB/s a rank, 0 for no cap"},

    {"resources.nodes", 0, 1, 1 << 16, "nodes of the job, at least 1"},
    {"resources.min_nodes", 0, 1, 1 << 16, "leave it out for min_nodes = nodes"},
    {"resources.devices_per_node", 0, 1, 1 << 16,
     "nodes * devices_per_node = tp * pp * dp; leave it out to have it derived"},
    {"resources.spares", 0, 0, 1 << 16, "spare nodes kept ready, 0 for none"},
    {"resources.threads_per_rank", 0, 0, 1024, "CPU threads a rank, 0 to share the cores evenly"},
    {"resources.memory_mib", 0, 0, 1e9, "MiB of the host a rank, 0 for its share of the node"},

    {"restart.max_restarts", 0, 0, INFINITY, "restarts for failures of the application, 0 for none"},
    {"restart.no_progress_limit", 0, 1, INFINITY,
     "attempts in a row without a later checkpoint before HELD, at least 1"},
};

enum { ROWS = sizeof rows / sizeof *rows };

static double number_at(const ProtobufCFieldDescriptor *f, const void *at)
{
    switch (f->type) {
    case PROTOBUF_C_TYPE_INT32:
        return *(const int32_t *)at;
    case PROTOBUF_C_TYPE_INT64:
        return (double)*(const int64_t *)at;
    case PROTOBUF_C_TYPE_DOUBLE:
        return *(const double *)at;
    default:
        return 0;
    }
}

static bool is_number(const ProtobufCFieldDescriptor *f)
{
    return f->type == PROTOBUF_C_TYPE_INT32 || f->type == PROTOBUF_C_TYPE_INT64 || f->type == PROTOBUF_C_TYPE_DOUBLE;
}

/* A bound without an exponent where that is short, for people. */
static const char *bound_text(double v, char out[NUMBER_TEXT])
{
    if (v == floor(v) && fabs(v) < 1e15)
        snprintf(out, NUMBER_TEXT, "%.0f", v);
    else
        number_from_double(v, out);
    return out;
}

/* "1 to 100", "greater than 0, at most 10", "0 or more". */
static void range_text(const struct row *row, char *out, size_t cap)
{
    char min[NUMBER_TEXT], max[NUMBER_TEXT];
    bound_text(row->min, min);
    bound_text(row->max, max);
    if (isinf(row->max))
        snprintf(out, cap, row->flags & ABOVE_MIN ? "greater than %s" : "%s or more", min);
    else if (row->flags & ABOVE_MIN)
        snprintf(out, cap, "greater than %s, at most %s", min, max);
    else
        snprintf(out, cap, row->flags & BELOW_MAX ? "%s to below %s" : "%s to %s", min, max);
}

static bool in_range(const struct row *row, double v)
{
    if (!isfinite(v))
        return false;
    bool low = row->flags & ABOVE_MIN ? v > row->min : v >= row->min;
    bool high = row->flags & BELOW_MAX ? v < row->max : v <= row->max;
    return low && high;
}

static void check_number(struct faults *all, const struct row *row, const char *path, const ProtobufCFieldDescriptor *f,
                         const void *at)
{
    if (in_range(row, number_at(f, at)))
        return;
    char value[NUMBER_TEXT], range[96];
    if (f->type == PROTOBUF_C_TYPE_DOUBLE)
        number_from_double(*(const double *)at, value);
    else if (f->type == PROTOBUF_C_TYPE_INT32)
        snprintf(value, sizeof value, "%" PRId32, *(const int32_t *)at);
    else
        snprintf(value, sizeof value, "%" PRId64, *(const int64_t *)at);
    if (row->min == row->max) {
        fault(all, row->mend, "%s = %s is not supported", path, value);
        return;
    }
    range_text(row, range, sizeof range);
    fault(all, row->mend, "%s = %s is out of range (%s)", path, value, range);
}

static bool parent_has_row(const char *path)
{
    const char *dot = strrchr(path, '.');
    if (!dot || strchr(path, '['))
        return false;
    for (int i = 0; i < ROWS; i++)
        if ((rows[i].flags & GROUP) && strlen(rows[i].path) == (size_t)(dot - path) &&
            strncmp(rows[i].path, path, (size_t)(dot - path)) == 0)
            return true;
    return false;
}

static void check_leaf(struct faults *all, const struct row *row, const char *path, const ProtobufCMessage *m,
                       const ProtobufCFieldDescriptor *f)
{
    size_t count = reflect_count(m, f);
    if (f->label == PROTOBUF_C_LABEL_REPEATED) {
        if ((row->flags & REQUIRED) && !count)
            fault(all, row->mend, "%s is required", path);
        if ((double)count > row->max)
            fault(all, row->mend, "%s has %zu entries, over the limit of %.0f", path, count, row->max);
        return;
    }
    if (!count) {
        if (row->flags & REQUIRED)
            fault(all, row->mend, "%s is required", path);
        return;
    }
    const void *at = reflect_get(m, f, 0);
    if (is_number(f))
        check_number(all, row, path, f, at);
    else if (f->type == PROTOBUF_C_TYPE_STRING && (row->flags & REQUIRED) && !**(char *const *)at)
        fault(all, row->mend, "%s is empty", path);
}

/* `rest` is what is left of the row's path, below message m (NULL: absent), which is at `path`. */
static void check_row(struct faults *all, const struct row *row, const char *rest,
                      const ProtobufCMessageDescriptor *type, const ProtobufCMessage *m, const char *path)
{
    size_t len = strcspn(rest, ".[");
    const ProtobufCFieldDescriptor *f = reflect_field(type, rest, len);
    const char *after = rest + len;
    char here[REFLECT_PATH];
    if (!f) {
        fault(all, "report this: it is a bug", "the validation table names a field that is not there: %s", row->path);
        return;
    }
    reflect_path(here, path, f->name, -1);
    if (!m) {
        if (!*after && (row->flags & REQUIRED) && !parent_has_row(row->path))
            fault(all, row->mend, "%s is required", here);
        else if (*after == '.')
            check_row(all, row, after + 1, f->descriptor, NULL, here);
        return;
    }
    if (!*after) {
        check_leaf(all, row, here, m, f);
    } else if (*after == '.') {
        const ProtobufCMessage *sub = reflect_count(m, f) ? *(ProtobufCMessage **)reflect_get(m, f, 0) : NULL;
        check_row(all, row, after + 1, f->descriptor, sub, here);
    } else {
        for (size_t i = 0; i < reflect_count(m, f); i++) {
            reflect_path(here, path, f->name, (long)i);
            check_row(all, row, after + 3, f->descriptor, *(ProtobufCMessage **)reflect_get(m, f, i), here);
        }
    }
}

/* Every enum has a name for its number and every double is finite, table row or not. */
static void check_values(struct faults *all, const ProtobufCMessage *m, const char *path)
{
    for (unsigned k = 0; k < m->descriptor->n_fields; k++) {
        const ProtobufCFieldDescriptor *f = &m->descriptor->fields[k];
        for (size_t i = 0; i < reflect_count(m, f); i++) {
            const void *at = reflect_get(m, f, i);
            char here[REFLECT_PATH];
            reflect_path(here, path, f->name, f->label == PROTOBUF_C_LABEL_REPEATED ? (long)i : -1);
            if (f->type == PROTOBUF_C_TYPE_MESSAGE)
                check_values(all, *(ProtobufCMessage *const *)at, here);
            if (f->type != PROTOBUF_C_TYPE_ENUM ||
                protobuf_c_enum_descriptor_get_value(f->descriptor, *(const int *)at))
                continue;
            struct error named;
            char digits[16];
            snprintf(digits, sizeof digits, "%d", *(const int *)at);
            reflect_unknown_enum_error(&named, "", here, f->descriptor, digits, strlen(digits));
            fault(all, "write the value's name", "%s", named.message);
        }
    }
}

/* ---- names ---- */

bool validate_name(const char *name)
{
    size_t len = strlen(name);
    return len >= 1 && len <= LIMIT_JOB_NAME &&
           strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-") == len;
}

/* The name as it may be shown: what a terminal or a log could take for a command becomes '?'. */
static void printable(const char *s, char *out, size_t cap)
{
    size_t n = 0;
    for (; *s && n + 1 < cap; s++)
        out[n++] = *s >= ' ' && *s < 0x7f ? *s : '?';
    out[n] = '\0';
}

static void check_names(struct faults *all, const Boost__JobSpec *spec)
{
    char shown[96];
    if (spec->name && *spec->name && !validate_name(spec->name)) {
        printable(spec->name, shown, sizeof shown);
        fault(all, "1 to 64 bytes of A-Z a-z 0-9 . _ -", "name '%s' is not allowed (%zu bytes)", shown,
              strlen(spec->name));
    }
    for (size_t i = 0; i < spec->n_after; i++) {
        const char *id = spec->after[i];
        enum dependency_kind kind;
        int64_t job;
        printable(id, shown, sizeof shown);
        if (!dependency_parse(id, &kind, &job))
            fault(all, "write after: \"afterok:17\" to wait until job 17 has COMPLETED",
                  "after[%zu] = '%s' is not a dependency (after, afterany, afterok or afternotok:<job>)", i, shown);
    }
}

static void add_fault(struct faults *all, const char *field, const struct error *err)
{
    fault(all, err->hint, "%s: %s", field, err->message);
}

static void check_placement(struct faults *all, const Boost__Resources *r)
{
    struct constraint c;
    struct error err;
    if (!r)
        return;
    if (r->constraint && constraint_compile(r->constraint, &c, &err))
        add_fault(all, "resources.constraint", &err);
    if (r->nodelist && nodelist_check(r->nodelist, &err))
        add_fault(all, "resources.nodelist", &err);
    if (r->exclude && nodelist_check(r->exclude, &err))
        add_fault(all, "resources.exclude", &err);
}

static void check_pairs(struct faults *all, const char *what, Boost__KeyValue *const *pairs, size_t n)
{
    char shown[96];
    for (size_t i = 0; i < n && n <= MAX_PAIRS; i++) { /* the table refuses longer lists; this is quadratic */
        const char *key = pairs[i]->key;
        if (!key || !*key)
            continue; /* the table says that it is required */
        printable(key, shown, sizeof shown);
        if (strchr(key, '='))
            fault(all, "write key: \"NAME\" value: \"x\"", "%s[%zu].key = '%s' holds a '='", what, i, shown);
        for (size_t j = 0; j < i; j++)
            if (pairs[j]->key && strcmp(pairs[j]->key, key) == 0) {
                fault(all, "keep one of the two", "%s '%s' is given twice ([%zu] and [%zu])", what, shown, j, i);
                break;
            }
    }
}

bool validate_env_is_ours(const char *key)
{
    static const char *const ours[] = {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "BOOST_RUN_DIR", "BOOST_ATTEMPT",
                                       "BOOST_RANK", "BOOST_LOCAL_RANK", "BOOST_WORLD", "BOOST_NODE"};
    for (size_t k = 0; k < sizeof ours / sizeof *ours; k++)
        if (!strcmp(key, ours[k]))
            return true;
    return false;
}

/* Each rank sees the devices that its node gives it, and no others; and is who its node says. */
static void check_env(struct faults *all, const Boost__JobSpec *spec)
{
    for (size_t i = 0; i < spec->n_env; i++) {
        const char *key = spec->env[i]->key;
        if (key && validate_env_is_ours(key))
            fault(all,
                  strncmp(key, "CUDA_", 5) ? "leave it out: a node tells each rank who it is"
                                           : "leave it out: a node gives each rank its GPU",
                  "env[%zu].key = '%s' is set by the node", i, key);
    }
}

/* ---- rules between fields ---- */

static void check_model(struct faults *all, const Boost__Model *m, const Boost__Parallel *p)
{
    if (!m->has_factorization)
        return;
    bool full_rank = m->factorization == BOOST__FACTORIZATION__VALUE__FULL_RANK;
    bool lax = m->factorization == BOOST__FACTORIZATION__VALUE__LAX;
    if (full_rank && m->has_rank)
        fault(all, "leave rank out, or choose factorization SVD, COLA or LAX",
              "model.rank does not apply to factorization FULL_RANK");
    if (!full_rank && !m->has_rank)
        fault(all, "add rank to model, usually a quarter of hidden", "model.rank is required unless FULL_RANK");
    if (!lax && m->has_lax_base)
        fault(all, "leave it out, or choose factorization: LAX", "model.lax_base applies to factorization LAX only");
    if (!lax && m->has_lax_gate)
        fault(all, "leave it out, or choose factorization: LAX", "model.lax_gate applies to factorization LAX only");
    if (!p || !p->has_strategy)
        return;
    bool full = p->strategy == BOOST__STRATEGY__VALUE__FULL;
    if (full && !full_rank)
        fault(all, "choose strategy BTP or VANILLA for a low-rank model",
              "parallel.strategy FULL applies to factorization FULL_RANK only");
    if (!full && full_rank)
        fault(all, "choose strategy FULL, or leave strategy out",
              "model.factorization FULL_RANK needs parallel.strategy FULL");
}

static void check_parallel(struct faults *all, const Boost__Parallel *p)
{
    bool vanilla = p->has_strategy && p->strategy == BOOST__STRATEGY__VALUE__VANILLA;
    if (p->has_vanilla_attention && !vanilla)
        fault(all, "leave it out, or choose strategy: VANILLA",
              "parallel.vanilla_attention applies to strategy VANILLA only");
    double ranks = (double)p->tp * p->pp * p->dp;
    bool alone = p->tp > MAX_RANKS || p->pp > MAX_RANKS || p->dp > MAX_RANKS; /* the table tells */
    if (p->tp > 0 && p->pp > 0 && p->dp > 0 && !alone && ranks > MAX_RANKS)
        fault(all, "lower one of the three", "tp * pp * dp = %.0f is over the limit of 65536 ranks", ranks);
}

/* Of the URL no more than its kind is said: it may hold a password. */
static bool can_fetch(struct faults *all, const char *url, const char *field)
{
    if (jobfile_is_fetched(url))
        return true;
    size_t kind = (size_t)(strstr(url, "://") - url);
    fault(all, "write http://, https:// or s3://; what the nodes have is named by its path alone",
          "%s: %.*s:// is no URL that can be fetched", field, (int)(kind < 20 ? kind : 20), url);
    return false;
}

static void check_urls(struct faults *all, const Boost__Data *d, Boost__TokenFile *const *files, size_t n,
                       const char *what)
{
    for (size_t i = 0; i < n; i++) {
        const char *path = files[i]->path ? files[i]->path : "", *end = path + strcspn(path, "?#");
        char field[64];
        snprintf(field, sizeof field, "data.%s[%zu].path", what, i);
        if (!jobfile_is_url(path) || !can_fetch(all, path, field))
            continue;
        if (!d->cache_dir || !*d->cache_dir)
            fault(all, "set data.cache_dir to a directory of each node, where files by URL are kept",
                  "data.%s[%zu].path is a URL and needs data.cache_dir", what, i);
        if (d->format == BOOST__FORMAT__VALUE__MEGATRON || (end - path > 4 && !strncmp(end - 4, ".idx", 4)))
            fault(all, "fetch both files to each node and name one by its path",
                  "data.%s[%zu].path: a MEGATRON pair is two files, fetching it by URL is not built in this version",
                  what, i);
    }
}

static void check_data(struct faults *all, const Boost__JobSpec *spec)
{
    const Boost__Data *d = spec->data;
    check_urls(all, d, d->train, d->n_train, "train");
    check_urls(all, d, d->eval, d->n_eval, "eval");
    if (spec->model && spec->model->has_vocab) {
        const int32_t vocab = spec->model->vocab;
        if (d->eod_id >= vocab)
            fault(all, "token ids are below vocab", "data.eod_id = %d is not below model.vocab = %d", d->eod_id, vocab);
        if (d->pad_id >= vocab)
            fault(all, "token ids are below vocab", "data.pad_id = %d is not below model.vocab = %d", d->pad_id, vocab);
    }
    if (d->mask_eod && d->eod_id < 0)
        fault(all, "set eod_id to the end-of-document token, or leave mask_eod out", "data.mask_eod needs data.eod_id");
    if (spec->run && spec->run->eval_every > 0 && !d->n_eval)
        fault(all, "add eval { path: ... } to data, or leave eval_every out",
              "run.eval_every = %" PRId64 " needs data.eval", spec->run->eval_every);
    if (spec->run && spec->parallel && spec->run->steps > 0 && spec->parallel->global_batch > 0 && d->seq_len > 0 &&
        (double)spec->run->steps * spec->parallel->global_batch * d->seq_len > 0x1p62)
        fault(all, "lower run.steps", "run.steps * parallel.global_batch * data.seq_len is over 2^62 tokens");
}

static void check_optimizer(struct faults *all, const Boost__Optimizer *o)
{
    if (o->wsd_decay_steps > 0 && o->schedule != BOOST__SCHEDULE__VALUE__WSD)
        fault(all, "leave it out, or choose schedule: WSD", "optimizer.wsd_decay_steps applies to schedule WSD only");
}

/* With "/<store id>-<job>/step-<n>.a<k>" behind it, it has to fit into what ranks and agents have for a path. */
enum { CHECKPOINT_DIR_MAX = 900 };

static void check_checkpoint(struct faults *all, const Boost__Checkpoint *c, const Boost__Data *d)
{
    if (c->dir && strlen(c->dir) > CHECKPOINT_DIR_MAX)
        fault(all, "name a directory with a shorter path, or a link to it",
              "checkpoint.dir has %zu bytes, the limit is %d", strlen(c->dir), CHECKPOINT_DIR_MAX);
    if (c->every_steps > 0 && c->interval != BOOST__INTERVAL__VALUE__STEPS)
        fault(all, "leave it out, or choose interval: STEPS", "checkpoint.every_steps applies to interval STEPS only");
    if (c->every_seconds > 0 && c->interval != BOOST__INTERVAL__VALUE__SECONDS)
        fault(all, "leave it out, or choose interval: SECONDS",
              "checkpoint.every_seconds applies to interval SECONDS only");
    if (c->interval == BOOST__INTERVAL__VALUE__SECONDS && c->every_seconds == 0)
        fault(all, "add every_seconds to checkpoint, e.g. every_seconds: 600",
              "checkpoint.interval SECONDS needs checkpoint.every_seconds");
    if (c->mirror && *c->mirror && strncmp(c->mirror, "s3://", 5) != 0)
        fault(all, "write mirror: \"s3://bucket/prefix\"", "checkpoint.mirror is not an s3:// address");
    if (jobfile_is_url(c->dir))
        fault(all, "set checkpoint.dir to a directory that all nodes see, and checkpoint.mirror to s3://bucket/prefix for "
              "copies", "checkpoint.dir is a URL: ranks write into directories alone");
    const Boost__InitFrom *from = c->init_from;
    if (from && jobfile_is_url(from->path) && can_fetch(all, from->path, "checkpoint.init_from.path") &&
        (!d || !d->cache_dir || !*d->cache_dir))
        fault(all, "set data.cache_dir to a directory of each node, where files by URL are kept",
              "checkpoint.init_from.path is a URL and needs data.cache_dir");
    if (from && from->weights_only && (!from->path || !*from->path))
        fault(all, "add path to init_from, or leave init_from out",
              "checkpoint.init_from.weights_only needs checkpoint.init_from.path");
}

static bool known_event(const char *word, size_t len)
{
    static const char *const events[] = {"failed", "recovered", "completed"};
    for (size_t i = 0; i < sizeof events / sizeof *events; i++)
        if (strlen(events[i]) == len && memcmp(events[i], word, len) == 0)
            return true;
    return false;
}

static void check_notify(struct faults *all, const Boost__Notify *n)
{
    const char *word = n->events ? n->events : "";
    bool events = *word, url = n->url && *n->url;
    while (*word) {
        size_t len = strcspn(word, ",");
        if (!known_event(word, len)) {
            char shown[64];
            printable(word, shown, len < sizeof shown ? len + 1 : sizeof shown);
            fault(all, "events is a list like \"failed,recovered,completed\"",
                  "notify.events: '%s' is none of failed, recovered, completed", shown);
        }
        word += len;
        if (*word == ',' && !*++word)
            fault(all, "events is a list like \"failed,recovered,completed\"", "notify.events ends in a comma");
    }
    if (url && strncmp(n->url, "https://", 8) != 0 && strncmp(n->url, "http://", 7) != 0)
        fault(all, "write url: \"https://...\"", "notify.url is not an http:// or https:// address");
    if (!url && events)
        fault(all, "add url to notify, or leave events out", "notify.events needs notify.url");
    if (!url && n->secret_file && *n->secret_file)
        fault(all, "add url to notify, or leave secret_file out", "notify.secret_file needs notify.url");
}

static void check_between(struct faults *all, const Boost__JobSpec *spec)
{
    if (spec->model)
        check_model(all, spec->model, spec->parallel);
    if (spec->parallel)
        check_parallel(all, spec->parallel);
    if (spec->data)
        check_data(all, spec);
    if (spec->optimizer)
        check_optimizer(all, spec->optimizer);
    if (spec->checkpoint)
        check_checkpoint(all, spec->checkpoint, spec->data);
    if (spec->resources && spec->resources->has_min_nodes && spec->resources->min_nodes > spec->resources->nodes)
        fault(all, "min_nodes is at most nodes", "resources.min_nodes = %d is over resources.nodes = %d",
              spec->resources->min_nodes, spec->resources->nodes);
    if (spec->notify)
        check_notify(all, spec->notify);
}

int validate_job_spec(const Boost__JobSpec *spec, struct error *err)
{
    struct faults all = {.shown = 0};
    buffer_init(&all.text, sizeof err->message - ROOM_FOR_COUNT);
    for (int i = 0; i < ROWS; i++)
        check_row(&all, &rows[i], rows[i].path, spec->base.descriptor, &spec->base, "");
    check_values(&all, &spec->base, "");
    check_names(&all, spec);
    check_placement(&all, spec->resources);
    check_pairs(&all, "label", spec->label, spec->n_label);
    check_pairs(&all, "env", spec->env, spec->n_env);
    check_env(&all, spec);
    check_between(&all, spec);
    int rc = ERR_OK;
    if (all.shown && all.more)
        rc = error_set(err, ERR_INVALID, "%s; and %d more", (char *)all.text.data, all.more);
    else if (all.shown || all.more)
        rc = error_set(err, ERR_INVALID, "%s", all.shown ? (char *)all.text.data : "no memory to say what is wrong");
    if (all.shown)
        error_hint(err, "%s", all.hint);
    buffer_free(&all.text);
    return rc;
}
