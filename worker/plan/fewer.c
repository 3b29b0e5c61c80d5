/* plan.h: a job on fewer nodes than it asked for. Only the replicas get fewer; the batch stays what it was, so each
 * takes more micro-batches, and the sample numbers of a step are the same. */
#include "proto/reflect.h"
#include "worker/plan/internal.h"
#include "worker/plan/plan.h"

int plan_replicas_on(const Boost__JobSpec *resolved, int nodes)
{
    const Boost__Parallel *par = spec_parallel(resolved);
    const Boost__Resources *res = spec_resources(resolved);
    int64_t one = (int64_t)par->tp * par->pp; /* ranks of a replica */
    int64_t each = res->has_devices_per_node ? res->devices_per_node : one * par->dp / res->nodes;
    int64_t ranks = nodes * each, replicas = ranks / one;
    bool fits = nodes > 0 && ranks % one == 0 && replicas <= par->dp && par->global_batch % replicas == 0;
    return fits ? (int)replicas : 0;
}

int plan_on_fewer_nodes(const Boost__JobSpec *resolved, int nodes, Boost__JobSpec **out, struct error *err)
{
    int dp = plan_replicas_on(resolved, nodes);
    *out = NULL;
    if (!dp)
        return error_set(err, ERR_INVALID, "the job cannot be laid out on %d nodes", nodes);
    Boost__JobSpec *s = (Boost__JobSpec *)reflect_clone(&resolved->base);
    if (!s)
        return error_set(err, ERR_NOMEM, "out of memory");
    Boost__Parallel *par = s->parallel;
    int32_t each = par->global_batch / dp, micro = par->micro_batch;
    while (each % micro)
        micro--;
    par->has_dp = par->has_micro_batch = 1;
    par->dp = dp;
    par->micro_batch = micro;
    s->resources->has_nodes = s->resources->has_min_nodes = 1;
    s->resources->nodes = nodes;
    if (s->resources->min_nodes > nodes)
        s->resources->min_nodes = nodes;
    *out = s;
    return ERR_OK;
}
