/* Reading a spec that may lack parts, and collecting what is wrong with it. */
#include "worker/plan/internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void faults_add(struct faults *f, const char *mend, const char *fmt, ...)
{
    f->count++;
    if (!f->err)
        return;
    if (f->count == 1) {
        error_set(f->err, f->code, "%s", "");
        error_hint(f->err, "%s", mend);
    }
    char text[sizeof f->err->message];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    enum { ROOM_FOR_REST = 24 };
    size_t used = strlen(f->err->message);
    if (f->hidden || used + 2 + strlen(text) + ROOM_FOR_REST > sizeof f->err->message) {
        f->hidden++;
        return;
    }
    snprintf(f->err->message + used, sizeof f->err->message - used, "%s%s", used ? "; " : "", text);
}

int faults_end(struct faults *f)
{
    if (!f->count)
        return ERR_OK;
    if (f->err && f->hidden) {
        size_t used = strlen(f->err->message);
        snprintf(f->err->message + used, sizeof f->err->message - used, "; and %d more", f->hidden);
    }
    return (int)f->code;
}

const Boost__Model *spec_model(const Boost__JobSpec *s)
{
    static const Boost__Model none = BOOST__MODEL__INIT;
    return s->model ? s->model : &none;
}

const Boost__Parallel *spec_parallel(const Boost__JobSpec *s)
{
    static const Boost__Parallel none = BOOST__PARALLEL__INIT;
    return s->parallel ? s->parallel : &none;
}

const Boost__Data *spec_data(const Boost__JobSpec *s)
{
    static const Boost__Data none = BOOST__DATA__INIT;
    return s->data ? s->data : &none;
}

const Boost__Resources *spec_resources(const Boost__JobSpec *s)
{
    static const Boost__Resources none = BOOST__RESOURCES__INIT;
    return s->resources ? s->resources : &none;
}

int64_t spec_kv_heads(const Boost__Model *m)
{
    return m->has_kv_heads ? m->kv_heads : m->heads;
}

Boost__Strategy__Value spec_strategy(const Boost__JobSpec *s)
{
    const Boost__Parallel *par = spec_parallel(s);
    if (par->has_strategy)
        return par->strategy;
    return spec_model(s)->factorization == BOOST__FACTORIZATION__VALUE__FULL_RANK ? BOOST__STRATEGY__VALUE__FULL
                                                                                  : BOOST__STRATEGY__VALUE__BTP;
}

Boost__Format__Value format_of_path(const char *path)
{
    static const struct {
        const char *suffix;
        Boost__Format__Value format;
    } known[] = {
        {".u16", BOOST__FORMAT__VALUE__U16},
        {".u32", BOOST__FORMAT__VALUE__U32},
        {".bin", BOOST__FORMAT__VALUE__LLMC},
        {".idx", BOOST__FORMAT__VALUE__MEGATRON},
    };
    size_t len = path ? strlen(path) : 0;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        size_t n = strlen(known[i].suffix);
        if (len > n && !strcmp(path + len - n, known[i].suffix))
            return known[i].format;
    }
    return BOOST__FORMAT__VALUE__TEXT;
}

Boost__Format__Value spec_format(const Boost__Data *d)
{
    if (d->format != BOOST__FORMAT__VALUE__AUTO)
        return d->format;
    return format_of_path(d->n_train ? d->train[0]->path : NULL);
}

int64_t round_up(int64_t n, int64_t multiple)
{
    return (n + multiple - 1) / multiple * multiple;
}
