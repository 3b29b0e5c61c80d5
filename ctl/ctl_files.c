/* boostctl validate, encode, decode: job files without a controller. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "ctl/ctl.h"
#include "ctl/json_out.h"
#include "ctl/options.h"
#include "proto/base/fs.h"
#include "proto/jobfile.h"
#include "worker/plan/plan.h"

int ctl_load_job(struct job_file *file, const char *path, const char *format_name, bool allow_unknown,
                 const struct option_list *set, struct error *err)
{
    enum job_format format = JOB_FORMAT_AUTO;
    int rc = format_name ? job_format_by_name(format_name, &format, err) : ERR_OK;
    if (!rc)
        rc = jobfile_load(file, path, format, allow_unknown, err);
    for (int i = 0; !rc && i < set->n; i++)
        if ((rc = jobfile_set(file->spec, &file->arena, set->items[i], err)))
            error_context(err, "--set %s", set->items[i]);
    return rc;
}

int verb_validate(struct ctl *ctl, int argc, char **argv)
{
    const char *format = NULL;
    bool allow_unknown = false, help = false;
    struct option_list set = {.n = 0};
    const struct option_row rows[] = {
        {0, "format", "F", "binary, text or json instead of going by content", NULL, &format, NULL},
        {0, "allow-unknown", NULL, "pass over fields this version does not know", &allow_unknown, NULL, NULL},
        {0, "set", "a.b=v", "change a field first; can be repeated", NULL, NULL, &set},
        {'h', "help", NULL, "this text", &help, NULL, NULL},
        {0, NULL, NULL, NULL, NULL, NULL, NULL},
    };
    int first = options_parse("validate", argc, argv, rows);
    if (first < 0)
        return EXIT_USAGE;
    if (help) {
        printf("usage: boostctl validate FILE [options]\n");
        options_help(rows);
        return EXIT_OK;
    }
    if (argc - first != 1)
        return ctl_usage("validate", "takes one job file");
    struct error err;
    struct job_file file = {0};
    int rc = ctl_load_job(&file, argv[first], format, allow_unknown, &set, &err);
    if (!rc && (rc = plan_validate(file.spec, &err)))
        error_context(&err, "%s", argv[first]);
    bool json = ctl->output == OUTPUT_JSON || ctl->output == OUTPUT_JSONL;
    if (json) {
        json_t *document = json_document("boost.validate/1");
        json_put(document, "valid", json_boolean(!rc));
        if (rc) {
            json_put(document, "message", json_text(err.message));
            json_put(document, "hint", json_text(err.hint));
        }
        json_emit(document, ctl->output == OUTPUT_JSONL);
    } else if (!rc && !ctl->quiet) {
        printf("%s: valid  [%s spec]\n", argv[first], job_format_name(file.format));
    }
    int code = !rc ? EXIT_OK : json ? ctl_exit_code(rc) : ctl_fail(&err);
    jobfile_free(&file);
    return code;
}

int verb_convert(struct ctl *ctl, int argc, char **argv)
{
    bool json = ctl->output == OUTPUT_JSON || ctl->output == OUTPUT_JSONL;
    const char *name = argv[0];
    bool encode = !strcmp(name, "encode");
    const char *format = NULL, *to = NULL, *output = NULL;
    bool allow_unknown = false, help = false;
    struct option_list set = {.n = 0};
    const struct option_row rows[] = {
        {0, "format", "F", "of the input: binary, text or json instead of going by content", NULL, &format, NULL},
        {0, "to", "F", encode ? "binary (default), text or json" : "text (default), json or binary", NULL, &to, NULL},
        {'O', "output", "FILE", "instead of standard output", NULL, &output, NULL},
        {0, "allow-unknown", NULL, "pass over fields this version does not know", &allow_unknown, NULL, NULL},
        {0, "set", "a.b=v", "change a field first; can be repeated", NULL, NULL, &set},
        {'h', "help", NULL, "this text", &help, NULL, NULL},
        {0, NULL, NULL, NULL, NULL, NULL, NULL},
    };
    int first = options_parse(name, argc, argv, rows);
    if (first < 0)
        return EXIT_USAGE;
    if (help) {
        printf("usage: boostctl %s FILE [options]     (FILE - is standard input)\n", name);
        options_help(rows);
        return EXIT_OK;
    }
    if (argc - first != 1)
        return ctl_usage(name, "takes one job file");
    struct error err;
    struct job_file file = {0};
    struct buffer out;
    buffer_init(&out, LIMIT_FRAME);
    enum job_format target = encode ? JOB_FORMAT_BINARY : json ? JOB_FORMAT_JSON : JOB_FORMAT_TEXT;
    int rc = ctl_load_job(&file, argv[first], format, allow_unknown, &set, &err);
    if (!rc && to)
        rc = job_format_by_name(to, &target, &err);
    if (!rc && target == JOB_FORMAT_AUTO)
        rc = error_set(&err, ERR_USAGE, "--to takes binary, text or json");
    if (!rc && output)
        rc = jobfile_save(file.spec, output, target, &err);
    else if (!rc && !(rc = jobfile_write(file.spec, target, &out, &err)))
        rc = fwrite(out.data, 1, out.len, stdout) == out.len ? ERR_OK : error_errno(&err, errno, "standard output");
    int code = rc ? ctl_fail(&err) : EXIT_OK;
    buffer_free(&out);
    jobfile_free(&file);
    return code;
}
