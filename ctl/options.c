/* options.h */
#include "ctl/options.h"

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/ctl.h"

enum { MAX_ROWS = 32, LONG_ONLY = 256 };

static bool store_value(const char *verb, const struct option_row *row, const char *value)
{
    if (row->flag)
        *row->flag = true;
    else if (row->text)
        *row->text = value ? value : "";
    else if (row->list->n == OPTION_LIST_MAX) {
        ctl_usage(verb, "--%s is given more than %d times", row->name, OPTION_LIST_MAX);
        return false;
    } else
        row->list->items[row->list->n++] = value;
    return true;
}

/* The global option that `word`, or the letter of one, is; NULL: none. As it is written before the command. */
static const char *global_option(const char *word, int letter)
{
    static const struct {
        int letter;
        const char *name, *shown;
    } globals[] = {
        {'o', "--output", "-o FORMAT"},
        {'q', "--quiet", "-q"},
        {0, "--no-color", "--no-color"},
        {0, "--socket", "--socket PATH"},
    };
    for (size_t i = 0; i < sizeof globals / sizeof *globals; i++)
        if ((letter && letter == globals[i].letter) || !strncmp(word, globals[i].name, strlen(globals[i].name)))
            return globals[i].shown;
    return NULL;
}

int options_parse(const char *verb, int argc, char **argv, const struct option_row *rows)
{
    char letters[3 * MAX_ROWS + 2] = ":";
    struct option longs[MAX_ROWS + 1] = {{0}};
    size_t at = 1;
    for (int i = 0; rows[i].name; i++) {
        int has = !rows[i].arg ? no_argument : rows[i].arg[0] == '[' ? optional_argument : required_argument;
        longs[i] = (struct option){rows[i].name, has, NULL, LONG_ONLY + i};
        if (!rows[i].letter)
            continue;
        letters[at++] = rows[i].letter;
        for (int colons = has == optional_argument ? 2 : has == required_argument; colons > 0; colons--)
            letters[at++] = ':';
    }
    letters[at] = '\0';
    optind = 0; /* glibc: start over with a new table */
    int got;
    while ((got = getopt_long(argc, argv, letters, longs, NULL)) != -1) {
        if (got == '?' || got == ':') {
            const char *what = optind > 0 && optind <= argc ? argv[optind - 1] : "";
            const char *global = got == '?' ? global_option(what, optopt) : NULL;
            if (global)
                ctl_usage(verb, "%s goes before the command: boostctl %s %s ...", global, global, verb);
            else
                ctl_usage(verb, got == ':' ? "option '%s' needs a value" : "unknown option '%s'", what);
            return -1;
        }
        int i = got - LONG_ONLY;
        for (int j = 0; got < LONG_ONLY && rows[j].name; j++)
            if (rows[j].letter == got)
                i = j;
        const char *value = optarg;
        /* "-w 5": an optional value as a word of its own, when it is a number */
        if (rows[i].arg && rows[i].arg[0] == '[' && !value && optind < argc &&
            argv[optind][0] >= '0' && argv[optind][0] <= '9')
            value = argv[optind++];
        if (!store_value(verb, &rows[i], value))
            return -1;
    }
    return optind;
}

void options_help(const struct option_row *rows)
{
    for (int i = 0; rows[i].name; i++) {
        char left[64];
        const char *arg = rows[i].arg ? rows[i].arg : "";
        if (rows[i].letter)
            snprintf(left, sizeof left, "-%c, --%s %s", rows[i].letter, rows[i].name, arg);
        else
            snprintf(left, sizeof left, "    --%s %s", rows[i].name, arg);
        printf("  %-28s %s\n", left, rows[i].help);
    }
}

bool option_int(const char *verb, const char *name, const char *text, long long min, long long max, long long *out)
{
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (errno || end == text || *end || value < min || value > max) {
        ctl_usage(verb, "%s takes a whole number from %lld to %lld, not '%s'", name, min, max, text);
        return false;
    }
    *out = value;
    return true;
}
