/* plan_validate: what can be known of a spec without a node. */
#include "proto/validate.h"

#include "worker/plan/internal.h"
#include "worker/plan/plan.h"

int plan_validate(const Boost__JobSpec *spec, struct error *err)
{
    int rc = validate_job_spec(spec, err);
    if (!rc)
        rc = layout_check(spec, err);
    if (!rc)
        rc = built_check(spec, err);
    if (!rc)
        rc = device_check(spec, spec_device(spec), err);
    return rc;
}
