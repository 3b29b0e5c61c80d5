/* rank.h */
#include "worker/rank.h"

#include <math.h>
#include <stdbool.h>

#include "proto/rankfiles.h"
#include "worker/engine.h"
#include "worker/plan/plan.h"
#include "worker/rendezvous.h"
#include "worker/report.h"
#include "worker/train.h"

/* A collective that takes longer is given up. A lost peer is seen at once by its closed connection
 * and a hang is the agent's to end, so this only bounds a partition that nobody else sees. */
enum { OPERATION_TIMEOUT_MS = 15 * 60 * 1000 };

int rank_exit_code(const struct error *err)
{
    switch (err->code) {
    case ERR_OK:
        return 0;
    case ERR_INVALID:
    case ERR_UNSUPPORTED:
    case ERR_NOT_FOUND:
        return RANK_EXIT_SPEC;
    case ERR_PEER_LOST:
    case ERR_TIMEOUT:
    case ERR_UNREACHABLE:
        return RANK_EXIT_PEER;
    case ERR_DEVICE:
        return RANK_EXIT_INFRA;
    default:
        return RANK_EXIT_APP;
    }
}

static int check_orders(const struct rank_orders *o, const struct plan *plan, struct error *err)
{
    const Boost__AttemptStart *s = o->start;
    if (!s->run_dir || !s->checkpoint_dir)
        return error_set(err, ERR_INVALID, "start.pb names no run directory or no checkpoint directory");
    if (s->world != plan->world)
        return error_set(err, ERR_INVALID, "start.pb says %d ranks, the layout of its job has %d", s->world,
                         plan->world);
    if (o->rank < 0 || o->rank >= plan->world)
        return error_set(err, ERR_INVALID, "rank %d is not below the %d ranks of the job", o->rank, plan->world);
    if (s->threads_per_rank < 1)
        return error_set(err, ERR_INVALID, "start.pb gives rank %d no threads", o->rank);
    return ERR_OK;
}

static int choose_kernels(const struct plan *plan, const struct kernels **out, struct error *err)
{
    switch (plan->precision) {
    case BOOST__PRECISION__VALUE__FP32:
        *out = kernels_cpu_fp32();
        return ERR_OK;
    case BOOST__PRECISION__VALUE__BF16:
        *out = kernels_cpu_bf16();
        return ERR_OK;
    case BOOST__PRECISION__VALUE__FP64:
        *out = kernels_cpu_fp64();
        return ERR_OK;
    default:
        error_set(err, ERR_UNSUPPORTED, "run.precision of this job is not built for the CPU");
        return error_hint(err, "set run.precision to FP32, BF16 or FP64");
    }
}

static int connect_processes(const struct rank_orders *o, const struct plan *plan, struct report *report,
                             struct comms *comms, struct error *err)
{
    const Boost__AttemptStart *s = o->start;
    if (!s->rendezvous_socket || !s->data_address)
        return error_set(err, ERR_INVALID, "start.pb names no rendezvous socket or no data address");
    report_phase(report, BOOST__RANK_UPDATE__PHASE__RENDEZVOUS);
    report_doing(report, "waiting for the other ranks at the rendezvous");
    struct rendezvous_client client;
    int rc = rendezvous_open(&client, s->rendezvous_socket, s->job, s->attempt, o->rank, s->rendezvous_timeout_ms,
                             err);
    if (!rc) {
        struct rendezvous table = rendezvous_table(&client);
        struct comm_layout layout = engine_layout(plan);
        rc = gloo_comms_create(o->rank, &layout, s->data_address, &table, s->rendezvous_timeout_ms,
                               OPERATION_TIMEOUT_MS, comms, err);
    }
    rendezvous_close(&client);
    return rc;
}

static int connect_ranks(const struct rank_orders *o, const struct plan *plan, struct report *report,
                         struct comms *comms, bool *connected, struct error *err)
{
    int rc;
    if (o->local)
        rc = local_comms_join(o->local, o->rank, comms, err);
    else
        rc = connect_processes(o, plan, report, comms, err);
    *connected = !rc;
    if (rc)
        return rc;
    comms_set_note(comms, report_collective, report);
    return ERR_OK;
}

static int run(const struct rank_orders *o, struct train_end *end, struct error *err)
{
    struct plan plan;
    struct report report = {0};
    struct comms comms = {0};
    struct train t = {.start = o->start, .plan = &plan, .comms = &comms, .rank = o->rank, .report = &report};
    struct local_world *alone = NULL;
    struct rank_orders orders = *o;
    bool reporting = false, connected = false;
    int rc = plan_make(o->start->spec, &plan, err);
    if (!rc)
        rc = check_orders(o, &plan, err);
    if (!rc)
        rc = choose_kernels(&plan, &t.kernels, err);
    if (rc)
        goto out;
    rc = report_open(&report, o->start, o->rank, o->local != NULL, o->log, err);
    reporting = !rc;
    if (!rc && !o->local && plan.world == 1) { /* a rank of its own needs no network */
        rc = local_world_create(&(struct comm_layout){.tp = 1, .dp = 1, .pp = 1}, &alone, err);
        orders.local = alone;
    }
    if (!rc)
        rc = connect_ranks(&orders, &plan, &report, &comms, &connected, err);
    if (!rc)
        rc = train(&t, end, err);
    if (reporting)
        report_phase(&report, BOOST__RANK_UPDATE__PHASE__ENDED);
out:
    if (rc && o->local)
        local_world_abort(o->local, o->rank);
    if (connected)
        comms_destroy(&comms);
    if (alone)
        local_world_destroy(alone);
    if (reporting)
        report_close(&report);
    return rc;
}

int rank_run(const struct rank_orders *o, struct error *err)
{
    struct train_end end = {.eval_loss = NAN};
    error_clear(err);
    if (!o->start->spec)
        error_set(err, ERR_INVALID, "start.pb holds no job");
    int rc = o->start->spec ? run(o, &end, err) : (int)err->code;
    Boost__DoneRecord__Why why = rc            ? BOOST__DONE_RECORD__WHY__FAILED
                                 : end.stopped ? BOOST__DONE_RECORD__WHY__STOPPED
                                               : BOOST__DONE_RECORD__WHY__COMPLETED;
    struct error not_told;
    if (o->start->run_dir &&
        report_done(o->start->run_dir, o->start->job, o->start->attempt, o->rank, why, end.step,
                    o->rank == 0 ? end.eval_loss : NAN, rc ? err : NULL, &not_told) &&
        !rc) {
        *err = not_told;
        error_context(err, "the end cannot be recorded");
    }
    return rank_exit_code(err);
}
