/* Reading a spec that may lack parts, and collecting what is wrong with it. */
#include "worker/plan/internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "proto/tokenfile.h"

enum { ROOM_FOR_REST = 24 }; /* "; and N more" */

/* Appends "; text" where that and the rest still fit, false: not. The first one is cut to fit. */
static bool append(char *to, size_t cap, const char *text, bool full)
{
    size_t used = strlen(to);
    if (full || (used && used + 2 + strlen(text) + ROOM_FOR_REST > cap))
        return false;
    snprintf(to + used, cap - used - ROOM_FOR_REST, "%s%s", used ? "; " : "", text);
    return true;
}

static void append_rest(char *to, size_t cap, int hidden)
{
    size_t used = strlen(to);
    if (hidden)
        snprintf(to + used, cap - used, "; and %d more", hidden);
}

void faults_add(struct faults *f, const char *mend, const char *fmt, ...)
{
    f->count++;
    if (!f->err)
        return;
    if (f->count == 1)
        error_set(f->err, f->code, "%s", "");
    char text[sizeof f->err->message];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    f->hidden += !append(f->err->message, sizeof f->err->message, text, f->hidden);
    if (!strstr(f->err->hint, mend))
        f->hidden_mends += !append(f->err->hint, sizeof f->err->hint, mend, f->hidden_mends);
}

int faults_end(struct faults *f)
{
    if (!f->count)
        return ERR_OK;
    if (f->err) {
        append_rest(f->err->message, sizeof f->err->message, f->hidden);
        append_rest(f->err->hint, sizeof f->err->hint, f->hidden_mends);
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

Boost__Format__Value spec_format(const Boost__Data *d)
{
    if (d->format != BOOST__FORMAT__VALUE__AUTO)
        return d->format;
    return token_format_of_name(d->n_train ? d->train[0]->path : NULL);
}

int64_t round_up(int64_t n, int64_t multiple)
{
    return (n + multiple - 1) / multiple * multiple;
}
