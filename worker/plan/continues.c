/* plan.h: whether a job can go on from a checkpoint that was written under another spec. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "proto/base/number.h"
#include "proto/reflect.h"
#include "worker/plan/internal.h"
#include "worker/plan/plan.h"

/* What changes the function that weights of the same shapes compute, and stands in config.json (worker/hf.h): there it
 * can be changed on purpose. */
static const char *const constants[] = {"rope_theta", "norm_eps", "mlp_activation"};

enum { VALUE_TEXT = 64 };

/* False: the field has no value. */
static bool text_of(const ProtobufCMessage *m, const ProtobufCFieldDescriptor *f, char out[VALUE_TEXT])
{
    if (!m || !reflect_count(m, f))
        return false;
    const void *at = reflect_get(m, f, 0);
    const ProtobufCEnumValue *v;
    char number[NUMBER_TEXT];
    switch (f->type) {
    case PROTOBUF_C_TYPE_DOUBLE:
        snprintf(out, VALUE_TEXT, "%s", number_from_double(*(const double *)at, number));
        break;
    case PROTOBUF_C_TYPE_INT64:
        snprintf(out, VALUE_TEXT, "%" PRId64, *(const int64_t *)at);
        break;
    case PROTOBUF_C_TYPE_BOOL:
        snprintf(out, VALUE_TEXT, "%s", *(const protobuf_c_boolean *)at ? "true" : "false");
        break;
    case PROTOBUF_C_TYPE_ENUM:
        v = protobuf_c_enum_descriptor_get_value(f->descriptor, *(const int *)at);
        snprintf(out, VALUE_TEXT, "%s", v ? v->name : "?");
        break;
    default:
        snprintf(out, VALUE_TEXT, "%" PRId32, *(const int32_t *)at);
    }
    return true;
}

static bool same_number(const ProtobufCMessage *a, const ProtobufCMessage *b, const ProtobufCFieldDescriptor *f)
{
    return f->type == PROTOBUF_C_TYPE_DOUBLE &&
           number_same_float(*(const double *)reflect_get(a, f, 0), *(const double *)reflect_get(b, f, 0));
}

/* False: they differ. What the checkpoint says nothing of, as one that is older than the field, is no difference. */
static bool compare(struct faults *f, const ProtobufCMessage *was, const ProtobufCMessage *now,
                    const ProtobufCFieldDescriptor *field, const char *group)
{
    char x[VALUE_TEXT], y[VALUE_TEXT], mend[160];
    if (!text_of(was, field, x))
        return true;
    bool given = text_of(now, field, y);
    if (given && (!strcmp(x, y) || same_number(was, now, field)))
        return true;
    snprintf(mend, sizeof mend, "--set %s.%s=%s", group, field->name, x);
    faults_add(f, mend, "%s.%s = %s, the checkpoint has %s", group, field->name, given ? y : "nothing", x);
    return false;
}

/* Every field of Model: either the shapes follow from it or what is computed with them. True: a constant differs. */
static bool compare_models(struct faults *f, const Boost__JobSpec *was, const Boost__JobSpec *now)
{
    bool other = false;
    for (unsigned i = 0; i < boost__model__descriptor.n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &boost__model__descriptor.fields[i];
        if (compare(f, &was->model->base, &now->model->base, field, "model"))
            continue;
        for (size_t k = 0; k < sizeof constants / sizeof *constants; k++)
            other |= !strcmp(field->name, constants[k]);
    }
    return other;
}

/* What the position in the data follows from. The layout is nowhere here, since a load cuts anew. */
static void compare_position(struct faults *f, const Boost__JobSpec *was, const Boost__JobSpec *now)
{
    static const char batch[] = "global_batch", seed[] = "seed";
    if (was->parallel && now->parallel)
        compare(f, &was->parallel->base, &now->parallel->base,
                reflect_field(&boost__parallel__descriptor, batch, sizeof batch - 1), "parallel");
    if (was->data && now->data)
        compare(f, &was->data->base, &now->data->base,
                reflect_field(&boost__data__descriptor, seed, sizeof seed - 1), "data");
}

static bool is_fp64(const Boost__JobSpec *s)
{
    return s->run && s->run->precision == BOOST__PRECISION__VALUE__FP64;
}

/* What has another form behind an export cannot go that way: SVD's pairs are multiplied, LAX has none. */
static void hint_meant(struct error *err, const Boost__JobSpec *was)
{
    static const char way[] = "; or, where it is meant: boostctl ckpt export, change config.json, start from that";
    size_t used = err ? strlen(err->hint) : 0;
    int32_t kind = was->model->factorization;
    bool exported_whole = kind == BOOST__FACTORIZATION__VALUE__FULL_RANK || kind == BOOST__FACTORIZATION__VALUE__COLA;
    if (err && exported_whole && used + sizeof way <= sizeof err->hint)
        memcpy(err->hint + used, way, sizeof way);
}

int plan_continues(const Boost__JobSpec *was, const Boost__JobSpec *now, bool weights_only, struct error *err)
{
    struct faults f = {.err = err, .code = ERR_INVALID};
    bool constant = was->model && now->model && compare_models(&f, was, now);
    if (!weights_only)
        compare_position(&f, was, now);
    if (is_fp64(was) != is_fp64(now))
        faults_add(&f, is_fp64(was) ? "--set run.precision=FP64" : "--set run.precision=FP32",
                   "run.precision: the checkpoint's state is %s", is_fp64(was) ? "FP64" : "FP32");
    int rc = faults_end(&f);
    if (constant && weights_only)
        hint_meant(err, was);
    return rc;
}
