/* What only one kind of device has, and which kind AUTO is. */
#include "worker/plan/internal.h"
#include "worker/plan/plan.h"

static const Boost__Run *spec_run(const Boost__JobSpec *s)
{
    static const Boost__Run none = BOOST__RUN__INIT;
    return s->run ? s->run : &none;
}

static bool wants_cuda(const Boost__JobSpec *s)
{
    const Boost__Parallel *par = spec_parallel(s);
    return par->attention == BOOST__ATTENTION__VALUE__CUDNN || !par->deterministic;
}

static bool wants_cpu(const Boost__JobSpec *s)
{
    Boost__Precision__Value precision = spec_run(s)->precision;
    return precision == BOOST__PRECISION__VALUE__FP32 || precision == BOOST__PRECISION__VALUE__FP64;
}

Boost__Device__Value spec_device(const Boost__JobSpec *s)
{
    Boost__Device__Value given = spec_resources(s)->device;
    if (given != BOOST__DEVICE__VALUE__AUTO)
        return given;
    if (wants_cuda(s))
        return BOOST__DEVICE__VALUE__CUDA;
    return wants_cpu(s) ? BOOST__DEVICE__VALUE__CPU : BOOST__DEVICE__VALUE__AUTO;
}

int device_check(const Boost__JobSpec *spec, Boost__Device__Value device, struct error *err)
{
    struct faults f = {.err = err, .code = ERR_INVALID};
    const Boost__Parallel *par = spec_parallel(spec);
    if (device == BOOST__DEVICE__VALUE__CPU && par->attention == BOOST__ATTENTION__VALUE__CUDNN)
        faults_add(&f, "set resources.device: CUDA, or leave parallel.attention out",
                   "parallel.attention = CUDNN applies to CUDA only, and this job runs on the CPU");
    if (device == BOOST__DEVICE__VALUE__CPU && !par->deterministic)
        faults_add(&f, "set resources.device: CUDA, or leave parallel.deterministic out",
                   "parallel.deterministic = false applies to CUDA only: the CPU always repeats bit for bit");
    if (device == BOOST__DEVICE__VALUE__CUDA && wants_cpu(spec))
        faults_add(&f, "set run.precision: BF16, or resources.device: CPU",
                   "run.precision = %s: CUDA trains in BF16 in this version",
                   spec_run(spec)->precision == BOOST__PRECISION__VALUE__FP32 ? "FP32" : "FP64");
    return faults_end(&f);
}
