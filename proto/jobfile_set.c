/* jobfile.h: one `--set path=value`. */
#include <stdio.h>
#include <string.h>

#include "proto/jobfile.h"
#include "proto/text.h"

enum { NO_INDEX = -1 };

struct target {
    ProtobufCMessage *m; /* that holds the field */
    const ProtobufCFieldDescriptor *f;
    long index; /* or NO_INDEX */
    char where[REFLECT_PATH];
    char prefix[REFLECT_PATH]; /* of errors */
};

/* "name" or "name[3]" at *p, which moves behind it. */
static int take_part(const char **p, const char **name, size_t *len, long *index, const char *prefix, struct error *err)
{
    *name = *p;
    *len = strspn(*p, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_");
    *p += *len;
    *index = NO_INDEX;
    if (!*len)
        return error_set(err, ERR_INVALID, "%sexpected a field name at '%.40s'", prefix, *p);
    if (**p != '[')
        return ERR_OK;
    size_t digits = strspn(*p + 1, "0123456789");
    if (!digits || digits > 6 || (*p)[1 + digits] != ']')
        return error_set(err, ERR_INVALID, "%sexpected [number] at '%.40s'", prefix, *p);
    *index = 0;
    for (size_t i = 1; i <= digits; i++)
        *index = *index * 10 + ((*p)[i] - '0');
    *p += digits + 2;
    return ERR_OK;
}

/* An index needs a list that has it, or ends just before it. */
static int check_index(const struct target *t, struct error *err)
{
    size_t count = reflect_count(t->m, t->f);
    if (t->index == NO_INDEX)
        return ERR_OK;
    if (t->f->label != PROTOBUF_C_LABEL_REPEATED)
        return error_set(err, ERR_INVALID, "%s%s is not a list: leave out the index", t->prefix, t->f->name);
    if ((size_t)t->index <= count)
        return ERR_OK;
    error_set(err, ERR_INVALID, "%s%s has %zu entries, there is no [%ld]", t->prefix, t->f->name, count, t->index);
    error_hint(err, "an index is 0 to %zu; the last of these appends", count);
    return ERR_INVALID;
}

/* Goes down into the message that t->f and t->index name, making it where it is missing. */
static int descend(struct target *t, struct arena *a, struct error *err)
{
    if (t->f->type != PROTOBUF_C_TYPE_MESSAGE)
        return error_set(err, ERR_INVALID, "%s%s is a %s: it has no fields", t->prefix, t->where,
                         reflect_type_name(t->f));
    ProtobufCMessage *sub;
    if (t->f->label != PROTOBUF_C_LABEL_REPEATED) {
        sub = reflect_sub(t->m, t->f, a);
    } else if (t->index == NO_INDEX) {
        error_set(err, ERR_INVALID, "%s%s is a list", t->prefix, t->where);
        error_hint(err, "say which entry: %s[0]", t->where);
        return ERR_INVALID;
    } else if ((size_t)t->index < reflect_count(t->m, t->f)) {
        sub = *(ProtobufCMessage **)reflect_get(t->m, t->f, (size_t)t->index);
    } else {
        sub = reflect_new(a, t->f->descriptor);
        ProtobufCMessage **at = sub ? reflect_add(t->m, t->f, a) : NULL;
        if (at)
            *at = sub;
        else
            sub = NULL;
    }
    if (!sub)
        return error_set(err, ERR_NOMEM, "%sno memory, or too many entries", t->prefix);
    t->m = sub;
    return ERR_OK;
}

static int find_target(struct target *t, struct arena *a, const char **p, struct error *err)
{
    for (;;) {
        const char *name;
        size_t len;
        char outer[REFLECT_PATH], part[REFLECT_PATH];
        int rc = take_part(p, &name, &len, &t->index, t->prefix, err);
        if (rc)
            return rc;
        t->f = reflect_field(t->m->descriptor, name, len);
        if (!t->f)
            return reflect_unknown_field_error(err, t->prefix, t->where, t->m->descriptor, name, len, REFLECT_DOTS);
        rc = check_index(t, err);
        if (rc)
            return rc;
        snprintf(outer, sizeof outer, "%s", t->where);
        snprintf(part, sizeof part, "%s", t->f->name);
        reflect_path(t->where, outer, part, t->index);
        if (**p != '.')
            return ERR_OK;
        ++*p;
        rc = descend(t, a, err);
        if (rc)
            return rc;
    }
}

/* The value, read into the same field of an empty message, so that a bad one changes nothing. */
static int read_into(ProtobufCMessage *fresh, const struct target *t, struct arena *a, const char *value,
                     struct error *err)
{
    bool list = t->f->label == PROTOBUF_C_LABEL_REPEATED && t->index == NO_INDEX;
    bool raw = t->f->type == PROTOBUF_C_TYPE_STRING && *value != '"' && !(list && *value == '[');
    if (!raw) {
        int rc = text_read_value(fresh, t->f, a, t->where, value, strlen(value), err);
        if (rc)
            error_context(err, "%.*s", (int)strlen(t->prefix) - 2, t->prefix);
        return rc;
    }
    char *copy = arena_strdup(a, value);
    char **at = copy ? reflect_add(fresh, t->f, a) : NULL;
    if (!at)
        return error_set(err, ERR_NOMEM, "%sno memory", t->prefix);
    *at = copy;
    return ERR_OK;
}

/* Appends all values of the field in `from`. */
static int append(const struct target *t, const ProtobufCMessage *from, struct arena *a, struct error *err)
{
    for (size_t i = 0; i < reflect_count(from, t->f); i++) {
        void *at = reflect_add(t->m, t->f, a);
        if (!at)
            return error_set(err, ERR_NOMEM, "%sno memory, or too many entries", t->prefix);
        memcpy(at, reflect_get(from, t->f, i), reflect_value_size(t->f));
    }
    return ERR_OK;
}

static int assign(const struct target *t, struct arena *a, bool plus, const char *value, struct error *err)
{
    bool list = t->f->label == PROTOBUF_C_LABEL_REPEATED;
    if (plus && (!list || t->index != NO_INDEX)) {
        error_set(err, ERR_INVALID, "%s+= appends to a list, and %s is none", t->prefix, t->where);
        error_hint(err, "write %s=%s", t->where, value);
        return ERR_INVALID;
    }
    if (!*value && !plus && t->index == NO_INDEX && (list || t->f->type != PROTOBUF_C_TYPE_STRING)) {
        reflect_clear(t->m, t->f);
        return ERR_OK;
    }
    ProtobufCMessage *fresh = reflect_new(a, t->m->descriptor);
    if (!fresh)
        return error_set(err, ERR_NOMEM, "%sno memory", t->prefix);
    int rc = read_into(fresh, t, a, value, err);
    if (rc)
        return rc;
    if (t->index != NO_INDEX && (size_t)t->index < reflect_count(t->m, t->f)) {
        memcpy(reflect_get(t->m, t->f, (size_t)t->index), reflect_get(fresh, t->f, 0), reflect_value_size(t->f));
        return ERR_OK;
    }
    if (list && !plus && t->index == NO_INDEX)
        reflect_clear(t->m, t->f);
    return append(t, fresh, a, err);
}

int jobfile_set(Boost__JobSpec *spec, struct arena *a, const char *assignment, struct error *err)
{
    struct target t = {.m = &spec->base};
    size_t path_len = strcspn(assignment, "=+");
    snprintf(t.prefix, sizeof t.prefix, "cannot set %.*s: ", path_len > 120 ? 120 : (int)path_len, assignment);
    const char *p = assignment;
    if (!strchr(assignment, '=')) {
        error_set(err, ERR_USAGE, "'%.120s' is not an assignment", assignment);
        error_hint(err, "write it as optimizer.lr=1e-3");
        return ERR_USAGE;
    }
    int rc = find_target(&t, a, &p, err);
    if (rc)
        return rc;
    bool plus = *p == '+';
    p += plus;
    if (*p != '=')
        return error_set(err, ERR_INVALID, "%sexpected '=' at '%.40s'", t.prefix, p);
    return assign(&t, a, plus, p + 1, err);
}
