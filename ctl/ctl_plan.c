/* boostctl plan: what a job file means for each rank, by the functions that the worker lays itself out with. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/ctl.h"
#include "ctl/format.h"
#include "ctl/json_out.h"
#include "ctl/options.h"
#include "proto/jobfile.h"
#include "worker/plan/intensity.h"
#include "worker/plan/plan.h"

static const char *const groups[] = {"tp", "pp", "dp", "ends", "world"};
enum { GROUPS = sizeof groups / sizeof *groups };
static const char *const kinds[PLAN_KINDS] = {"all_reduce", "reduce_scatter", "all_gather", "send", "recv"};
static const char *const passes[PLAN_PASSES] = {"forward", "backward", "recompute", "step", "eval"};
static const char *const categories[MEM_COUNT] = {"weights", "master", "grads", "moments", "saved", "scratch", "head"};
static const char *const category_heads[MEM_COUNT] = {"WEIGHTS", "MASTER",  "GRADS", "MOMENTS",
                                                      "SAVED",   "SCRATCH", "HEAD"};
static const Boost__Recompute__Value modes[] = {BOOST__RECOMPUTE__VALUE__NONE, BOOST__RECOMPUTE__VALUE__LOW_RANK,
                                                BOOST__RECOMPUTE__VALUE__LAYER};
enum { MODES = sizeof modes / sizeof *modes };

static const char *mode_name(Boost__Recompute__Value mode)
{
    return enum_name(&boost__recompute__value__descriptor, (int)mode);
}

/* Everything there is to say, before it is a table or JSON. */
struct answer {
    struct ctl *ctl;
    const Boost__JobSpec *resolved;
    bool micro_batch_given;
    struct plan p;
    struct plan_backend backend;
};

static bool mode_applies(const struct plan *p, Boost__Recompute__Value mode)
{
    return mode != BOOST__RECOMPUTE__VALUE__LOW_RANK || p->factorization != BOOST__FACTORIZATION__VALUE__FULL_RANK;
}

static void memory_of(const struct answer *a, Boost__Recompute__Value mode, int stage, struct plan_memory *out)
{
    struct plan p = a->p;
    p.recompute = mode;
    plan_stage_memory(&p, stage, &a->backend, out);
}

/* ---- collectives ---- */

struct collective {
    int stage, group, kind, pass;
    struct plan_comm count;
    int64_t bytes;
};

/* Of one element that is no statistic. */
static int64_t element_bytes(const struct plan_backend *b, int group, int kind)
{
    if (!strcmp(groups[group], "world"))
        return (int64_t)sizeof(double);
    bool of_gradients = !strcmp(groups[group], "dp") || !strcmp(groups[group], "ends");
    return (int64_t)dtype_size(of_gradients && kind != PLAN_ALL_GATHER ? b->grad : b->act);
}

/* Calls `each` for every kind of call that a step of a rank (or an evaluation's micro-batch) has. */
static void each_collective(const struct answer *a, void (*each)(const struct collective *c, void *arg), void *arg)
{
    for (int stage = 0; stage < a->p.pp; stage++) {
        struct plan_comm_counts counts;
        plan_stage_comm_counts(&a->p, stage, &counts);
        const struct plan_comm(*of[GROUPS])[PLAN_PASSES] = {counts.tp, counts.pp, counts.dp, counts.ends, counts.world};
        for (int group = 0; group < GROUPS; group++)
            for (int pass = 0; pass < PLAN_PASSES; pass++)
                for (int kind = 0; kind < PLAN_KINDS; kind++) {
                    struct collective c = {stage, group, kind, pass, of[group][kind][pass], 0};
                    c.bytes = plan_comm_bytes(&c.count, element_bytes(&a->backend, group, kind),
                                              (int64_t)dtype_size(a->backend.stat));
                    if (c.count.calls)
                        each(&c, arg);
                }
    }
}

/* ---- JSON ---- */

static json_t *count_of(double n)
{
    const double exact = 9007199254740992; /* 2^53 */
    return n < exact ? json_integer((json_int_t)n) : json_number(n);
}

static json_t *json_parameters(const struct plan *p)
{
    json_t *o = json_object(), *stages = json_array();
    json_put(o, "total", json_integer(plan_parameters(p)));
    for (int i = 0; i < p->pp; i++) {
        struct plan_stage stage;
        json_t *s = json_object();
        plan_stage_at(p, i, &stage);
        json_put(s, "stage", json_integer(i));
        json_put(s, "first_layer", json_integer(stage.layer0));
        json_put(s, "layers", json_integer(stage.layers));
        json_put(s, "elements_a_rank", json_integer(stage.elements));
        json_array_append_new(stages, s);
    }
    json_put(o, "stages", stages);
    return o;
}

static json_t *json_memory(const struct answer *a)
{
    json_t *list = json_array();
    for (int m = 0; m < MODES; m++)
        for (int i = 0; i < a->p.pp && mode_applies(&a->p, modes[m]); i++) {
            struct plan_memory memory;
            json_t *o = json_object();
            memory_of(a, modes[m], i, &memory);
            json_put(o, "recompute", json_string(mode_name(modes[m])));
            json_put(o, "of_this_job", json_boolean(modes[m] == a->p.recompute));
            json_put(o, "stage", json_integer(i));
            for (int c = 0; c < MEM_COUNT; c++)
                json_put(o, categories[c], json_integer(memory.bytes[c]));
            json_put(o, "total", json_integer(memory.total));
            json_array_append_new(list, o);
        }
    return list;
}

static void json_one_collective(const struct collective *c, void *arg)
{
    json_t *o = json_object();
    json_put(o, "stage", json_integer(c->stage));
    json_put(o, "group", json_string(groups[c->group]));
    json_put(o, "kind", json_string(kinds[c->kind]));
    json_put(o, "pass", json_string(passes[c->pass]));
    json_put(o, "calls", json_integer(c->count.calls));
    json_put(o, "elements", json_integer(c->count.elements));
    json_put(o, "bytes", json_integer(c->bytes));
    json_array_append_new(arg, o);
}

static json_t *json_gemms(const struct plan_gemm *g, int n)
{
    static const char *const places[] = {
        [GEMM_BLOCK] = "layer", [GEMM_CROSSING] = "layer_but_the_first", [GEMM_HEAD] = "head"};
    json_t *list = json_array();
    for (int i = 0; i < n; i++) {
        json_t *o = json_object();
        json_put(o, "weights", json_string(g[i].what));
        json_put(o, "place", json_string(places[g[i].place]));
        json_put(o, "pass", json_string(passes[g[i].pass]));
        json_put(o, "gives",
                 json_string(g[i].weight                 ? "weight_gradient"
                             : g[i].pass == PLAN_FORWARD ? "output"
                                                         : "input_gradient"));
        json_put(o, "m", json_integer(g[i].m));
        json_put(o, "n", json_integer(g[i].n));
        json_put(o, "k", json_integer(g[i].k));
        json_put(o, "batch", json_integer(g[i].batch));
        json_put(o, "calls", json_integer(g[i].calls));
        json_put(o, "flop", count_of(g[i].flop));
        json_put(o, "bytes", count_of(g[i].bytes));
        json_put(o, "flop_per_byte", json_number(g[i].flop / g[i].bytes));
        json_array_append_new(list, o);
    }
    return list;
}

static void print_json(const struct answer *a, const struct plan_gemm *g, int n)
{
    const struct plan *p = &a->p;
    json_t *o = json_document("boost.plan/1"), *collectives = json_array();
    json_put(o, "name", json_text(a->resolved->name));
    json_put(o, "factorization",
             json_string(enum_name(&boost__factorization__value__descriptor, (int)p->factorization)));
    json_put(o, "strategy", json_string(enum_name(&boost__strategy__value__descriptor, (int)p->strategy)));
    json_put(o, "device", json_string(p->cuda ? "CUDA" : "CPU"));
    json_put(o, "precision", json_string(enum_name(&boost__precision__value__descriptor, (int)p->precision)));
    json_put(o, "recompute", json_string(mode_name(p->recompute)));
    json_put(o, "tp", json_integer(p->tp));
    json_put(o, "pp", json_integer(p->pp));
    json_put(o, "dp", json_integer(p->dp));
    json_put(o, "ranks", json_integer(p->world));
    json_put(o, "micro_batch", json_integer(p->micro_batch));
    json_put(o, "micro_batch_given", json_boolean(a->micro_batch_given));
    json_put(o, "micro_batches", json_integer(p->accumulation));
    json_put(o, "tokens_per_step", json_integer(p->global_batch * p->s));
    json_put(o, "model_flop_per_step", count_of(plan_model_flop(p)));
    json_put(o, "parameters", json_parameters(p));
    json_put(o, "memory_bytes", json_memory(a));
    each_collective(a, json_one_collective, collectives);
    json_put(o, "collectives", collectives);
    json_put(o, "gemms", json_gemms(g, n));
    json_emit(o, a->ctl->output == OUTPUT_JSONL);
}

/* ---- tables ---- */

/* A cell of bytes: rounded, or under -o wide exact. */
static void bytes_cell(const struct answer *a, struct table *t, int64_t bytes)
{
    char text[FORMAT_TEXT];
    if (a->ctl->output == OUTPUT_WIDE)
        table_cell(t, "%lld", (long long)bytes);
    else
        table_cell(t, "%s", bytes ? format_bytes(bytes, text) : "-");
}

static void count_cell(const struct answer *a, struct table *t, double n)
{
    char text[FORMAT_TEXT];
    if (a->ctl->output == OUTPUT_WIDE)
        table_cell(t, "%.0f", n);
    else
        table_cell(t, "%s", format_count(n, text));
}

static void print_summary(const struct answer *a)
{
    const struct plan *p = &a->p;
    char count[FORMAT_TEXT], flop[FORMAT_TEXT];
    print_safe(stdout, a->resolved->name);
    printf(": %s, %s, %s on %s; tp %d x pp %d x dp %d = %d %s\n",
           enum_name(&boost__factorization__value__descriptor, (int)p->factorization),
           enum_name(&boost__strategy__value__descriptor, (int)p->strategy),
           enum_name(&boost__precision__value__descriptor, (int)p->precision), p->cuda ? "CUDA" : "the CPU", p->tp,
           p->pp, p->dp, p->world, p->world == 1 ? "rank" : "ranks");
    printf("step          %lld tokens = %lld x %lld sequences of %lld%s; %s FLOP of the model\n",
           (long long)(p->global_batch * p->s), (long long)(p->global_batch / p->micro_batch),
           (long long)p->micro_batch, (long long)p->s,
           a->micro_batch_given ? "" : " (parallel.micro_batch is left out: the node's memory decides, at most 8 here)",
           format_count(plan_model_flop(p), flop));
    printf("parameters    %s", format_count((double)plan_parameters(p), count));
    for (int i = 0; i < p->pp; i++) {
        struct plan_stage stage;
        plan_stage_at(p, i, &stage);
        if (p->pp > 1)
            printf("%s stage %d (layers %lld to %lld)", i ? "," : ";", i, (long long)stage.layer0,
                   (long long)(stage.layer0 + stage.layers - 1));
        printf("%s %s a rank", p->pp > 1 ? "" : ",", format_count((double)stage.elements, count));
    }
    putchar('\n');
}

/* The stage that needs most; under -o wide all. */
static void print_memory(const struct answer *a)
{
    const char *headers[MEM_COUNT + 3] = {"RECOMPUTE", "STAGE"};
    memcpy(&headers[2], category_heads, sizeof category_heads);
    headers[MEM_COUNT + 2] = "TOTAL";
    struct table *t = table_new(MEM_COUNT + 3, headers, "lrrrrrrrrr");
    for (int m = 0; m < MODES; m++) {
        int largest = 0;
        struct plan_memory memory, most = {.total = 0};
        for (int i = 0; i < a->p.pp; i++) {
            memory_of(a, modes[m], i, &memory);
            if (memory.total > most.total) {
                most = memory;
                largest = i;
            }
        }
        for (int i = 0; i < a->p.pp && mode_applies(&a->p, modes[m]); i++) {
            if (i != largest && a->ctl->output != OUTPUT_WIDE)
                continue;
            memory_of(a, modes[m], i, &memory);
            table_cell(t, "%s%s", mode_name(modes[m]), modes[m] == a->p.recompute ? " (this job)" : "");
            table_cell(t, "%d", i);
            for (int c = 0; c < MEM_COUNT; c++)
                bytes_cell(a, t, memory.bytes[c]);
            bytes_cell(a, t, memory.total);
        }
    }
    printf("\nbytes of a rank%s\n",
           a->p.pp > 1 && a->ctl->output != OUTPUT_WIDE ? ", of the stage that needs most (-o wide: of all)" : "");
    table_print(t, stdout, a->ctl->color, 2);
    table_free(t);
}

struct rows {
    const struct answer *a;
    struct table *t;
    int n;
};

static void table_collective(const struct collective *c, void *arg)
{
    struct rows *r = arg;
    r->n++;
    table_cell(r->t, "%d", c->stage);
    table_cell(r->t, "%s", groups[c->group]);
    table_cell(r->t, "%s", passes[c->pass]);
    table_cell(r->t, "%s", kinds[c->kind]);
    table_cell(r->t, "%lld", (long long)c->count.calls);
    count_cell(r->a, r->t, (double)c->count.elements);
    bytes_cell(r->a, r->t, c->bytes);
}

static void print_collectives(const struct answer *a)
{
    static const char *const headers[] = {"STAGE", "GROUP", "PASS", "KIND", "CALLS", "ELEMENTS", "BYTES"};
    struct rows rows = {a, table_new(7, headers, "rlllrrr"), 0};
    each_collective(a, table_collective, &rows);
    if (rows.n) {
        printf("\ncollectives of a rank for a step (eval: for a micro-batch of an evaluation)\n");
        table_print(rows.t, stdout, a->ctl->color, 2);
    } else {
        printf("\ncollectives   none: one rank\n");
    }
    table_free(rows.t);
}

static void print_gemms(const struct answer *a, const struct plan_gemm *g, int n)
{
    static const char *const headers[] = {"WEIGHTS", "GIVES", "M",    "N",     "K",
                                          "BATCH",   "CALLS", "FLOP", "BYTES", "FLOP/B"};
    struct table *t = table_new(10, headers, "llrrrrrrrr");
    for (int i = 0; i < n; i++) {
        table_cell(t, "%s", g[i].what);
        table_cell(t, "%s", g[i].pass == PLAN_FORWARD ? "output" : g[i].weight ? "weight grad" : "input grad");
        table_cell(t, "%lld", (long long)g[i].m);
        table_cell(t, "%lld", (long long)g[i].n);
        table_cell(t, "%lld", (long long)g[i].k);
        table_cell(t, "%lld", (long long)g[i].batch);
        table_cell(t, "%lld", (long long)g[i].calls);
        count_cell(a, t, g[i].flop);
        bytes_cell(a, t, (int64_t)g[i].bytes);
        table_cell(t, "%.1f", g[i].flop / g[i].bytes);
    }
    printf("\nmatrix products of a layer, and of the head, for a micro-batch%s\n",
           a->p.recompute == BOOST__RECOMPUTE__VALUE__NONE ? "" : " (recompute repeats some of the forward)");
    table_print(t, stdout, a->ctl->color, 2);
    table_free(t);
}

/* ---- the command ---- */

static int make(struct answer *a, const Boost__JobSpec *spec, Boost__JobSpec **resolved, struct error *err)
{
    struct plan_machine machine = {0};
    int rc = plan_resolve(spec, &machine, resolved, err);
    if (rc)
        return rc;
    a->resolved = *resolved;
    a->micro_batch_given = spec->parallel && spec->parallel->has_micro_batch;
    rc = plan_make(*resolved, &a->p, err);
    if (!rc)
        plan_backend_estimate(&a->p, &a->backend);
    return rc;
}

static void print_answer(const struct answer *a)
{
    struct plan_gemm g[PLAN_GEMMS_MAX];
    int n = plan_gemms(&a->p, &a->backend, g);
    if (a->ctl->output == OUTPUT_JSON || a->ctl->output == OUTPUT_JSONL) {
        print_json(a, g, n);
        return;
    }
    print_summary(a);
    print_memory(a);
    print_collectives(a);
    print_gemms(a, g, n);
}

int verb_plan(struct ctl *ctl, int argc, char **argv)
{
    const char *format = NULL, *devices = NULL;
    bool allow_unknown = false, calibrate = false, help = false;
    struct option_list set = {.n = 0};
    const struct option_row rows[] = {
        {0, "set", "a.b=v", "change a field first; can be repeated", NULL, NULL, &set},
        {0, "format", "F", "binary, text or json instead of going by content", NULL, &format, NULL},
        {0, "allow-unknown", NULL, "pass over fields this version does not know", &allow_unknown, NULL, NULL},
        {0, "devices", "N", "search layouts for N devices (not built in this version)", NULL, &devices, NULL},
        {0, "calibrate", NULL, "measure this machine (not built in this version)", &calibrate, NULL, NULL},
        {'h', "help", NULL, "this text", &help, NULL, NULL},
        {0, NULL, NULL, NULL, NULL, NULL, NULL},
    };
    int first = options_parse("plan", argc, argv, rows);
    if (first < 0)
        return EXIT_USAGE;
    if (help) {
        printf("usage: boostctl plan FILE [options]     (FILE - is standard input; -o wide: exact numbers)\n");
        options_help(rows);
        return EXIT_OK;
    }
    if (argc - first != 1)
        return ctl_usage("plan", "takes one job file, not %d", argc - first);
    if (ctl->output == OUTPUT_NAME)
        return ctl_usage("plan", "has no ids: -o takes table, wide, json or jsonl here");
    struct error err;
    if (devices || calibrate) {
        error_set(&err, ERR_UNSUPPORTED, "plan --%s is not built in this version (a cost model)",
                  devices ? "devices" : "calibrate");
        error_hint(&err, "give the layout: --set parallel.tp=2 and so on");
        ctl_fail(&err);
        return EXIT_REFUSED;
    }
    struct job_file file = {0};
    struct answer a = {.ctl = ctl};
    Boost__JobSpec *resolved = NULL;
    int rc = ctl_load_job(&file, argv[first], format, allow_unknown, &set, &err);
    if (!rc && file.unknown.len && !ctl->quiet)
        fprintf(stderr, "boostctl: passed over unknown fields: %s\n", (const char *)file.unknown.data);
    if (!rc && (rc = make(&a, file.spec, &resolved, &err)))
        error_context(&err, "%s", argv[first]);
    if (!rc)
        print_answer(&a);
    if (resolved)
        boost__job_spec__free_unpacked(resolved, NULL);
    jobfile_free(&file);
    return rc ? ctl_fail(&err) : EXIT_OK;
}
