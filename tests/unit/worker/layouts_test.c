/* Any mix of what is computed, how it is cut, and what is kept equals one rank (layouts.h): a list that covers every
 * valid pair of values of two factors; with BOOST_PRODUCT_SECONDS all combinations, as many as the time allows.
 * time limit: 240 s */
#include "tests/unit/worker/layouts.h"

#include "proto/base/clock.h"

static struct tiny base(void)
{
    struct tiny c = tiny_default;
    c.d = 16;
    c.h = c.hk = 8;
    c.r = 4; /* VANILLA cuts the latent */
    c.L = 4;
    c.micro = 1;
    c.global = 8;
    return c;
}

/* ---- factors ---- */

/* The first ones constrain each other, as plan_validate() says; the others go with everything. */
enum factor {
    WAY, /* model and strategy in one, so that a pair is a triple of theirs */
    TP,
    DP,
    NORM,
    GROUPED,
    RECOMPUTE,
    OVERLAP,
    ZERO,
    HEADS,
    BUCKETS,
    CONSTRAINED,
    PP = CONSTRAINED,
    TIED,
    VOCABULARY,
    BATCHES,
    FACTORS,
    MAX_VALUES = 40,
};
static const int values[FACTORS] = {40, 3, 3, 2, 2, 3, 2, 2, 2, 2, 3, 2, 2, 3};

static const struct {
    struct tiny_way way;
    bool mlp_silu;
} models[] = {
    {{.name = "FULL_RANK", .factorization = FULL_RANK}, true},
    {{.name = "SVD", .factorization = SVD}, true},
    {{.name = "COLA", .factorization = COLA}, false},
    {{.name = "COLA", .factorization = COLA}, true},
    {{.name = "LAX COLA IDENTITY", .factorization = LAX, .gate = IDENTITY}, false},
    {{.name = "LAX SVD IDENTITY", .factorization = LAX, .gate = IDENTITY, .svd_base = true}, false},
    {{.name = "LAX COLA LINEAR", .factorization = LAX, .gate = LINEAR}, false},
    {{.name = "LAX SVD LINEAR", .factorization = LAX, .gate = LINEAR, .svd_base = true}, false},
    {{.name = "LAX COLA TENSOR", .factorization = LAX, .gate = TENSOR}, false},
    {{.name = "LAX SVD TENSOR", .factorization = LAX, .gate = TENSOR, .svd_base = true}, false},
};
static const struct {
    const char *name;
    int strategy;
    bool published;
} strategies[] = {
    {"FULL", FULL, false}, {"VANILLA", VANILLA, false}, {"PUBLISHED", VANILLA, true}, {"BTP", BTP, false}};

static struct tiny cell(const int x[FACTORS])
{
    static char name[80];
    struct tiny c = base();
    c.way = models[x[WAY] / 4].way;
    c.mlp_silu = models[x[WAY] / 4].mlp_silu;
    if (c.way.factorization == LAX)
        c.r = 12; /* TENSOR: a matrix [3, 4]; a LayerNorm of much less is ill-conditioned */
    c.way.strategy = strategies[x[WAY] % 4].strategy;
    c.way.published = strategies[x[WAY] % 4].published;
    c.way.sync = x[NORM];
    c.way.ungrouped = x[GROUPED];
    c.recompute = (int[]){BOOST__RECOMPUTE__VALUE__NONE, LOW_RANK, LAYER}[x[RECOMPUTE]];
    c.way.overlap = x[OVERLAP];
    c.tp = 1 << x[TP];
    c.dp = 1 << x[DP];
    c.pp = 1 << x[PP];
    c.zero = x[ZERO];
    c.tied = x[TIED];
    c.hk = x[HEADS] ? 4 : 8;
    c.bucket_bytes = x[BUCKETS];
    c.global = c.dp * (int[]){1, 3, 6}[x[BATCHES]];
    c.V = x[VOCABULARY] ? 20 : 128 * c.tp; /* with and without rows of padding, or ranks of padding alone */
    snprintf(name, sizeof name, "%s %s%s%s%s", c.way.name, strategies[x[WAY] % 4].name, x[NORM] ? " SYNC" : "",
             x[GROUPED] ? " ungrouped" : "", x[OVERLAP] ? " overlap" : "");
    c.way.name = name;
    return c;
}

static bool is_valid(const int x[FACTORS])
{
    struct tiny c = cell(x);
    return (!c.bucket_bytes || c.dp > 1) && tiny_is_valid(&c);
}

static bool next(int *x, int first, int end)
{
    for (int f = first; f < end; f++) {
        if (++x[f] < values[f])
            return true;
        x[f] = 0;
    }
    return false;
}

/* All combinations of the constrained factors that plan_validate() passes. */
struct combinations {
    signed char (*of)[CONSTRAINED];
    int n;
};
static struct combinations valid_combinations(void)
{
    int total = 1, x[FACTORS] = {0};
    for (int f = 0; f < CONSTRAINED; f++)
        total *= values[f];
    struct combinations list = {calloc((size_t)total, sizeof *list.of), 0};
    assert_non_null(list.of);
    do {
        if (is_valid(x)) {
            for (int f = 0; f < CONSTRAINED; f++)
                list.of[list.n][f] = (signed char)x[f];
            list.n++;
        }
    } while (next(x, 0, CONSTRAINED));
    return list;
}

/* ---- a list that covers every valid pair ---- */

typedef bool pair_set[FACTORS][MAX_VALUES][FACTORS][MAX_VALUES]; /* the smaller factor first */

/* Pairs of value v of factor f with the factors before `end` that are new. */
static int fresh_of(pair_set seen, const signed char *x, int end, int f, int v)
{
    int fresh = 0;
    for (int a = 0; a < end; a++)
        fresh += !seen[a][x[a]][f][v];
    return fresh;
}

static int choose(pair_set seen, const signed char *x, int f, int turn, int *fresh)
{
    int best = 0, most = -1;
    for (int i = 0; i < values[f]; i++) { /* equal ones take turns */
        int v = (i + turn) % values[f], n = fresh_of(seen, x, f, f, v);
        if (n > most) {
            most = n;
            best = v;
        }
    }
    *fresh = most;
    return best;
}

/* What a combination would bring: its own pairs, and with each free factor those of the best value. */
static int worth(pair_set seen, const signed char *x)
{
    int sum = 0;
    for (int f = 1; f < CONSTRAINED; f++)
        sum += fresh_of(seen, x, f, f, x[f]);
    for (int f = CONSTRAINED; f < FACTORS; f++) {
        int most = 0;
        for (int v = 0; v < values[f]; v++) {
            int n = fresh_of(seen, x, CONSTRAINED, f, v);
            most = n > most ? n : most;
        }
        sum += most;
    }
    return sum;
}

/* Greedy: the first of the combinations that are worth most, then value by value. False when nothing is new. */
static bool next_cell(const struct combinations *all, pair_set seen, int turn, int out[FACTORS])
{
    int best = 0, most = -1, fresh = 0;
    for (int i = 0; i < all->n; i++) {
        int n = worth(seen, all->of[i]);
        if (n > most) {
            most = n;
            best = i;
        }
    }
    signed char x[FACTORS];
    memcpy(x, all->of[best], CONSTRAINED);
    for (int f = 1; f < CONSTRAINED; f++)
        fresh += fresh_of(seen, x, f, f, x[f]);
    for (int f = CONSTRAINED; f < FACTORS; f++) {
        int n;
        x[f] = (signed char)choose(seen, x, f, turn, &n);
        fresh += n;
    }
    for (int f = 0; f < FACTORS; f++) {
        out[f] = x[f];
        for (int a = 0; a < f; a++)
            seen[a][x[a]][f][x[f]] = true;
    }
    return fresh > 0;
}

/* By other means than the search: no valid pair is missing. */
static int count_pairs(const struct combinations *all, pair_set seen)
{
    static pair_set possible;
    int pairs = 0;
    memset(possible, 0, sizeof possible);
    for (int i = 0; i < all->n; i++) {
        int x[FACTORS] = {0};
        for (int f = 0; f < CONSTRAINED; f++)
            x[f] = all->of[i][f];
        do
            for (int a = 0; a < FACTORS; a++)
                for (int b = a + 1; b < FACTORS; b++)
                    possible[a][x[a]][b][x[b]] = true;
        while (next(x, CONSTRAINED, FACTORS));
    }
    for (int a = 0; a < FACTORS; a++)
        for (int b = a + 1; b < FACTORS; b++)
            for (int v = 0; v < values[a] * values[b]; v++) {
                int va = v / values[b], vb = v % values[b];
                if (possible[a][va][b][vb] && !seen[a][va][b][vb])
                    fail_msg("no cell has value %d of factor %d with value %d of factor %d", va, a, vb, b);
                pairs += possible[a][va][b][vb];
            }
    return pairs;
}

static void any_mix_equals_one_rank(void **state)
{
    (void)state;
    static pair_set seen;
    /* So many cells are run by processes over Gloo too, small ones; or as many as BOOST_LAYOUTS says, of any size. */
    const char *wanted = getenv("BOOST_LAYOUTS");
    long as_processes = wanted ? strtol(wanted, NULL, 10) : 24;
    int largest = wanted ? MAX_PROCESSES : 16, cells = 0, x[FACTORS];
    struct combinations all = valid_combinations();
    while (next_cell(&all, seen, cells, x)) {
        struct tiny c = cell(x);
        int world = c.tp * c.dp * c.pp;
        bool fits = world <= largest && world > 1 && as_processes > 0;
        as_processes -= fits;
        equals_one_rank(&c, THREADS | (fits ? PROCESSES : 0), true);
        cells++;
    }
    print_message("%d cells cover all %d pairs that are valid, of %d combinations of the first %d factors\n", cells,
                  count_pairs(&all, seen), all.n, CONSTRAINED);
    free(all.of);
}

/* ---- every combination ---- */

/* In an order that jumps about, from a place that is another each day (or BOOST_PRODUCT_SEED), for so many seconds. */
static void the_whole_product(void **state)
{
    (void)state;
    const char *seconds = getenv("BOOST_PRODUCT_SECONDS"), *seed = getenv("BOOST_PRODUCT_SEED");
    struct combinations all = valid_combinations();
    enum { JUMP = 1000003 }; /* a prime that is larger than every factor of the number of cells */
    int64_t free_values = 1, done = 0, end = clock_mono_ns() + strtoll(seconds, NULL, 10) * NS_PER_S;
    for (int f = CONSTRAINED; f < FACTORS; f++)
        free_values *= values[f];
    int64_t cells = all.n * free_values;
    int64_t at = (seed ? strtoll(seed, NULL, 10) : clock_wall_ns() / NS_PER_S / 86400) % cells, first = at;
    for (; done < cells && clock_mono_ns() < end; done++, at = (at + JUMP) % cells) {
        int x[FACTORS];
        int64_t rest = at / all.n;
        for (int f = 0; f < CONSTRAINED; f++)
            x[f] = all.of[at % all.n][f];
        for (int f = CONSTRAINED; f < FACTORS; f++, rest /= values[f - 1])
            x[f] = (int)(rest % values[f]);
        struct tiny c = cell(x);
        equals_one_rank(&c, THREADS, false);
    }
    print_message("%lld of %lld cells from number %lld\n", (long long)done, (long long)cells, (long long)first);
    free(all.of);
}

/* ---- beyond the list ---- */

/* Degrees that divide nothing: layers over stages, parameters over replicas. */
static void odd_degrees(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++) {
        struct tiny c = base();
        c.way = tiny_ways[(2 * i + 1) % TINY_WAYS];
        c.pp = (int[]){3, 1, 3}[i];
        c.dp = (int[]){1, 3, 3}[i];
        c.zero = i == 2;
        c.tied = i & 1;
        c.bucket_bytes = c.dp > 1 ? 9000 : 0; /* about two layers */
        c.L = c.pp == 3 ? 5 : 4;
        c.global = 6;
        equals_one_rank(&c, THREADS, true);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_mix_equals_one_rank),
        cmocka_unit_test(odd_degrees),
    };
    const struct CMUnitTest product[] = {cmocka_unit_test(the_whole_product)};
    if (getenv("BOOST_PRODUCT_SECONDS"))
        return cmocka_run_group_tests(product, NULL, NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
