/* What a layer of LLaMA's shapes sends over tp, counted by the engine itself with empty operations: the elements of
 * the closed forms, and the table in worker/plan/README.md. */
#include "tests/unit/worker/dry.h"
#include "tests/unit/worker/tiny.h"

enum { D = 4096, RANK = D / 4, T = 4 * 4096, TP = 4 };

static const struct tiny_way full = {.name = "FULL", .factorization = FULL_RANK, .strategy = FULL};
static const struct tiny_way sliced = {.name = "VANILLA, SLICED", .factorization = COLA, .strategy = VANILLA};
static const struct tiny_way published = {
    .name = "VANILLA, PUBLISHED", .factorization = COLA, .strategy = VANILLA, .published = true};
static const struct tiny_way btp = {.name = "BTP", .factorization = COLA, .strategy = BTP};

static struct tiny shape(const struct tiny_way *way, int f, int layers)
{
    struct tiny c = tiny_default;
    c.way = *way;
    c.fp64 = false;
    c.d = D, c.f = f, c.r = RANK, c.h = c.hk = 32, c.V = 32000, c.s = 4096, c.L = layers;
    c.micro = c.global = 4;
    c.tp = TP;
    return c;
}

/* Elements and bytes on the wire of one rank, of a ring in bf16 where activations are: an all-reduce sends every
 * element 2(t-1)/t times, the two others half of that. */
struct traffic {
    int64_t elements, calls;
    double wire;
};
static void add(struct traffic *to, const struct comm_counters *c, enum comm_pass pass, int sign)
{
    for (int kind = 0; kind < COMM_KIND_COUNT; kind++) {
        const struct comm_count *n = &c->by[GROUP_TP][kind][pass];
        to->elements += sign * n->elements;
        to->calls += sign * n->calls;
        to->wire += sign * (double)n->elements * 2 * (kind == COMM_ALL_REDUCE ? 2 : 1) * (TP - 1) / TP;
    }
}

static void count(const struct tiny *c, struct comm_counters *out)
{
    struct plan p;
    struct error err;
    tiny_plan(c, &p);
    if (dry_step(&p, out, &err))
        fail_msg("%s", err.message);
    /* The whole step is the plan's. */
    struct plan_comm_counts formula;
    plan_comm_counts(&p, &formula);
    for (int kind = 0; kind < COMM_KIND_COUNT; kind++)
        for (int pass = 0; pass < PASS_EVAL; pass++) {
            const struct comm_count *got = &out->by[GROUP_TP][kind][pass];
            assert_true(got->calls == formula.tp[kind][pass].calls);
            assert_true(got->elements == formula.tp[kind][pass].elements);
        }
}

/* A layer: what two have more than one; 32 have 32 times that besides the edges. */
struct layer {
    struct traffic forward, backward;
};
static struct layer layer_of(const struct tiny_way *way, int f)
{
    struct layer l = {{0, 0, 0}, {0, 0, 0}};
    struct comm_counters one, two, all;
    struct tiny c = shape(way, f, 1);
    count(&c, &one);
    c.L = 2;
    count(&c, &two);
    c.L = 32;
    count(&c, &all);
    add(&l.forward, &two, PASS_FORWARD, 1);
    add(&l.forward, &one, PASS_FORWARD, -1);
    add(&l.backward, &two, PASS_BACKWARD, 1);
    add(&l.backward, &one, PASS_BACKWARD, -1);
    struct traffic whole = {0, 0, 0};
    add(&whole, &all, PASS_FORWARD, 1);
    add(&whole, &one, PASS_FORWARD, -1);
    assert_true(whole.elements == 31 * l.forward.elements && whole.calls == 31 * l.forward.calls);
    return l;
}

static void equal_the_closed_forms(void **state)
{
    (void)state;
    static const int widths[] = {D * 5 / 2, 11008, D * 4};
    const int64_t t = T, d = D, r = RANK;
    for (int i = 0; i < 3; i++) {
        int64_t f = widths[i];
        struct layer a = layer_of(&full, widths[i]), s = layer_of(&sliced, widths[i]),
                     b = layer_of(&published, widths[i]), c = layer_of(&btp, widths[i]);
        assert_true(a.forward.elements == 2 * t * d && a.backward.elements == 2 * t * d);
        assert_true(b.forward.elements == t * (5 * d + 2 * f) && b.backward.elements == t * (3 * d + f));
        assert_true(b.forward.calls == 7 && b.backward.calls == 4);
        /* SLICED calls otherwise and sends the same bytes, both ways together: T(16d + 6f)(t-1)/t elements. */
        assert_true(s.forward.wire + s.backward.wire == b.forward.wire + b.backward.wire);
        assert_true(b.forward.wire + b.backward.wire == 2.0 * (double)(t * (16 * d + 6 * f)) * (TP - 1) / TP);
        /* 7Tr, and two statistics that go along. */
        assert_true(c.forward.elements == 7 * t * r + 2 * t && c.backward.elements == 7 * t * r);
        assert_true(c.forward.calls == 4 && c.backward.calls == 4);
    }
}

/* ---- the table of the README ---- */

static char *readme(void)
{
    const char *root = getenv("BOOST_ROOT");
    char path[512];
    enum { MOST = 1 << 16 };
    char *text = calloc(1, MOST);
    snprintf(path, sizeof path, "%s/worker/plan/README.md", root ? root : ".");
    FILE *f = fopen(path, "rbe");
    if (!f)
        fail_msg("cannot open %s (run from the repository or set BOOST_ROOT)", path);
    (void)!fread(text, 1, MOST - 1, f);
    fclose(f);
    return text;
}

static void has_row(const char *text, const char *row)
{
    print_message("%s", row);
    if (!strstr(text, row))
        fail_msg("worker/plan/README.md lacks this row");
}

static void the_readme_says_so(void **state)
{
    (void)state;
    char *text = readme(), row[240];
    const struct tiny_way *const ways[] = {&full, &published, &sliced, &btp};
    for (int i = 0; i < 4; i++) {
        struct layer l = layer_of(ways[i], 11008);
        const double mib = 1 << 20;
        snprintf(row, sizeof row, "| %s | %lld | %lld | %.0f | %.0f |\n", ways[i]->name, (long long)l.forward.elements,
                 (long long)l.backward.elements, (double)l.forward.elements * 2 / mib,
                 (l.forward.wire + l.backward.wire) / mib);
        has_row(text, row);
    }
    static const struct {
        const char *name;
        int f;
    } shapes[] = {{"f = 2.5d", D * 5 / 2}, {"LLaMA-7B, f = 11008", 11008}, {"f = 4d", D * 4}};
    for (int i = 0; i < 3; i++) {
        struct layer a = layer_of(&full, shapes[i].f), b = layer_of(&published, shapes[i].f),
                     c = layer_of(&btp, shapes[i].f);
        /* Parameters of a layer without gains, which are the data-parallel traffic. */
        struct tiny dense = shape(&full, shapes[i].f, 1), low = shape(&btp, shapes[i].f, 1), more;
        struct plan p[4];
        tiny_plan(&dense, &p[0]);
        tiny_plan(&low, &p[1]);
        more = dense, more.L = 2;
        tiny_plan(&more, &p[2]);
        more = low, more.L = 2;
        tiny_plan(&more, &p[3]);
        double dp = (double)(plan_parameters(&p[2]) - plan_parameters(&p[0]) - 2 * D) /
                    (double)(plan_parameters(&p[3]) - plan_parameters(&p[1]) - 2 * D);
        double forward = (double)b.forward.elements;
        snprintf(row, sizeof row, "| %s | %.2f | %.2f | %.2f | %.2f | %.2f |\n", shapes[i].name,
                 forward / (double)a.forward.elements, forward / (double)(c.forward.elements - 2 * T),
                 (forward + (double)b.backward.elements) / (double)(2 * c.backward.elements),
                 (double)a.forward.elements / (double)(c.forward.elements - 2 * T), dp);
        has_row(text, row);
    }
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equal_the_closed_forms),
        cmocka_unit_test(the_readme_says_so),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
