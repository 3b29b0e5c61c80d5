/* reflect.h: names, the nearest known one, and the errors that tell it. */
#include <ctype.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "proto/reflect.h"

enum { LONGEST_NAME = 48, FAR = 1000 };

/* Edit distance where a swap of neighbours is one edit, case not counted (optimal
 * string alignment). */
static int distance(const char *x, size_t nx, const char *y, size_t ny)
{
    if (nx > LONGEST_NAME || ny > LONGEST_NAME)
        return FAR;
    int rows[LONGEST_NAME + 1][LONGEST_NAME + 1];
    for (size_t i = 0; i <= nx; i++) {
        for (size_t j = 0; j <= ny; j++) {
            if (!i || !j) {
                rows[i][j] = (int)(i + j);
                continue;
            }
            int cx = tolower((unsigned char)x[i - 1]), cy = tolower((unsigned char)y[j - 1]);
            int best = rows[i - 1][j - 1] + (cx != cy);
            if (rows[i - 1][j] + 1 < best)
                best = rows[i - 1][j] + 1;
            if (rows[i][j - 1] + 1 < best)
                best = rows[i][j - 1] + 1;
            if (i > 1 && j > 1 && cx == tolower((unsigned char)y[j - 2]) && cy == tolower((unsigned char)x[i - 2]) &&
                rows[i - 2][j - 2] + 1 < best)
                best = rows[i - 2][j - 2] + 1;
            rows[i][j] = best;
        }
    }
    return rows[nx][ny];
}

/* Near: at most a third of the letters, and always one if there are two. */
static int near_limit(size_t len)
{
    return len < 2 ? 0 : len < 6 ? 1 : (int)(len / 3);
}

const char *reflect_nearest_field(const ProtobufCMessageDescriptor *type, const char *name, size_t len)
{
    const char *best = NULL;
    int best_distance = near_limit(len) + 1;
    for (unsigned i = 0; i < type->n_fields; i++) {
        int d = distance(name, len, type->fields[i].name, strlen(type->fields[i].name));
        if (d < best_distance) {
            best = type->fields[i].name;
            best_distance = d;
        }
    }
    return best;
}

/* What people call a value otherwise: by letters GPU is nearer to CPU than to CUDA. */
static const char *synonym(const char *name, size_t len)
{
    static const char *const pairs[][2] = {{"GPU", "CUDA"}, {"NVIDIA", "CUDA"}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        if (strlen(pairs[i][0]) == len && !strncasecmp(pairs[i][0], name, len))
            return pairs[i][1];
    return NULL;
}

const char *reflect_nearest_enum(const ProtobufCEnumDescriptor *type, const char *name, size_t len)
{
    const char *best = synonym(name, len);
    if (best && reflect_enum_by_name(type, best, strlen(best)))
        return best;
    best = NULL;
    int best_distance = near_limit(len) + 1;
    for (unsigned i = 0; i < type->n_values; i++) {
        int d = distance(name, len, type->values[i].name, strlen(type->values[i].name));
        if (d < best_distance) {
            best = type->values[i].name;
            best_distance = d;
        }
    }
    return best;
}

const ProtobufCEnumValue *reflect_enum_by_name(const ProtobufCEnumDescriptor *type, const char *name, size_t len)
{
    for (unsigned i = 0; i < type->n_value_names; i++)
        if (strlen(type->values_by_name[i].name) == len && memcmp(type->values_by_name[i].name, name, len) == 0)
            return &type->values[type->values_by_name[i].index];
    return NULL;
}

/* The group that has a field of exactly this name: the commonest slip is a field on the wrong level. */
static const ProtobufCFieldDescriptor *group_with(const ProtobufCMessageDescriptor *type, const char *name, size_t len)
{
    for (unsigned i = 0; i < type->n_fields; i++)
        if (type->fields[i].type == PROTOBUF_C_TYPE_MESSAGE && reflect_field(type->fields[i].descriptor, name, len))
            return &type->fields[i];
    return NULL;
}

int reflect_unknown_field_error(struct error *err, const char *prefix, const char *where,
                                const ProtobufCMessageDescriptor *type, const char *name, size_t len,
                                enum reflect_form form)
{
    const char *near = reflect_nearest_field(type, name, len);
    const ProtobufCFieldDescriptor *group = group_with(type, name, len);
    char guess[REFLECT_PATH + 128] = "", path[REFLECT_PATH];
    if (group && form == REFLECT_DOTS) {
        reflect_path(path, where, group->name, group->label == PROTOBUF_C_LABEL_REPEATED ? 0 : -1);
        snprintf(guess, sizeof guess, "; did you mean '%s.%.*s'?", path, (int)len, name);
    } else if (group)
        snprintf(guess, sizeof guess, "; did you mean '%s { %.*s }'?", group->name, (int)len, name);
    else if (near)
        snprintf(guess, sizeof guess, "; did you mean '%s'?", near);
    error_set(err, ERR_INVALID, "%sunknown field '%.*s' in %s%s", prefix, len > 100 ? 100 : (int)len, name,
              where[0] ? where : type->short_name, guess);
    struct buffer list;
    buffer_init(&list, sizeof err->hint);
    for (unsigned i = 0; i < type->n_fields; i++)
        buffer_printf(&list, "%s%s", i ? ", " : "", type->fields[i].name);
    if (list.data)
        error_hint(err, "%s has: %s", where[0] ? where : type->short_name, (char *)list.data);
    buffer_free(&list);
    return ERR_INVALID;
}

int reflect_unknown_enum_error(struct error *err, const char *prefix, const char *where,
                               const ProtobufCEnumDescriptor *type, const char *name, size_t len)
{
    const char *near = reflect_nearest_enum(type, name, len);
    struct buffer list;
    buffer_init(&list, sizeof err->hint);
    for (unsigned i = 0; i < type->n_values; i++)
        buffer_printf(&list, "%s%s", i ? " " : "", type->values[i].name);
    error_set(err, ERR_INVALID, "%s%s cannot be '%.*s' (one of %s)%s%s%s", prefix, where, len > 100 ? 100 : (int)len,
              name, list.data ? (char *)list.data : "", near ? "; did you mean '" : "", near ? near : "",
              near ? "'?" : "");
    buffer_free(&list);
    return ERR_INVALID;
}
