/* Elements that a layer of LLaMA-7B sends over tp, counted by an engine that computes nothing, beside the closed
 * forms: one JSON object, {"fwd_full": [counted, formula], ...}. */
#include <stdio.h>
#include <string.h>

#include "proto/reflect.h"
#include "proto/text.h"
#include "tests/unit/worker/dry.h"

enum { D = 4096, F = 11008, RANK = 1024, T = 4 * 4096 };

/* A resolved plan of one strategy; layers are what differs. */
static int make_plan(const char *model, const char *parallel, int layers, struct plan *out, struct error *err)
{
    char text[1024];
    snprintf(
        text, sizeof text,
        "spec_version: 1 name: \"shape\" model { %s hidden: %d layers: %d heads: 32 intermediate: %d vocab: 32000 }"
        " parallel { %s tp: 4 micro_batch: 4 global_batch: 4 } data { train { path: \"/none\" } seq_len: 4096 }"
        " optimizer { lr: 0.001 } run { steps: 1 } checkpoint { dir: \"/none\" }",
        model, D, layers, F, parallel);
    struct arena arena;
    arena_init(&arena, 1 << 20);
    ProtobufCMessage *spec = reflect_new(&arena, &boost__job_spec__descriptor);
    Boost__JobSpec *resolved = NULL;
    int rc = spec ? text_read(spec, &arena, "shape", text, strlen(text), NULL, err) : ERR_NOMEM;
    if (!rc)
        rc = plan_resolve((Boost__JobSpec *)spec, &(struct plan_machine){0}, &resolved, err);
    if (!rc)
        rc = plan_make(resolved, out, err);
    if (resolved)
        boost__job_spec__free_unpacked(resolved, NULL);
    arena_free(&arena);
    return rc;
}

/* Forward and backward elements of one layer: what two have more than one. */
static int count(const char *model, const char *parallel, long long elements[2], struct error *err)
{
    elements[0] = elements[1] = 0;
    for (int layers = 1; layers <= 2; layers++) {
        struct plan p;
        struct comm_counters counted;
        int rc = make_plan(model, parallel, layers, &p, err);
        if (!rc)
            rc = dry_step(&p, &counted, err);
        if (rc)
            return rc;
        for (int kind = 0; kind < COMM_KIND_COUNT; kind++)
            for (int pass = PASS_FORWARD; pass <= PASS_BACKWARD; pass++)
                elements[pass] += (layers == 2 ? 1 : -1) * (long long)counted.by[GROUP_TP][kind][pass].elements;
    }
    return ERR_OK;
}

int main(void)
{
    const long long t = T, d = D, f = F, r = RANK;
    const struct {
        const char *name, *model, *parallel;
        long long forward, backward;
    } ways[] = {
        {"full", "factorization: FULL_RANK", "strategy: FULL", 2 * t * d, 2 * t * d},
        {"vanilla", "factorization: COLA rank: 1024", "strategy: VANILLA vanilla_attention: PUBLISHED",
         t * (5 * d + 2 * f), t * (3 * d + f)},
        {"btp", "factorization: COLA rank: 1024", "strategy: BTP", 7 * t * r + 2 * t, 7 * t * r},
    };
    printf("{");
    for (size_t i = 0; i < sizeof ways / sizeof ways[0]; i++) {
        struct error err = {0};
        long long n[2];
        if (count(ways[i].model, ways[i].parallel, n, &err)) {
            fprintf(stderr, "%s: %s\n", ways[i].name, err.message);
            return 1;
        }
        printf("%s\"fwd_%s\": [%lld, %lld], \"fwdbwd_%s\": [%lld, %lld]", i ? ", " : "", ways[i].name, n[0],
               ways[i].forward, ways[i].name, n[0] + n[1], ways[i].forward + ways[i].backward);
    }
    printf("}\n");
    return 0;
}
