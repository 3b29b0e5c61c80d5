/* Option tables of the verbs, over getopt_long: one table gives parsing and help. */
#ifndef BOOST_CTL_OPTIONS_H
#define BOOST_CTL_OPTIONS_H

#include <stdbool.h>

struct option_row {
    char letter;      /* 0 = long only                                     */
    const char *name; /* long name                                         */
    const char *arg;  /* NULL: a flag; "FILE"; "[SEC]": optional           */
    const char *help;
    /* exactly one of these gets the value; many-valued options append to `list` */
    bool *flag;
    const char **text; /* for an optional argument that is left out: "" */
    struct option_list *list;
};

enum { OPTION_LIST_MAX = 256 };
struct option_list {
    const char *items[OPTION_LIST_MAX];
    int n;
};

/* Parses argv; options and operands in any order. Returns the index of the first operand (argv is permuted),
 * or -1 with the message printed. `rows` ends with a row whose name is NULL. */
int options_parse(const char *verb, int argc, char **argv, const struct option_row *rows);
/* Prints the table, two columns. */
void options_help(const struct option_row *rows);

/* A whole number in [min, max]; false with the message printed. */
bool option_int(const char *verb, const char *name, const char *text, long long min, long long max, long long *out);

#endif
