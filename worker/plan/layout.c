/* What can be laid out: divisibility, and options that apply to the strategy at all.
 * Rules of every strategy, built or not, so that a message about a job's shape does
 * not depend on what this version happens to run. */
#include "worker/plan/internal.h"
#include "worker/plan/plan.h"

#include <float.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "proto/tokenfile.h"

static int64_t gcd(int64_t a, int64_t b)
{
    while (b) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* "1, 2, 3, 6": the divisors of n, at most the first 16. */
static const char *divisors(int64_t n, char *out, size_t cap)
{
    enum { SHOWN = 16, LARGEST_TRIED = 65536 };
    size_t used = 0;
    int shown = 0;
    out[0] = '\0';
    for (int64_t i = 1; i <= n && i <= LARGEST_TRIED && used + 1 < cap; i++) {
        if (n % i)
            continue;
        if (shown++ == SHOWN) {
            snprintf(out + used, cap - used, ", ...");
            break;
        }
        int wrote = snprintf(out + used, cap - used, "%s%lld", used ? ", " : "", (long long)i);
        used += wrote > 0 ? (size_t)wrote : 0;
    }
    return out;
}

/* The multiples of `step` on both sides of n: "6 or 8" (only the upper one below the first). */
static const char *neighbours(int64_t n, int64_t step, char *out, size_t cap)
{
    int64_t below = n / step * step;
    if (below > 0)
        snprintf(out, cap, "%lld or %lld", (long long)below, (long long)(below + step));
    else
        snprintf(out, cap, "%lld", (long long)step);
    return out;
}

static bool heads_fit(int64_t hidden, int64_t heads, int64_t kv_heads)
{
    return hidden % heads == 0 && hidden / heads % 2 == 0 && heads % kv_heads == 0;
}

static void check_heads(struct faults *f, const Boost__Model *m)
{
    char near[64], mend[160];
    if (m->hidden % m->heads) {
        snprintf(mend, sizeof mend, "set model.hidden: %s", neighbours(m->hidden, 2 * (int64_t)m->heads, near, sizeof near));
        faults_add(f, mend, "model.hidden = %d is not a multiple of model.heads = %d; nearest: %s", m->hidden, m->heads,
                   near);
        return;
    }
    if (m->hidden / m->heads % 2)
        faults_add(f, "choose model.hidden and model.heads so that their quotient is even",
                   "model.hidden / model.heads = %d is odd, and rotary positions need an even head width",
                   m->hidden / m->heads);
    int64_t hk = spec_kv_heads(m);
    if (m->heads % hk) {
        snprintf(mend, sizeof mend, "set model.kv_heads to one of %s", divisors(m->heads, near, sizeof near));
        faults_add(f, mend, "model.kv_heads = %lld does not divide model.heads = %d", (long long)hk, m->heads);
    }
}

/* A width that parallel.tp divides where the strategy cuts it. */
struct width {
    const char *name;
    int64_t value;
    bool applies;
};
enum { HEADS, KV_HEADS, INTERMEDIATE, HIDDEN, RANK, WIDTHS };

/* Whether `value` in the place of width `which` alone meets every rule of the widths. */
static bool mends(const struct width *widths, int which, int64_t value, bool kv_follows, int64_t t)
{
    int64_t v[WIDTHS];
    for (int i = 0; i < WIDTHS; i++)
        v[i] = i == which ? value : widths[i].value;
    if (kv_follows)
        v[KV_HEADS] = v[HEADS];
    for (int i = 0; i < WIDTHS; i++)
        if (widths[i].applies && v[i] % t)
            return false;
    return heads_fit(v[HIDDEN], v[HEADS], v[KV_HEADS]);
}

/* ", or model.heads: 4 or 8": the nearest values of this width alone that mend it; "" when none near does. */
static const char *other_width(const struct width *widths, int which, bool kv_follows, int64_t t, char *out, size_t cap)
{
    enum { TRIED = 1024 };
    int64_t first = widths[which].value / t * t, below = 0, above = 0;
    for (int64_t k = 0; k < TRIED && first - k * t > 0 && !below; k++)
        if (mends(widths, which, first - k * t, kv_follows, t))
            below = first - k * t;
    for (int64_t k = 1; k <= TRIED && !above; k++)
        if (mends(widths, which, first + k * t, kv_follows, t))
            above = first + k * t;
    if (below && above)
        snprintf(out, cap, ", or model.%s: %lld or %lld", widths[which].name, (long long)below, (long long)above);
    else if (below || above)
        snprintf(out, cap, ", or model.%s: %lld", widths[which].name, (long long)(below ? below : above));
    else
        out[0] = '\0';
    return out;
}

static void check_tp(struct faults *f, const Boost__JobSpec *spec)
{
    const Boost__Model *m = spec_model(spec);
    int64_t t = spec_parallel(spec)->tp;
    const struct plan_cut *cut = plan_cut_of(spec_strategy(spec), spec_parallel(spec)->vanilla_attention ==
                                                                      BOOST__VANILLA_ATTENTION__VALUE__PUBLISHED);
    const struct width widths[WIDTHS] = {
        [HEADS] = {"heads", m->heads, cut->heads},
        [KV_HEADS] = {"kv_heads", spec_kv_heads(m), cut->heads},
        [INTERMEDIATE] = {"intermediate", m->intermediate, cut->mlp},
        [HIDDEN] = {"hidden", m->hidden, cut->hidden},
        [RANK] = {"rank", m->rank, cut->latent},
    };
    int64_t all = 0;
    for (int i = 0; i < WIDTHS; i++)
        if (widths[i].applies)
            all = gcd(widths[i].value, all);
    char legal[128], other[96], mend[320];
    divisors(all, legal, sizeof legal);
    for (int i = 0; i < WIDTHS; i++) {
        if (!widths[i].applies || widths[i].value % t == 0)
            continue;
        if (widths[i].value == widths[HEADS].value && i == KV_HEADS)
            continue; /* kv_heads follows heads: said once */
        snprintf(mend, sizeof mend, "set parallel.tp to one of %s%s", legal,
                 other_width(widths, i, !m->has_kv_heads, t, other, sizeof other));
        faults_add(f, mend, "model.%s = %lld is not divisible by parallel.tp = %lld; legal tp here: %s", widths[i].name,
                   (long long)widths[i].value, (long long)t, legal);
    }
}

static void check_batch(struct faults *f, const Boost__JobSpec *spec)
{
    const Boost__Parallel *par = spec_parallel(spec);
    int64_t s = spec_data(spec)->seq_len;
    int64_t micro = par->has_micro_batch ? par->micro_batch : 1;
    char near[64], mend[160];
    if (par->global_batch % (micro * par->dp)) {
        neighbours(par->global_batch, micro * par->dp, near, sizeof near);
        snprintf(mend, sizeof mend, "set parallel.global_batch: %s", near);
        if (par->has_micro_batch)
            faults_add(f, mend,
                       "parallel.global_batch = %d is not a multiple of parallel.micro_batch * parallel.dp = %d * %d",
                       par->global_batch, par->micro_batch, par->dp);
        else
            faults_add(f, mend, "parallel.global_batch = %d is not a multiple of parallel.dp = %d", par->global_batch,
                       par->dp);
    }
    if (micro * s > INT32_MAX)
        faults_add(f, "lower parallel.micro_batch or data.seq_len",
                   "a micro-batch of parallel.micro_batch * data.seq_len = %lld tokens is above %d",
                   (long long)(micro * s), INT32_MAX);
}

/* Every stage has a layer. */
static void check_stages(struct faults *f, const Boost__JobSpec *spec)
{
    int pp = spec_parallel(spec)->pp, layers = spec_model(spec)->layers;
    char mend[96];
    if (pp <= layers)
        return;
    snprintf(mend, sizeof mend, "set parallel.pp to at most %d", layers);
    faults_add(f, mend, "parallel.pp = %d stages are more than model.layers = %d", pp, layers);
}

static void check_devices(struct faults *f, const Boost__JobSpec *spec)
{
    const Boost__Parallel *par = spec_parallel(spec);
    const Boost__Resources *res = spec_resources(spec);
    int64_t world = (int64_t)par->tp * par->pp * par->dp; /* at most 65536, by proto/validate */
    char mend[160];
    if (res->has_devices_per_node && (int64_t)res->nodes * res->devices_per_node != world) {
        snprintf(mend, sizeof mend, "leave resources.devices_per_node out, or make resources.nodes * it %lld",
                 (long long)world);
        faults_add(f, mend, "resources.nodes * devices_per_node = %d * %d is not parallel.tp * pp * dp = %lld",
                   res->nodes, res->devices_per_node, (long long)world);
    } else if (world % res->nodes) {
        snprintf(mend, sizeof mend, "set resources.nodes to a divisor of %lld", (long long)world);
        faults_add(f, mend, "parallel.tp * pp * dp = %lld ranks do not spread evenly over resources.nodes = %d",
                   (long long)world, res->nodes);
    } else if (res->has_min_nodes && res->min_nodes < res->nodes && !plan_replicas_on(spec, res->min_nodes)) {
        int n = res->min_nodes;
        while (n < res->nodes && !plan_replicas_on(spec, n))
            n++;
        snprintf(mend, sizeof mend, "set resources.min_nodes: %d", n);
        faults_add(f, mend,
                   "resources.min_nodes = %d nodes hold no whole replicas (tp * pp = %lld ranks each), or not so many that "
                   "they divide parallel.global_batch = %d",
                   res->min_nodes, (long long)par->tp * par->pp, par->global_batch);
    }
}

/* One format for all files: a rank reads train and eval with the same reader. */
static void check_formats(struct faults *f, const Boost__Data *d)
{
    if (d->format != BOOST__FORMAT__VALUE__AUTO || !d->n_train)
        return;
    Boost__Format__Value first = spec_format(d);
    const struct {
        const char *list;
        size_t n;
        Boost__TokenFile **files;
    } lists[] = {{"train", d->n_train, d->train}, {"eval", d->n_eval, d->eval}};
    for (int l = 0; l < 2; l++)
        for (size_t i = 0; i < lists[l].n; i++)
            if (token_format_of_name(lists[l].files[i]->path) != first)
                faults_add(f, "set data.format",
                           "data.%s[%zu].path and data.train[0].path differ in their format by name", lists[l].list, i);
}

/* A sample is taken by parts of the sum of weights (worker/data_order.h): less than one part is never taken. */
static void check_weights(struct faults *f, const Boost__Data *d)
{
    static const double parts = 1 << 20;
    double sum = 0;
    for (size_t i = 0; i < d->n_train; i++)
        sum += d->train[i]->weight;
    if (sum > DBL_MAX)
        faults_add(f, "divide all weights by the largest", "the sum of data.train weights is not finite");
    for (size_t i = 0; i < d->n_train && sum <= DBL_MAX; i++)
        if (d->train[i]->weight < sum / parts)
            faults_add(f, "raise it, or leave the file out",
                       "data.train[%zu].weight = %g is less than one part in %.0f of all weights", i,
                       d->train[i]->weight, parts);
}

/* Explicit options that have no meaning for this job and that proto/validate leaves to the layout. */
static void check_applies(struct faults *f, const Boost__JobSpec *spec)
{
    const Boost__Model *m = spec_model(spec);
    const Boost__Parallel *par = spec_parallel(spec);
    bool full_rank = m->factorization == BOOST__FACTORIZATION__VALUE__FULL_RANK;
    bool btp = spec_strategy(spec) == BOOST__STRATEGY__VALUE__BTP;
    enum { BUCKET_MIB = 64 }; /* the default, which a resolved job carries */
    if (!btp && par->norm != BOOST__NORM__VALUE__AUTO)
        faults_add(f, "leave parallel.norm out", "parallel.norm applies to strategy BTP only");
    if (!btp && par->overlap == BOOST__SWITCH__VALUE__ON)
        faults_add(f, "leave parallel.overlap out", "parallel.overlap: ON applies to strategy BTP only");
    if (full_rank && par->grouped != BOOST__SWITCH__VALUE__AUTO) /* a site of dense layers is one fan, always */
        faults_add(f, "leave parallel.grouped out", "parallel.grouped applies to low-rank models only");
    if (full_rank && par->recompute == BOOST__RECOMPUTE__VALUE__LOW_RANK)
        faults_add(f, "set parallel.recompute: LAYER",
                   "parallel.recompute: LOW_RANK needs latents, and FULL_RANK has none");
    if (par->dp == 1 && par->bucket_mib != BUCKET_MIB)
        faults_add(f, "leave parallel.bucket_mib out, or raise parallel.dp",
                   "parallel.bucket_mib = %d cuts the gradients that travel over parallel.dp, which is 1",
                   par->bucket_mib);
    if (par->zero == 1 && par->dp == 1)
        faults_add(f, "leave parallel.zero out, or raise parallel.dp",
                   "parallel.zero = 1 shards over parallel.dp, which is 1");
}

int layout_check(const Boost__JobSpec *spec, struct error *err)
{
    struct faults f = {.err = err, .code = ERR_INVALID};
    const Boost__Model *m = spec_model(spec);
    check_applies(&f, spec);
    check_heads(&f, m);
    if (!spec_parallel(spec)->auto_)
        check_tp(&f, spec);
    check_stages(&f, spec);
    check_batch(&f, spec);
    check_devices(&f, spec);
    check_formats(&f, spec_data(spec));
    check_weights(&f, spec_data(spec));
    return faults_end(&f);
}
