/* plan.h: whether a job can go on from a checkpoint that was written under another spec. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "proto/reflect.h"
#include "worker/plan/internal.h"
#include "worker/plan/plan.h"

/* What the state's tensors follow from; the layout is not among it, since a load cuts anew. */
static const char *const shapes[] = {"model.factorization", "model.hidden",        "model.layers",       "model.heads",
                                     "model.kv_heads",      "model.rank",          "model.intermediate", "model.vocab",
                                     "model.lax_gate",      "model.tie_embeddings"};
/* What the position in the data follows from. */
static const char *const position[] = {"parallel.global_batch", "data.seed"};

static const ProtobufCFieldDescriptor *find(const Boost__JobSpec *spec, const char *path, const ProtobufCMessage **in)
{
    size_t len = strcspn(path, ".");
    const ProtobufCFieldDescriptor *group = reflect_field(spec->base.descriptor, path, len);
    *in = group && reflect_count(&spec->base, group) ? *(ProtobufCMessage *const *)reflect_get(&spec->base, group, 0)
                                                     : NULL;
    return *in ? reflect_field((*in)->descriptor, path + len + 1, strlen(path + len + 1)) : NULL;
}

static int64_t value_of(const Boost__JobSpec *spec, const char *path, const char **name)
{
    const ProtobufCMessage *m;
    const ProtobufCFieldDescriptor *f = find(spec, path, &m);
    *name = NULL;
    if (!f || !reflect_count(m, f))
        return 0;
    const void *at = reflect_get(m, f, 0);
    if (f->type == PROTOBUF_C_TYPE_INT64)
        return *(const int64_t *)at;
    if (f->type == PROTOBUF_C_TYPE_BOOL)
        return *(const protobuf_c_boolean *)at != 0;
    if (f->type == PROTOBUF_C_TYPE_ENUM) {
        const ProtobufCEnumValue *v = protobuf_c_enum_descriptor_get_value(f->descriptor, *(const int *)at);
        *name = v ? v->name : NULL;
        return *(const int *)at;
    }
    return *(const int32_t *)at;
}

static void compare(struct faults *f, const Boost__JobSpec *was, const Boost__JobSpec *now, const char *path)
{
    const char *x, *y;
    char mend[160];
    int64_t a = value_of(was, path, &x), b = value_of(now, path, &y);
    if (a == b)
        return;
    if (x && y) {
        snprintf(mend, sizeof mend, "set %s: %s", path, x);
        faults_add(f, mend, "%s = %s, the checkpoint has %s", path, y, x);
    } else {
        snprintf(mend, sizeof mend, "set %s: %" PRId64, path, a);
        faults_add(f, mend, "%s = %" PRId64 ", the checkpoint has %" PRId64, path, b, a);
    }
}

static bool is_fp64(const Boost__JobSpec *s)
{
    return s->run && s->run->precision == BOOST__PRECISION__VALUE__FP64;
}

int plan_continues(const Boost__JobSpec *was, const Boost__JobSpec *now, bool weights_only, struct error *err)
{
    struct faults f = {.err = err, .code = ERR_INVALID};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        compare(&f, was, now, shapes[i]);
    for (size_t i = 0; !weights_only && i < sizeof position / sizeof *position; i++)
        compare(&f, was, now, position[i]);
    if (is_fp64(was) != is_fp64(now))
        faults_add(&f, is_fp64(was) ? "set run.precision: FP64" : "set run.precision: FP32",
                   "run.precision: the checkpoint's state is %s", is_fp64(was) ? "FP64" : "FP32");
    return faults_end(&f);
}
