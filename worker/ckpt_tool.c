/* ckpt_tool.h */
#include "worker/ckpt_tool.h"

#include <getopt.h>
#include <jansson.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/json.h"
#include "worker/ckpt_dir.h"
#include "worker/ckpt_weights.h"
#include "worker/hf.h"

enum { EXIT_FAILED = 1, EXIT_USAGE = 2, DEFAULT_FILE_MIB = 4096 };

struct arguments {
    bool headers, bf16;
    int64_t rank, max_file_mib;
    char *from, *to; /* to: NULL where the verb takes one word */
};

static void print_fault(void *arg, const char *text)
{
    int *n = arg;
    printf("fault: %s\n", text);
    ++*n;
}

static int verify(const struct arguments *a, struct error *err)
{
    int faults = 0;
    int rc = ckpt_verify(a->from, a->headers, print_fault, &faults, err);
    if (!rc && !faults)
        printf("%s is sound\n", a->from);
    return rc;
}

static void keep_first(void *arg, const char *text)
{
    struct error *first = arg;
    if (!first->code)
        (void)error_set(first, ERR_CORRUPT, "%s", text);
}

/* A bit that has turned would go into the other form, and nothing would tell of it there. */
static int check_whole(const char *dir, struct error *err)
{
    struct error first;
    error_clear(&first);
    int rc = ckpt_verify(dir, false, keep_first, &first, err);
    if (rc || !first.code)
        return rc;
    error_set(err, ERR_CORRUPT, "%s is damaged: %s", dir, first.message);
    return error_hint(err, "take another one: boostctl ckpt ls, ckpt verify");
}

static int export(const struct arguments *a, struct error *err)
{
    int rc = check_whole(a->from, err);
    if (!rc)
        rc = hf_export(a->from, a->to, a->bf16 ? DTYPE_BF16 : DTYPE_F32, a->max_file_mib << 20, err);
    if (!rc)
        printf("%s is exported to %s\n", a->from, a->to);
    return rc;
}

static int import(const struct arguments *a, struct error *err)
{
    char path[PATH_MAX];
    int rc = hf_import(a->from, a->to, path, sizeof path, err);
    if (!rc)
        printf("%s is imported to %s\n", a->from, path);
    return rc;
}

/* The model of a Hugging Face directory that can be imported, as a job on one line of JSON. */
static int model(const struct arguments *a, struct error *err)
{
    struct hf_source *s = NULL;
    json_t *tree = NULL;
    char *text = NULL;
    int rc = hf_open(a->from, &s, err);
    if (!rc && (!(tree = json_tree(&hf_spec(s)->base)) || !(text = json_dumps(tree, JSON_COMPACT))))
        rc = error_set(err, ERR_NOMEM, "out of memory");
    if (!rc)
        printf("%s\n", text);
    free(text);
    json_decref(tree);
    hf_close(s);
    return rc;
}

static int convert(const struct arguments *a, struct error *err)
{
    char path[PATH_MAX];
    int rc = check_whole(a->from, err);
    if (!rc)
        rc = ckpt_convert(a->from, a->to, a->rank, path, sizeof path, err);
    if (!rc)
        printf("%s is converted to %s\n", a->from, path);
    return rc;
}

static const struct {
    const char *name, *takes;
    int words;
    int (*run)(const struct arguments *a, struct error *err);
} verbs[] = {
    {"verify", "[--headers] CKPTDIR", 1, verify},
    {"export", "[--bf16] [--file-mib N] CKPTDIR DIR", 2, export},
    {"import", "HFDIR DIR", 2, import},
    {"model", "HFDIR", 1, model},
    {"convert", "[--rank R] CKPTDIR DIR", 2, convert},
};

static bool number(const char *text, int64_t *out)
{
    char *end;
    *out = strtoll(text, &end, 10);
    return end != text && !*end && *out > 0 && *out <= INT32_MAX;
}

static bool parse(int argc, char **argv, int words, struct arguments *a)
{
    static const struct option options[] = {{"headers", no_argument, NULL, 'h'},
                                            {"bf16", no_argument, NULL, 'b'},
                                            {"rank", required_argument, NULL, 'r'},
                                            {"file-mib", required_argument, NULL, 'm'},
                                            {0}};
    *a = (struct arguments){.max_file_mib = DEFAULT_FILE_MIB};
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        bool ok = true;
        if (c == 'h')
            a->headers = true;
        else if (c == 'b')
            a->bf16 = true;
        else if (c == 'r')
            ok = number(optarg, &a->rank);
        else if (c == 'm')
            ok = number(optarg, &a->max_file_mib);
        else
            ok = false;
        if (!ok)
            return false;
    }
    if (argc - optind != words)
        return false;
    a->from = argv[optind];
    a->to = words > 1 ? argv[optind + 1] : NULL;
    for (char *dir = a->from; dir; dir = dir == a->from ? a->to : NULL)
        for (size_t len = strlen(dir); len > 1 && dir[len - 1] == '/';)
            dir[--len] = '\0';
    return true;
}

int ckpt_tool(int argc, char **argv, struct error *err)
{
    struct arguments a;
    for (size_t i = 0; argc > 0 && i < sizeof verbs / sizeof *verbs; i++) {
        if (strcmp(argv[0], verbs[i].name) != 0)
            continue;
        if (!parse(argc, argv, verbs[i].words, &a)) {
            error_set(err, ERR_USAGE, "ckpt %s takes: %s", verbs[i].name, verbs[i].takes);
            return EXIT_USAGE;
        }
        int rc = verbs[i].run(&a, err);
        if (!rc && fflush(stdout))
            rc = error_set(err, ERR_IO, "cannot write to stdout");
        return rc ? EXIT_FAILED : 0;
    }
    error_set(err, ERR_USAGE, "ckpt takes: verify, export, import, model or convert");
    return EXIT_USAGE;
}
